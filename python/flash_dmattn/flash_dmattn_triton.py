"""The original package's module of this name, for code that imports from it.

It needs no Triton: `flash_dmattn_func` computes."""

from torch import Tensor

from .flash_dmattn_interface import flash_dmattn_func
from .prepared import Mask

__all__ = ["triton_dmattn_func"]


def triton_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """`flash_dmattn_func` in the argument order of the original's Triton function.

    Args:
        softmax_scale, scale: two names of one number, default 1 / sqrt(D).

    Other arguments, result and errors as in `flash_dmattn_func`.
    """
    return flash_dmattn_func(
        query, key, value, attn_mask, attn_bias, scale, is_causal=is_causal, softmax_scale=softmax_scale
    )
