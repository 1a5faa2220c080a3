"""The best keys of every rank, on all ranks: what dynamic-mask attention over a split sequence sends.

A key that is not among the `window_size` best of its own rank's keys can never be kept by a later rank: those that beat
it there stand before every later row, too. So every rank sends these best keys, with values, biases and scores, and
puts the earlier ranks' in front of its own. Within packed documents these are the best of the rank's last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _library
from .._arguments import as_int, as_size, check_bool, check_optional_tensor, check_tensor
from ..selection import select_keys
from ._dtensor import to_shares
from ._ranks import check_agreement, check_shares, group_of
from .packed import SplitDocuments, check_cu_seqlens, split_documents, within
from .packing import by_head, pack
from .prepend import OwnKeys, PrependKept


@dataclass(frozen=True, eq=False)
class GatheredKeys:
    """What `gather_kept_keys` has started, for `dynamic_mask_attention` to end."""

    group: ProcessGroup
    window_size: int
    given: dict[str, Tensor | None]  # by name: what gather_kept_keys got
    kept: Tensor | None = None  # as kept_keys returns; None where nothing is sent
    received: Tensor | None = None  # uint8, of all ranks; reading it waits for it
    own: OwnKeys | None = None  # this rank's keys in their place; None: in compiled code
    cu_seqlens: Tensor | None = None  # what gather_kept_keys got

    def check_given(self, tensors: dict[str, Tensor | None], window_size: int, group: object) -> None:
        """Raises: ValueError: something that the attention is given is not what was gathered."""
        for name, gathered in (self.given | {"cu_seqlens": self.cu_seqlens}).items():
            if tensors[name] is not gathered:
                raise ValueError(f"{name} must be what gather_kept_keys was given, the same object; got another {name}")
        if window_size != self.window_size:
            raise ValueError(
                f"window_size must be {self.window_size}, what gather_kept_keys was given; got {window_size}"
            )
        if group is not None and group_of(group) != self.group:
            raise ValueError(
                "group must be the one in which gather_kept_keys was called, or not given; got another group"
            )

    def documents(self) -> SplitDocuments:
        """Those of cu_seqlens, which are given."""
        length = self.given["key"].shape[1]
        if isinstance(self.given["key"], DTensor):
            length //= self.group.size()
        return split_documents(self.cu_seqlens, length, dist.get_rank(self.group), self.group.size())

    def bounds(self) -> dict[str, Tensor]:
        """The documents of this rank's rows, and of its keys with those of earlier ranks in front."""
        if self.cu_seqlens is None:
            return {}
        count = 0 if self.kept is None else self.kept.shape[2]
        documents = self.documents()
        return {"cu_seqlens_q": documents.bounds_of_rows(), "cu_seqlens_k": documents.bounds_of_keys(count)}


def gather_kept_keys(
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    window_size: int,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    scores: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    check: bool = False,
) -> GatheredKeys:
    """Starts the exchange of `dynamic_mask_attention` as soon as keys, values and biases exist: what is enqueued
    between the two calls, for example the projection of queries, runs beside it.

        gathered = gather_kept_keys(key, value, key_bias, 2048, group=mesh)
        query = project(x)
        out = dynamic_mask_attention(query, key, value, key_bias, 2048, gathered=gathered)

    The result is the one without it, to the bit, and so are gradients. All ranks call it, in the same place among their
    collectives, and give each handle to `dynamic_mask_attention` once, with the tensors unchanged. Of a handle that is
    never given torch warns when the process ends.

    Args:
        key, value, key_bias, window_size, scores, key_mask, group: as in `dynamic_mask_attention`, which then takes the
            same objects.
        check: let ranks compare shapes, dtypes and options in this call.

    Returns:
        The handle. With CUDA tensors the host does not wait, and a forward that is compiled leaves it to the compiler
        where the exchange ends.

    Raises:
        TypeError, ValueError: as in `dynamic_mask_attention`.
    """
    for name, tensor in (("key", key), ("value", value), ("key_bias", key_bias)):
        check_tensor(name, tensor)
    for name, tensor in (("scores", scores), ("key_mask", key_mask)):
        check_optional_tensor(name, tensor)
    check_cu_seqlens(cu_seqlens)
    check_bool("check", check)
    window_size = as_int("window_size", window_size)
    given = {"key": key, "value": value, "key_bias": key_bias, "scores": scores, "key_mask": key_mask}
    shares, mesh = to_shares(given, group)
    group = group_of(group if mesh is None else mesh)
    facts = shares | {"cu_seqlens": cu_seqlens}
    check_agreement(group, "gather_kept_keys", facts, {"window_size": window_size}, check)
    check_shares({name: shares[name] for name in ("key", "value")})
    return start_gather(given, shares, window_size, group, cu_seqlens)


def start_gather(
    given: dict[str, Tensor | None],
    shares: dict[str, Tensor | None],
    window_size: int,
    group: ProcessGroup,
    cu_seqlens: Tensor | None = None,
) -> GatheredKeys:
    """`gather_kept_keys`, of tensors that are this rank's shares.

    Raises:
        ValueError: as `check_forms`; devices differ; a negative window_size.
    """
    key, value, key_bias, scores, key_mask = (shares[name] for name in given)
    check_forms(key, value, key_bias, scores, key_mask)
    _library.check_devices((*given, "cu_seqlens"), (key, value, key_bias, scores, key_mask, cu_seqlens))
    as_size("window_size", window_size)
    if group.size() == 1 or 0 in (window_size, *key.shape[:3]):
        return GatheredKeys(group, window_size, given, cu_seqlens=cu_seqlens)
    if cu_seqlens is not None:
        documents = split_documents(cu_seqlens, key.shape[1], dist.get_rank(group), group.size())
        key_mask = within(key_mask, documents.sends())
    best_by = key_bias if scores is None else scores
    tensors = [key, value, *_in_one_form(key_bias, scores, *_sets(best_by, key_mask))]
    tensors = [tensor.detach() for tensor in tensors if tensor is not None]
    earlier = dist.get_rank(group) * min(window_size, key.shape[1])
    own = None if torch.compiler.is_compiling() else OwnKeys.copied_beside(tensors, earlier)
    kept = kept_keys(best_by, window_size, key_mask)
    packed = pack([by_head(tensor) for tensor in tensors], kept)
    # Returns before it has ended: what follows runs beside it, until the result is read.
    received = collectives.all_gather_tensor(packed, 0, group)
    return GatheredKeys(group, window_size, given, kept, received, own, cu_seqlens)


def check_forms(key: Tensor, value: Tensor, key_bias: Tensor, scores: Tensor | None, key_mask: Tensor | None) -> None:
    """That values belong to the keys, and what is per key, with heads that see the same keys of other ranks."""
    batch, length, heads = key.shape[:3]
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            "value must have key's batch size, length and heads; "
            f"got value {tuple(value.shape)}, key {tuple(key.shape)}"
        )
    for name, tensor in (("key_bias", key_bias), ("scores", scores)):
        if tensor is not None and not _is_per_key(tensor, batch, heads, length):
            raise ValueError(
                f"{name} must be (B or 1, Hkv or 1, S / P) where the sequence is split across ranks, since the query "
                f"heads of a key head see the same keys of other ranks; got {name} {tuple(tensor.shape)}, "
                f"key {tuple(key.shape)}"
            )
    heads = (key_bias if scores is None else scores).shape[1]
    if key_mask is not None and not _is_per_key(key_mask, batch, heads, length):
        raise ValueError(
            f"key_mask must be (B or 1, heads of scores or 1, S / P); got key_mask {tuple(key_mask.shape)}, "
            f"key {tuple(key.shape)}, scores of {heads} head{'s' if heads > 1 else ''}"
        )


def _is_per_key(tensor: Tensor, batch: int, heads: int, length: int) -> bool:
    if tensor.dim() != 3:
        return False
    return tensor.shape[0] in (1, batch) and tensor.shape[1] in (1, heads) and tensor.shape[2] == length


def kept_keys(scores: Tensor, window_size: int, key_mask: Tensor | None) -> Tensor:
    """Which keys the last row keeps: their indices in ascending order, then Sk where there are fewer.

    Args:
        scores, window_size, key_mask: as in `select_keys`.

    Returns:
        int64 (B, heads, min(window_size, Sk)), of what scores and key_mask broadcast to.
    """
    scores = scores.detach().expand(*_sets(scores, key_mask), -1)
    seqlen_k = scores.shape[2]
    intervals = select_keys(scores, window_size, seqlen_q=1, causal=False, key_mask=key_mask)
    is_kept = intervals.begin < intervals.end
    # Counted through all heads at once, which GPUs scan with all their blocks, where they take one for each row.
    so_far = is_kept.flatten().cumsum(0).view(is_kept.shape)
    first = so_far[..., :1] - is_kept[..., :1].long()  # how many were kept before this head
    # The n-th is where the count reaches n, which is at the end where fewer are kept.
    return torch.searchsorted(so_far, first + torch.arange(1, min(window_size, seqlen_k) + 1, device=scores.device))


def _sets(scores: Tensor, key_mask: Tensor | None) -> tuple[int, int]:
    """Batch elements and heads that may keep different keys."""
    batch, heads = scores.shape[:2]
    return batch if key_mask is None else max(batch, key_mask.shape[0]), heads


def prepend_kept(
    query: Tensor, shares: dict[str, Tensor | None], gathered: GatheredKeys
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """key, value, key_bias, scores and key_mask of the shares with what earlier ranks kept in front. Of these the mask
    hides those of other documents than this rank's first."""
    key, value, key_bias, scores, key_mask = (shares[name] for name in gathered.given)
    kept = gathered.kept
    if kept is None:
        return key, value, key_bias, scores, key_mask
    key_bias, scores = _in_one_form(key_bias, scores, *kept.shape[:2])
    own = None if torch.compiler.is_compiling() else gathered.own
    key, value, key_bias, scores = PrependKept.apply(
        query, key, value, key_bias, scores, own, kept, gathered.received, gathered.group
    )
    if key_mask is not None:
        earlier = key_bias.shape[2] - key_mask.shape[2]
        key_mask = torch.nn.functional.pad(key_mask, (earlier, 0), value=True)
    if gathered.cu_seqlens is not None:
        seen = gathered.documents().sees(kept.shape[2])
        key_mask = within(key_mask, torch.nn.functional.pad(seen, (0, shares["key"].shape[1]), value=True))
    return key, value, key_bias, scores, key_mask


def _in_one_form(key_bias: Tensor, scores: Tensor | None, batch: int, heads: int) -> tuple[Tensor, Tensor | None]:
    """As sent, in the widest of their forms and that of the sets: in another one a kept key stands in another place."""
    if scores is not None:
        scores = scores.detach().expand(batch, heads, -1)
    batch, heads = max(batch, key_bias.shape[0]), max(heads, key_bias.shape[1])
    return key_bias.expand(batch, heads, -1), scores
