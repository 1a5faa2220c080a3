"""Lists of keys per query row on a GPU, beside the oracle that is given the mask which says the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import assert_same_bits, make_case, poison_unseen, run_library
from compare import assert_case_close
from flash_dmattn import KeptKeys, KeyIndices, attention, plan_report, prepare_mask
from oracle import Case
from torch import Tensor

pytestmark = pytest.mark.devices("cuda")

ROWS, KEYS = 1100, 900
FORMS = {  # (B or 1, heads or 1, Sq or 1, n), block_size, whether lists have lengths; B 2, H 4, Hkv 2
    "of_all_heads": ((2, 1, ROWS, 60), 1, False),
    "of_key_heads": ((1, 2, ROWS, 60), 1, True),
    "of_heads": ((2, 4, ROWS, 20), 1, True),
    "one_list": ((1, 1, 1, 200), 1, False),
    "blocks": ((2, 2, ROWS, 3), 64, False),
    "no_entries": ((1, 1, ROWS, 0), 1, False),
}


def lists_of(form: str) -> KeyIndices:
    shape, block_size, with_lengths = FORMS[form]
    indices = torch.randint(-2, KEYS // block_size + 3, shape, dtype=torch.int32)
    lengths = torch.randint(-1, shape[3] + 2, shape[:3], dtype=torch.int32) if with_lengths else None
    return KeyIndices(indices, block_size, lengths)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_are_the_mask_that_says_the_same(dtype: torch.dtype, form: str, head_dim: int) -> None:
    case = make_case(2, 4, 2, ROWS, KEYS, head_dim, dtype=dtype, bias=(1, 2, KEYS))
    lists = lists_of(form)
    for deterministic in (False, True):
        got = run_library(replace(case, mask=lists), deterministic=deterministic)
        assert_case_close(replace(case, mask=lists.dense_mask(KEYS)), got, few_elements=True)


def lists_that_are_alike(rows: int, keys: int, kept: int) -> KeyIndices:
    """Blocks of 128 rows draw from pools of their own, which 1024 rows together make nearly all keys: a list of these
    has parts for fewer rows, and keys in several of them."""
    pools = torch.stack([torch.randperm(keys)[:kept] for _ in range(rows // 128)])
    return KeyIndices(pools.repeat_interleave(128, 0).int()[None, None])


def test_rows_that_choose_alike_compute_little_more_than_they_keep() -> None:
    rows, keys, kept = 2048, 16000, 2048
    case = make_case(1, 2, 1, rows, keys, 64)
    lists = lists_that_are_alike(rows, keys, kept)
    report = plan_report(case.query, case.key, mask=lists)
    assert report.kept_scores == 2 * rows * kept
    assert report.ratio < 1.05
    assert_case_close(replace(case, mask=lists.dense_mask(keys)), run_library(replace(case, mask=lists)))


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_keys_that_stand_twice_in_a_list(key_heads: int, head_dim: int) -> None:
    """With a bias by key, whose gradient both places add to. A deterministic backward has lists of its own, whether the
    call's plan was made before or not."""
    rows, keys = 2048, 5000
    case = make_case(1, 4, key_heads, rows, keys, head_dim, bias=(1, key_heads, keys))
    lists = lists_that_are_alike(rows, keys, 640)
    visible = replace(case, mask=lists.dense_mask(keys))
    prepared = prepare_mask(lists, seqlen_q=rows, seqlen_k=keys)
    assert_case_close(visible, run_library(replace(case, mask=lists)))
    got = run_library(replace(case, mask=lists), deterministic=True)
    assert_case_close(visible, got)
    for mask in (lists, prepared, lists, prepared):
        assert_same_bits(got, run_library(replace(case, mask=mask), deterministic=True))


@pytest.mark.parametrize("form", FORMS)
def test_causal_rule_and_lengths_intersect(form: str) -> None:
    case = make_case(2, 4, 2, ROWS, KEYS, 64, bias=(1, 2, KEYS))
    lists = lists_of(form)
    options = {"is_causal": True, "seqlens_k": torch.tensor([KEYS, 500], dtype=torch.int32)}
    case = replace(case, options={**case.options, **options})
    got = run_library(replace(case, mask=lists))
    assert_case_close(replace(case, mask=lists.dense_mask(KEYS)), got, few_elements=True)


@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows(rows: int) -> None:
    """Kept keys and the lists that they return, in steps of a growing cache."""
    case = make_case(2, 4, 2, rows, KEYS, 64)
    scores = torch.randn(2, 2, KEYS)
    kept = KeptKeys.from_scores(scores[..., :-rows], 100)
    lists = kept.append_(scores[..., -rows:], torch.full((2,), KEYS - rows, dtype=torch.int32))
    got = run_library(replace(case, mask=lists))
    assert_case_close(replace(case, mask=lists.dense_mask(KEYS)), got, few_elements=True)


FEW_ROWS_FORMS = {  # (B or 1, heads or 1, Sq or 1, n), block_size, whether lists have lengths; B 3, H 8, Hkv 2
    "of_key_heads": ((3, 2, 1, 700), 1, False),
    "of_heads": ((3, 8, 1, 300), 1, True),
    "of_rows": ((3, 1, -1, 200), 1, True),
    "of_rows_and_heads": ((1, 8, -1, 150), 1, False),
    "one_list": ((1, 1, 1, 900), 1, False),
    "blocks": ((3, 2, -1, 9), 64, True),
    "uneven_blocks": ((1, 2, 1, 70), 5, False),
    "more_entries_than_keys": ((1, 2, -1, 3000), 1, False),
    "no_entries": ((1, 1, 1, 0), 1, False),
}


def few_rows_lists(form: str, rows: int, keys: int) -> KeyIndices:
    """Repeats, entries of no key and any order, as they come."""
    (batch, heads, listed_rows, count), block_size, with_lengths = FEW_ROWS_FORMS[form]
    shape = (batch, heads, rows if listed_rows == -1 else 1, count)
    indices = torch.randint(-2, keys // block_size + 3, shape, dtype=torch.int64)
    lengths = torch.randint(-1, count + 2, shape[:3], dtype=torch.int32) if with_lengths else None
    return KeyIndices(indices, block_size, lengths)


@pytest.mark.parametrize("form", FEW_ROWS_FORMS)
@pytest.mark.parametrize("rows, head_dim", [(1, 128), (3, 64), (16, 64)])
def test_few_rows_of_any_form(dtype: torch.dtype, form: str, rows: int, head_dim: int) -> None:
    """Keys that no list names hold NaN; the causal rule, lengths, a bias and a mask per key beside the lists."""
    keys = 1300
    case = make_case(3, 8, 2, rows, keys, head_dim, dtype=dtype, bias=(1, 2, keys))
    lists = few_rows_lists(form, rows, keys)
    check_few_rows(case, lists)
    options = {"is_causal": True, "seqlens_k": torch.tensor([keys, 0, 777], dtype=torch.int32)}
    case = replace(case, options={**case.options, **options})
    check_few_rows(case, lists)
    check_few_rows(case, lists.intersection(torch.rand(3, 1, keys) < 0.7))


def check_few_rows(case: Case, lists: KeyIndices) -> None:
    expected = poison_unseen(replace(case, mask=lists.dense_mask(case.key.shape[1])))
    got = run_library(replace(expected, mask=lists))
    assert_case_close(expected, got, few_elements=True)
    # Without a backward to follow nothing is planned, and nothing changes.
    assert_same_bits(run_library(replace(expected, mask=lists), needs=()), got)


def test_few_rows_over_a_long_cache() -> None:
    """More keys than a block has bits for."""
    keys = 140_000
    case = make_case(1, 4, 2, 2, keys, 32)
    lists = KeyIndices(torch.randint(-1, keys + 10, (1, 2, 2, 2048)))
    expected = poison_unseen(replace(case, mask=lists.dense_mask(keys)))
    assert_case_close(expected, run_library(replace(expected, mask=lists), needs=()), few_elements=True)


def test_few_rows_are_captured_and_read_when_replayed() -> None:
    case = make_case(2, 4, 2, 1, KEYS, 64)
    inputs = (case.query, case.key, case.value)
    lists = KeyIndices(torch.randint(0, KEYS, (2, 2, 1, 80), dtype=torch.int32))
    graph = torch.cuda.CUDAGraph()
    attention(*inputs, mask=lists)
    with torch.cuda.graph(graph):
        captured = attention(*inputs, mask=lists)
    for _ in range(3):
        lists.indices.copy_(torch.randint(-1, KEYS + 5, lists.indices.shape, dtype=torch.int32))
        graph.replay()
        assert torch.equal(captured, attention(*inputs, mask=lists))


def test_prepared_reported_compiled_and_captured() -> None:
    case = make_case(2, 4, 2, ROWS, KEYS, 64)
    lists = lists_of("of_key_heads")
    expected = run_library(replace(case, mask=lists), deterministic=True)
    prepared = prepare_mask(lists, seqlen_q=ROWS, seqlen_k=KEYS)
    assert_same_bits(expected, run_library(replace(case, mask=prepared), deterministic=True))
    report = plan_report(case.query, case.key, mask=lists)
    shown = lists.dense_mask(KEYS).expand(2, -1, ROWS, -1).repeat_interleave(2, 1)
    assert report.kept_scores == int(shown.sum())

    def call(query: Tensor, key: Tensor, value: Tensor, lists: KeyIndices) -> Tensor:
        return attention(query, key, value, mask=lists)

    inputs = (case.query, case.key, case.value)
    out = call(*inputs, lists)
    assert torch.equal(torch.compile(call, fullgraph=True)(*inputs, lists), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*inputs, lists)
    graph.replay()
    assert torch.equal(captured, out)
