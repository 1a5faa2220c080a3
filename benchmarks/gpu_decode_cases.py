"""The cases of gpu_attention.py that generation asks for: one query over a long cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from flash_dmattn import KeptKeys, KeyIndices, attention
from gpu_common import DEVICE, DTYPE, Bench, Work, check_equal, device_sampler, normal
from report import Comparison
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
# What steps of generation read in turn, at least, so that nothing stays in the GPU's cache from one round to the next.
LEAST_BYTES_IN_TURN = 1 << 28


def decode(bench: Bench) -> Iterator[Comparison]:
    """One query over a long cache: bytes of kept keys and values against the copy of this run."""
    length, kept = bench.length(65536), bench.length(2048)
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
        query = normal(batch, 1, HEADS, HEAD_DIM)
        key, value = (normal(batch, length, KEY_HEADS, HEAD_DIM) for _ in range(2))
        # In turn, so that the kept keys do not stay in the cache from one call to the next.
        masks: list[Tensor | KeyIndices | None] = [None]
        if form != "all":
            masks = []
            for _ in range(4):
                best = torch.rand(batch, KEY_HEADS, length, device=DEVICE).topk(kept).indices
                mask = torch.zeros(batch, KEY_HEADS, length, dtype=torch.bool, device=DEVICE).scatter_(-1, best, True)
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
        read = len(masks) * 2 * batch * seen * KEY_HEADS * HEAD_DIM * DTYPE.itemsize
        yield from bench.compare(
            f"decode B{batch} H{HEADS} Hkv{KEY_HEADS} D{HEAD_DIM} over {length} keys, {seen} kept"
            + (" by lists" if form == "lists" else ""),
            "share of the copy",
            ours,
            unit="%",
            amount=100 * read / bench.copy_bandwidth,
            least=least,
        )
    yield from _append(bench, 8, KEY_HEADS, length, kept)


def _append(bench: Bench, batch: int, heads: int, length: int, window: int) -> Iterator[Comparison]:
    """What a step does before it attends: a new key, which is not among the best, as most are not."""
    kept = KeptKeys.from_scores(torch.randn(batch, heads, length, device=DEVICE), window)
    new = torch.full((batch, heads, 1), torch.finfo(torch.float32).min / 2, device=DEVICE)
    positions = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    case = f"decode B{batch} Hkv{heads}, the best {window} kept up to date"
    yield from bench.compare(case, "append_", lambda: kept.append_(new, positions), limit=0.006)


def batches(bench: Bench) -> Iterator[Comparison]:
    """A step of generation over short and long caches, dense and with 2048 keys kept by lists: what plot.py draws."""
    for keys, batch in itertools.product((4096, 65536, 524288), (1, 8, 32)):
        yield from _steps(bench, batch, bench.length(keys), bench.length(2048))


def _steps(bench: Bench, batch: int, length: int, kept: int) -> Iterator[Comparison]:
    """As if every layer of a model had a step: caches and lists in turn."""
    key_bytes = 2 * batch * KEY_HEADS * HEAD_DIM * DTYPE.itemsize  # of one key and its value
    case = f"step B{batch} H{HEADS} Hkv{KEY_HEADS} D{HEAD_DIM} over {length} keys"
    turns = math.ceil(LEAST_BYTES_IN_TURN / (key_bytes * kept))
    count = min(turns, math.ceil(LEAST_BYTES_IN_TURN / (key_bytes * length)))
    torch.cuda.empty_cache()  # of the steps before: what torch holds of it does not count as free
    if 1.1 * count * key_bytes * length > torch.cuda.mem_get_info()[0]:
        bench.notes.append(f"{case}: left out, keys and values take {count * key_bytes * length >> 30} GiB")
        return
    query = normal(batch, 1, HEADS, HEAD_DIM)
    caches = [[normal(batch, length, KEY_HEADS, HEAD_DIM) for _ in range(2)] for _ in range(count)]
    in_turn = [caches[turn % count] for turn in range(turns)]
    lists = [
        KeyIndices(torch.rand(batch, KEY_HEADS, length, device=DEVICE).topk(kept).indices[:, :, None].int())
        for _ in range(turns)
    ]

    def dense() -> list[Tensor]:
        return [attention(query, key, value) for key, value in in_turn]

    def keeping() -> list[Tensor]:
        return [attention(query, key, value, mask=each) for (key, value), each in zip(in_turn, lists, strict=True)]

    def sdpa() -> list[Tensor]:
        """With whichever kernel PyTorch prefers of those that share keys among query heads."""
        heads_first = [[tensor.transpose(1, 2) for tensor in (query, *cache)] for cache in in_turn]
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            return [F.scaled_dot_product_attention(*tensors, enable_gqa=True) for tensors in heads_first]

    def sampler_of_a_step(work: Work) -> Callable[[], float]:
        sample = device_sampler(work)
        return lambda: sample() / turns

    if length <= bench.length(4096):
        check_equal(dense()[0], sdpa()[0].transpose(1, 2))
    sizes = {"batch": batch, "keys": length, "kept": kept}
    yield from bench.compare(case, "dense", dense, {"SDPA": sdpa}, sizes=sizes, sampler_of=sampler_of_a_step)
    yield from bench.compare(case, "kept", keeping, {"dense": dense}, sizes=sizes, sampler_of=sampler_of_a_step)


CASES = {"decode": decode, "batches": batches}
