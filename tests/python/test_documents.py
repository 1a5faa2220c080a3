"""KeyIntervals.documents: packed documents as intervals, whatever their bounds say."""

from __future__ import annotations

import re

import pytest
import torch
from flash_dmattn import KeyIntervals
from hypothesis import given
from hypothesis import strategies as st
from packed import bounds_of, document_mask, packings
from torch._dynamo.testing import CompileCounter

pytestmark = pytest.mark.devices("cpu", "cuda")


@pytest.mark.devices("cpu")
@given(packings(), st.booleans())
def test_is_a_loop_over_documents(packing: tuple[list[int], list[int], int, int], is_causal: bool) -> None:
    lengths_q, lengths_k, after_q, after_k = packing
    bounds_q, bounds_k = bounds_of(lengths_q), bounds_of(lengths_k)
    rows, keys = sum(lengths_q) + after_q, sum(lengths_k) + after_k
    intervals = KeyIntervals.documents(bounds_q, rows, cu_seqlens_k=bounds_k, seqlen_k=keys, is_causal=is_causal)
    expected = document_mask(bounds_q, bounds_k, rows, keys, right=0 if is_causal else None)
    assert intervals.shape == (1, 1, keys) and (intervals.begin <= intervals.end).all()
    assert torch.equal(intervals.dense_mask(rows)[0, 0], expected)
    if lengths_q == lengths_k:
        same = KeyIntervals.documents(bounds_q.tolist(), rows, seqlen_k=keys, is_causal=is_causal)
        assert torch.equal(same.begin, intervals.begin) and torch.equal(same.end, intervals.end)


@pytest.mark.devices("cpu")
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 24), min_size=3, max_size=6),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 24), min_size=6, max_size=6),
    st.booleans(),
)
def test_wrong_contents_are_clamped_where_nobody_reads_them(
    starts: list[int], key_starts: list[int], is_causal: bool
) -> None:
    """Compiled code cannot look at bounds, as the host cannot at those of a GPU."""
    rows, keys = 20, 17

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def make(bounds_q: torch.Tensor, bounds_k: torch.Tensor) -> KeyIntervals:
        return KeyIntervals.documents(bounds_q, rows, cu_seqlens_k=bounds_k, seqlen_k=keys, is_causal=is_causal)

    bounds_q = torch.tensor(starts, dtype=torch.int32)
    bounds_k = torch.tensor(key_starts[: len(starts)], dtype=torch.int64)
    intervals = make(bounds_q, bounds_k)
    assert (intervals.begin >= 0).all() and (intervals.begin <= intervals.end).all() and (intervals.end <= rows).all()
    expected = document_mask(bounds_q, bounds_k, rows, keys, right=0 if is_causal else None)
    assert torch.equal(intervals.dense_mask(rows)[0, 0], expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_many_tiny_documents_and_one_huge(is_causal: bool) -> None:
    lengths = torch.randint(0, 3, (5000,), device="cpu").tolist()
    lengths.insert(2500, 30_000)
    bounds = bounds_of(lengths)
    total = int(bounds[-1])
    intervals = KeyIntervals.documents(bounds, total, is_causal=is_causal)
    start = torch.cat([torch.full((length,), int(first)) for length, first in zip(lengths, bounds, strict=False)])
    end = torch.cat([torch.full((length,), int(last)) for length, last in zip(lengths, bounds[1:], strict=True)])
    assert torch.equal(intervals.begin[0, 0].long(), torch.arange(total) if is_causal else start)
    assert torch.equal(intervals.end[0, 0].long(), end)


def test_lengths_default_to_the_last_bounds_on_the_host() -> None:
    bounds, key_bounds = torch.tensor([0, 3, 5], device="cpu"), [0, 1, 9]
    intervals = KeyIntervals.documents(bounds, cu_seqlens_k=key_bounds)
    assert intervals.shape == (1, 1, 9)
    assert torch.equal(intervals.dense_mask(5)[0, 0].cpu(), document_mask(bounds, key_bounds, 5, 9))
    assert KeyIntervals.documents(bounds, 8).shape == (1, 1, 8)
    assert KeyIntervals.documents(bounds, 8, seqlen_k=11).shape == (1, 1, 11)


def test_no_document_at_all() -> None:
    intervals = KeyIntervals.documents([0], 4, is_causal=True)
    assert intervals.shape == (1, 1, 4) and not intervals.dense_mask(4).any()


META = torch.zeros(3, dtype=torch.int32, device="meta")
ERRORS = {
    "device": (
        lambda: KeyIntervals.documents(META),
        ValueError,
        "seqlen must be given for cu_seqlens on a device, for whose last bound the host would have to wait; "
        "got cu_seqlens on meta, seqlen None",
    ),
    "device of keys": (
        lambda: KeyIntervals.documents(META, 4, cu_seqlens_k=META),
        ValueError,
        "seqlen_k must be given for cu_seqlens_k on a device",
    ),
    "documents": (
        lambda: KeyIntervals.documents([0, 2], cu_seqlens_k=[0, 1, 2]),
        ValueError,
        "cu_seqlens_k must have cu_seqlens' shape, a bound for each document and one more; "
        "got cu_seqlens (2,), cu_seqlens_k (3,)",
    ),
    "keys": (
        lambda: KeyIntervals.documents([0, 2], 2, cu_seqlens_k=[0, 4], seqlen_k=3),
        ValueError,
        "cu_seqlens_k must end within the 3 keys; got 4 at the end",
    ),
    "rows": (
        lambda: KeyIntervals.documents([0, 2], 1, cu_seqlens_k=[0, 4]),
        ValueError,
        "cu_seqlens must end within the 1 rows; got 2 at the end",
    ),
    "order of keys": (
        lambda: KeyIntervals.documents([0, 2, 2], cu_seqlens_k=[0, 3, 1]),
        ValueError,
        "cu_seqlens_k must begin with 0 and never fall; got [0, 3, 1]",
    ),
    "length": (lambda: KeyIntervals.documents([0, 2], -1), ValueError, "seqlen must be between 0 and 2^31 - 1; got"),
    "length type": (lambda: KeyIntervals.documents([0], 1.0), TypeError, "seqlen must be an int; got seqlen of type"),
    "causal": (
        lambda: KeyIntervals.documents([0, 2], is_causal=1),
        TypeError,
        "is_causal must be a bool; got is_causal of type int",
    ),
    "sparse": (
        lambda: KeyIntervals.documents(torch.tensor([0, 2]).to_sparse()),
        ValueError,
        "cu_seqlens must be a dense tensor",
    ),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("make", "kind", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(make: object, kind: type, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        make()


def test_meta_bounds_give_shapes() -> None:
    assert KeyIntervals.documents(META, 4, seqlen_k=7).begin.device.type == "meta"


def test_compiles_once_for_all_totals() -> None:
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def mask_of(bounds: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        intervals = KeyIntervals.documents(bounds, tokens.shape[0], is_causal=True)
        return intervals.dense_mask(tokens.shape[0])

    for lengths in ([3, 4], [5, 2, 9], [1, 0, 7, 30], [12, 13]):
        bounds = bounds_of(lengths)
        expected = document_mask(bounds, bounds, sum(lengths) + 2, sum(lengths) + 2, right=0)
        assert torch.equal(mask_of(bounds, torch.zeros(sum(lengths) + 2))[0, 0].cpu(), expected)
    assert counter.frame_count == 1
