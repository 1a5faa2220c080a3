"""Attention in which every query sees only some keys, chosen by data, with an additive bias and its gradient.

`attention` is the library's own surface, `select_keys` chooses what it shows, and `dynamic_mask_attention` does both in
one call; the other functions carry the names of the original package.
"""

from ._library import cpu_info
from .flash_dmattn_interface import (
    CPU_AVAILABLE,
    CUDA_AVAILABLE,
    FLEX_AVAILABLE,
    TRITON_AVAILABLE,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flex_dmattn_func,
    get_available_backends,
    triton_dmattn_func,
)
from .functional import attention, dynamic_mask_attention
from .selection import KeyIntervals, select_keys

__version__ = cpu_info().version

__all__ = [
    "CPU_AVAILABLE",
    "CUDA_AVAILABLE",
    "FLEX_AVAILABLE",
    "TRITON_AVAILABLE",
    "KeyIntervals",
    "attention",
    "dynamic_mask_attention",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flex_dmattn_func",
    "get_available_backends",
    "select_keys",
    "triton_dmattn_func",
]
