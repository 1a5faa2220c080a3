"""plan_report and plan_chunks: what they count and show, against dense masks and against what calls do."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys

import pytest
import torch
from cases import default_dtype, make_case, run_library
from compare import assert_case_close
from flash_dmattn import KeyIntervals, PlanReport, attention, plan_report, prepare_mask, select_keys
from flash_dmattn.planning import plan_chunks
from oracle import visibility
from torch import Tensor

pytestmark = pytest.mark.devices("cpu", "cuda")
LENGTHS = torch.tensor([300, 211], dtype=torch.int32)
SIZES = {"rows": 250, "keys": 300, "head_dim": 8}
CASES = {
    "dense": {},
    "causal": {"is_causal": True},
    "lengths": {"is_causal": True, "seqlens_k": LENGTHS},
    "full": {"mask": (2, 4, 250, 300), "density": 0.3},
    "few": {"mask": (1, 2, 250, 300), "density": 0.004, "is_causal": True},
    "per_key": {"mask": (2, 1, 300), "density": 0.2, "seqlens_k": LENGTHS},
    "per_row": {"mask": (2, 1, 250, 1)},
    "rows_and_keys": {"mask": (250, 300), "is_causal": True},
    "bias": {"mask": (2, 1, 300), "bias": (2, 4, 250, 300)},
}


def report_of(case: object, **changes: object) -> PlanReport:
    return plan_report(case.query, case.key, **{"mask": case.mask, **case.options, **changes})


def assert_adds_up(report: PlanReport, case: object) -> None:
    batch, heads, key_heads, rows, keys = case.sizes
    assert report.kept_scores == int(visibility(case).sum())
    assert report.computed_scores >= report.kept_scores
    tiles = batch * heads * math.ceil(rows / report.row_tile) * math.ceil(keys / report.key_tile)
    assert report.tiles_empty + report.tiles_partial + report.tiles_full == tiles
    assert report.computed_scores <= (report.tiles_partial + report.tiles_full) * report.row_tile * report.key_tile
    assert report.tiles_full * report.key_tile <= report.kept_scores
    of_all = batch * heads * math.ceil(rows / report.chunk_rows)
    # Where batch elements see the same, a GPU plans once for all of them.
    assert report.plans * report.shared_heads in ({of_all, of_all // batch} if case.query.is_cuda else {of_all})
    assert report.copied_keys <= report.plans * keys
    assert 0 <= report.lists <= report.plans and 0 <= report.bitmaps <= report.plans
    assert report.plan_bytes > 0 or (case.query.is_cuda and case.mask is None)  # which needs no plan to compute


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_counts_what_is_visible(options: dict) -> None:
    case = make_case(**SIZES, **options)
    assert_adds_up(report_of(case), case)
    by_shape = plan_report(
        case.query.shape, list(case.key.shape), mask=case.mask, dtype=case.query.dtype, **case.options
    )
    assert by_shape == report_of(case)


@pytest.mark.parametrize("is_causal", [False, True])
def test_counts_intervals(is_causal: bool) -> None:
    case = make_case(**SIZES, is_causal=is_causal)
    bounds = torch.randint(-20, 270, (2, 2, 2, 300), dtype=torch.int32)
    intervals = KeyIntervals(*bounds)
    dense = dataclasses.replace(case, mask=intervals.dense_mask(250))
    report = report_of(case, mask=intervals)
    assert_adds_up(report, dense)
    assert (report.visibility, report.shared_heads) == ("bitmap", 2)
    prepared = report_of(case, mask=prepare_mask(intervals))
    assert prepared == report


LOG = """
import sys
import torch
import flash_dmattn as f

torch.manual_seed(0)
query, key = torch.randn(1, 500, 4, 16, requires_grad=True), torch.randn(1, 600, 2, 16)
window = f.KeyIntervals.sliding_window(50, 0, 500, 600)
masks = {
    "none": None,
    "per_key": torch.rand(1, 1, 600) < 0.2,
    "full": torch.rand(1, 1, 500, 600) < 0.004,
    "top": f.select_keys(torch.randn(1, 2, 600), 40, seqlen_q=500),
    "window": window,
    "prepared": f.prepare_mask(window.dense_mask(500)),
}
for name, mask in masks.items():
    print(name, file=sys.stderr)
    f.attention(query, key, key, mask=mask, is_causal=True).sum().backward()
    report = f.plan_report(query, key, mask=mask, is_causal=True)
    ranges = report.plans - report.lists
    print("report", report.lists, ranges, report.visibility, f"{report.ratio:.2f}", file=sys.stderr)
"""
KINDS = {
    "none": ("range", "prefix", "no mask by key"),
    "per_key": ("list", "prefix", "mask by key"),
    "full": ("list", "bitmap", "mask by row and key"),
    "top": ("list", "bitmap", "intervals"),
    "window": ("range", "bitmap", "intervals"),
    "prepared": ("range", "bitmap", "intervals"),
}


@pytest.mark.devices("cpu")
def test_the_log_names_the_plan_that_was_reported() -> None:
    """And so the report counts what the C++ library counted while it computed."""
    environment = {"FLASH_DMATTN_LOG": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", LOG], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    for at, (name, (keys, rows, rule)) in enumerate(KINDS.items()):
        title, forward, backward, report = lines[4 * at : 4 * at + 4]
        assert title == name
        lists, ranges, reported, ratio = report.split()[1:]
        assert f"plans: {lists} list, {ranges} range, {reported}, {ratio} computed per kept score ({rule}" in forward
        assert reported == rows and (lists == "0") == (keys == "range"), forward
        assert " backward " in backward and f"{rows}, " in backward and f"({rule}" in backward


@pytest.mark.devices("cpu")
def test_float64_has_no_plan() -> None:
    case = make_case(**SIZES, **CASES["few"], dtype=torch.float64)
    report = report_of(case)
    assert report.kept_scores == report.computed_scores == int(visibility(case).sum())
    assert (report.backend, report.plans, report.keys, report.visibility) == ("cpu/float64", 0, "none", "none")


def test_nothing_visible_and_nothing_at_all() -> None:
    dtype = default_dtype()
    report = plan_report((1, 4, 2, 8), (1, 4, 1, 8), mask=torch.zeros(1, 1, 4, dtype=torch.bool), dtype=dtype)
    assert (report.kept_scores, report.computed_scores, report.copied_keys) == (0, 0, 0) and math.isnan(report.ratio)
    report = plan_report((0, 4, 2, 8), (0, 4, 1, 8), dtype=dtype)
    assert (report.plans, report.rule) == (0, "nothing to compute")


@pytest.mark.devices("cpu")
def test_is_frozen_and_printable() -> None:
    report = plan_report((1, 300, 2, 8), (1, 300, 1, 8), mask=KeyIntervals.documents([0, 100, 300]), is_causal=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.kept_scores = 1
    text = str(report)
    assert text.startswith("cpu/") and f"{report.ratio:.3f}x" in text and report.rule in text
    assert eval(repr(report)) == report


ERRORS = {
    "type": ({"query": 3}, TypeError, "query must be a torch.Tensor or a shape; got query of type int"),
    "size": ({"key": (1, 2.0, 1, 8)}, TypeError, "key must be an int; got key of type float"),
    "rank": ({"query": (4, 2, 8)}, ValueError, "query must have 4 dimensions, none negative; got query (4, 2, 8)"),
    "negative": ({"query": (1, -1, 2, 8)}, ValueError, "query must have 4 dimensions, none negative; got query"),
    "heads": ({"key": (1, 5, 3, 8)}, ValueError, "query must have a multiple of key's heads"),
    "head_dim": ({"key": (1, 5, 1, 9)}, ValueError, "key must have query's head dim"),
    "group": ({"query": (1, 8, 2**31, 8)}, ValueError,
              "query must have at most 65536 heads for each of key's; got query (1, 8, 2147483648, 8), key (1, 5,"),
    "large_group": ({"query": (1, 8, 2**40, 8)}, ValueError, "query must have at most 65536 heads for each of key's"),
    "all_heads": ({"query": (2**16, 8, 2**15, 8), "key": (2**16, 5, 2**15, 8)}, ValueError,
                  "query must have fewer than 2^31 heads in all batch elements; got query (65536, 8, 32768, 8)"),
    "all_rows": ({"query": (1, 2**31 - 2049, 2**14, 8), "key": (1, 5, 2**14, 8)}, ValueError,
                 "query must have fewer than 2^44 positions in all heads and batch elements; got query"),
    "all_keys": ({"query": (1, 4, 2**14, 8), "key": (1, 2**31 - 2049, 1, 8)}, ValueError,
                 "key must have fewer than 2^44 positions for all heads of query and batch elements; got key"),
    "scores": ({"query": (1, 2**30, 2, 8), "key": (1, 2**30, 2, 8)}, ValueError,
               "query must make fewer than 2^60 scores B * H * Sq * Sk with key; got query (1, 1073741824, 2, 8), key"),
    "length": ({"key": (1, 2**31 - 2048, 1, 8)}, ValueError, "key must have fewer than 2^31 - 2048 positions; got key"),
    "size_of_64_bits": ({"query": (1, 2**63, 1, 8)}, ValueError, "query must fit 64 bits; got query 92233720368547"),
    "elements": ({"query": (1, 2**60, 2, 8)}, ValueError, "query must have fewer than 2^63 elements; got query (1, "),
    "mask_type": ({"mask": [True]}, TypeError, "mask must be a torch.Tensor, KeyIntervals, KeyIndices,"),
    "mask": ({"mask": torch.ones(3, 5, dtype=torch.bool)}, ValueError, "mask must broadcast to"),
    "mask_device": ({"query": torch.empty(1, 4, 2, 8), "mask": KeyIntervals.causal(4, 5, device="meta")}, ValueError,
                    "intervals.begin must be on the device of query"),
    "meta": ({"query": torch.empty(1, 4, 2, 8, device="meta"), "key": torch.empty(1, 5, 1, 8, device="meta")},
             ValueError, "query must have data; got query on meta"),
    "lengths": ({"seqlens_k": torch.tensor([3])}, ValueError, "seqlens_k must be int32"),
    "causal": ({"is_causal": 1}, TypeError, "is_causal must be a bool"),
    "deterministic": ({"deterministic": 1}, TypeError, "deterministic must be a bool"),
    "dtype": ({"dtype": torch.int32}, ValueError, "query must be float16, bfloat16, float32 or float64"),
}  # fmt: skip


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(changes: dict, kind: type, message: str) -> None:
    arguments = {"query": (1, 4, 2, 8), "key": (1, 5, 1, 8)} | changes
    with pytest.raises(kind, match=re.escape(message)):
        plan_report(arguments.pop("query"), arguments.pop("key"), **arguments)


def test_reads_no_element_of_query_and_key_and_any_strides() -> None:
    query = torch.randn(1, 40, 8, 2, dtype=default_dtype()).transpose(2, 3)
    key = torch.randn(1, dtype=default_dtype()).expand(1, 50, 1, 8)
    by_shape = plan_report(query.shape, key.shape, is_causal=True, dtype=default_dtype())
    assert plan_report(query, key, is_causal=True) == by_shape


# ---- Chunks


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("name", ["causal", "lengths", "full", "few", "per_key", "rows_and_keys"])
def test_chunks_show_what_is_visible(name: str) -> None:
    case = make_case(**SIZES, **CASES[name])
    for batch, head in ((0, 0), (1, 3)):
        arguments = {"mask": case.mask, **case.options, "batch": batch, "head": head}
        planned = torch.zeros(250, 300, dtype=torch.bool)
        for chunk in plan_chunks(case.query, case.key, **arguments):
            planned[chunk.row_begin : chunk.row_begin + chunk.rows, chunk.keys.long()] = chunk.visible
            assert chunk.tiles.shape == (math.ceil(chunk.rows / 32), math.ceil(len(chunk.keys) / 64))
        assert torch.equal(planned, visibility(case)[batch, head])


@pytest.mark.devices("cpu")
def test_chunks_stand_in_order_of_leaving() -> None:
    """Keys that are seen by the first row come first, those that stay longest in front; arrivals follow by index."""
    intervals = select_keys(torch.randn(1, 1, 1024), 128)
    chunks = plan_chunks((1, 1024, 1, 8), (1, 1024, 1, 8), mask=intervals, is_causal=True)
    assert len(chunks) > 2
    for chunk in chunks[1:]:
        begin, end = intervals.begin[0, 0, chunk.keys.long()], intervals.end[0, 0, chunk.keys.long()]
        survivors = int((begin <= chunk.row_begin).sum())
        assert chunk.is_list and chunk.has_bitmap and 0 < survivors < len(chunk.keys)
        assert (begin[:survivors] <= chunk.row_begin).all()
        last_tile = ((end[:survivors].clamp(max=chunk.row_begin + chunk.rows) - chunk.row_begin - 1) // 32).diff()
        assert (last_tile <= 0).all()
        assert (chunk.keys[survivors:].diff() > 0).all()


# ---- A list and a range


def with_hidden_key(case: object, at: int) -> object:
    """The same attention with one more key, at index `at`, that no row sees and whose numbers are NaN."""

    def insert(tensor: Tensor, dim: int, value: object) -> Tensor:
        before, after = tensor.split([at, tensor.shape[dim] - at], dim)
        hidden = torch.full_like(tensor.narrow(dim, 0, 1), value)
        return torch.cat([before, hidden, after], dim)

    mask = case.mask
    if isinstance(mask, KeyIntervals):
        mask = KeyIntervals(insert(mask.begin, 2, 0), insert(mask.end, 2, 0))
    else:
        mask = insert(mask, -1, False)
    return dataclasses.replace(
        case,
        key=insert(case.key, 1, math.nan),
        value=insert(case.value, 1, math.nan),
        bias=insert(case.bias, 2, math.nan),
        mask=mask,
    )


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("form", ["per_key", "bool", "intervals"])
def test_list_and_range_give_the_same(form: str, dtype: torch.dtype) -> None:
    """Keys that every chunk of rows sees as neighbours, and the same with a hidden key among them."""
    case = make_case(rows=200, keys=230, head_dim=16, bias=(2, 2, 230), dtype=dtype)
    window = KeyIntervals.sliding_window(None, 90, 200, 230)  # every chunk of rows sees the first 120 keys
    mask = {
        "per_key": torch.ones(1, 1, 230, dtype=torch.bool),
        "bool": window.dense_mask(200),
        "intervals": window,
    }[form]
    as_range = dataclasses.replace(case, mask=mask)
    as_list = with_hidden_key(as_range, at=60)
    if dtype != torch.float64:
        one, other = report_of(as_range), report_of(as_list)
        assert one.lists == 0 and other.lists == other.plans == one.plans
        assert (one.kept_scores, one.bitmaps) == (other.kept_scores, other.bitmaps)
    got = run_library(as_list)
    expected = run_library(as_range)
    for name, result in got.items():
        dim = {"dkey": 1, "dvalue": 1, "dbias": 2}.get(name)
        if dim is not None:
            assert (result.select(dim, 60) == 0).all()
            result = torch.cat([result.narrow(dim, 0, 60), result.narrow(dim, 61, 170)], dim)
        if form != "intervals":  # which may stand in another order in a list
            assert torch.equal(result, expected[name]), name
    dense = as_list if form != "intervals" else dataclasses.replace(as_list, mask=as_list.mask.dense_mask(200))
    assert_case_close(dense, got)


def test_attention_is_unchanged_by_reporting() -> None:
    case = make_case(**SIZES, **CASES["full"])
    before = attention(case.query, case.key, case.value, mask=case.mask)
    report_of(case)
    assert torch.equal(attention(case.query, case.key, case.value, mask=case.mask), before)
