"""Keys of earlier ranks in front of a rank's own, and gradients the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives

from ._ranks import token_dim
from .packing import by_head, of_ranks, unpack, with_tokens


@dataclass(frozen=True, eq=False)
class OwnKeys:
    """A rank's own keys, values and what is per key, each in a tensor that has room in front for those of earlier
    ranks: a copy that a GPU may still be making, beside what its current stream does."""

    tensors: list[Tensor]
    written: torch.cuda.Event | None = None  # None: they are

    @classmethod
    def copied(cls, tensors: Sequence[Tensor], earlier: int) -> OwnKeys:
        """Of the tensors as they are now, with `earlier` tokens of room."""
        whole = [_with_room(tensor, earlier) for tensor in tensors]
        _copy_behind(whole, tensors, earlier)
        return cls(whole)

    @classmethod
    def copied_beside(cls, tensors: Sequence[Tensor], earlier: int) -> OwnKeys:
        """The same; on a GPU by a stream of its own, and not in compiled code. The copy takes the memory's time, and
        what a rank chooses and packs meanwhile mostly waits."""
        if not tensors[0].is_cuda:
            return cls.copied(tensors, earlier)
        # Made for the current stream, whose work so far the other one waits for: nobody else uses this memory by then.
        whole = [_with_room(tensor, earlier) for tensor in tensors]
        stream = torch.cuda.Stream(tensors[0].device)
        stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.stream(stream):
            _copy_behind(whole, tensors, earlier)
        for tensor in whole:
            tensor.record_stream(stream)  # a handle that nobody reads may be gone before they are written
        return cls(whole, stream.record_event())

    def wait(self) -> list[Tensor]:
        """The tensors, for the current stream."""
        if self.written is not None:
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self.written)
        return self.tensors


def _with_room(tensor: Tensor, earlier: int) -> Tensor:
    shape = list(tensor.shape)
    shape[token_dim(tensor)] += earlier
    return tensor.new_empty(shape)


def _copy_behind(whole: Sequence[Tensor], tensors: Sequence[Tensor], earlier: int) -> None:
    for target, tensor in zip(whole, tensors, strict=True):
        by_head(target)[:, :, earlier:].copy_(by_head(tensor))


class PrependKept(torch.autograd.Function):
    """Puts the keys of earlier ranks in front of this rank's own, and sends back the gradients of what it made of them.

    It takes the query only to run whenever a gradient is wanted: every rank has to join the backward's collective, also
    the first one, which uses no other's keys, and one whose keys are frozen.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor,
        scores: Tensor | None,
        own: OwnKeys | None,
        kept: Tensor,
        received: Tensor,
        group: ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """`own`: of the others; None: not copied yet."""
        tensors = [tensor for tensor in (key, value, key_bias, scores) if tensor is not None]
        rank, count = dist.get_rank(group), kept.shape[2]
        # Before the first read of what others sent, which may still be on its way.
        whole = (own or OwnKeys.copied(tensors, rank * count)).wait()
        sources = unpack(received, [by_head(tensor) for tensor in tensors], count, group.size())
        for target, source in zip(whole, sources, strict=True):
            of_ranks(by_head(target), rank, count).copy_(source[:rank])
        ctx.save_for_backward(kept)
        ctx.group = group
        key, value, key_bias, *others = whole
        if others:
            ctx.mark_non_differentiable(*others)
        return key, value, key_bias, others[0] if others else None

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        size, rank, count = ctx.group.size(), dist.get_rank(ctx.group), kept.shape[2]
        of_whole = [by_head(gradient) for gradient in gradients[:3]]
        own = [gradient[:, :, rank * count :] for gradient in of_whole]
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        shapes = [with_tokens(gradient, count) for gradient in of_whole]
        lengths = [shape.numel() for shape in shapes]
        sent = gradients[0].new_empty((size, sum(lengths)), dtype=dtype)
        sent[rank:].zero_()  # of this rank and later ones it used no key
        for part, gradient, shape in zip(sent.split(lengths, 1), of_whole, shapes, strict=True):
            part[:rank].view(rank, *shape).copy_(of_ranks(gradient, rank, count))
        sums = collectives.reduce_scatter_tensor(sent.view(-1), "sum", 0, ctx.group)
        _add_at(own, kept, [part.view(shape) for part, shape in zip(sums.split(lengths), shapes, strict=True)])
        results = [
            by_head(gradient).contiguous() if ctx.needs_input_grad[index] else None
            for index, gradient in enumerate(own, start=1)
        ]
        return None, *results, *([None] * 5)


def _add_at(gradients: Sequence[Tensor], kept: Tensor, of_others: Sequence[Tensor]) -> None:
    """Adds to the gradients (B, heads, S, ...) of this rank's keys, in place, what others (B, heads, kept, ...) made of
    those that it kept: in float32 with one rounding.

    In place, although autograd made them: the keys in front of which others' stand have one reader, the attention, so
    its gradient of them is nobody else's, and it is as large as all keys.
    """
    length = gradients[0].shape[2]
    is_empty = kept == length
    # An empty place repeats the first one, so that both write the same. Where none is kept, all are the last key's, to
    # which nothing is added: nobody sees what is empty.
    places = torch.where(is_empty, kept[..., :1], kept).clamp(max=length - 1)
    for gradient, others in zip(gradients, of_others, strict=True):
        index, is_none = (facts.expand(*gradient.shape[:2], -1) for facts in (places, is_empty))
        if gradient.dim() == 4:
            index, is_none = index[..., None].expand_as(others), is_none[..., None]
        sums = gradient.gather(2, index)
        torch.add(torch.where(is_none, others[:, :, :1], others), sums, out=sums)
        gradient.scatter_(2, index, sums)
