"""Lists of keys per query row: what sparse attention models choose by data, for every query anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._arguments import as_int, as_length, broadcasts, check_layout, check_optional_tensor, check_tensor
from .selection import KeyIntervals

_LAST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class KeyIndices:
    """Each query row sees the keys that its list names. What `attention` takes as a mask.

    Entry e of a list names the keys e * block_size to e * block_size + block_size - 1 that exist; an entry that begins
    outside of 0 <= e * block_size < Sk, such as -1, names none. In any order; repeats count once. The causal rule and
    seqlens_k hide keys as always. A pytree: torch.compile, torch.export and vmap take and return it. Source:
    docs/semantics.md, "Lists of keys per query".

    Args:
        indices: (B or 1, 1 or Hkv or H, Sq or 1, n), int32, any strides; n may be 0. int64 is converted here, once: an
            entry beyond 2^31 - 1 names no key.
        block_size: keys that an entry stands for, 1 to 2^31 - 1.
        lengths: int32 (B or 1, heads or 1, Sq or 1), only so many entries of a list count, the first ones; clamped to
            0 ... n. Default: all.
        intervals, key_mask: hide more of the listed keys: KeyIntervals, and bool (B or 1, heads or 1, Sk), True =
            visible. `intersection` fills them.

    Raises:
        TypeError: not tensors or integers. ValueError: dtypes, dimensions or devices; B or heads that do not broadcast;
            block_size.
    """

    indices: Tensor
    block_size: int = 1
    lengths: Tensor | None = None
    intervals: KeyIntervals | None = None
    key_mask: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("indices", self.indices)
        _check_dimensions("indices", self.indices, 4, (torch.int32, torch.int64), "int32 or int64")
        block_size = as_int("block_size", self.block_size)
        if not 1 <= block_size <= _LAST:
            raise ValueError(f"block_size must be between 1 and 2^31 - 1; got block_size {block_size}")
        object.__setattr__(self, "block_size", block_size)
        if self.indices.dtype == torch.int64:
            # Before they are narrowed: 2^32 must not become key 0.
            fits = (self.indices >= 0) & (self.indices <= _LAST)
            object.__setattr__(self, "indices", torch.where(fits, self.indices, -1).int())
        check_optional_tensor("lengths", self.lengths)
        if self.lengths is not None:
            _check_dimensions("lengths", self.lengths, 3, (torch.int32,), "int32")
        if self.intervals is not None and not isinstance(self.intervals, KeyIntervals):
            raise TypeError(f"intervals must be KeyIntervals or None; got {type(self.intervals).__name__}")
        check_optional_tensor("key_mask", self.key_mask)
        if self.key_mask is not None:
            _check_dimensions("key_mask", self.key_mask, 3, (torch.bool,), "bool")
        for name in ("lengths", "intervals", "key_mask"):
            self._check_fit(name, getattr(self, name))

    def _check_fit(self, name: str, value: Tensor | KeyIntervals | None) -> None:
        if value is None:
            return
        if value.device != self.indices.device:
            raise ValueError(
                f"{name} must be on the device of indices; got {name} on {value.device}, "
                f"indices on {self.indices.device}"
            )
        if not broadcasts(self.indices.shape[:2], value.shape[:2]):
            shapes = f"{name} {tuple(value.shape)}, indices {tuple(self.indices.shape)}"
            raise ValueError(f"{name} must have as many batch elements and heads as indices, or 1; got {shapes}")

    @property
    def shape(self) -> torch.Size:
        """(B or 1, heads, Sq or 1, n), of the indices."""
        return self.indices.shape

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def to(self, device: torch.device | str) -> KeyIndices:
        """The same on `device`."""

        def moved(value: Tensor | KeyIntervals | None) -> Tensor | KeyIntervals | None:
            return None if value is None else value.to(device)

        return KeyIndices(
            self.indices.to(device),
            self.block_size,
            moved(self.lengths),
            moved(self.intervals),
            moved(self.key_mask),
        )

    def dense_mask(self, seqlen_k: int, seqlen_q: int | None = None) -> Tensor:
        """The same as a mask, to look at: bool (B or 1, heads, Sq or 1, Sk), True = visible.

        Holds a byte for every row and key, and n * block_size positions for every row.

        Args:
            seqlen_k: Sk, which the lists do not tell.
            seqlen_q: Sq, needed for lists that all rows share if there are intervals; default: that of the indices.
        """
        seqlen_k = as_length("seqlen_k", seqlen_k)
        rows = self.indices.shape[2] if seqlen_q is None else as_int("seqlen_q", seqlen_q)
        if self.indices.shape[2] not in (1, rows):
            raise ValueError(f"seqlen_q must be the {self.indices.shape[2]} rows of the indices; got seqlen_q {rows}")
        begin = self.indices.long() * self.block_size
        exists = (begin >= 0) & (begin < seqlen_k)
        if self.lengths is not None:
            exists = exists & (torch.arange(self.indices.shape[3], device=self.device) < self.lengths[..., None])
        # A block is no longer than the keys; what lies outside of these is sent behind them, and cut off.
        offset = torch.arange(min(self.block_size, seqlen_k), device=self.device)
        position = torch.where(exists[..., None], begin[..., None] + offset, seqlen_k).clamp(max=seqlen_k).flatten(3)
        mask = torch.zeros((*position.shape[:3], seqlen_k + 1), dtype=torch.bool, device=self.device)
        mask = mask.scatter_(3, position, True)[..., :seqlen_k]
        if self.key_mask is not None:
            mask = mask & self.key_mask[:, :, None]
        if self.intervals is not None:
            if rows == 1 and seqlen_q is None:
                raise ValueError("seqlen_q must be given for one list with intervals; got None")
            mask = mask & self.intervals.dense_mask(rows)
        return mask

    def intersection(self, other: KeyIntervals | Tensor) -> KeyIndices:
        """The listed keys that another condition shows, too. Nothing of the size Sq * Sk is made.

        Args:
            other: KeyIntervals, or a bool mask per key (B or 1, heads or 1, Sk), True = visible.

        Raises:
            TypeError: neither of the two. ValueError: its dtype, dimensions or shape.
        """
        if isinstance(other, KeyIntervals):
            held = other if self.intervals is None else self.intervals.intersection(other)
            return replace(self, intervals=held)
        if not isinstance(other, Tensor):
            raise TypeError(f"other must be KeyIntervals or a torch.Tensor; got other of type {type(other).__name__}")
        check_layout("other", other)
        _check_dimensions("other", other, 3, (torch.bool,), "bool per key,")
        if self.key_mask is None:
            return replace(self, key_mask=other)
        if not broadcasts(self.key_mask.shape, other.shape):
            shapes = f"{tuple(other.shape)}, {tuple(self.key_mask.shape)}"
            raise ValueError(f"other must broadcast with the mask that is held, (B, heads, Sk); got {shapes}")
        return replace(self, key_mask=self.key_mask & other)


def _check_dimensions(name: str, tensor: Tensor, count: int, dtypes: tuple[torch.dtype, ...], rule: str) -> None:
    if tensor.dtype not in dtypes or tensor.dim() != count:
        raise ValueError(
            f"{name} must be {rule} with {count} dimensions; "
            f"got {name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        )


_HELD = ("indices", "lengths", "intervals", "key_mask")


def _held(lists: KeyIndices) -> tuple[str, ...]:
    """The names of what it holds."""
    return tuple(name for name in _HELD if getattr(lists, name) is not None)


def _flatten(lists: KeyIndices) -> tuple[list[object], tuple[tuple[str, ...], int]]:
    names = _held(lists)
    return [getattr(lists, name) for name in names], (names, lists.block_size)


def _flatten_with_keys(lists: KeyIndices) -> tuple[list[tuple[pytree.KeyEntry, object]], tuple]:
    values, context = _flatten(lists)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(context[0], values, strict=True)], context


def _unflatten(values: Sequence[object], context: tuple[tuple[str, ...], int]) -> KeyIndices:
    # Unchecked, since the leaves of a tree need not be tensors: vmap's dimensions, shardings, shapes.
    names, block_size = context
    held = dict(zip(names, values, strict=True))
    lists = object.__new__(KeyIndices)
    for name in _HELD:
        object.__setattr__(lists, name, held.get(name))
    object.__setattr__(lists, "block_size", block_size)
    return lists


pytree.register_pytree_node(
    KeyIndices,
    _flatten,
    _unflatten,
    serialized_type_name="flash_dmattn.KeyIndices",
    flatten_with_keys_fn=_flatten_with_keys,
)

# So that torch.load reads saved lists with weights_only=True, its default.
torch.serialization.add_safe_globals([KeyIndices])
