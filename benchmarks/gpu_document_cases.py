"""The cases of gpu_attention.py with packed documents."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from flash_dmattn import dynamic_mask_attention, varlen_attention
from gpu_common import DEVICE, FA4, Bench, backward_of, check_equal, fa4_call, if_installed, normal, step_of
from report import Comparison
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

TORCH, BATCH = "torch's varlen_attn", "own, as a batch"


def documents(bench: Bench) -> Iterator[Comparison]:
    """Documents of one length, one after another, each causal; and the selection within each."""
    tokens = bench.length(32768)
    for length in (128, 256, 512, 1024, 2048, 8192):
        yield from _causal(bench, tokens, bench.length(length), 0.95 if length >= 1024 else 1.0)
    yield from _selected(bench)


def _bounds(tokens: int, length: int) -> Tensor:
    return torch.arange(0, tokens + 1, length, dtype=torch.int32, device=DEVICE)


def _causal(bench: Bench, tokens: int, length: int, goal: float) -> Iterator[Comparison]:
    heads, head_dim = 16, 128
    leaves = [normal(tokens, heads, head_dim).requires_grad_() for _ in range(3)]
    dout, bounds = normal(tokens, heads, head_dim), _bounds(tokens, length)

    def ours() -> Tensor:
        return varlen_attention(*leaves, bounds, is_causal=True)

    def theirs() -> Tensor:
        return varlen_attn(*leaves, bounds, bounds, length, length, window_size=(-1, 0))

    check_equal(ours(), theirs())
    fa4 = fa4_call(
        "flash_attn_varlen_func",
        *leaves,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=length,
        max_seqlen_k=length,
        causal=True,
    )
    forwards = {TORCH: theirs} | if_installed(FA4, fa4)
    backwards = {name: backward_of(forward, leaves, dout) for name, forward in forwards.items()}
    case = f"documents of {length}, {tokens} tokens, H{heads} D{head_dim}"
    teraflop = 2 * tokens * length * heads * head_dim / 1e12
    goals = dict.fromkeys(forwards, goal)
    yield from bench.compare(case, "forward", ours, forwards, unit="TFLOPS", amount=teraflop, goals=goals)
    backward = backward_of(ours, leaves, dout)
    yield from bench.compare(case, "backward", backward, backwards, unit="TFLOPS", amount=2.5 * teraflop, goals=goals)


def _selected(bench: Bench) -> Iterator[Comparison]:
    """The best keys of each document, against the same documents as a batch."""
    count, length, heads, key_heads, head_dim = 32, bench.length(8192), 8, 2, 128
    window, tokens = bench.length(1024), count * length
    shapes = (count, length, heads, head_dim), (count, length, key_heads, head_dim), (count, key_heads, length)
    batch = [normal(*shape).requires_grad_() for shape in (shapes[0], shapes[1], shapes[1], shapes[2])]
    packed = [tensor.detach().reshape(1, tokens, *tensor.shape[2:]).requires_grad_() for tensor in batch[:3]]
    packed.append(batch[3].detach().transpose(0, 1).reshape(1, key_heads, tokens).requires_grad_())
    dout, bounds = normal(*shapes[0]), _bounds(tokens, length)

    def ours() -> Tensor:
        return dynamic_mask_attention(*packed, window, cu_seqlens_q=bounds)

    def theirs() -> Tensor:
        return dynamic_mask_attention(*batch, window)

    check_equal(ours().view(shapes[0]), theirs())
    case, goals = f"{count} documents of {length}, H{heads} Hkv{key_heads} D{head_dim} w{window}", {BATCH: 1 / 1.1}
    yield from bench.compare(case, "selection + forward", ours, {BATCH: theirs}, goals=goals)

    step, others = step_of(ours, packed, dout.view(1, tokens, *shapes[0][2:])), {BATCH: step_of(theirs, batch, dout)}
    yield from bench.compare(case, "forward and backward", step, others, goals=goals)


CASES = {"documents": documents}
