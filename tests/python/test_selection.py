"""select_keys against brute force, its errors, and as an operator."""

from __future__ import annotations

import math
import re

import pytest
import torch
from flash_dmattn import KeyIntervals, select_keys
from flash_dmattn.utils.mask import topk_mask
from hypothesis import event, given, settings
from hypothesis import strategies as st
from selecting import visible_keys
from torch import Tensor
from torch.library import opcheck

SELECT = torch.ops.flash_dmattn.select_keys.default
INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

pytestmark = pytest.mark.devices("cpu", "cuda")


def assert_selects(scores: Tensor, window: int, rows: int, **options: object) -> KeyIntervals:
    intervals = select_keys(scores, window, seqlen_q=rows, **options)
    expected = visible_keys(scores, window, rows, **options)
    assert intervals.begin.dtype == intervals.end.dtype == torch.int32
    assert intervals.shape == scores.shape and intervals.begin.is_contiguous() and intervals.end.is_contiguous()
    assert torch.equal(intervals.dense_mask(rows), expected)
    assert intervals.kept_scores() == intervals.kept_scores(rows) == int(expected.sum())
    # In order, inside the rows, and (0, 0) where nothing is seen: what plans are made from.
    seen = expected.any(2)
    assert torch.equal(intervals.begin < intervals.end, seen)
    assert (intervals.begin[~seen] == 0).all() and (intervals.end[~seen] == 0).all()
    assert (intervals.end <= rows).all() and (intervals.begin >= 0).all()
    return intervals


def special_values(dtype: torch.dtype) -> list[float]:
    info = torch.finfo(dtype)
    next_to_lowest = torch.nextafter(*torch.tensor([info.min, 0.0], dtype=dtype, device="cpu")).item()
    subnormal = info.smallest_normal / 2
    return [NAN, -NAN, INF, -INF, info.min, info.max, next_to_lowest, 0.0, -0.0, 1.0, -1.0, subnormal, -subnormal]


# ---- Against brute force


@st.composite
def selections(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of select_keys, most of them with many ties."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    keys = draw(st.integers(0, 24) | st.sampled_from([1, 33, 65]))
    rows = draw(st.integers(0, 30) | st.just(keys))
    dtype = draw(st.sampled_from(DTYPES))
    ties = st.sampled_from([0.0, 1.0, 2.0])
    values = draw(st.sampled_from([ties, st.sampled_from(special_values(dtype)), st.floats(-4, 4, width=16), ties]))
    scores = draw(st.lists(values, min_size=batch * heads * keys, max_size=batch * heads * keys))
    result = {
        "scores": torch.tensor(scores, dtype=torch.float64).to(dtype).reshape(batch, heads, keys),
        "window": draw(st.sampled_from([0, 1, 2, 3, 7, keys - 1 if keys else 0, keys, keys + 1, 2**40])),
        "rows": rows,
        "causal": draw(st.booleans()),
    }
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), keys)
        shown = draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)))
        result["key_mask"] = torch.tensor(shown, dtype=torch.bool).reshape(shape)
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(-2, keys + 2), min_size=batch, max_size=batch))
        result["seqlens_k"] = torch.tensor(lengths, dtype=torch.int32)
    return result


@settings(max_examples=800)
@given(selections())
def test_equals_sorting_every_row(arguments: dict) -> None:
    event(f"causal {arguments['causal']}, Sq {'>' if arguments['rows'] > arguments['scores'].shape[2] else '<='} Sk")
    assert_selects(**arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_special_values(dtype: torch.dtype, causal: bool) -> None:
    """Every pair of special values meets, in both orders, in every window."""
    values = torch.tensor(special_values(dtype), dtype=dtype)
    order = torch.cat([torch.randperm(len(values)) for _ in range(6)])
    scores = torch.stack([values[order], values[order.flip(0)]])[None]
    for window in (1, 2, 5, 20, 60, len(order)):
        assert_selects(scores, window, scores.shape[2], causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lowest_finite_values_are_never_kept(dtype: torch.dtype) -> None:
    lowest = torch.finfo(dtype).min
    scores = torch.tensor([[[lowest, -INF, 1.0, lowest, -3.0, -INF]]], dtype=dtype)
    mask = assert_selects(scores, 6, 6).dense_mask(6)
    assert mask[0, 0, 5].tolist() == [False, False, True, False, True, False]
    # The lowest value of a narrower type is a number like any other.
    assert assert_selects(torch.full((1, 1, 3), torch.finfo(torch.float16).min).double(), 3, 3).kept_scores() == 6


def test_equal_scores_make_a_sliding_window() -> None:
    for zeros in (torch.zeros(1, 1, 40), torch.tensor([0.0, -0.0]).repeat(20)[None, None], torch.full((1, 1, 40), NAN)):
        window = assert_selects(zeros, 7, 40)
        assert torch.equal(window.dense_mask(40), KeyIntervals.sliding_window(6, 0, 40).dense_mask(40))


@pytest.mark.parametrize(("rows", "keys"), [(1, 50), (20, 50), (50, 50), (70, 50), (0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("window", [0, 1, 9, 50, 51])
def test_lengths(rows: int, keys: int, window: int) -> None:
    for causal in (True, False):
        assert_selects(torch.randint(-3, 4, (2, 3, keys)).float(), window, rows, causal=causal)


@pytest.mark.parametrize(("rows", "keys"), [(50, 50), (20, 50), (1, 50), (50, 20)])
@pytest.mark.parametrize("window", [0, 1, 7, 50])
def test_equals_topk_mask_under_the_causal_mask(rows: int, keys: int, window: int) -> None:
    """What users of the original package get, on scores without ties."""
    scores = torch.stack([torch.randperm(keys) for _ in range(6)]).view(2, 3, keys).float() - keys / 2
    causal = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    expected = topk_mask(scores, causal, window, torch.finfo(torch.float32).min).view(2, 3, rows, keys)
    assert torch.equal(select_keys(scores, window, seqlen_q=rows).dense_mask(rows), expected)


def test_key_masks_and_lengths_that_hide_everything() -> None:
    scores = torch.randn(2, 2, 30)
    nothing = torch.zeros(2, 1, 30, dtype=torch.bool)
    nothing[1, :, 3] = True
    assert assert_selects(scores, 5, 30, key_mask=nothing).kept_scores() == 2 * 27
    assert assert_selects(scores, 5, 30, key_mask=nothing[:1]).kept_scores() == 0
    lengths = torch.tensor([0, 30], dtype=torch.int32)
    assert assert_selects(scores, 30, 30, seqlens_k=lengths).kept_scores() == 2 * 30 * 31 // 2


def test_long_selection() -> None:
    """Many keys, few distinct scores, drift: what the brute force can still do."""
    scores = torch.randint(0, 60, (1, 2, 700)) + torch.arange(700) // 20 * torch.tensor([[[0], [1]]])
    assert_selects(scores.float(), 64, 700)
    assert_selects(-scores.bfloat16(), 200, 300)


def test_same_for_any_strides_batch_and_number_of_threads() -> None:
    scores = torch.randint(0, 50, (3, 4, 20000)).float()
    torch.set_num_threads(1)
    alone = [select_keys(scores[b : b + 1, h : h + 1], 100) for b in range(3) for h in range(4)]
    torch.set_num_threads(2)
    for view in (scores, scores.transpose(1, 2).contiguous().transpose(1, 2), scores.repeat_interleave(2, 2)[..., ::2]):
        together = select_keys(view, 100)
        for index, one in enumerate(alone):
            assert torch.equal(together.begin[index // 4, index % 4], one.begin[0, 0])
            assert torch.equal(together.end[index // 4, index % 4], one.end[0, 0])
    expanded = select_keys(scores[:1, :1].expand(2, 3, -1), 100)
    assert torch.equal(expanded.end, alone[0].end.expand(2, 3, -1))


def test_seqlen_q_defaults_to_the_keys() -> None:
    scores = torch.randn(1, 1, 9)
    assert torch.equal(select_keys(scores, 3).end, select_keys(scores, 3, seqlen_q=9).end)


def test_scores_are_detached() -> None:
    scores = torch.randn(1, 2, 9, requires_grad=True)
    intervals = select_keys(scores, 3)
    assert not intervals.begin.requires_grad and not intervals.end.requires_grad


# ---- Errors of select_keys

GOOD = torch.zeros(2, 3, 5)
SELECT_ERRORS = {
    "scores type": ([1.0], {}, TypeError, "scores must be a torch.Tensor; got scores of type list"),
    "scores scalar": (torch.tensor(1.0), {}, ValueError, "scores must have 1 to 4 dimensions"),
    "scores rank": (torch.zeros(3, 5), {}, ValueError, "scores must have 3 dimensions; got scores (3, 5)"),
    "scores dtype": (
        GOOD.int(),
        {},
        ValueError,
        "scores must be float16, bfloat16, float32 or float64; got scores int32",
    ),
    "window type": (GOOD, {"window_size": 2.0}, TypeError, "window_size must be an int; got window_size of type float"),
    "window bool": (GOOD, {"window_size": True}, TypeError, "window_size must be an int; got window_size of type bool"),
    "window negative": (
        GOOD,
        {"window_size": -1},
        ValueError,
        "window_size must not be negative; got window_size -1",
    ),
    "window hugely negative": (GOOD, {"window_size": -(10**30)}, ValueError, "window_size must fit 64 bits; got windo"),
    "window most negative": (
        GOOD,
        {"window_size": -(2**63)},
        ValueError,
        "window_size must not be negative; got windo",
    ),
    "window huge": (
        GOOD,
        {"window_size": 2**63},
        ValueError,
        "window_size must fit 64 bits; got window_size 9223372036854775808",
    ),
    "seqlen_q type": (GOOD, {"seqlen_q": "3"}, TypeError, "seqlen_q must be an int; got seqlen_q of type str"),
    "seqlen_q negative": (GOOD, {"seqlen_q": -1}, ValueError, "seqlen_q must be between 0 and 2^31 - 1"),
    "seqlen_q large": (GOOD, {"seqlen_q": 2**31}, ValueError, "seqlen_q must be between 0 and 2^31 - 1"),
    "seqlen_q huge": (GOOD, {"seqlen_q": 10**30}, ValueError, "seqlen_q must fit 64 bits; got seqlen_q 10000000"),
    "heads": (
        torch.zeros(()).expand(1, 2**31, 4),
        {},
        ValueError,
        "scores must have fewer than 2^31 heads in all batch elements; got scores (1, 2147483648, 4)",
    ),
    "positions": (
        torch.zeros(()).expand(2**10, 2**20, 2**14),
        {},
        ValueError,
        "scores must have fewer than 2^44 positions in all heads and batch elements; got scores",
    ),
    "causal type": (GOOD, {"causal": 1}, TypeError, "causal must be a bool; got causal of type int"),
    "key_mask type": (
        GOOD,
        {"key_mask": [True]},
        TypeError,
        "key_mask must be a torch.Tensor or None; got key_mask of type list",
    ),
    "key_mask dtype": (GOOD, {"key_mask": torch.ones(2, 3, 5)}, ValueError, "key_mask must be bool; got key_mask f"),
    "key_mask rank": (GOOD, {"key_mask": torch.ones(2, 5) > 0}, ValueError, "key_mask must have 3 dimensions"),
    "key_mask shape": (
        GOOD,
        {"key_mask": torch.ones(2, 2, 5) > 0},
        ValueError,
        "key_mask must be (B or 1, heads or 1, Sk) for scores (B, heads, Sk); got key_mask (2, 2, 5), scores (2, 3, 5)",
    ),
    "key_mask device": (
        GOOD,
        {"key_mask": (torch.ones(2, 3, 5) > 0).to("meta")},
        ValueError,
        "key_mask must be on the device of scores; got key_mask on meta, scores on cpu",
    ),
    "seqlens shape": (GOOD, {"seqlens_k": torch.ones(3).int()}, ValueError, "seqlens_k must have the shape (B) = (2)"),
    "seqlens dtype": (GOOD, {"seqlens_k": torch.ones(2).long()}, ValueError, "seqlens_k must be int32; got seqlens_k"),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("scores", "options", "kind", "message"), SELECT_ERRORS.values(), ids=SELECT_ERRORS.keys())
def test_errors_name_the_argument(scores: object, options: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        select_keys(scores, **({"window_size": 2} | options))


# ---- As an operator


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("hidden", [True, False])
def test_opcheck(causal: bool, hidden: bool) -> None:
    key_mask = torch.rand(2, 1, 9) < 0.7 if hidden else None
    lengths = torch.tensor([9, 4], dtype=torch.int32) if hidden else None
    opcheck(SELECT, (torch.randn(2, 3, 9), 3, 5, causal, key_mask, lengths))


def test_compiles_once_for_all_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(select_keys, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for keys, window, rows in ((9, 3, 5), (30, 7, 30), (12, 2, 17)):
            scores, lengths = torch.randn(2, 3, keys), torch.tensor([keys, keys - 2], dtype=torch.int32)
            options = {"seqlen_q": rows, "seqlens_k": lengths, "key_mask": torch.rand(2, 1, keys) < 0.5}
            result, expected = compiled(scores, window, **options), select_keys(scores, window, **options)
            assert isinstance(result, KeyIntervals)
            assert torch.equal(result.begin, expected.begin) and torch.equal(result.end, expected.end)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("error:.*performance drop")
@pytest.mark.parametrize("in_dims", [(0, None, None), (2, 0, 0), (None, 3, 1), (None, None, 0), (1, None, 1)], ids=str)
def test_vmap_equals_a_loop(in_dims: tuple) -> None:
    sizes = [(2, 3, 12), (2, 1, 12), (2,)]
    shapes = [size if dim is None else (*size[:dim], 4, *size[dim:]) for size, dim in zip(sizes, in_dims, strict=True)]
    arguments = [torch.randn(shapes[0]), torch.rand(shapes[1]) < 0.7, torch.randint(0, 13, shapes[2]).int()]

    def select(scores: Tensor, key_mask: Tensor, seqlens_k: Tensor) -> KeyIntervals:
        return select_keys(scores, 3, seqlen_q=8, key_mask=key_mask, seqlens_k=seqlens_k)

    mapped = torch.vmap(select, in_dims)(*arguments)
    assert isinstance(mapped, KeyIntervals)
    for index in range(4):
        one = select(*(t if dim is None else t.select(dim, index) for t, dim in zip(arguments, in_dims, strict=True)))
        assert torch.equal(mapped.begin[index], one.begin) and torch.equal(mapped.end[index], one.end)
