"""Dynamic selection: which keys each query row sees, as one interval of rows per key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _library
from ._arguments import (
    as_int,
    as_length,
    broadcasts,
    check_bool,
    check_layout,
    check_optional_tensor,
    check_tensor,
    warn_of_two_readings,
)
from ._documents import check_cu_seqlens, interval_bounds, packed_window_size


@dataclass(frozen=True, eq=False)
class KeyIntervals:
    """Key j is visible to the query rows begin[j] <= row < end[j]. What `attention` takes as a mask.

    Rows are numbered 0 to Sq, whatever the causal rule aligns them to. Values outside of that are clamped; an empty
    interval hides its key. A pytree: torch.compile, torch.export and vmap take and return it.

    Args:
        begin, end: int32 (B or 1, H or Hkv or 1, Sk), both of one shape, any strides.
        window_size: no row sees more keys than this, and each row at most one that the row before it does not, as it is
            in what `select_keys` and `sliding_window` return; 0: unknown. GPUs then plan in less memory, and calls with
            very many keys are faster. Results are right whatever it says. As a pytree it is forgotten.

    Raises:
        TypeError: not tensors. ValueError: their dtypes, shapes or devices; a negative window_size.
    """

    begin: Tensor
    end: Tensor
    window_size: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "window_size", as_int("window_size", self.window_size))
        if self.window_size < 0:
            raise ValueError(f"window_size must be at least 0; got window_size {self.window_size}")
        for name, bound in (("begin", self.begin), ("end", self.end)):
            check_tensor(name, bound)
            if bound.dtype != torch.int32:
                raise ValueError(f"{name} must be int32; got {name} {str(bound.dtype).removeprefix('torch.')}")
            if bound.dim() != 3:
                raise ValueError(f"{name} must have 3 dimensions; got {name} {tuple(bound.shape)}")
        if self.begin.shape != self.end.shape:
            raise ValueError(
                f"begin and end must have one shape; got begin {tuple(self.begin.shape)}, end {tuple(self.end.shape)}"
            )
        if self.begin.device != self.end.device:
            raise ValueError(
                f"begin and end must be on one device; got begin on {self.begin.device}, end on {self.end.device}"
            )

    @property
    def shape(self) -> torch.Size:
        """(B or 1, heads, Sk)"""
        return self.begin.shape

    @property
    def device(self) -> torch.device:
        return self.begin.device

    def to(self, device: torch.device | str) -> KeyIntervals:
        """The same on `device`."""
        return KeyIntervals(self.begin.to(device), self.end.to(device), self.window_size)

    def dense_mask(self, seqlen_q: int) -> Tensor:
        """The same as a mask, to look at: bool (B or 1, heads, Sq, Sk), True = visible. Holds Sq * Sk elements."""
        row = torch.arange(as_length("seqlen_q", seqlen_q), device=self.device)[:, None]
        return (self.begin[..., None, :] <= row) & (row < self.end[..., None, :])

    def kept_scores(self, seqlen_q: int | None = None) -> int:
        """How many scores are visible, over the B and heads that are held here.

        Args:
            seqlen_q: clamps the intervals; None takes them as they are, which suits what `select_keys` makes.
        """
        end = self.end if seqlen_q is None else self.end.clamp(max=as_length("seqlen_q", seqlen_q))
        return int((end.long() - self.begin.clamp(min=0)).clamp(min=0).sum())

    def intersection(self, other: KeyIntervals | Tensor) -> KeyIntervals:
        """What both show.

        Args:
            other: intervals, or a bool mask, True = visible, in any form that `attention` takes: per key
                (B or 1, heads or 1, Sk), (Sq, Sk) or (B or 1, heads or 1, Sq or 1, Sk). Heads must be equal or 1.

        Returns:
            Intervals of the shape that both broadcast to.

        Raises:
            TypeError: neither of the two. ValueError: the shapes do not broadcast; or a mask leaves a key rows that are
                not one range, so that no interval can say it (such a mask costs Sq * Sk memory here).
        """
        if isinstance(other, KeyIntervals):
            self._check_broadcast(other.shape, "other")
            begin, end = torch.broadcast_tensors(
                torch.maximum(self.begin, other.begin), torch.minimum(self.end, other.end)
            )
            known = [size for size in (self.window_size, other.window_size) if size != 0]
            return KeyIntervals(begin, torch.maximum(begin, end), min(known, default=0))
        if not isinstance(other, Tensor):
            raise TypeError(f"other must be KeyIntervals or a torch.Tensor; got other of type {type(other).__name__}")
        check_layout("other", other)
        if other.dtype != torch.bool or not 2 <= other.dim() <= 4:
            raise ValueError(
                "other must be a bool mask with 2, 3 or 4 dimensions; "
                f"got other {str(other.dtype).removeprefix('torch.')} {tuple(other.shape)}"
            )
        mask = other[None, None] if other.dim() == 2 else other[..., None, :] if other.dim() == 3 else other
        self._check_broadcast((*mask.shape[:2], mask.shape[3]), "other")
        warn_of_two_readings("other", other, self.shape[0], mask.shape[2], mask.shape[3])
        if mask.shape[2] != 1:
            return _intervals_of(self.dense_mask(mask.shape[2]) & mask)
        shown = mask[:, :, 0]
        return KeyIntervals(torch.where(shown, self.begin, 0), torch.where(shown, self.end, 0), self.window_size)

    def _check_broadcast(self, shape: Sequence[int], name: str) -> None:
        if not broadcasts(self.shape[:2], shape[:2]):
            raise ValueError(f"{name} must broadcast to {tuple(self.shape)}, (B, heads, Sk); got {tuple(shape)}")
        if shape[2] != self.shape[2]:
            raise ValueError(f"{name} must have {self.shape[2]} keys; got {tuple(shape)}, (B, heads, Sk)")

    @classmethod
    def causal(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        seqlens_k: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> KeyIntervals:
        """Row i sees keys j <= i + n - Sq, where n keys exist: what is_causal says, as intervals.

        Args:
            seqlen_q, seqlen_k: Sq and Sk, Sk = Sq if not given.
            seqlens_k: int32 (B), n of each batch element; the keys from n on are hidden. Default: n = Sk.
            device: default: that of seqlens_k, else torch's.

        Returns:
            (B or 1, 1, Sk).
        """
        return cls.sliding_window(None, 0, seqlen_q, seqlen_k, seqlens_k=seqlens_k, device=device)

    @classmethod
    def sliding_window(
        cls,
        left: int | None,
        right: int | None,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        seqlens_k: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> KeyIntervals:
        """Row i stands at position p = i + n - Sq and sees keys p - left <= j <= p + right; None sees them all.

        The window is causal with right = 0 and then shows left + 1 keys. Other arguments and result as in `causal`.
        """
        seqlen_q, seqlen_k = _lengths(seqlen_q, seqlen_k)
        left = None if left is None else as_length("left", left)
        right = None if right is None else as_length("right", right)
        key, existing = _positions(seqlen_k, seqlens_k, device)
        row = key - (existing - seqlen_q)  # that stands where the key does
        begin = torch.zeros_like(row) if right is None else (row - right).clamp(0, seqlen_q)
        end = torch.full_like(row, seqlen_q) if left is None else (row + (left + 1)).clamp(0, seqlen_q)
        end = torch.where(key < existing, torch.maximum(begin, end), begin)
        window_size = 0 if left is None or right is None else left + right + 1
        return cls(begin.int(), end.int(), window_size)

    @classmethod
    def prefix(
        cls,
        prefix_length: int | Tensor,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        seqlens_k: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> KeyIntervals:
        """Every row sees the first keys, and of the others what the causal rule allows. Call attention without
        is_causal, which would hide a part of the prefix.

        Args:
            prefix_length: how many keys; an integer tensor (B) for each batch element its own.

        Other arguments and result as in `causal`.
        """
        if isinstance(prefix_length, Tensor):
            check_layout("prefix_length", prefix_length)
            if prefix_length.dim() != 1 or prefix_length.is_floating_point() or prefix_length.dtype == torch.bool:
                raise ValueError(
                    "prefix_length must be an int or an integer tensor (B); got prefix_length "
                    f"{str(prefix_length.dtype).removeprefix('torch.')} {tuple(prefix_length.shape)}"
                )
            device = prefix_length.device if device is None else device
            prefix_length = prefix_length.to(device)[:, None, None]
        else:
            prefix_length = as_length("prefix_length", prefix_length)
        others = cls.causal(seqlen_q, seqlen_k, seqlens_k=seqlens_k, device=device)
        key = torch.arange(others.shape[2], device=others.device)
        begin = torch.where((key < prefix_length) & (others.begin < others.end), 0, others.begin)
        return cls(begin, others.end.expand(begin.shape))

    @classmethod
    def documents(
        cls,
        cu_seqlens: Tensor | Sequence[int],
        seqlen: int | None = None,
        *,
        cu_seqlens_k: Tensor | Sequence[int] | None = None,
        seqlen_k: int | None = None,
        is_causal: bool = False,
        device: torch.device | str | None = None,
    ) -> KeyIntervals:
        """Documents packed behind one another, each of which sees itself only: row i of document d its own keys.

        Computed on the device, by operations that CUDA graphs capture and torch.compile traces. Bounds on the host (a
        CPU tensor or a list) are checked there, but not in compiled code; contents that are not checked are clamped to
        the tokens, and each bound to be no less than those before it. Tokens before the first bound and from the last
        one on belong to no document: keys are hidden, rows see nothing. Documents may be empty.

        Args:
            cu_seqlens: integers (documents + 1), where the rows of each document begin and the last ends; from 0 on,
                never falling.
            seqlen: Sq, default cu_seqlens[-1], which is read only for bounds on the host.
            cu_seqlens_k: the same of keys, where a document has other numbers of rows and keys; default cu_seqlens.
            seqlen_k: Sk, default: cu_seqlens_k[-1], or seqlen without cu_seqlens_k.
            is_causal: the intervals obey the causal rule, aligned to the end of each document: its last row sees all of
                its keys. Call attention without is_causal then, which aligns to the last of all keys.
            device: default: that of cu_seqlens, if it is a tensor, else that of cu_seqlens_k, else torch's.

        Returns:
            (1, 1, Sk).

        Raises:
            TypeError: a length or is_causal is of another type. ValueError: bounds of another form or number; wrong
                contents on the host; a tensor on another device than the CPU without the length.
        """
        check_bool("is_causal", is_causal)
        return cls(*interval_bounds(cu_seqlens, seqlen, cu_seqlens_k, seqlen_k, is_causal, device))


def select_keys(
    scores: Tensor,
    window_size: int,
    *,
    seqlen_q: int | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> KeyIntervals:
    """The `window_size` keys of highest score, in O(Sk log window_size) time and O(Sk) memory.

    Among equal scores the newest key (highest index) stays; -0 equals 0, NaNs are equal and rank highest. Scores of
    -inf or the dtype's lowest finite value are never kept. Source: docs/semantics.md, "Dynamic selection".

    Args:
        scores: (B, heads, Sk), float16, bfloat16, float32 or float64, any strides; detached.
        window_size: keys that a row sees at most; 0 hides all.
        seqlen_q: Sq, default Sk.
        causal: each row keeps the highest of the keys that the causal rule shows it (j <= i + n - Sq, where n keys
            exist), and the intervals obey that rule. False: the highest of all keys, the same for every row.
        key_mask: bool (B or 1, heads or 1, Sk); False hides the key from every row and from the selection.
        seqlens_k: int32 (B), only the first seqlens_k[b] keys of batch element b exist.
        cu_seqlens_q: packed documents, int32 (documents + 1), where the rows of each begin and the last end; or
            (B, documents + 1) for each batch element its own. The selection restarts in every document: its keys alone
            compete, and only its rows see them. The causal rule is aligned to its last key. Contents are clamped as in
            `KeyIntervals.documents`. Not beside seqlens_k.
        cu_seqlens_k: the same of keys, of the same shape; default cu_seqlens_q.

    Returns:
        Intervals (B, heads, Sk) for `attention`, which must be given the same seqlens_k; with documents, no is_causal.

    Raises:
        TypeError: an argument is not a tensor, int or bool where it must be.
        ValueError: a shape, dtype, device or value breaks a rule; names the argument, the rule and the values.
    """
    check_tensor("scores", scores)
    check_optional_tensor("key_mask", key_mask)
    check_optional_tensor("seqlens_k", seqlens_k)
    check_cu_seqlens(cu_seqlens_q, cu_seqlens_k)
    check_bool("causal", causal)
    window_size = as_int("window_size", window_size)
    if seqlen_q is not None:
        seqlen_q = as_int("seqlen_q", seqlen_q)
    else:
        seqlen_q = scores.shape[-1] if scores.dim() > 0 else 0  # a rank that is wrong is refused by the library
    documents = (cu_seqlens_q, cu_seqlens_k)
    bounds = _library.select_keys(scores, window_size, seqlen_q, causal, key_mask, seqlens_k, *documents)
    return KeyIntervals(*bounds, packed_window_size(window_size, causal, *documents))


def _lengths(seqlen_q: int, seqlen_k: int | None) -> tuple[int, int]:
    seqlen_q = as_length("seqlen_q", seqlen_q)
    return seqlen_q, seqlen_q if seqlen_k is None else as_length("seqlen_k", seqlen_k)


def _positions(
    seqlen_k: int, seqlens_k: Tensor | None, device: torch.device | str | None
) -> tuple[Tensor, Tensor | int]:
    """Every key's index, (1, 1, Sk), and how many keys exist, an int or (B, 1, 1)."""
    check_optional_tensor("seqlens_k", seqlens_k)
    if seqlens_k is None:
        return torch.arange(seqlen_k, device=device)[None, None], seqlen_k
    if seqlens_k.dtype != torch.int32 or seqlens_k.dim() != 1:
        raise ValueError(
            "seqlens_k must be int32 (B); got seqlens_k "
            f"{str(seqlens_k.dtype).removeprefix('torch.')} {tuple(seqlens_k.shape)}"
        )
    device = seqlens_k.device if device is None else device
    existing = seqlens_k.to(device).long().clamp(0, seqlen_k)[:, None, None]
    return torch.arange(seqlen_k, device=device)[None, None], existing


def _intervals_of(mask: Tensor) -> KeyIntervals:
    """mask bool (B, heads, Sq, Sk) -> the intervals that say the same.

    Raises:
        ValueError: a key is visible to rows that are not one range.
    """
    seen = mask.any(-2)
    begin = mask.byte().argmax(-2)  # the first True
    end = mask.shape[-2] - mask.flip(-2).byte().argmax(-2)
    torn = seen & (mask.sum(-2) != end - begin)
    if torn.any():
        batch, head, key = torn.nonzero()[0].tolist()
        raise ValueError(
            "the intersection must leave every key one range of rows; "
            f"got gaps in the rows of key {key} (batch {batch}, head {head}): use a bool mask instead"
        )
    return KeyIntervals(torch.where(seen, begin, 0).int(), torch.where(seen, end, 0).int())


def unchecked_intervals(begin: object, end: object, window_size: int) -> KeyIntervals:
    """For trees, whose leaves need not be tensors: vmap's dimensions, shardings, shapes."""
    intervals = object.__new__(KeyIntervals)
    for name, value in (("begin", begin), ("end", end), ("window_size", window_size)):
        object.__setattr__(intervals, name, value)
    return intervals


# Without window_size: a program that was exported for one takes others, too.
def _flatten(intervals: KeyIntervals) -> tuple[list[Tensor], None]:
    return [intervals.begin, intervals.end], None


def _flatten_with_keys(intervals: KeyIntervals) -> tuple[list[tuple[pytree.KeyEntry, Tensor]], None]:
    return [(pytree.GetAttrKey(name), getattr(intervals, name)) for name in ("begin", "end")], None


def _unflatten(bounds: Sequence[object], _context: None) -> KeyIntervals:
    return unchecked_intervals(*bounds, 0)


pytree.register_pytree_node(
    KeyIntervals,
    _flatten,
    _unflatten,
    serialized_type_name="flash_dmattn.KeyIntervals",
    flatten_with_keys_fn=_flatten_with_keys,
)

# So that torch.load reads saved intervals with weights_only=True, its default.
torch.serialization.add_safe_globals([KeyIntervals])
