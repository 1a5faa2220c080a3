"""Dynamic-mask attention over a sequence that is split across ranks.

A key that is not among the `window_size` best of its own rank's keys can never be kept by a later rank: those that beat
it there stand before every later row, too. So every rank sends these best keys, with values, biases and scores, and
puts the earlier ranks' in front of its own. Keys keep their order, so ties resolve as in one process; each rank then
makes one ordinary call. No ring, no merging of results, and shapes that depend on nothing but shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from .. import functional
from .._arguments import as_int, check_bool, check_optional_tensor, check_tensor
from ..selection import select_keys
from ._dtensor import from_share, to_shares
from ._ranks import check_agreement, check_shares, group_of

_ALIGNMENT = 16  # bytes, of the tensors in what a rank sends


def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    window_size: int,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    scores: Tensor | None = None,
    key_mask: Tensor | None = None,
    selection: str = "causal",
    seqlens_k: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    check: bool = False,
) -> Tensor:
    """`flash_dmattn.dynamic_mask_attention` of a whole sequence, of which every rank of `group` holds a share.

    Rank r of P has the tokens r S / P to (r + 1) S / P - 1. Every rank sends its `window_size` best keys to all others
    and receives theirs: (P - 1) w Hkv (2 D elements and a bias) bytes each way in the forward, (P - 1) w Hkv (2 D + 1)
    float32 in the backward (float64 for float64). The host does not wait for them. Results are those of one process but
    for roundings of gradients, which are added up in float32. Source: docs/distributed.md.

    All ranks call it, and all run the backward if one does: a rank that needs no gradient itself still has others'.

    Args:
        query: (B, S / P, H, D); key, value: (B, S / P, Hkv, D): this rank's share, the same shape on every rank.
        key_bias: (B or 1, Hkv or 1, S / P), query's dtype or float32.
        window_size: keys that a row sees at most, of the whole sequence.
        group: the ranks, in the order of the sequence; or a mesh of one dimension. DTensors have one: query, key, value
            and what is per key, all split along the sequence, may be given instead of shares.
        scores: what to select by, detached; default key_bias. (B or 1, Hkv or 1, S / P), any floating dtype.
        key_mask: bool (B or 1, heads of scores or 1, S / P); False hides the key, before the selection.
        selection, seqlens_k: for the names of the other function only; see below.
        scale, softcap, deterministic: as in `flash_dmattn.dynamic_mask_attention`.
        check: let ranks compare shapes, dtypes and options in this call, which waits for all of them. A group's first
            call does so, and all with TORCH_DISTRIBUTED_DEBUG=DETAIL; others trust the ranks.

    Returns:
        out (B, S / P, H, D), this rank's share; of DTensors (B, S, H, D), split likewise.

    Raises:
        As `flash_dmattn.dynamic_mask_attention`, and ValueError: what is not exact this way, which is selection
        "per_key" (every rank's keys compete with later ones), seqlens_k (use key_mask), a head of scores or of the bias
        for each query head (heads of a group would see different keys of other ranks), and shares of unequal length;
        ranks that disagree. A rank that is gone or never calls ends in torch's own timeout on the others.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value), ("key_bias", key_bias)):
        check_tensor(name, tensor)
    for name, tensor in (("scores", scores), ("key_mask", key_mask), ("seqlens_k", seqlens_k)):
        check_optional_tensor(name, tensor)
    check_bool("check", check)
    window_size = as_int("window_size", window_size)
    tensors = {"query": query, "key": key, "value": value, "key_bias": key_bias, "scores": scores, "key_mask": key_mask}
    shares, mesh = to_shares(tensors, group)
    if mesh is not None:
        out = dynamic_mask_attention(
            **shares,
            window_size=window_size,
            group=mesh,
            selection=selection,
            seqlens_k=seqlens_k,
            scale=scale,
            softcap=softcap,
            deterministic=deterministic,
            check=check,
        )
        return from_share(out, mesh)
    group = group_of(group)
    options = {"window_size": window_size, "scale": scale, "softcap": softcap, "selection": selection}
    check_agreement(group, tensors | {"seqlens_k": seqlens_k}, options, check)
    check_shares(query, key, value)
    _refuse_inexact(key, {"key_bias": key_bias, "scores": scores}, selection, seqlens_k)
    if group.size() > 1 and min(window_size, key.shape[1]) > 0:
        key, value, key_bias, scores, key_mask = _prepend_kept(
            query, key, value, key_bias, scores, key_mask, window_size, group
        )
    return functional.dynamic_mask_attention(
        query,
        key,
        value,
        key_bias,
        window_size,
        scores=scores,
        key_mask=key_mask,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
    )


def _refuse_inexact(key: Tensor, per_key: dict[str, Tensor | None], selection: str, seqlens_k: Tensor | None) -> None:
    if selection != "causal":
        raise ValueError(
            "selection must be 'causal' where the sequence is split across ranks, since later keys compete in others; "
            f"got selection {selection!r}"
        )
    if seqlens_k is not None:
        raise ValueError("seqlens_k is not supported where the sequence is split across ranks: hide keys by key_mask")
    for name, tensor in per_key.items():
        if tensor is not None and (tensor.dim() != 3 or tensor.shape[1] not in (1, key.shape[2])):
            raise ValueError(
                f"{name} must be (B or 1, Hkv or 1, S / P) where the sequence is split across ranks, since the query "
                f"heads of a key head see the same keys of other ranks; got {name} {tuple(tensor.shape)}, "
                f"key {tuple(key.shape)}"
            )


def _prepend_kept(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    scores: Tensor | None,
    key_mask: Tensor | None,
    window_size: int,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Key, value, key_bias, scores and key_mask with what earlier ranks kept in front."""
    kept = kept_keys(key_bias if scores is None else scores, window_size, key_mask)
    # In its own form per element and head a kept key stands in other places, so all have the widest of these forms.
    batch, heads = (max(sizes) for sizes in zip(kept.shape[:2], key_bias.shape[:2], strict=True))
    key_bias = key_bias.expand(batch, heads, -1)
    if scores is not None:
        scores = scores.detach().expand(*kept.shape[:2], -1)
    key, value, key_bias, scores = _PrependKept.apply(query, key, value, key_bias, scores, kept, group)
    if key_mask is not None:
        earlier = key_bias.shape[2] - key_mask.shape[2]
        key_mask = torch.nn.functional.pad(key_mask, (earlier, 0), value=True)
    return key, value, key_bias, scores, key_mask


def kept_keys(scores: Tensor, window_size: int, key_mask: Tensor | None) -> Tensor:
    """Which keys the last row keeps: their indices in ascending order, then Sk where there are fewer.

    Args:
        scores, window_size, key_mask: as in `select_keys`.

    Returns:
        int64 (B, heads, min(window_size, Sk)), of what scores and key_mask broadcast to.
    """
    scores = scores.detach()
    if key_mask is not None:
        scores = scores.expand(max(scores.shape[0], key_mask.shape[0]), -1, -1)
    seqlen_k = scores.shape[2]
    count = min(window_size, seqlen_k)
    intervals = select_keys(scores, window_size, seqlen_q=1, causal=False, key_mask=key_mask)
    is_kept = intervals.begin < intervals.end
    # The n-th kept key goes to place n, all others to one place more, which is cut off.
    place = torch.where(is_kept, is_kept.cumsum(-1) - 1, count)
    index = torch.arange(seqlen_k, device=scores.device).expand_as(place)
    kept = index.new_full((*place.shape[:2], count + 1), seqlen_k)
    return kept.scatter_(-1, place, index)[..., :count]


class _PrependKept(torch.autograd.Function):
    """Sends what `kept` says of every rank's keys to all ranks, and back the gradients of what others made of it.

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
        kept: Tensor,
        group: ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        tokens, rows = (key, value), (key_bias,) if scores is None else (key_bias, scores)
        sent = [_take_tokens(tensor, kept) for tensor in tokens] + [_take_rows(tensor, kept) for tensor in rows]
        # Returns before it has ended: what follows runs beside it, until the result is read.
        received = collectives.all_gather_tensor(torch.cat(list(_padded_bytes(sent))), 0, group)
        rank = dist.get_rank(group)
        earlier = rank * kept.shape[2]
        whole = []
        for tensor, dim in (*((tensor, 1) for tensor in tokens), *((tensor, 2) for tensor in rows)):
            shape = list(tensor.shape)
            shape[dim] += earlier
            whole.append(tensor.new_empty(shape))
            whole[-1].narrow(dim, earlier, tensor.shape[dim]).copy_(tensor)
        for target, source, dim in zip(whole, _of_ranks(received, sent, group.size()), (1, 1, 2, 2), strict=False):
            # (rank, ..., kept, ...): ranks come before what each of them kept.
            target.narrow(dim, 0, earlier).copy_(source[:rank].movedim(0, dim).flatten(dim, dim + 1))
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
        earlier, dims = rank * count, (1, 1, 2)
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        shapes = []
        for gradient, dim in zip(gradients[:3], dims, strict=True):
            shapes.append(list(gradient.shape))
            shapes[-1][dim] = count
        lengths = [torch.Size(shape).numel() for shape in shapes]
        parts = gradients[0].new_zeros((size, sum(lengths)), dtype=dtype)
        for part, gradient, shape, dim in zip(parts.split(lengths, 1), gradients[:3], shapes, dims, strict=True):
            others = gradient.narrow(dim, 0, earlier).unflatten(dim, (rank, count)).movedim(dim, 0)
            part[:rank].view(rank, *shape).copy_(others)
        own = collectives.reduce_scatter_tensor(parts.view(-1), "sum", 0, ctx.group)
        results: list[Tensor | None] = []
        for index, (part, gradient, shape, dim) in enumerate(
            zip(own.split(lengths), gradients[:3], shapes, dims, strict=True), start=1
        ):
            if not ctx.needs_input_grad[index]:
                results.append(None)
                continue
            # A place without a kept key has a gradient of 0: nobody sees it.
            gradient = gradient.narrow(dim, earlier, gradient.shape[dim] - earlier).clone()
            where = _token_index(kept, gradient) if dim == 1 else _row_index(kept, gradient)
            results.append(gradient.scatter_add_(dim, where, part.view(shape).to(gradient.dtype)))
        return None, *results, None, None, None


def _token_index(kept: Tensor, tokens: Tensor) -> Tensor:
    """For gather and scatter of tokens (B, S, Hkv, D): (B, kept, Hkv, D)."""
    batch, length, heads, head_dim = tokens.shape
    index = kept.clamp(max=length - 1).expand(batch, heads, -1)
    return index.transpose(1, 2)[..., None].expand(-1, -1, -1, head_dim)


def _row_index(kept: Tensor, rows: Tensor) -> Tensor:
    """The same for rows (B or 1, heads, S)."""
    batch, heads, length = rows.shape
    return kept.clamp(max=length - 1).expand(batch, heads, -1)


def _take_tokens(tokens: Tensor, kept: Tensor) -> Tensor:
    return tokens.gather(1, _token_index(kept, tokens))


def _take_rows(rows: Tensor, kept: Tensor) -> Tensor:
    """-inf where nothing is kept, which no selection keeps."""
    return rows.gather(2, _row_index(kept, rows)).masked_fill(kept == rows.shape[2], -torch.inf)


def _of_ranks(received: Tensor, sent: Sequence[Tensor], ranks: int) -> Iterator[Tensor]:
    """(P, *shape) of each tensor that all ranks sent."""
    received, first = received.view(ranks, -1), 0
    for tensor in sent:
        yield received[:, first : first + tensor.nbytes].view(tensor.dtype).unflatten(1, tensor.shape)
        first += _padded(tensor.nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _padded_bytes(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        as_bytes = tensor.contiguous().view(-1).view(torch.uint8)
        yield torch.nn.functional.pad(as_bytes, (0, _padded(tensor.nbytes) - tensor.nbytes))
