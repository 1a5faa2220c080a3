"""Packed documents by loops over documents, rows and keys, written from docs/semantics.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor


def bounds_of(lengths: Sequence[int]) -> Tensor:
    """Where documents of these lengths begin and the last ends, int32 (documents + 1)."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def clamped(bounds: Tensor | Sequence[int], length: int) -> list[int]:
    """The bounds as they are read: within the tokens, and none below those before it."""
    bounds, at_least, result = torch.as_tensor(bounds).tolist(), 0, []
    for bound in bounds:
        at_least = max(at_least, min(bound, length))
        result.append(at_least)
    return result


def documents(
    cu_seqlens_q: Tensor | Sequence[int], cu_seqlens_k: Tensor | Sequence[int], rows: int, keys: int
) -> Iterator[tuple[slice, slice]]:
    """The rows and the keys of every document."""
    starts, key_starts = clamped(cu_seqlens_q, rows), clamped(cu_seqlens_k, keys)
    for document in range(len(starts) - 1):
        yield slice(*starts[document : document + 2]), slice(*key_starts[document : document + 2])


def document_mask(
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    rows: int,
    keys: int,
    left: int | None = None,
    right: int | None = None,
) -> Tensor:
    """bool (rows, keys). right=0: the causal rule, aligned to the end of each document."""
    mask = torch.zeros(rows, keys, dtype=torch.bool, device="cpu")
    for own_rows, own_keys in documents(cu_seqlens_q, cu_seqlens_k, rows, keys):
        for row in range(own_rows.start, own_rows.stop):
            place = own_keys.stop - (own_rows.stop - row)
            for key in range(own_keys.start, own_keys.stop):
                after_left = left is None or key >= place - left
                mask[row, key] = after_left and (right is None or key <= place + right)
    return mask


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Rows and keys of each document, and how many of both follow the last document."""
    count = draw(st.integers(0, 6))
    rows = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    equal = draw(st.booleans())
    keys = rows if equal else draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    after = draw(st.integers(0, 4))
    return rows, keys, after, after if equal else draw(st.integers(0, 4))
