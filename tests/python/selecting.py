"""Dynamic selection by brute force, written from docs/semantics.md: every row sorts the keys it can see."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def visible_keys(
    scores: Tensor,
    window: int,
    rows: int,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
) -> Tensor:
    """scores (B, heads, Sk) -> bool (B, heads, Sq, Sk): what the selection alone leaves visible.

    Arguments as in `flash_dmattn.select_keys`.
    """
    batch, heads, keys = scores.shape
    lowest = torch.finfo(scores.dtype).min
    values = scores.tolist()  # exact: every dtype fits a float
    hidden = None if key_mask is None else key_mask.logical_not().expand(batch, heads, keys).tolist()
    lengths = [keys] * batch if seqlens_k is None else [min(max(n, 0), keys) for n in seqlens_k.tolist()]
    visible = torch.zeros(batch, heads, rows, keys, dtype=torch.bool, device="cpu")
    for b in range(batch):
        for h in range(heads):
            # By score and then by index; all NaNs are one score above all others (-0.0 == 0.0 in Python, too).
            rank = [(math.isnan(x), 0.0 if math.isnan(x) else x, j) for j, x in enumerate(values[b][h])]
            eligible = [
                j
                for j in range(lengths[b])
                if not values[b][h][j] <= lowest and not (hidden is not None and hidden[b][h][j])
            ]
            for row in range(rows):
                last = row + lengths[b] - rows if causal else keys
                kept = sorted((j for j in eligible if j <= last), key=lambda j, rank=rank: rank[j], reverse=True)
                visible[b, h, row, kept[:window]] = True
    return visible.to(scores.device)
