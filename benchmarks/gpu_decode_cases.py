"""The cases of gpu_attention.py that generation asks for: one query over a long cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from flash_dmattn import KeptKeys, KeyIndices, attention
from gpu_common import DEVICE, DTYPE, Bench, check_equal, normal
from report import Comparison
from torch import Tensor


def decode(bench: Bench) -> Iterator[Comparison]:
    """One query over a long cache: bytes of kept keys and values against the copy of this run."""
    heads, key_heads, head_dim, length, kept = 32, 8, 128, bench.length(65536), bench.length(2048)
    # Batch, what says which keys are kept, and the least share that we want.
    cases = (
        (1, "all", 85.0),
        (8, "all", 97.0),
        (8, "mask", 70.0),
        (32, "mask", 85.0),
        (8, "lists", 60.0),
        (32, "lists", 75.0),
    )
    for batch, form, least in cases:
        query = normal(batch, 1, heads, head_dim)
        key, value = (normal(batch, length, key_heads, head_dim) for _ in range(2))
        # In turn, so that the kept keys do not stay in the cache from one call to the next.
        masks: list[Tensor | KeyIndices | None] = [None]
        if form != "all":
            masks = []
            for _ in range(4):
                best = torch.rand(batch, key_heads, length, device=DEVICE).topk(kept).indices
                mask = torch.zeros(batch, key_heads, length, dtype=torch.bool, device=DEVICE).scatter_(-1, best, True)
                masks.append(mask if form == "mask" else KeyIndices(best[:, :, None]))
            if form == "lists":
                check_equal(attention(query, key, value, mask=masks[-1]), attention(query, key, value, mask=mask))

        def ours(
            query: Tensor = query,
            key: Tensor = key,
            value: Tensor = value,
            masks: list[Tensor | KeyIndices | None] = masks,
        ) -> list[Tensor]:
            return [attention(query, key, value, mask=mask) for mask in masks]

        seen = length if form == "all" else kept
        read = len(masks) * 2 * batch * seen * key_heads * head_dim * DTYPE.itemsize
        yield from bench.compare(
            f"decode B{batch} H{heads} Hkv{key_heads} D{head_dim} over {length} keys, {seen} kept"
            + (" by lists" if form == "lists" else ""),
            "share of the copy",
            ours,
            unit="%",
            amount=100 * read / bench.copy_bandwidth,
            least=least,
        )
    yield from _append(bench, 8, key_heads, length, kept)


def _append(bench: Bench, batch: int, heads: int, length: int, window: int) -> Iterator[Comparison]:
    """What a step does before it attends: a new key, which is not among the best, as most are not."""
    kept = KeptKeys.from_scores(torch.randn(batch, heads, length, device=DEVICE), window)
    new = torch.full((batch, heads, 1), torch.finfo(torch.float32).min / 2, device=DEVICE)
    positions = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    case = f"decode B{batch} Hkv{heads}, the best {window} kept up to date"
    yield from bench.compare(case, "append_", lambda: kept.append_(new, positions), limit=0.006)


CASES = {"decode": decode}
