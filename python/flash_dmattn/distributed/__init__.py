"""Attention over a sequence that is split across the ranks of a process group (docs/distributed.md).

Every rank holds an equal share of the tokens, all of their heads. The functions here take a rank's share and return its
share of the result; gradients flow to the ranks that own them.
"""

from .dynamic_mask import dynamic_mask_attention
from .halo import previous_tokens
from .interval_mask import attention
from .kept_keys import GatheredKeys, gather_kept_keys
from .module import DynamicMaskAttention, DynamicMaskParallel
from .order import shard, unshard

__all__ = [
    "DynamicMaskAttention",
    "DynamicMaskParallel",
    "GatheredKeys",
    "attention",
    "dynamic_mask_attention",
    "gather_kept_keys",
    "previous_tokens",
    "shard",
    "unshard",
]


def __dir__() -> list[str]:
    """What completion offers."""
    return __all__
