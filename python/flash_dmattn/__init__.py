"""Attention in which every query sees only some keys, chosen by data, with an additive bias and its gradient.

`attention` is the library's own surface, `select_keys` chooses what it shows, and `dynamic_mask_attention` does both in
one call; `varlen_attention` is for packed documents. Time is proportional to what is seen of selections, intervals,
masks of keys and blocks, and of `KeyIndices`, lists of keys per query, as far as neighbouring queries choose alike.
`KeptKeys` keeps a selection up to date while a cache grows, `prepare_mask` makes a mask cheap to use many times,
`plan_report` tells what a call will do. The other functions carry the names of the original package.
"""

from ._library import cpu_info as _cpu_info
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
from .kept_keys import KeptKeys
from .key_indices import KeyIndices
from .planning import PlanReport, plan_report
from .prepared import PreparedMask, prepare_mask
from .selection import KeyIntervals, select_keys
from .varlen import flash_dmattn_varlen_func, varlen_attention

__version__ = _cpu_info().version

__all__ = [
    "CPU_AVAILABLE",
    "CUDA_AVAILABLE",
    "FLEX_AVAILABLE",
    "TRITON_AVAILABLE",
    "KeptKeys",
    "KeyIndices",
    "KeyIntervals",
    "PlanReport",
    "PreparedMask",
    "attention",
    "dynamic_mask_attention",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "flex_dmattn_func",
    "get_available_backends",
    "plan_report",
    "prepare_mask",
    "select_keys",
    "triton_dmattn_func",
    "varlen_attention",
]


def __dir__() -> list[str]:
    """What completion offers: the public names, and the public packages that were imported."""
    packages = [name for name in ("distributed", "integrations", "utils") if name in globals()]
    return sorted([*__all__, *packages, "__version__"])
