"""Attention under KeyIntervals over a sequence that is split across ranks: only keys that a rank's rows see travel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from .. import functional
from .._arguments import check_bool, check_optional_tensor, check_tensor
from ..selection import KeyIntervals
from ._dtensor import from_share, to_shares
from ._ranks import check_agreement, check_shares, group_of, token_dim, wants_gradient
from .order import Order, part_length, parts_of


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    mask: KeyIntervals | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    order: Order = "contiguous",
    check: bool = False,
) -> Tensor:
    """`flash_dmattn.attention` of a whole sequence, of which every rank of `group` holds a share, under intervals.

    A rank gets the keys, values and biases of others that any of its rows sees, and none else: of a window of W tokens
    W keys, of documents those that ranks share. Without a mask that hides more, causal attention sends every key to all
    later ranks, (P - 1) / 2 times the share of K and V on average: the mask is what makes this cheap. The host waits
    once, to learn how many keys are sent. Source: docs/distributed.md.

    All ranks call it, and all run the backward if one does.

    Args:
        query: (B, S / P, H, D): this rank's share, the same shape on every rank.
        key, value: (B, S / P, Hkv, D), as query.
        group: the ranks, in the order of the sequence; or a mesh of one dimension. DTensors have one, as for
            `dynamic_mask_attention`.
        mask: of the whole sequence, (B or 1, H or Hkv or 1, S), the same on every rank. None: every key is visible but
            for the causal rule.
        bias: this rank's share of a bias per key, (B or 1, H or Hkv or 1, S / P), query's dtype or float32. Its
            gradient has its shape.
        is_causal: row i sees keys j <= i, numbered in the whole sequence.
        scale, softcap, deterministic: as in `flash_dmattn.attention`.
        order: which tokens a rank holds, as in `shard`.
        check: as in `dynamic_mask_attention`.

    Returns:
        out (B, S / P, H, D), this rank's share; of DTensors (B, S, H, D), split likewise.

    Raises:
        TypeError: as in `flash_dmattn.attention`.
        ValueError: as there, and a mask or bias of another form, or of another length; ranks that disagree.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    check_optional_tensor("bias", bias)
    check_bool("is_causal", is_causal)
    check_bool("check", check)
    tensors = {"query": query, "key": key, "value": value, "bias": bias}
    shares, mesh = to_shares(tensors, group)
    if mesh is not None:
        out = attention(
            **shares,
            group=mesh,
            mask=mask,
            scale=scale,
            is_causal=is_causal,
            softcap=softcap,
            deterministic=deterministic,
            order=order,
            check=check,
        )
        return from_share(out, mesh)
    group = group_of(group)
    form = mask.shape if isinstance(mask, KeyIntervals) else type(mask).__name__
    options = {"mask": form, "is_causal": is_causal, "order": order, "scale": scale, "softcap": softcap}
    options["gradients"] = wants_gradient(tensors)
    check_agreement(group, "attention", tensors, options, check)
    check_shares({"query": query, "key": key, "value": value})
    seqlen = key.shape[1] * group.size()
    _check_forms(key, mask, bias, seqlen)
    part_length(seqlen, group.size(), order)
    intervals = _visible_rows(mask, is_causal, seqlen, key.device)
    rank, ranks = dist.get_rank(group), group.size()
    local = _local(intervals, seqlen, rank, ranks, order)
    # Of every rank's rows: (P, S), and from it who sends what.
    others = (local if of == rank else _local(intervals, seqlen, of, ranks, order) for of in range(ranks))
    sees = torch.stack([_is_seen(of_rank) for of_rank in others])
    exchange = _plan_exchange(sees, rank, ranks, order, group)
    key, value, bias = _Fetch.apply(query, key, value, bias, exchange)
    chosen = [bound[..., exchange.received] for bound in (local.begin, local.end)]
    return functional.attention(
        query,
        key,
        value,
        mask=KeyIntervals(*chosen),
        bias=bias,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
    )


def _check_forms(key: Tensor, mask: object, bias: Tensor | None, seqlen: int) -> None:
    if mask is not None and not isinstance(mask, KeyIntervals):
        raise TypeError(f"mask must be KeyIntervals of the whole sequence, or None; got {type(mask).__name__}")
    if mask is not None and mask.shape[2] != seqlen:
        raise ValueError(f"mask must be of the whole sequence, {seqlen} keys; got mask {tuple(mask.shape)}")
    if bias is not None and (bias.dim() != 3 or bias.shape[2] != key.shape[1]):
        raise ValueError(
            "bias must be a share of a bias per key, (B or 1, H or Hkv or 1, S / P), where the sequence is split "
            f"across ranks; got bias {tuple(bias.shape)}, key {tuple(key.shape)}"
        )


def _visible_rows(mask: KeyIntervals | None, is_causal: bool, seqlen: int, device: torch.device) -> KeyIntervals:
    """Which rows of the whole sequence see each key, the causal rule included."""
    if mask is None:
        mask = KeyIntervals.sliding_window(None, 0 if is_causal else None, seqlen, device=device)
    elif is_causal:
        mask = mask.intersection(KeyIntervals.causal(seqlen, device=device))
    return mask


def _local(intervals: KeyIntervals, seqlen: int, rank: int, ranks: int, order: Order) -> KeyIntervals:
    """The same in the numbers of a rank's rows, which stand one part after the other.

    A bound becomes the number of the rank's rows before it, so that an interval stays one.
    """
    length = part_length(seqlen, ranks, order)
    bounds = []
    for bound in (intervals.begin, intervals.end):
        counts = [(bound - part * length).clamp(0, length) for part in parts_of(rank, ranks, order)]
        bounds.append(torch.stack(counts).sum(0, dtype=torch.int32))
    return KeyIntervals(*bounds, intervals.window_size)


def _is_seen(intervals: KeyIntervals) -> Tensor:
    """bool (S): by any row, in any batch element or head."""
    return (intervals.begin < intervals.end).flatten(0, 1).any(0)


@dataclass(frozen=True)
class _Exchange:
    group: ProcessGroup
    sent: Tensor  # int64: of the rank's own tokens, those for the first rank, those for the second, and so on
    send_counts: list[int]  # for each rank
    received: Tensor  # int64: which tokens of the sequence come, ascending
    receive_counts: list[int]  # from each rank
    places: Tensor  # int64: where what comes, rank by rank, stands among them


def _plan_exchange(sees: Tensor, rank: int, ranks: int, order: Order, group: ProcessGroup) -> _Exchange:
    length = part_length(sees.shape[1], ranks, order)
    tokens = torch.arange(sees.shape[1], device=sees.device).split(length)
    held = [torch.cat([tokens[part] for part in parts_of(of, ranks, order)]) for of in range(ranks)]
    counts = torch.stack([sees[:, own].sum(1) for own in held]).tolist()  # holder by receiver; the host waits here
    own = sees[:, held[rank]]
    sent = torch.cat([is_sent.nonzero()[:, 0] for is_sent in own])
    coming = torch.cat([own[sees[rank, own]] for own in held])
    received, from_order = coming.sort()
    places = torch.empty_like(from_order)
    places[from_order] = torch.arange(len(from_order), device=places.device)
    return _Exchange(group, sent, counts[rank], received, [of[rank] for of in counts], places)


class _Fetch(torch.autograd.Function):
    """Brings the keys, values and biases that the rank's rows see, and sends back their gradients.

    It takes the query only to run whenever a gradient is wanted: every rank has to join the backward's collective.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, exchange: _Exchange
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        tensors = [key, value] if bias is None else [key, value, bias]
        rows = [_token_rows(tensor).index_select(0, exchange.sent) for tensor in tensors]
        sent = torch.cat([row.contiguous().view(torch.uint8) for row in rows], 1)
        came = _all_to_all(sent, exchange.receive_counts, exchange.send_counts, exchange.group)
        came = torch.empty_like(came).index_copy_(0, exchange.places, came)
        parts = came.split([row.shape[1] * row.element_size() for row in rows], 1)
        results = [
            _from_token_rows(part.contiguous().view(tensor.dtype), tensor)
            for part, tensor in zip(parts, tensors, strict=True)
        ]
        ctx.exchange = exchange
        ctx.likes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        return results[0], results[1], results[2] if bias is not None else None

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange, likes = ctx.exchange, ctx.likes
        dtype = torch.promote_types(likes[0].dtype, torch.float32)
        rows = [_token_rows(gradient).to(dtype) for gradient in gradients[: len(likes)]]
        sent = torch.cat(rows, 1).index_select(0, exchange.places)
        came = _all_to_all(sent, exchange.send_counts, exchange.receive_counts, exchange.group)
        sums = came.new_zeros((likes[0].shape[1], came.shape[1]))
        # One rank after another: a token is there once for each, so the order of additions is always the same.
        for index, part in zip(
            exchange.sent.split(exchange.send_counts), came.split(exchange.send_counts), strict=True
        ):
            sums.index_add_(0, index, part)
        parts = sums.split([row.shape[1] for row in rows], 1)
        results = [
            _from_token_rows(part, like).to(like.dtype) if ctx.needs_input_grad[index] else None
            for index, (part, like) in enumerate(zip(parts, likes, strict=True), start=1)
        ]
        return None, *results, *([None] * (4 - len(results)))


def _token_rows(tensor: Tensor) -> Tensor:
    """(B, S, heads, D) or (B or 1, heads, S) as (S, everything else)."""
    return tensor.movedim(token_dim(tensor), 0).flatten(1)


def _from_token_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The same back, for other tokens."""
    dim = token_dim(like)
    return rows.unflatten(1, like.movedim(dim, 0).shape[1:]).movedim(0, dim)


def _all_to_all(rows: Tensor, receive_counts: list[int], send_counts: list[int], group: ProcessGroup) -> Tensor:
    came = collectives.all_to_all_single(rows.contiguous(), receive_counts, send_counts, group)
    return collectives.wait_tensor(came)
