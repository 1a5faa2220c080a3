"""Keys that rows choose for themselves, as sparse attention models do, more or less alike from row to row."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 128
# The pool out of which the rows of a block choose, in multiples of what a row keeps; None: all keys of the past.
POOLS = {"coherent": 1.5, "medium": 3.0, "independent": None}


def choose_keys(
    length: int, kept: int, pool: float | None, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """`kept` random keys of every row's past, in no order: int32 (length, kept) on `device`, padded with -1.

    Each block of 128 rows has a pool of pool * kept random keys from its own past, of which each of its rows draws
    those that it keeps.
    """
    generator = torch.Generator(device).manual_seed(seed)
    chosen = torch.full((length, kept), -1, dtype=torch.int32, device=device)
    for first in range(0, length, BLOCK_ROWS):
        rows = torch.arange(first, min(first + BLOCK_ROWS, length), device=device)
        past = first + len(rows)
        size = past if pool is None else min(int(pool * kept), past)
        keys = torch.randperm(past, generator=generator, device=device)[:size]
        ranks = torch.rand(len(rows), size, generator=generator, device=device).masked_fill_(keys > rows[:, None], -1)
        best, places = ranks.topk(min(kept, size), dim=1, sorted=False)
        chosen[rows, : best.shape[1]] = torch.where(best >= 0, keys[places], -1).int()
    return chosen
