"""Masks of Transformers' models as what selection and attention take: intervals of rows, per-key masks, lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _log
from .._device_plan import MOST_DECODE_ROWS
from .._documents import rows_of_documents
from ..key_indices import KeyIndices
from ..prepared import PreparedMask, prepare_mask
from ..selection import KeyIntervals, select_keys
from ..utils.mask import topk_mask

# ---- Intervals as a tensor. Transformers hands masks on to all layers if they are tensors with four dimensions.


def row_intervals(
    rows: int,
    keys: int,
    row_offset: int | Tensor = 0,
    key_offset: int | Tensor = 0,
    *,
    left: int | None = None,
    right: int | None = None,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """For every key the rows that see it, without looking at any row.

    Row i stands at position row_offset + i, key j at key_offset + j.

    Args:
        left, right: a row sees keys from `left` positions before it to `right` behind it; None: all on that side.
        documents: integers (B, keys) that never fall along a sequence; rows see keys of their own only. Rows and keys
            are the same tokens then.
        padding: bool (B, keys), False hides the key.

    Returns:
        int32 (B or 1, 1, 2, keys): begins, then ends.
    """
    key = torch.arange(keys, device=device)
    row = (key + (key_offset - row_offset))[None]  # that stands where the key does
    begin = torch.zeros_like(row) if right is None else row - right
    end = torch.full_like(row, rows) if left is None else row + left + 1
    if documents is not None:
        documents = documents.contiguous()
        begin = torch.maximum(begin, torch.searchsorted(documents, documents))
        end = torch.minimum(end, torch.searchsorted(documents, documents, right=True))
    begin, end = begin.clamp(0, rows), end.clamp(0, rows)
    end = torch.maximum(begin, end)
    if padding is not None:
        begin, end = torch.where(padding, begin, 0), torch.where(padding, end, 0)
    return torch.stack([begin, end], dim=-2)[:, None].int()


def is_row_intervals(mask: object) -> bool:
    """Whether it is what `row_intervals` returns. Masks of Transformers are bool or floating point."""
    return isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[2] == 2


def intervals_in(mask: Tensor) -> KeyIntervals:
    """What `row_intervals` returned, as KeyIntervals."""
    return KeyIntervals(mask[:, :, 0], mask[:, :, 1])


# ---- Packed documents


def check_packed(cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None, batch: int, rows: int, keys: int) -> bool:
    """Whether documents are given. Of their bounds only the shapes are looked at, which does not wait for a device.

    Raises:
        ValueError: documents in several sequences, or with keys of a cache; bounds that do not go together.
    """
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return False
    given = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
    shapes = {name: None if bounds is None else tuple(bounds.shape) for name, bounds in given.items()}
    go_together = shapes["cu_seq_lens_q"] == shapes["cu_seq_lens_k"] and len(shapes["cu_seq_lens_q"]) == 1
    if not go_together or batch != 1 or rows != keys:
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k must both be bounds of the documents of one sequence (documents + 1), "
            "without keys of a cache; got "
            + ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            + f", batch size {batch}, {rows} rows, {keys} keys"
        )
    return True


def packed_documents(
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    rows: int,
    keys: int,
    *,
    left: int | None = None,
    right: int | None = None,
    device: torch.device,
) -> KeyIntervals:
    """What rows see of their own document: keys from `left` before their own place in it to `right` behind it; None:
    all on that side. Contents of bounds are clamped, as in KeyIntervals.documents."""
    bounds = cu_seq_lens_q.to(device), cu_seq_lens_k.to(device)
    return KeyIntervals(*rows_of_documents(*bounds, rows, keys, left=left, right=right))


def within_documents(
    documents: KeyIntervals, mask: PreparedMask | KeyIntervals | KeyIndices | Tensor | None, rows: int
) -> KeyIntervals | KeyIndices | Tensor:
    """What both show; None shows all."""
    if mask is None:
        return documents
    if isinstance(mask, KeyIndices):
        return mask.intersection(documents)
    if isinstance(mask, PreparedMask):
        mask = mask.intervals if mask.kind == "intervals" else mask.dense_mask()
    if isinstance(mask, KeyIntervals):
        return documents.intersection(mask)
    return documents.dense_mask(rows) & mask


# ---- Masks that are looked at once

_prepared = WeakTensorKeyDictionary()
_growing = WeakTensorKeyDictionary()


def _once(known: WeakTensorKeyDictionary, mask: Tensor, make: Callable[[Tensor], object]) -> object:
    """make(mask), remembered as long as the tensor lives and is not written to: all layers are given the same one."""
    if mask.is_inference():  # these do not tell when they are written to
        return make(mask)
    found = known.get(mask)
    if found is None or found[0] != mask._version:
        known[mask] = found = mask._version, make(mask)
    return found[1]


def prepared_mask(mask: Tensor, rows: int) -> PreparedMask | KeyIntervals | Tensor:
    """What attention takes for a bool mask (B or 1, heads, Sq or 1, Sk) or for what `row_intervals` returned.

    Prepared for all layers at once, by reading a bool mask's elements; the mask as it is in compiled code, and for so
    few rows that attention makes no plan.
    """
    is_intervals = is_row_intervals(mask)
    if torch.compiler.is_compiling() or rows <= MOST_DECODE_ROWS:
        return intervals_in(mask) if is_intervals else mask

    def prepare(mask: Tensor) -> PreparedMask:
        # What is remembered must not hold on to the mask itself: copies, or an alias of its memory.
        held = KeyIntervals(*(mask[:, :, bound].clone() for bound in (0, 1))) if is_intervals else mask.detach()
        return prepare_mask(held, rows)

    return _once(_prepared, mask, prepare)


# ---- Selection within masks


@dataclass(frozen=True)
class GrowingMask:
    """A mask in which no row sees less than the rows before it, at least within its document. A key that drops out of
    the best therefore never comes back, and `select_keys` can select within the mask.

    Args:
        causal: row i sees keys j <= i + n - Sq, where n keys exist; else all rows see the same keys.
        key_mask: bool (B or 1, heads or 1, Sk), False hides the key.
        seqlens_k: int32 (B or 1), how many keys exist; default all.
        document_end: integers (B or 1, heads or 1, Sk), where the document of each key ends, 0 for keys that are not
            seen; Sq = Sk.
    """

    causal: bool
    key_mask: Tensor | None = None
    seqlens_k: Tensor | None = None
    document_end: Tensor | None = None


def growing_mask(mask: Tensor) -> GrowingMask | None:
    """mask bool (B or 1, heads, Sq or 1, Sk) -> the same as a GrowingMask, None if it is none.

    Reads the mask's elements, once for all layers.
    """
    if mask.shape[2] == 1:
        return GrowingMask(False, mask[:, :, 0])
    return _once(_growing, mask, _find_growing)


def _find_growing(mask: Tensor) -> GrowingMask | None:
    rows, keys = mask.shape[2:]
    prepared = prepare_mask(mask)
    if prepared.kind == "keys":
        return GrowingMask(False, prepared.mask[:, :, 0])
    if prepared.kind == "mask":
        return None
    begin, end = prepared.intervals.begin.long(), prepared.intervals.end.long()
    seen, key = begin < end, torch.arange(keys, device=mask.device)
    if not (seen & (end != rows)).any():
        # Causal: a key that is not seen by all rows is first seen by the row where it stands, the same way for all.
        late = seen & (begin > 0)
        shift = torch.where(late, key - begin, -rows).amax((1, 2))
        shift = torch.where(late.any(2).any(1), shift, keys - rows)
        stands = key - shift[:, None, None]
        if (seen & (begin != stands.clamp(min=0))).any() or (shift > keys - rows).any():
            return None
        seqlens_k = None if (shift == keys - rows).all() else (shift + rows).int()
        return GrowingMask(True, seen, seqlens_k)
    # Documents: each key is first seen by its own row, and the last row that sees it ends a document.
    end = torch.where(seen, end, 0)
    ended = torch.nn.functional.pad(end.cummax(-1).values, (1, -1))  # the latest end of the keys before
    follows = (begin == key) & ((ended <= key) | (ended == end))
    if rows != keys or (seen & ~follows).any():
        return None
    return GrowingMask(True, seen, None, end)


def select_within(scores: Tensor, window_size: int, mask: GrowingMask, rows: int) -> KeyIntervals:
    """The `window_size` keys of highest score among those that the mask shows each row.

    Args:
        scores: (B or 1, heads, Sk), detached here.

    Returns:
        Intervals (B or 1, heads, Sk), which include the mask.
    """
    scores, key_mask, seqlens_k = scores.detach(), mask.key_mask, mask.seqlens_k
    held = (key_mask, seqlens_k, mask.document_end)
    batch = max([scores.shape[0], *(tensor.shape[0] for tensor in held if tensor is not None)])
    heads = max([scores.shape[1], *(tensor.shape[1] for tensor in held if tensor is not None and tensor.dim() == 3)])
    scores = scores.expand(batch, heads if scores.shape[1] == 1 else -1, -1)
    seqlens_k = None if seqlens_k is None else seqlens_k.expand(batch)
    if mask.document_end is None:
        return select_keys(
            scores, window_size, seqlen_q=rows, causal=mask.causal, key_mask=key_mask, seqlens_k=seqlens_k
        )
    # Heads may have documents of their own, as batch elements may: those are what has bounds.
    shape = scores.shape
    bounds = _bounds_of_documents(mask.document_end)
    if bounds.shape[1] != 1:
        scores = scores.reshape(batch * heads, 1, -1)
        bounds = bounds.expand(batch, heads, -1)
        key_mask = None if key_mask is None else key_mask.expand(shape).reshape(batch * heads, 1, -1)
    bounds = bounds.expand(batch, -1, -1).reshape(scores.shape[0], -1)
    intervals = select_keys(
        scores, window_size, seqlen_q=rows, causal=mask.causal, key_mask=key_mask, cu_seqlens_q=bounds
    )
    return KeyIntervals(intervals.begin.view(shape), intervals.end.view(shape), intervals.window_size)


def _bounds_of_documents(document_end: Tensor) -> Tensor:
    """int32 (B, heads, Sk + 1): where documents begin and end, as `select_keys` takes it. With empty documents between
    the others it has one size for any number of them, which nobody has to wait for."""
    end = document_end.long()
    ends = end.new_zeros((*end.shape[:-1], end.shape[-1] + 1)).scatter(-1, end, end)
    return ends.cummax(-1).values.int()


def dense_selection(scores: Tensor, window_size: int, mask: Tensor | None) -> Tensor:
    """As `select_within` for any bool mask and for scores with rows of their own, with Sq * Sk elements and
    torch.topk's choice among equal scores.

    Args:
        scores: (B or 1, heads, Sk) or (B or 1, heads, Sq or 1, Sk). mask: bool (B or 1, heads or 1, Sq or 1, Sk).

    Returns:
        bool, in the form of scores or (B, heads, Sq, Sk).
    """
    _log.info("the best %d keys as a dense mask, of scores %s", window_size, tuple(scores.shape))
    return topk_mask(scores, mask, window_size, torch.finfo(scores.dtype).min)
