"""The original package's module of this name, for code that imports from it."""

from .flash_dmattn_interface import flex_dmattn_func

flex_attention_forward = flex_dmattn_func  # the name under which the original's module defines it

__all__ = ["flex_attention_forward", "flex_dmattn_func"]
