"""Documents packed behind one another: which rows and keys belong to which, found by operations on the device.

Where documents begin and end is told by bounds, integers that never fall: document d has the tokens bounds[d] to
bounds[d + 1] - 1. Contents of tensors are not known to be right, so that bounds are clamped before they are used: to
the number of tokens, and each to be no less than those before it. Tokens before the first bound and from the last one
on belong to no document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _library
from ._arguments import as_length, check_layout, check_optional_tensor


class DocumentKeys(NamedTuple):
    """What every key knows of its document: int64 (..., Sk). Of a key without a document rows_begin = rows_end = 0."""

    document: Tensor
    """Its number; wrong for keys without one."""
    stands: Tensor
    """The row that stands where the key does, if the ends of the document's rows and keys are aligned."""
    rows_begin: Tensor
    """The document's first row."""
    rows_end: Tensor
    """The row behind its last one."""
    keys_end: Tensor
    """The key behind its last one."""

    def rows_in_window(self, left: int | None, right: int | None) -> tuple[Tensor, Tensor]:
        """The begin and end of the rows that see each key: those of its document from whose own place it is at most
        `left` keys to the left and `right` to the right; None: all on that side. begin <= end."""
        begin, end = self.rows_begin, self.rows_end
        if right is not None:
            begin = torch.clamp(self.stands - right, min=begin, max=end)
        if left is not None:
            end = torch.clamp(self.stands + (left + 1), min=begin, max=end)
        return begin, end


def documents_of_keys(bounds_q: Tensor, bounds_k: Tensor, seqlen_q: int, seqlen_k: int) -> DocumentKeys:
    """bounds_q, bounds_k: integers (..., documents + 1), contents clamped here."""
    bounds_q, bounds_k = clamped_bounds(bounds_q, seqlen_q), clamped_bounds(bounds_k, seqlen_k)
    key = torch.arange(seqlen_k, device=bounds_k.device).expand(*bounds_k.shape[:-1], seqlen_k).contiguous()
    last = bounds_k.shape[-1] - 2
    if last < 0:  # no documents at all
        nothing = torch.zeros_like(key)
        return DocumentKeys(nothing, nothing, nothing, nothing, nothing)
    after = torch.searchsorted(bounds_k, key, right=True)
    belongs = (after > 0) & (after <= last + 1)
    document = (after - 1).clamp(0, last)
    rows_begin, rows_end = (torch.where(belongs, bounds_q.gather(-1, document + shift), 0) for shift in (0, 1))
    keys_end = bounds_k.gather(-1, document + 1)
    return DocumentKeys(document, rows_end - (keys_end - key), rows_begin, rows_end, keys_end)


def rows_of_documents(
    bounds_q: Tensor,
    bounds_k: Tensor,
    seqlen_q: int,
    seqlen_k: int,
    *,
    left: int | None = None,
    right: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The begin and end, int32 (1, 1, Sk), of the rows that see each key: `DocumentKeys.rows_in_window`.

    bounds_q, bounds_k: integers (documents + 1), contents clamped here.
    """
    if bounds_k.device.type == "cuda" and "cuda" in _library.device_backends() and left is None and right in (None, 0):
        # A selection that evicts no key says it in two kernels, where the operations below are thirty.
        scores = torch.zeros(1, 1, seqlen_k, dtype=torch.bfloat16, device=bounds_k.device)
        bounds = _as_int32(bounds_q, seqlen_q), _as_int32(bounds_k, seqlen_k)
        return _library.select_keys(scores, seqlen_k, seqlen_q, right == 0, None, None, *bounds)
    begin, end = documents_of_keys(bounds_q, bounds_k, seqlen_q, seqlen_k).rows_in_window(left, right)
    return begin.int()[None, None], end.int()[None, None]


def _as_int32(bounds: Tensor, length: int) -> Tensor:
    """Narrowed, but for what does not fit: it stays what it is clamped to."""
    return bounds if bounds.dtype == torch.int32 else bounds.clamp(0, length).int()


def clamped_bounds(bounds: Tensor, length: int) -> Tensor:
    """int64: within 0 to length and never falling, whatever the contents are."""
    return bounds.long().clamp(0, length).cummax(-1).values.contiguous()


def first_causal_rows(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, seqlen_q: int, seqlen_k: int) -> Tensor:
    """int32 (B or 1, 1, Sk): the first row that sees each key under the causal rule of its document. Bounds, checked:
    (documents + 1) or (B, documents + 1)."""
    bounds_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    documents = documents_of_keys(cu_seqlens_q, bounds_k, seqlen_q, seqlen_k)
    begin, _ = documents.rows_in_window(None, 0)
    return begin.int().view(-1, 1, seqlen_k)


# ---- Arguments


def check_cu_seqlens(cu_seqlens_q: object, cu_seqlens_k: object) -> None:
    """Raises: TypeError: one is neither a tensor nor None. ValueError: a layout; cu_seqlens_k alone."""
    check_optional_tensor("cu_seqlens_q", cu_seqlens_q)
    check_optional_tensor("cu_seqlens_k", cu_seqlens_k)
    if cu_seqlens_k is not None and cu_seqlens_q is None:
        raise ValueError("cu_seqlens_k needs cu_seqlens_q, where the documents' rows begin; got cu_seqlens_q None")


def packed_window_size(window_size: int, causal: bool, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> int:
    """KeyIntervals.window_size of a selection. A document's first row may see many keys that the row before it does
    not, unless it has as many keys as rows and is causal."""
    return window_size if cu_seqlens_q is None or (causal and cu_seqlens_k is None) else 0


def interval_bounds(
    cu_seqlens: Tensor | Sequence[int],
    seqlen: int | None,
    cu_seqlens_k: Tensor | Sequence[int] | None,
    seqlen_k: int | None,
    is_causal: bool,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:
    """What `KeyIntervals.documents` documents: its begin and end, int32 (1, 1, Sk)."""
    rows = _read_bounds("cu_seqlens", cu_seqlens, "seqlen", seqlen, "keys" if cu_seqlens_k is None else "rows")
    if cu_seqlens_k is None:
        keys = rows if seqlen_k is None else _read_bounds("cu_seqlens", cu_seqlens, "seqlen_k", seqlen_k, "keys")
    else:
        keys = _read_bounds("cu_seqlens_k", cu_seqlens_k, "seqlen_k", seqlen_k, "keys")
        if rows.bounds.shape != keys.bounds.shape:
            raise ValueError(
                "cu_seqlens_k must have cu_seqlens' shape, a bound for each document and one more; "
                f"got cu_seqlens {tuple(rows.bounds.shape)}, cu_seqlens_k {tuple(keys.bounds.shape)}"
            )
    if device is None:
        given = [bounds.device for bounds in (cu_seqlens, cu_seqlens_k) if isinstance(bounds, Tensor)]
        device = given[0] if given else torch.get_default_device()
    bounds = rows.bounds.to(device), keys.bounds.to(device)
    return rows_of_documents(*bounds, rows.length, keys.length, right=0 if is_causal else None)


class _Bounds(NamedTuple):
    bounds: Tensor  # integers (documents + 1)
    length: int  # of the tokens that they divide


def _read_bounds(
    name: str, cu_seqlens: Tensor | Sequence[int], length_name: str, length: int | None, tokens: str
) -> _Bounds:
    """Bounds on the host are checked, but not in compiled code; others are taken as they are."""
    if isinstance(cu_seqlens, Tensor):
        check_layout(name, cu_seqlens)
    try:
        # Tensors stay where they are: as_tensor would take them to the default device.
        bounds = cu_seqlens if isinstance(cu_seqlens, Tensor) else torch.as_tensor(cu_seqlens, device="cpu")
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name} must make a tensor of integers; got {name} {cu_seqlens!r}") from error
    if bounds.dim() != 1 or len(bounds) == 0 or bounds.is_floating_point() or bounds.dtype == torch.bool:
        raise ValueError(
            f"{name} must be integers of 1 dimension, at least one; got {name} "
            f"{str(bounds.dtype).removeprefix('torch.')} {tuple(bounds.shape)}"
        )
    if length is not None:
        length = as_length(length_name, length)
    if bounds.device.type != "cpu":
        if length is None:
            raise ValueError(
                f"{length_name} must be given for {name} on a device, for whose last bound the host would have to "
                f"wait; got {name} on {bounds.device}, {length_name} None"
            )
        return _Bounds(bounds, length)
    if length is not None and torch.compiler.is_compiling():
        return _Bounds(bounds, length)
    _check_contents(name, bounds, length, tokens)
    return _Bounds(bounds, int(bounds[-1]) if length is None else length)


def _check_contents(name: str, bounds: Tensor, length: int | None, tokens: str) -> None:
    bounds = bounds.long()
    last = int(bounds[-1])
    if last >= 2**31:
        raise ValueError(f"{name} must end below 2^31; got {last} at the end")
    if bounds[0] != 0 or (bounds.diff() < 0).any():
        raise ValueError(f"{name} must begin with 0 and never fall; got {bounds.tolist()}")
    if length is not None and last > length:
        raise ValueError(f"{name} must end within the {length} {tokens}; got {last} at the end")
