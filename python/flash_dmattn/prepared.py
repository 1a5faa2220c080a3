"""Masks that are looked at once and used many times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _library, _log
from ._arguments import as_int, as_length, check_bool, check_layout, warn_of_two_readings
from ._visibility import Visibility
from .key_indices import KeyIndices
from .selection import KeyIntervals, unchecked_intervals

BareMask = Tensor | KeyIntervals | KeyIndices
"""What says which keys each query row sees: bool, intervals of rows per key, or lists of keys per row."""


@dataclass(frozen=True, eq=False, repr=False)
class PreparedMask:
    """What `prepare_mask` made of a mask. `attention` and the other functions take it as a mask.

    Tensors and sizes, nothing else: a pytree that torch.compile takes, that can be saved and moved. Immutable, but a
    bool mask that was kept is the caller's own tensor, which must not change where there is a plan.

    Args:
        intervals: what is visible, if every key's rows follow one another. None otherwise.
        mask: bool (B or 1, heads, Sq or 1, Sk or 1), if there are neither intervals nor lists.
        seqlen_q, seqlen_k: the lengths that it was made for; None: any.
        is_causal: it tells what is visible under the causal rule, and only calls with is_causal=True take it.
        plan: on a GPU, if both lengths are known, the plan of calls with this is_causal and without seqlens_k, uint8;
            other calls plan for themselves. None: all do.
        indices: what is visible, if it was prepared from lists of keys.
    """

    intervals: KeyIntervals | None
    mask: Tensor | None
    seqlen_q: int | None
    seqlen_k: int | None
    is_causal: bool
    plan: Tensor | None = None
    indices: KeyIndices | None = None

    @property
    def held(self) -> BareMask:
        """What it holds instead of the mask."""
        return next(held for held in (self.intervals, self.mask, self.indices) if held is not None)

    @property
    def kind(self) -> str:
        """What it became: "intervals", two integers a key; "keys", a bool a key; "mask" or "indices", as it was."""
        if self.mask is None:
            return "indices" if self.intervals is None else "intervals"
        return "keys" if self.mask.shape[2] == 1 and self.mask.shape[3] != 1 else "mask"

    @property
    def shape(self) -> torch.Size:
        """(B or 1, heads), of what it holds: 1 where all share it."""
        return self.held.shape[:2]

    @property
    def device(self) -> torch.device:
        return self.held.device

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, the plan's too; those of broadcast dimensions count once."""
        tensors = pytree.tree_leaves([self.held, self.plan])
        return sum(_without_broadcast(tensor).nbytes for tensor in tensors if tensor is not None)

    def to(self, device: torch.device | str) -> PreparedMask:
        """The same there; the plan is made anew, or left out where none is used."""
        if torch.device(device) == self.device:
            return self
        return _make(self.held.to(device), self.seqlen_q, self.seqlen_k, self.is_causal)

    def __reduce__(self) -> tuple:
        # Without the plan, which is made anew: another device, or version of the library, has another one.
        return _make, (self.held, self.seqlen_q, self.seqlen_k, self.is_causal)

    def dense_mask(self, seqlen_q: int | None = None) -> Tensor:
        """The same as a mask, to look at: bool (B or 1, heads, Sq, Sk or 1), True = visible.

        What the causal rule hides anyway may be either, if it was prepared with is_causal.

        Args:
            seqlen_q: Sq, where the mask was made for any; default: what it was made for.
        """
        if seqlen_q is None:
            seqlen_q = self.seqlen_q
        elif self.seqlen_q is not None and as_int("seqlen_q", seqlen_q) != self.seqlen_q:
            raise ValueError(f"seqlen_q must be the {self.seqlen_q} that the mask was made for; got {seqlen_q}")
        if seqlen_q is None:
            raise ValueError("seqlen_q must be given for a mask that was made for any number of rows; got None")
        if self.intervals is not None:
            return self.intervals.dense_mask(seqlen_q)
        if self.indices is not None:
            return self.indices.dense_mask(self.seqlen_k, seqlen_q).expand(-1, -1, seqlen_q, -1)
        return self.mask.expand(-1, -1, seqlen_q, -1 if self.seqlen_k is None else self.seqlen_k)

    def __repr__(self) -> str:
        held = {
            "intervals": "one interval of rows per key",
            "keys": "one bool per key",
            "mask": "the bool mask itself",
            "indices": "a list of keys per row",
        }[self.kind]
        planned = "" if self.plan is None else " and a plan"
        lengths = ["any" if n is None else str(n) for n in (self.seqlen_q, self.seqlen_k)]
        return (
            f"PreparedMask({self.kind}: {held}{planned}, {_size(self.nbytes)}; "
            f"B {self.shape[0]}, heads {self.shape[1]}, Sq {lengths[0]}, Sk {lengths[1]}, "
            f"is_causal={self.is_causal}, device={self.device})"
        )


Mask = BareMask | PreparedMask
"""What functions of attention take as a mask."""


def prepare_mask(
    mask: BareMask, seqlen_q: int | None = None, *, seqlen_k: int | None = None, is_causal: bool = False
) -> PreparedMask:
    """Looks at a mask once, for all the layers, heads, steps or recomputations that use it.

    If the rows that see a key follow one another, for every key (masks of the highest scores under the causal rule,
    windows, documents, padding), the result holds one interval per key: O(Sk) to read instead of Sq * Sk, and attention
    orders and gathers such keys better. If all rows see the same keys it holds one bool per key. Otherwise it holds the
    mask itself. `PreparedMask.kind` and its repr say which. On a GPU it also holds the plan that every forward and
    backward would otherwise make for itself, if Sq and Sk are known: then the mask must not be changed afterwards.

    The mask's elements are read here, at most once for intervals and once for a plan, with O(Sk) memory beside it and
    the result. Not inside torch.compile, since what comes out depends on them; the result may be used there.

    Args:
        mask: bool, True = visible, in any form that `attention` takes; or KeyIntervals; or KeyIndices, which are held
            as they are.
        seqlen_q: Sq, for a mask that does not tell (KeyIntervals, or one row for all); default: any, and no plan.
        seqlen_k: Sk, which KeyIndices need, since they do not tell; of other masks it must be their own.
        is_causal: the calls will have the causal rule, and must: what it hides need not fit the intervals then.

    Raises:
        TypeError: the mask is none of the three. ValueError: its shape, dtype, device or lengths.
    """
    check_bool("is_causal", is_causal)
    seqlen_q = None if seqlen_q is None else as_length("seqlen_q", seqlen_q)
    seqlen_k = None if seqlen_k is None else as_length("seqlen_k", seqlen_k)
    if isinstance(mask, KeyIndices):
        return _prepare_indices(mask, seqlen_q, seqlen_k, is_causal)
    if isinstance(mask, KeyIntervals):
        _check_keys(mask, mask.shape[2], seqlen_k)
        return _make(mask, seqlen_q, mask.shape[2], is_causal)
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"mask must be a torch.Tensor, KeyIntervals or KeyIndices; got mask of type {type(mask).__name__}"
        )
    check_layout("mask", mask)
    if mask.dtype != torch.bool or not 2 <= mask.dim() <= 4:
        raise ValueError(
            "mask must be bool with 2, 3 or 4 dimensions; "
            f"got mask {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
        )
    mask = mask[None, None] if mask.dim() == 2 else mask[:, :, None] if mask.dim() == 3 else mask
    rows, keys = mask.shape[2:]
    if rows != 1 and seqlen_q not in (None, rows):
        raise ValueError(f"seqlen_q must be the mask's {rows} rows; got seqlen_q {seqlen_q}, mask {tuple(mask.shape)}")
    seqlen_q = seqlen_q if rows == 1 else rows
    if keys != 1:
        _check_keys(mask, keys, seqlen_k)
        seqlen_k = keys
    _library.check_data("mask", mask)
    mask = _without_broadcast(mask)
    if mask.shape[2] == 1 or mask.shape[3] == 1 or mask.numel() == 0:
        return _make(mask, seqlen_q, seqlen_k, is_causal)
    begin, end, exact = _library.mask_intervals(mask, is_causal)
    if not exact:
        return _make(mask, seqlen_q, seqlen_k, is_causal)
    shown = begin < end
    key = torch.arange(keys, device=mask.device)
    first_row = (key - (keys - rows)).clamp(min=0) if is_causal else torch.zeros_like(key)
    if not (shown & ((begin > first_row) | (end < rows))).any():  # every key is shown to all rows or to none
        return _make(shown[:, :, None], seqlen_q, seqlen_k, is_causal)
    return _make(KeyIntervals(begin, end), seqlen_q, seqlen_k, is_causal)


def _prepare_indices(lists: KeyIndices, seqlen_q: int | None, seqlen_k: int | None, is_causal: bool) -> PreparedMask:
    rows = lists.shape[2]
    if rows != 1 and seqlen_q not in (None, rows):
        raise ValueError(f"seqlen_q must be the {rows} rows of the lists; got seqlen_q {seqlen_q}")
    if seqlen_k is None:
        raise ValueError("seqlen_k must be given for KeyIndices, which do not tell how many keys there are; got None")
    _library.check_data("mask", lists.indices)
    return _make(lists, seqlen_q if rows == 1 else rows, seqlen_k, is_causal)


def _check_keys(mask: Tensor | KeyIntervals, keys: int, seqlen_k: int | None) -> None:
    if seqlen_k not in (None, keys):
        raise ValueError(f"seqlen_k must be the mask's {keys} keys; got seqlen_k {seqlen_k}, mask {tuple(mask.shape)}")


def check_mask(name: str, value: object) -> None:
    if value is not None and not isinstance(value, (Tensor, KeyIntervals, KeyIndices, PreparedMask)):
        raise TypeError(
            f"{name} must be a torch.Tensor, KeyIntervals, KeyIndices, PreparedMask or None; "
            f"got {name} of type {type(value).__name__}"
        )
    if isinstance(value, Tensor):
        check_layout(name, value)


def visibility_of(
    mask: Mask | None,
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    is_causal: bool,
    seqlens_k: Tensor | None = None,
) -> Visibility:
    """What these arguments of a call let each query see, with a plan if the mask has one for such calls. Warns of a
    bool mask that can be read in two ways.

    Raises:
        ValueError: a prepared mask was made for other shapes.
    """
    plan = None
    if isinstance(mask, PreparedMask):
        _check_fit(mask, query_shape, key_shape, is_causal)
        if mask.is_causal == is_causal and seqlens_k is None:
            plan = mask.plan
        elif mask.plan is not None:
            _log.info("the plan of %r is not used: this call has seqlens_k, or is_causal %s", mask, is_causal)
        mask = mask.held
    seen = Visibility(seqlens_k=seqlens_k, plan=plan, is_causal=is_causal)
    if isinstance(mask, KeyIndices):
        seen = seen._replace(
            mask=mask.key_mask, indices=mask.indices, index_lengths=mask.lengths, index_block_size=mask.block_size
        )
        mask = mask.intervals
        if mask is None:
            return seen
    if isinstance(mask, KeyIntervals):
        return seen._replace(interval_begin=mask.begin, interval_end=mask.end, interval_window=mask.window_size)
    if mask is not None and len(query_shape) == len(key_shape) == 4:
        warn_of_two_readings("mask", mask, query_shape[0], query_shape[1], key_shape[1])
    return seen._replace(mask=mask)


def dense_mask(
    mask: Mask | None,
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    is_causal: bool,
) -> Tensor | None:
    """The mask as a bool tensor, for what knows nothing else."""
    if isinstance(mask, PreparedMask):
        _check_fit(mask, query_shape, key_shape, is_causal)
        mask = mask.held
    if isinstance(mask, (KeyIndices, KeyIntervals)):
        _log.info(
            "a dense mask of %d rows and %d keys is made of %s", query_shape[1], key_shape[1], type(mask).__name__
        )
    if isinstance(mask, KeyIndices):
        return mask.dense_mask(key_shape[1], query_shape[1])
    if isinstance(mask, KeyIntervals):
        return mask.dense_mask(query_shape[1])
    if mask is not None and len(query_shape) == len(key_shape) == 4:
        warn_of_two_readings("mask", mask, query_shape[0], query_shape[1], key_shape[1])
    return mask


def _check_fit(mask: PreparedMask, query_shape: Sequence[int], key_shape: Sequence[int], is_causal: bool) -> None:
    if len(query_shape) != 4 or len(key_shape) != 4:
        return  # refused by the library
    if mask.is_causal and not is_causal:
        raise ValueError("is_causal must be True for a mask that was prepared with is_causal=True; got is_causal False")
    batch, heads = mask.shape
    made_for = (
        batch in (1, query_shape[0])
        and heads in (1, query_shape[2], key_shape[2])
        and (mask.seqlen_q is None or mask.seqlen_q == query_shape[1])
        and (mask.seqlen_k is None or mask.seqlen_k == key_shape[1])
    )
    if not made_for:
        made_of_keys = mask.shape == (1, 1) and (mask.seqlen_q, mask.seqlen_k) == (query_shape[0], key_shape[1])
        hint = ": if it was made of a mask (B, Sk), make it of (B, 1, Sk), mask[:, None, :]" if made_of_keys else ""
        raise ValueError(
            f"mask must have been prepared for these shapes; got query {tuple(query_shape)}, key {tuple(key_shape)}, "
            f"mask {mask!r}{hint}"
        )


def _make(held: BareMask, seqlen_q: int | None, seqlen_k: int | None, is_causal: bool) -> PreparedMask:
    prepared = _with_plan(
        PreparedMask(
            held if isinstance(held, KeyIntervals) else None,
            held if isinstance(held, Tensor) else None,
            seqlen_q,
            seqlen_k,
            is_causal,
            indices=held if isinstance(held, KeyIndices) else None,
        )
    )
    _log.debug("prepared %r", prepared)
    return prepared


def _with_plan(prepared: PreparedMask) -> PreparedMask:
    """With the plan of a GPU, where it can be made."""
    seqlen_q, seqlen_k, is_causal = prepared.seqlen_q, prepared.seqlen_k, prepared.is_causal
    if prepared.device.type != "cuda" or seqlen_q is None or seqlen_k is None:
        return prepared
    # Of heads and batch elements that it does not tell apart one is enough, and their head dim does not matter.
    batch, heads = prepared.shape
    one = torch.empty((), dtype=torch.bfloat16, device=prepared.device)
    query, key = (one.expand(batch, length, heads, 8) for length in (seqlen_q, seqlen_k))
    visibility = visibility_of(prepared, query.shape, key.shape, is_causal)
    return replace(prepared, plan=_library.attention_plan(query, key, visibility))


def _without_broadcast(tensor: Tensor) -> Tensor:
    """A view in which every dimension along which nothing changes, by its stride, has size 1."""
    for dim in range(tensor.dim()):
        if tensor.size(dim) > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _size(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _held(mask: PreparedMask) -> tuple[str, ...]:
    """The names of what it holds."""
    return tuple(name for name in ("intervals", "mask", "plan", "indices") if getattr(mask, name) is not None)


def _context_of(mask: PreparedMask) -> tuple[tuple[str, ...], int, int | None, int | None, bool]:
    # The intervals forget their window_size as a tree, and the plan is one for it.
    window_size = 0 if mask.intervals is None else mask.intervals.window_size
    return _held(mask), window_size, mask.seqlen_q, mask.seqlen_k, mask.is_causal


def _flatten(mask: PreparedMask) -> tuple[list[object], tuple]:
    return [getattr(mask, name) for name in _held(mask)], _context_of(mask)


def _flatten_with_keys(mask: PreparedMask) -> tuple[list[tuple[pytree.KeyEntry, object]], tuple]:
    return [(pytree.GetAttrKey(name), getattr(mask, name)) for name in _held(mask)], _context_of(mask)


def _unflatten(held: Sequence[object], context: tuple) -> PreparedMask:
    names, window_size, *sizes = context
    tensors = dict(zip(names, held, strict=True))
    intervals = tensors.get("intervals")
    if isinstance(intervals, KeyIntervals):
        intervals = unchecked_intervals(intervals.begin, intervals.end, window_size)
    return PreparedMask(intervals, tensors.get("mask"), *sizes, tensors.get("plan"), tensors.get("indices"))


pytree.register_pytree_node(
    PreparedMask,
    _flatten,
    _unflatten,
    serialized_type_name="flash_dmattn.PreparedMask",
    flatten_with_keys_fn=_flatten_with_keys,
)

# So that torch.load reads saved masks with weights_only=True, its default: a saved mask is a call of _make.
torch.serialization.add_safe_globals([PreparedMask, _make])
