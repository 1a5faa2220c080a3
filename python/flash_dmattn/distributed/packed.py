"""Packed documents of a sequence that is split across ranks.

Of the keys that a rank holds only those of its last document are seen by later ranks, if it continues there. So a rank
sends the best of these, and hides what earlier ranks sent of documents that ended before its own first row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._arguments import check_optional_tensor
from .._documents import clamped_bounds


class SplitDocuments(NamedTuple):
    """The documents of the whole sequence as one rank knows them, without a look at them on the host."""

    bounds: Tensor  # int64 (documents + 1), clamped
    share: int  # tokens of a rank
    rank: int

    def sends(self) -> Tensor:
        """bool (1, 1, share): the keys of the document that continues on the next rank."""
        first = self.rank * self.share
        key = torch.arange(first, first + self.share, device=self.bounds.device)
        begin, exists = self._document_of(first + self.share)
        return (exists & (key >= begin))[None, None]

    def sees(self, count: int) -> Tensor:
        """bool (1, 1, rank * count): of what each earlier rank sent, `count` keys, what is of this rank's first
        document."""
        begin, exists = self._document_of(self.rank * self.share)
        ends = torch.arange(1, self.rank + 1, device=self.bounds.device) * self.share
        return (exists & (begin < ends)).repeat_interleave(count)[None, None]

    def bounds_of_rows(self) -> Tensor:
        """int32 (documents + 1): of this rank's rows."""
        return (self.bounds - self.rank * self.share).clamp(0, self.share).int()

    def bounds_of_keys(self, count: int) -> Tensor:
        """The same of its keys, with `count` of each earlier rank in front, which its first document has."""
        first, earlier = self.rank * self.share, self.rank * count
        bounds = torch.where(self.bounds <= first, 0, self.bounds - first + earlier)
        return bounds.clamp(max=earlier + self.share).int()

    def _document_of(self, token: int) -> tuple[Tensor, Tensor]:
        """Where the document of a token begins, and whether there is one: tensors of one number."""
        after = (self.bounds <= token).sum()
        exists = (after > 0) & (after < len(self.bounds))
        return self.bounds.gather(0, (after - 1).clamp(min=0)[None])[0], exists


def split_documents(cu_seqlens: Tensor, share: int, rank: int, ranks: int) -> SplitDocuments:
    return SplitDocuments(clamped_bounds(cu_seqlens, share * ranks), share, rank)


def check_cu_seqlens(cu_seqlens: object) -> None:
    """Raises: TypeError: neither a tensor nor None. ValueError: another dtype or shape."""
    check_optional_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens is not None and (cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or len(cu_seqlens) == 0):
        raise ValueError(
            "cu_seqlens must be int32 (documents + 1), of the whole sequence; got cu_seqlens "
            f"{str(cu_seqlens.dtype).removeprefix('torch.')} {tuple(cu_seqlens.shape)}"
        )


def within(key_mask: Tensor | None, shown: Tensor) -> Tensor:
    """What both show."""
    return shown if key_mask is None else key_mask & shown
