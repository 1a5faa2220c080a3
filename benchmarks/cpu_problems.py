"""What the CPU's sweeps and dynamic masks are measured on: one attention by this library and by others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from flash_dmattn import KeyIntervals, PreparedMask, attention, dynamic_mask_attention, select_keys
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

DTYPE = torch.float32
FlexForward = Callable[[], Tensor]


@dataclass
class Problem:
    """One attention in the layouts of both: (B, S, H, D) here, (B, H, S, D) in torch; every leaf wants its gradient."""

    length: int
    heads: int = 2
    key_heads: int = 1
    head_dim: int = 64
    query: Tensor = field(init=False)
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int) -> Tensor:
            return torch.randn(1, self.length, heads, self.head_dim, generator=generator, dtype=DTYPE)

        self.query, self.key, self.value = normal(self.heads), normal(self.key_heads), normal(self.key_heads)
        self.dout = normal(self.heads)
        # Each library gets leaves of its own, contiguous in its own layout.
        self.their_inputs = [t.transpose(1, 2).contiguous() for t in (self.query, self.key, self.value)]
        self.their_dout = self.dout.transpose(1, 2).contiguous()
        for leaf in (self.query, self.key, self.value, *self.their_inputs):
            leaf.requires_grad_()

    @property
    def shape(self) -> str:
        return f"H{self.heads} Hkv{self.key_heads} D{self.head_dim}"

    def our_leaves(self) -> list[Tensor]:
        return [self.query, self.key, self.value]

    def attend(self, mask: Tensor | KeyIntervals | PreparedMask | None, *, is_causal: bool) -> Tensor:
        return attention(self.query, self.key, self.value, mask=mask, is_causal=is_causal)

    def our_dense(self) -> Tensor:
        return self.attend(None, is_causal=True)

    def theirs(self, mask: Tensor | None) -> Tensor:
        """By scaled_dot_product_attention."""
        grouped = self.heads != self.key_heads
        return F.scaled_dot_product_attention(*self.their_inputs, attn_mask=mask, enable_gqa=grouped)

    def backward_of(self, out: Tensor, leaves: list[Tensor], dout: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def flex(self, is_visible: Callable[..., Tensor], score_mod: Callable[..., Tensor] | None = None) -> FlexForward:
        """FlexAttention, compiled; its block mask, the same for all heads, is made here."""
        block_mask = create_block_mask(is_visible, None, None, self.length, self.length, device="cpu")
        torch.compiler.reset()  # or shapes of other cases count against the limit of recompilations
        flex = torch.compile(flex_attention, dynamic=False)
        grouped = self.heads != self.key_heads
        inputs = [tensor.detach() for tensor in self.their_inputs]  # on a CPU it refuses what wants a gradient
        return lambda: flex(*inputs, score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped)


def key_scores(length: int, drift: float = 0.0, heads: int = 1) -> Tensor:
    """(1, heads, length): normal scores, of which no two are equal, since torch.topk does not say which stay.

    With `drift` they rise along the sequence, by so many standard deviations: then newer keys push out older ones.
    """
    generator = torch.Generator().manual_seed(1)
    ranks = torch.stack([torch.randperm(length, generator=generator) for _ in range(heads)])
    scores = torch.special.ndtri((ranks.double() + 0.5) / length)
    return (scores + drift * torch.arange(length) / length).float()[None]


class DynamicProblem(Problem):
    """Causal attention of every row to the `window` keys of highest bias among its past."""

    def __init__(self, length: int, window: int, drift: float = 0.0, head_dim: int = 64) -> None:
        super().__init__(length, head_dim=head_dim)
        self.window = window
        self.key_bias = key_scores(length, drift, self.key_heads).requires_grad_()

    def our_leaves(self) -> list[Tensor]:
        return [self.query, self.key, self.value, self.key_bias]

    def select(self) -> KeyIntervals:
        return select_keys(self.key_bias, self.window)

    def ours(self, mask: Tensor | KeyIntervals | PreparedMask) -> Tensor:
        return attention(self.query, self.key, self.value, mask=mask, bias=self.key_bias, is_causal=True)

    def ours_selected(self) -> Tensor:
        return dynamic_mask_attention(self.query, self.key, self.value, self.key_bias, self.window)

    def our_step(self) -> object:
        """What training needs of one layer: selection, forward, backward."""
        return torch.autograd.grad(self.ours_selected(), self.our_leaves(), self.dout)

    @torch.no_grad()
    def their_mask(self) -> Tensor:
        """(1, key_heads, S, S): the bias of each row's highest keys, -inf elsewhere."""
        causal = torch.ones(self.length, self.length, dtype=torch.bool).tril_()
        scores = self.key_bias[:, :, None].masked_fill(~causal, -math.inf)
        values, indices = scores.topk(min(self.window, self.length), sorted=False)
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, values != -math.inf)
        return scores.masked_fill_(~kept, -math.inf)

    def flex_forward(self, intervals: KeyIntervals) -> FlexForward:
        """FlexAttention given the intervals, and the bias as a score_mod."""
        begin, end, bias = intervals.begin[0, 0], intervals.end[0, 0], self.key_bias.detach()[0, 0]

        def is_visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (begin[key] <= row) & (row < end[key])

        def with_bias(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return score + bias[key]

        return self.flex(is_visible, with_bias)

    @torch.no_grad()
    def check(self, intervals: KeyIntervals, mask: Tensor) -> None:
        """Raises AssertionError if the two do not select and compute the same."""
        assert torch.equal(intervals.dense_mask(self.length), mask != -math.inf), "other keys were selected"
        expected = self.theirs(mask).transpose(1, 2)
        torch.testing.assert_close(self.ours(intervals), expected, atol=1e-4, rtol=1e-4, check_stride=False)
        torch.testing.assert_close(self.ours_selected(), expected, atol=1e-4, rtol=1e-4, check_stride=False)
