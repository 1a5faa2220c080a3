"""Selection that restarts in every document."""

from __future__ import annotations

import re

import pytest
import torch
from flash_dmattn import KeyIntervals, select_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import bounds_of, documents, packings
from selecting import visible_keys
from test_selection import DTYPES, special_values
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck

SELECT = torch.ops.flash_dmattn.select_keys.default

pytestmark = pytest.mark.devices("cpu", "cuda")


def loop(
    scores: Tensor,
    window: int,
    rows: int,
    bounds_q: Tensor,
    bounds_k: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
) -> Tensor:
    """bool (B, heads, rows, keys): what a selection in each document for itself leaves visible."""
    batch, heads, keys = scores.shape
    visible = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    key_mask = None if key_mask is None else key_mask.expand(scores.shape)
    for b in range(batch):
        own = [bounds if bounds.dim() == 1 else bounds[b] for bounds in (bounds_q, bounds_k)]
        for own_rows, own_keys in documents(*own, rows, keys):
            mask = None if key_mask is None else key_mask[b : b + 1, :, own_keys]
            count = own_rows.stop - own_rows.start
            seen = visible_keys(scores[b : b + 1, :, own_keys], window, count, causal=causal, key_mask=mask)
            visible[b, :, own_rows, own_keys] = seen[0]
    return visible


def assert_selects(
    scores: Tensor, window: int, rows: int, bounds_q: Tensor, bounds_k: Tensor | None, **options
) -> KeyIntervals:
    intervals = select_keys(scores, window, seqlen_q=rows, cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k, **options)
    expected = loop(scores, window, rows, bounds_q, bounds_q if bounds_k is None else bounds_k, **options)
    assert torch.equal(intervals.dense_mask(rows), expected)
    seen = expected.any(2)  # (0, 0) where nothing is seen
    assert (intervals.begin[~seen] == 0).all() and (intervals.end[~seen] == 0).all()
    assert (intervals.begin >= 0).all() and (intervals.end <= rows).all()
    return intervals


@pytest.mark.devices("cpu")
@settings(max_examples=300)
@given(st.data(), packings(), st.integers(1, 2), st.integers(1, 2), st.booleans())
def test_is_a_loop_over_documents(data: st.DataObject, packing: tuple, batch: int, heads: int, causal: bool) -> None:
    lengths_q, lengths_k, after_q, after_k = packing
    rows, keys = sum(lengths_q) + after_q, sum(lengths_k) + after_k
    dtype = data.draw(st.sampled_from(DTYPES))
    values = data.draw(st.sampled_from([st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from(special_values(dtype))]))
    count = batch * heads * keys
    scores = torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count)), dtype=torch.float64)
    scores = scores.to(dtype).reshape(batch, heads, keys)
    bounds_q, bounds_k = bounds_of(lengths_q), bounds_of(lengths_k)
    if lengths_q == lengths_k and data.draw(st.booleans()):
        bounds_k = None
    options = {"causal": causal}
    if data.draw(st.booleans()):
        options["key_mask"] = torch.rand(data.draw(st.sampled_from([1, batch])), 1, keys) < 0.7
    window = data.draw(st.sampled_from([0, 1, 2, 5, 100]))
    assert_selects(scores, window, rows, bounds_q, bounds_k, **options)


@pytest.mark.devices("cpu")
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 24), min_size=1, max_size=6),
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 24), min_size=6, max_size=6),
    st.booleans(),
)
def test_wrong_contents_are_clamped(starts: list[int], key_starts: list[int], causal: bool) -> None:
    scores = torch.randint(0, 3, (1, 2, 17)).float()
    bounds_q = torch.tensor(starts, dtype=torch.int32)
    bounds_k = torch.tensor(key_starts[: len(starts)], dtype=torch.int32)
    assert_selects(scores, 3, 20, bounds_q, bounds_k, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_every_batch_element_has_documents_of_its_own(causal: bool) -> None:
    scores = torch.randint(0, 4, (3, 2, 20)).bfloat16()
    bounds_q = torch.tensor([[0, 5, 9, 20], [0, 0, 20, 20], [0, 1, 2, 3]], dtype=torch.int32)
    bounds_k = torch.tensor([[0, 2, 11, 20], [0, 7, 16, 20], [0, 5, 5, 9]], dtype=torch.int32)
    assert_selects(scores, 3, 20, bounds_q, bounds_k, causal=causal)
    # As views with other strides.
    wide = torch.stack([bounds_q, bounds_k], dim=-1)
    assert_selects(scores, 3, 20, wide[..., 0], wide[..., 1], causal=causal)


def test_many_tiny_documents_and_one_huge() -> None:
    lengths = torch.randint(0, 4, (3000,), device="cpu").tolist()
    lengths.insert(1000, 9000)
    bounds = bounds_of(lengths)
    scores = torch.randint(0, 1000, (1, 2, int(bounds[-1]))).float()
    packed = select_keys(scores, 2, seqlen_q=scores.shape[2], cu_seqlens_q=bounds)
    for document in [*range(0, 3000, 301), 1000]:
        first, last = bounds[document : document + 2].tolist()
        alone = select_keys(scores[..., first:last], 2)
        shown = alone.begin < alone.end
        for got, expected in ((packed.begin, alone.begin), (packed.end, alone.end)):
            assert torch.equal(got[..., first:last], torch.where(shown, expected + first, 0))


def test_is_known_to_keep_no_more_than_the_window_where_it_is() -> None:
    bounds, scores = bounds_of([3, 4]), torch.zeros(1, 1, 7)
    assert select_keys(scores, 2, cu_seqlens_q=bounds).window_size == 2
    assert select_keys(scores, 2, cu_seqlens_q=bounds, cu_seqlens_k=bounds).window_size == 0
    assert select_keys(scores, 2, cu_seqlens_q=bounds, causal=False).window_size == 0


SCORES = torch.zeros(2, 2, 6)
BOUNDS = torch.tensor([0, 2, 6], dtype=torch.int32)
ERRORS = {
    "type": ({"cu_seqlens_q": [0, 2]}, TypeError, "cu_seqlens_q must be a torch.Tensor or None; got cu_seqlens_q of"),
    "dtype": ({"cu_seqlens_q": BOUNDS.long()}, ValueError, "cu_seqlens_q must be int32; got cu_seqlens_q int64"),
    "empty": ({"cu_seqlens_q": BOUNDS[:0]}, ValueError, "cu_seqlens_q must "),
    "batch": (
        {"cu_seqlens_q": BOUNDS.expand(3, 3)},
        ValueError,
        "cu_seqlens_q must be (documents + 1) or (B, documents + 1) with B = 2; got cu_seqlens_q (3, 3)",
    ),
    "keys alone": (
        {"cu_seqlens_k": BOUNDS},
        ValueError,
        "cu_seqlens_k needs cu_seqlens_q, where the documents' rows begin; got cu_seqlens_q None",
    ),
    "keys' shape": (
        {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS[:2]},
        ValueError,
        "cu_seqlens_k must have the shape of cu_seqlens_q = ",
    ),
    "keys' dtype": (
        {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS.float()},
        ValueError,
        "cu_seqlens_k must be int32; got cu_seqlens_k float32",
    ),
    "seqlens_k": (
        {"cu_seqlens_q": BOUNDS, "seqlens_k": BOUNDS[:2]},
        ValueError,
        "seqlens_k must not be given beside cu_seqlens_q, which says where keys end; got seqlens_k (2), cu_seqlens_q",
    ),
    "device": (
        {"cu_seqlens_q": BOUNDS.to("meta")},
        ValueError,
        "cu_seqlens_q must be on the device of scores; got cu_seqlens_q on meta, scores on cpu",
    ),
    "key_mask": (
        {"cu_seqlens_q": BOUNDS, "key_mask": torch.ones(2, 3, 6) > 0},
        ValueError,
        "key_mask must be (B or 1, heads or 1, Sk) for scores (B, heads, Sk); got key_mask (2, 3, 6)",
    ),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("arguments", "kind", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(arguments: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        select_keys(SCORES, 2, **arguments)


def test_vmap() -> None:
    scores, own = torch.randn(3, 2, 2, 12), torch.tensor([[0, 4, 12], [0, 0, 7], [0, 12, 12]], dtype=torch.int32)

    def select(scores: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        intervals = select_keys(scores, 3, seqlen_q=12, cu_seqlens_q=bounds)
        return intervals.begin, intervals.end

    for bounds, dim in ((own, 0), (own[0], None), (own[:, None].expand(3, 2, 3), 0), (own[:2], None)):
        mapped = torch.vmap(select, in_dims=(0, dim))(scores, bounds)
        for index in range(3):
            alone = select(scores[index], bounds if dim is None else bounds[index])
            assert torch.equal(mapped[0][index], alone[0]) and torch.equal(mapped[1][index], alone[1])


def test_is_an_operator() -> None:
    bounds = BOUNDS.to(torch.get_default_device())
    opcheck(SELECT, (torch.randn(1, 2, 6), 2, 6, True, None, None, bounds, bounds))


def test_compiles_once_for_all_totals() -> None:
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def select(scores: Tensor, bounds: Tensor) -> Tensor:
        return select_keys(scores, 3, seqlen_q=scores.shape[2], cu_seqlens_q=bounds).end

    for lengths in ([3, 4], [5, 2, 9], [2, 0, 7, 30], [12, 13]):
        bounds, scores = bounds_of(lengths), torch.randn(1, 2, sum(lengths) + 3)
        expected = select_keys(scores, 3, cu_seqlens_q=bounds)
        assert torch.equal(select(scores, bounds), expected.end)
    assert counter.frame_count == 1


def test_float64_is_not_rounded() -> None:
    """Neighbours that float32 cannot tell apart."""
    scores = torch.tensor([1.0, 1 + 2**-40, 1.0, 1 + 2**-50], dtype=torch.float64)[None, None]
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    assert_selects(scores, 1, 4, bounds, None)
