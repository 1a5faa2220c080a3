"""Packed documents on a GPU: nothing waits, and a captured graph serves other boundaries of the same total."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import assert_near, assert_same_bits, make_case
from flash_dmattn import KeyIntervals, dynamic_mask_attention, select_keys, varlen_attention
from oracle import Case
from packed import bounds_of
from torch import Tensor

pytestmark = pytest.mark.devices("cuda")

LEAVES = ("query", "key", "value", "bias")
TOTAL = 3000
LENGTHS = {  # of as many documents
    "even": [750, 750, 750, 750],
    "one_huge": [1, 2990, 8, 1],
    "empty": [0, 1500, 0, 1500],
    "trailing": [1000, 10, 1000, 500],
}


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """An operation for which the host waits raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def packed_case() -> Case:
    return make_case(1, 4, 2, TOTAL, TOTAL, 64, bias=(1, 2, TOTAL))


def run(case: Case, bounds: Tensor, window: int | None) -> dict[str, Tensor]:
    """out, lse and all gradients, in the same bits whenever it runs."""
    leaves = [getattr(case, name)[0].detach().requires_grad_() for name in LEAVES]
    options = {"is_causal": True, "deterministic": True, "return_lse": True, "window_size": window}
    out, lse = varlen_attention(*leaves[:3], bounds, bias=leaves[3], **options)
    gradients = torch.autograd.grad(out, leaves, case.dout[0])
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(LEAVES, gradients, strict=True))


@pytest.mark.parametrize("window", [None, 100], ids=["all", "top"])
def test_graph_replays_on_other_boundaries(window: int | None) -> None:
    case, bounds = packed_case(), bounds_of(LENGTHS["even"])
    warm_up = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(warm_up):
        run(case, bounds, window)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(case, bounds, window)
    for lengths in (*LENGTHS.values(), LENGTHS["even"]):
        bounds.copy_(bounds_of(lengths))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, run(case, bounds_of(lengths), window))


@pytest.mark.parametrize("window", [None, 100], ids=["all", "top"])
def test_the_host_waits_for_nothing(no_waiting: None, window: int | None) -> None:
    run(packed_case_without_waiting(), torch.arange(0, TOTAL + 1, 100, dtype=torch.int32), window)


def packed_case_without_waiting() -> Case:
    query, dout = torch.zeros(2, 1, TOTAL, 4, 64, dtype=torch.bfloat16)
    key, value = torch.zeros(2, 1, TOTAL, 2, 64, dtype=torch.bfloat16)
    return Case(query, key, value, dout, bias=torch.zeros(1, 2, TOTAL, dtype=torch.bfloat16))


def test_documents_are_made_on_the_device(no_waiting: None) -> None:
    bounds = torch.arange(0, TOTAL + 1, 100, dtype=torch.int32)
    intervals = KeyIntervals.documents(bounds, TOTAL, is_causal=True)
    unequal = KeyIntervals.documents(bounds, TOTAL, cu_seqlens_k=bounds // 2, seqlen_k=TOTAL)
    assert intervals.device.type == unequal.device.type == "cuda"


def test_bounds_without_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="seqlen must be given for cu_seqlens on a device"):
        KeyIntervals.documents(torch.tensor([0, 5], dtype=torch.int32))


def test_wrong_contents_are_clamped() -> None:
    wrong = torch.tensor([5, 2**31 - 1, 3, -(2**31), TOTAL], dtype=torch.int32)
    right = torch.tensor([5, TOTAL, TOTAL, TOTAL, TOTAL], dtype=torch.int32)
    case = packed_case()
    for window in (None, 100):
        assert_same_bits(run(case, wrong, window), run(case, right, window))
    intervals, expected = (KeyIntervals.documents(bounds, TOTAL) for bounds in (wrong, right))
    assert torch.equal(intervals.begin, expected.begin) and torch.equal(intervals.end, expected.end)


@pytest.mark.parametrize("causal", [True, False])
def test_selection_is_that_of_the_cpu(causal: bool) -> None:
    scores = torch.randint(0, 50, (2, 3, TOTAL)).bfloat16()
    for lengths in LENGTHS.values():
        bounds, key_bounds = bounds_of(lengths), bounds_of(lengths[::-1])
        for other in (None, key_bounds):
            given = {"cu_seqlens_q": bounds, "cu_seqlens_k": other}
            got = select_keys(scores, 64, causal=causal, **given)
            on_cpu = {name: None if tensor is None else tensor.cpu() for name, tensor in given.items()}
            expected = select_keys(scores.cpu(), 64, causal=causal, **on_cpu)
            assert torch.equal(got.begin.cpu(), expected.begin) and torch.equal(got.end.cpu(), expected.end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_selection_of_special_scores_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    """NaNs of either sign are alike, and zeros; the sorting must not tell them apart."""
    nan, inf, lowest = torch.nan, torch.inf, torch.finfo(dtype).min
    values = torch.tensor([nan, -nan, inf, -inf, lowest, 0.0, -0.0, 1.0, -1.0], dtype=dtype)
    scores, bounds = values[torch.randint(0, len(values), (2, 2, 600))], bounds_of([100, 0, 450, 20])
    for window in (1, 7, 60):
        got = select_keys(scores, window, cu_seqlens_q=bounds)
        expected = select_keys(scores.cpu(), window, cu_seqlens_q=bounds.cpu())
        assert torch.equal(got.begin.cpu(), expected.begin) and torch.equal(got.end.cpu(), expected.end)


def test_selection_in_documents_is_that_of_a_batch() -> None:
    """32 documents of one length, and a batch of 32."""
    count, length = 32, 500
    case = make_case(count, 4, 2, length, length, 64, bias=(count, 2, length))
    batch = dynamic_mask_attention(case.query, case.key, case.value, case.bias, 64)
    tokens = [tensor.flatten(0, 1) for tensor in (case.query, case.key, case.value)]
    bounds = torch.arange(count + 1, dtype=torch.int32) * length
    bias = case.bias.transpose(0, 1).flatten(1)
    packed = varlen_attention(*tokens, bounds, bias=bias, window_size=64, is_causal=True)
    assert_near(packed, batch.flatten(0, 1))
