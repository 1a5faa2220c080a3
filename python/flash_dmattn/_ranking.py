"""Selection within documents where only selection within one sequence has a kernel, as on GPUs.

Keys are numbered by document first and by score second, and selected by these numbers as if all were one sequence. A
later document's keys then outrank all earlier ones, so that no row's own document loses to one before it: a key that
another one of its document evicts leaves at that key, and one that a later document's evicts stays to the end of its
own. Exact for all dtypes, in O(Sk log Sk) time for the sorting and O(Sk) memory, without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._arguments import as_length
from ._documents import documents_of_keys


def select_in_documents(
    select: Callable[..., tuple[Tensor, Tensor]],
    scores: Tensor,
    window_size: int,
    seqlen_q: int,
    causal: bool,
    key_mask: Tensor | None,
    seqlens_k: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What the operator select_keys gives for these arguments.

    Args:
        select: the operator, which is called without documents.
        scores: (B, heads, Sk); others as in `flash_dmattn.select_keys`.

    Returns:
        begin and end, int32 (B, heads, Sk).

    Raises:
        ValueError: as the operator.
    """
    _check_scores(scores, seqlen_q, key_mask)
    _check_bounds(scores, seqlens_k, cu_seqlens_q, cu_seqlens_k)
    seqlen_k = scores.shape[2]
    bounds_q = cu_seqlens_q[:, None] if cu_seqlens_q.dim() == 2 else cu_seqlens_q  # (B, 1, documents + 1)
    bounds_k = bounds_q if cu_seqlens_k is None else cu_seqlens_k[:, None] if cu_seqlens_k.dim() == 2 else cu_seqlens_k
    documents = documents_of_keys(bounds_q, bounds_k, seqlen_q, seqlen_k)
    takes_part = ~(scores <= torch.finfo(scores.dtype).min) & (documents.rows_begin < documents.rows_end)
    if key_mask is not None:
        takes_part = takes_part & key_mask
    # Keys come one a row: what ends an interval is the key that comes then, if it is one of the same document.
    ranks = _ranks(scores, documents.document)
    _, evicted_by = select(ranks, window_size, seqlen_k, True, takes_part, None)
    is_kept = evicted_by > 0
    leaves = evicted_by.long()
    stays = leaves >= documents.keys_end
    if causal:
        begin, end = documents.rows_in_window(None, 0)
        row = torch.nn.functional.pad(begin.expand_as(leaves), (0, 1))  # leaves may be Sk, which is no key
        end = torch.where(stays, end, row.gather(2, leaves))
    else:
        begin, end = documents.rows_begin, documents.rows_end
        is_kept = is_kept & stays
    is_kept = is_kept & (begin < end)
    return torch.where(is_kept, begin, 0).int(), torch.where(is_kept, end, 0).int()


def _ranks(scores: Tensor, document: Tensor) -> Tensor:
    """float64 (B, heads, Sk): the place of each key in the order of documents, then scores, then indices."""
    scores = torch.where(scores.isnan(), torch.nan, scores + 0.0)  # NaNs are alike, and -0 is 0
    by_score = scores.sort(dim=-1, stable=True).indices
    by_document = document.expand_as(by_score).gather(-1, by_score).sort(dim=-1, stable=True).indices
    order = by_score.gather(-1, by_document)
    place = torch.arange(scores.shape[2], dtype=torch.float64, device=scores.device)
    return torch.zeros_like(scores, dtype=torch.float64).scatter(-1, order, place.expand_as(scores))


# The operator's rules of what it is not given.


def _check_scores(scores: Tensor, seqlen_q: int, key_mask: Tensor | None) -> None:
    if scores.dim() != 3:
        raise ValueError(f"scores must have 3 dimensions; got scores {tuple(scores.shape)}")
    if not scores.is_floating_point():
        raise ValueError(
            "scores must be float16, bfloat16, float32 or float64; got scores "
            f"{str(scores.dtype).removeprefix('torch.')}"
        )
    as_length("seqlen_q", seqlen_q)
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be bool; got key_mask {str(key_mask.dtype).removeprefix('torch.')}")
    batch, heads, keys = scores.shape
    shape = tuple(key_mask.shape)
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] != keys:
        raise ValueError(
            "key_mask must be (B or 1, heads or 1, Sk) for scores (B, heads, Sk); "
            f"got key_mask {shape}, scores {tuple(scores.shape)}"
        )


def _check_bounds(scores: Tensor, seqlens_k: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None) -> None:
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if bounds is None:
            continue
        if bounds.dtype != torch.int32:
            raise ValueError(f"{name} must be int32; got {name} {str(bounds.dtype).removeprefix('torch.')}")
        sizes = tuple(bounds.shape)
        if len(sizes) not in (1, 2) or sizes[-1] < 1 or (len(sizes) == 2 and sizes[0] != scores.shape[0]):
            raise ValueError(
                f"{name} must be (documents + 1) or (B, documents + 1) with B = {scores.shape[0]}; got {name} {sizes}"
            )
    if cu_seqlens_k is not None and cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k must have the shape of cu_seqlens_q = {tuple(cu_seqlens_q.shape)}; "
            f"got cu_seqlens_k {tuple(cu_seqlens_k.shape)}"
        )
    if seqlens_k is not None:
        raise ValueError(
            "seqlens_k must not be given beside cu_seqlens_q, which says where keys end; "
            f"got seqlens_k {tuple(seqlens_k.shape)}, cu_seqlens_q {tuple(cu_seqlens_q.shape)}"
        )
