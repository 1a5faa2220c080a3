"""The keys that causal selection keeps of a growing cache, kept up to date as keys arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _library
from ._arguments import as_size, check_optional_tensor, check_tensor
from .key_indices import KeyIndices
from .selection import select_keys

MAX_NEW_KEYS = 16
"""How many keys `KeptKeys.append_` takes at once. kMaxNewKeys in include/flash_dmattn/kept_keys.h."""

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class KeptKeys:
    """The `window_size` keys of highest score of a cache that grows, for `attention` of its newest rows.

        kept = KeptKeys.from_scores(scores, 2048)  # after a prefill
        mask = kept.append_(new_scores, positions)  # each step: what the step's query rows see
        out = attention(query, key, value, mask=mask)

    Exact for causal selection, and for that only: each row keeps the best of all keys up to its own. The keys that a
    row may see then only grow in number, so that a key that has dropped out of the best never comes back
    (docs/selection.md): what was kept and the new keys are all there is to choose from. Where keys leave by age, as
    from a sliding window or a cache that evicts, a key that dropped out may come back once better ones have left.
    Windows are therefore refused by name (`sliding_window`). A cache that is cropped brings dropped keys back, too:
    begin again with `from_scores` of the scores that are left, or give `append_` the scores of all keys: it then finds
    by the lengths, on the device, that what is kept is of another cache, and chooses anew.

    The order of keys is that of `select_keys`: among equal scores the newest stays; -0 equals 0, NaNs are equal and
    rank highest; -inf and the dtype's lowest finite value are never kept. A pytree: torch.compile takes and returns
    it.

    Args:
        indices: int32 (B, heads, w), contiguous: the kept keys in any order, none twice; -1: an empty place.
        scores: (B, heads, w), contiguous, float16, bfloat16, float32 or float64: their scores; anything in empty
            places. Without a gradient.
        lengths: int32 (B, heads), contiguous, or None: how many keys the cache had when these were its best, which
            `append_` keeps up to date; -1: they are not the best of any.

    Raises:
        TypeError: not tensors. ValueError: dtypes, shapes or devices; scores that require a gradient.
    """

    indices: Tensor
    scores: Tensor
    lengths: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("indices", self.indices)
        check_tensor("scores", self.scores)
        if self.indices.dtype != torch.int32 or self.indices.dim() != 3:
            raise ValueError(f"indices must be int32 with 3 dimensions; got {_shown('indices', self.indices)}")
        if self.scores.dtype not in _FLOATING:
            raise ValueError(
                f"scores must be float16, bfloat16, float32 or float64; got {_shown('scores', self.scores)}"
            )
        if self.indices.shape != self.scores.shape:
            raise ValueError(
                "indices and scores must have one shape; "
                f"got indices {tuple(self.indices.shape)}, scores {tuple(self.scores.shape)}"
            )
        if self.indices.device != self.scores.device:
            raise ValueError(
                "indices and scores must be on one device; "
                f"got indices on {self.indices.device}, scores on {self.scores.device}"
            )
        check_optional_tensor("lengths", self.lengths)
        if self.lengths is not None:
            if self.lengths.dtype != torch.int32 or self.lengths.shape != self.indices.shape[:2]:
                raise ValueError(
                    "lengths must be int32 (B, heads) for indices (B, heads, w); "
                    f"got {_shown('lengths', self.lengths)}, indices {tuple(self.indices.shape)}"
                )
            if self.lengths.device != self.indices.device:
                raise ValueError(
                    "lengths must be on the device of indices; "
                    f"got lengths on {self.lengths.device}, indices on {self.indices.device}"
                )
        if self.scores.requires_grad:
            raise ValueError("scores must not require a gradient, since they are written to; got scores that do")

    @property
    def shape(self) -> torch.Size:
        """(B, heads, w)"""
        return self.indices.shape

    @property
    def window_size(self) -> int:
        """w, how many keys are kept at most."""
        return self.indices.shape[2]

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def to(self, device: torch.device | str) -> KeptKeys:
        """The same on `device`."""
        return KeptKeys(*(None if tensor is None else tensor.to(device) for tensor in self._tensors()))

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.indices, self.scores, self.lengths

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        window_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        sliding_window: None = None,
    ) -> KeptKeys:
        """Of a cache without keys.

        Args:
            batch, heads: B, and the heads that have scores of their own.
            window_size: w. So much memory is taken, however few keys come.
            dtype: of the scores.
            sliding_window: must be None; a cache of a window cannot be kept so.

        Raises:
            TypeError, ValueError: sizes that are no integers, or negative; a dtype; a sliding_window.
        """
        _refuse_windows(sliding_window)
        sizes = {"batch": batch, "heads": heads, "window_size": window_size}
        shape = [as_size(name, size) for name, size in sizes.items()]
        if dtype not in _FLOATING:
            raise ValueError(f"dtype must be float16, bfloat16, float32 or float64; got dtype {dtype}")
        indices = torch.full(shape, -1, dtype=torch.int32, device=device)
        scores = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        return cls(indices, scores, torch.zeros(shape[:2], dtype=torch.int32, device=device))

    @classmethod
    def from_scores(
        cls,
        scores: Tensor,
        window_size: int,
        seqlens_k: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        sliding_window: None = None,
    ) -> KeptKeys:
        """Of a cache with keys, after a prefill of any length for example, in O(Sk log w). The host waits for nothing.

        Args:
            scores, window_size, seqlens_k, key_mask: as in `select_keys`; scores (B, heads, Sk). Keys that are hidden
                by key_mask are never kept; append new ones to hide with a score of -inf.
            sliding_window: must be None; a cache of a window cannot be kept so.

        Returns:
            The kept keys by index, and empty places behind them.

        Raises:
            TypeError, ValueError: as `select_keys`; a sliding_window.
        """
        _refuse_windows(sliding_window)
        best = select_keys(
            scores, window_size, seqlen_q=1, causal=False, key_mask=key_mask, seqlens_k=seqlens_k
        )  # what the last row keeps under either rule
        kept, window_size = best.begin < best.end, as_size("window_size", window_size)
        # Kept keys move to the places 0, 1, ..., all others to one place too many, which is cut off.
        place = torch.where(kept, kept.cumsum(2) - 1, window_size)
        key = torch.arange(kept.shape[2], dtype=torch.int32, device=kept.device).expand(kept.shape)
        shape = (*kept.shape[:2], window_size + 1)
        indices = torch.full(shape, -1, dtype=torch.int32, device=kept.device).scatter_(2, place, key)
        held = scores.new_full(shape, -torch.inf).scatter_(2, place, scores.detach())
        if seqlens_k is None:
            lengths = torch.full(kept.shape[:2], kept.shape[2], dtype=torch.int32, device=kept.device)
        else:
            lengths = seqlens_k.clamp(0, kept.shape[2])[:, None].expand(kept.shape[:2]).contiguous()
        return cls(indices[..., :window_size].contiguous(), held[..., :window_size].contiguous(), lengths)

    def append_(self, new_scores: Tensor, positions: Tensor, cache_scores: Tensor | None = None) -> KeyIndices:
        """Takes new keys in, in place, in O(w) time for each, however many keys the cache has.

        Afterwards this holds the keys that `select_keys` on all scores so far would keep for the last row: a new key
        takes the first empty place, or that of the key that it puts out. One kernel on a GPU, for which the host does
        not wait.

        Args:
            new_scores: (B, heads, S), S at most 16, any strides, of the dtype of `scores`; detached. -inf: not to be
                kept, as of padding.
            positions: int32 (B), the index of the first of the new keys of each batch element, above those of all keys
                before; the others follow. A new key with a negative index is never kept.
            cache_scores: (B, heads, Sk), any strides, of the dtype of `scores`, or None; detached: of all keys of the
                cache by index, -inf where one is hidden. Needs `lengths`. Where these are not the positions, since keys
                were taken off the cache's end or came without this call, the best keys before the positions are found
                anew, in O(Sk) time, and then the new ones are taken in. The host does not wait for that, either.

        Returns:
            The mask for S query rows at the new keys, lists (B, heads, S, w): row i sees the keys kept after the new
            keys 0 to i. A copy, which later steps do not change. Call attention with is_causal=False or True, both are
            right if the new keys are the last that exist: no list names a key behind its row, so that the causal rule
            has nothing left to hide.

        Raises:
            TypeError: not tensors. ValueError: their shapes, dtypes or devices; tensors that are not contiguous; no
                lengths beside cache_scores.
        """
        check_tensor("new_scores", new_scores)
        check_tensor("positions", positions)
        check_optional_tensor("cache_scores", cache_scores)
        state = self.indices, self.scores, new_scores, positions, self.lengths, cache_scores
        return KeyIndices(_library.append_kept_keys(*state))

    def reorder_(self, beam_idx: Tensor) -> KeptKeys:
        """Batch element b becomes what beam_idx[b] was, in place, as in a cache whose beams are reordered.

        Args:
            beam_idx: int32 or int64 (B), each below B.

        Returns:
            This object.

        Raises:
            TypeError: no tensor. ValueError: its dtype, shape or device.
        """
        check_tensor("beam_idx", beam_idx)
        if beam_idx.dtype not in (torch.int32, torch.int64) or beam_idx.shape != self.indices.shape[:1]:
            raise ValueError(
                f"beam_idx must be int32 or int64 with the shape (B) = ({self.indices.shape[0]}); "
                f"got {_shown('beam_idx', beam_idx)}"
            )
        if beam_idx.device != self.device:
            raise ValueError(
                f"beam_idx must be on the device of indices; got beam_idx on {beam_idx.device}, "
                f"indices on {self.device}"
            )
        for tensor in self._tensors():
            if tensor is not None:
                tensor.copy_(tensor.index_select(0, beam_idx))
        return self


def _shown(name: str, tensor: Tensor) -> str:
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _refuse_windows(sliding_window: object) -> None:
    if sliding_window is not None:
        raise ValueError(
            "sliding_window must be None: a key that dropped out of the best may come back when better ones leave the "
            "window, so that what is kept does not tell; select anew in each step (select_keys); "
            f"got sliding_window {sliding_window}"
        )


_HELD = ("indices", "scores", "lengths")


def _flatten(kept: KeptKeys) -> tuple[list[object], None]:
    values = [getattr(kept, name) for name in _HELD]
    return values if values[-1] is not None else values[:-1], None


def _flatten_with_keys(kept: KeptKeys) -> tuple[list[tuple[pytree.KeyEntry, object]], None]:
    return [(pytree.GetAttrKey(name), value) for name, value in zip(_HELD, _flatten(kept)[0], strict=False)], None


def _unflatten(values: Sequence[object], _: None) -> KeptKeys:
    # Unchecked, since the leaves of a tree need not be tensors: vmap's dimensions, shardings, shapes.
    kept, held = object.__new__(KeptKeys), dict(zip(_HELD, values, strict=False))
    for name in _HELD:
        object.__setattr__(kept, name, held.get(name))
    return kept


pytree.register_pytree_node(
    KeptKeys,
    _flatten,
    _unflatten,
    serialized_type_name="flash_dmattn.KeptKeys",
    flatten_with_keys_fn=_flatten_with_keys,
)

# So that torch.load reads saved kept keys with weights_only=True, its default.
torch.serialization.add_safe_globals([KeptKeys])
