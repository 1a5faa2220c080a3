"""The cases of gpu_attention.py with lists of keys per query (KeyIndices): packing, and what it leaves to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from choices import POOLS, choose_keys
from flash_dmattn import KeyIndices, PreparedMask, attention, prepare_mask
from gpu_common import (
    DEVICE,
    DTYPE,
    EFFICIENT,
    FA4,
    FLEX,
    Bench,
    Problem,
    Work,
    backward_of,
    check_equal,
    compiled_flex,
    fa4_forward,
    if_installed,
    kernel_seconds,
    peak_beyond_results,
    step_of,
)
from report import Comparison
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

PREPARED_MASK, DENSE = "own, the mask prepared", "own dense causal"


def lists(bench: Bench) -> Iterator[Comparison]:
    """Rows that choose for themselves, as sparse attention models do."""
    yield from _packing(bench)
    yield from _blocks(bench)
    # By how alike neighbouring rows choose: of own dense causal attention, forward and backward.
    goals = {"coherent": 3.5, "medium": 1.8, "independent": 0.9}
    for choice, goal in goals.items():
        yield from _chosen(bench, choice, goal)
    yield from _latent(bench)


def _packing(bench: Bench) -> Iterator[Comparison]:
    problem = Problem(32, 8, 128, bench.length(16384))
    chosen = choose_keys(problem.length, bench.length(2048), POOLS["coherent"], device=DEVICE)
    indices = KeyIndices(chosen[None, None])
    case = f"lists {problem.name} of {chosen.shape[1]} keys"

    def prepare() -> PreparedMask:
        return prepare_mask(indices, seqlen_k=problem.length, is_causal=True)

    yield from bench.note(case, "packing", kernel_seconds(prepare, "pack_indices"), limit=0.12)
    prepared, mask = prepare(), prepare_mask(indices.dense_mask(problem.length), is_causal=True)

    def ours(mask: PreparedMask = prepared) -> Tensor:
        return attention(problem.query, problem.key, problem.value, mask=mask, is_causal=True)

    check_equal(ours(), ours(mask))
    goals = {PREPARED_MASK: 0.95}
    yield from bench.compare(case, "forward after packing", ours, {PREPARED_MASK: lambda: ours(mask)}, goals=goals)


def _blocks(bench: Bench) -> Iterator[Comparison]:
    """A quarter of all blocks of 128 keys, shared by 64 neighbouring rows, against as many tiles of a bool mask."""
    problem = Problem(32, 8, 128, bench.length(16384))
    blocks = problem.length // 128
    kept = math.ceil(blocks / 4)

    def chosen(rows: int) -> Tensor:
        """(length, kept): the same for `rows` neighbouring rows."""
        drawn = torch.rand(problem.length // rows, blocks, device=DEVICE).topk(kept).indices
        return drawn.repeat_interleave(rows, 0).int()

    indices = KeyIndices(chosen(64)[None, None], block_size=128)
    prepared = prepare_mask(indices, seqlen_k=problem.length)
    tiles = prepare_mask(KeyIndices(chosen(128)[None, None], block_size=128).dense_mask(problem.length))

    def ours(mask: PreparedMask) -> Callable[[], Tensor]:
        return lambda: attention(problem.query, problem.key, problem.value, mask=mask)

    amount = problem.teraflop(kept / blocks)
    case, others = f"lists {problem.name}, {kept} blocks of 128 keys", {"own tile mask": ours(tiles)}
    goals = {"own tile mask": 0.9}
    yield from bench.compare(case, "forward", ours(prepared), others, unit="TFLOPS", amount=amount, goals=goals)


def _chosen(bench: Bench, choice: str, goal: float) -> Iterator[Comparison]:
    problem = Problem(32, 8, 128, bench.length(32768))
    indices = choose_keys(problem.length, bench.length(2048), POOLS[choice], device=DEVICE)

    def step(**arguments: object) -> Work:
        forward = partial(attention, *problem.leaves, is_causal=True, **arguments)
        return step_of(forward, problem.leaves, problem.dout)

    mask = KeyIndices(indices[None, None])
    others, goals = {DENSE: step()}, {DENSE: goal}
    if choice == "coherent":
        others[FLEX], goals[FLEX] = _flex_step(problem, mask.dense_mask(problem.length)[0, 0]), 3.0
    case = f"lists {problem.name} of {indices.shape[1]} keys, {choice}"
    yield from bench.compare(case, "forward and backward", step(mask=mask), others, goals=goals)


def _latent(bench: Bench) -> Iterator[Comparison]:
    """Values of another head dim than keys, as in multi-head latent attention, and one list for all heads."""
    problem = Problem(16, 16, 192, bench.length(16384), value_dim=128)
    indices = choose_keys(problem.length, bench.length(2048), POOLS["coherent"], device=DEVICE)
    mask = KeyIndices(indices[None, None])

    def forward(mask: KeyIndices | None = None) -> Tensor:
        return attention(*problem.leaves, mask=mask, is_causal=True)

    case, leaves_and_dout = f"dense {problem.name} causal", (problem.leaves, problem.dout)
    forwards = if_installed(FA4, fa4_forward(problem, causal=True))
    backwards = {name: backward_of(work, *leaves_and_dout) for name, work in forwards.items()}
    yield from bench.compare(case, "forward", forward, forwards, goals={FA4: 0.95})
    yield from bench.compare(case, "backward", backward_of(forward, *leaves_and_dout), backwards, goals={FA4: 0.95})

    ours, dense = (step_of(partial(forward, each), *leaves_and_dout) for each in (mask, None))
    sdpa = problem.sdpa(SDPBackend.EFFICIENT_ATTENTION, attn_mask=mask.dense_mask(problem.length))
    check_equal(forward(mask), sdpa().transpose(1, 2))
    others = {DENSE: dense, EFFICIENT: step_of(sdpa, problem.their_leaves, problem.their_dout)}
    case = f"lists {problem.name} of {indices.shape[1]} keys, coherent"
    yield from bench.compare(case, "forward and backward", ours, others, goals={DENSE: 1.75, EFFICIENT: 4.0})
    yield _peak(case, lambda: (out := forward(mask), *torch.autograd.grad(out, *leaves_and_dout)))


def _peak(case: str, step: Callable[[], tuple[Tensor, ...]]) -> Comparison:
    """What a step needs beside its inputs, output and gradients."""
    megabytes = peak_beyond_results(step) / 1e6
    return Comparison(case, "peak memory", str(DTYPE).removeprefix("torch."), "MB", megabytes, limit=600)


def _flex_step(problem: Problem, mask: Tensor) -> Work:
    flex = compiled_flex()

    def is_visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return mask[row, key]

    block_mask = create_block_mask(is_visible, None, None, problem.length, problem.length, device=DEVICE, _compile=True)

    forward = partial(flex, *problem.their_leaves, block_mask=block_mask, enable_gqa=True)
    return step_of(forward, problem.their_leaves, problem.their_dout)


CASES = {"lists": lists}
