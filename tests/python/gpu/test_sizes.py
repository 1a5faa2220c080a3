"""Sizes that only a GPU holds: tensors and masks of more than 2^31 elements, long sequences in little memory."""

from __future__ import annotations

import pytest
import torch
from cases import make_case, run_library
from compare import assert_case_close
from flash_dmattn import KeyIntervals, attention, dynamic_mask_attention, prepare_mask, select_keys
from oracle import Case
from torch import Tensor

GIB = 2**30
pytestmark = pytest.mark.devices("cuda")


def needs(gib: int) -> pytest.MarkDecorator:
    free = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
    return pytest.mark.skipif(free < gib * GIB, reason=f"needs a GPU with {gib} GiB")


@pytest.fixture(autouse=True)
def _give_memory_back() -> None:
    torch.cuda.empty_cache()


@needs(40)
@pytest.mark.parametrize("seen", ["last", "spread"])
def test_keys_and_values_of_more_than_31_bits(seen: str) -> None:
    """Sk x Hkv x D > 2^31 in both; the keys that are seen lie at the far end, or all over."""
    keys, key_heads, head_dim, rows = 2**21 + 77, 8, 128, 64
    key, value = (torch.empty(1, keys, key_heads, head_dim, dtype=torch.bfloat16).normal_() for _ in range(2))
    assert key.numel() > 2**31
    case = make_case(1, 16, key_heads, rows, 1, head_dim, with_dlse=True)
    kept = torch.arange(keys - 600, keys) if seen == "last" else torch.randperm(keys)[:600].sort().values
    mask = torch.zeros(1, 1, keys, dtype=torch.bool)
    mask[..., kept] = True
    whole = Case(case.query, key, value, case.dout, mask=mask, dlse=case.dlse)
    got = run_library(whole)
    part = Case(case.query, key[:, kept], value[:, kept], case.dout, dlse=case.dlse)
    small = {name: tensor[:, kept] if name in ("dkey", "dvalue") else tensor for name, tensor in got.items()}
    for name in ("dkey", "dvalue"):
        got[name][:, kept] = 0
        assert not got[name].any()
    assert_case_close(part, small)


@needs(40)
def test_every_key_of_more_than_31_bits() -> None:
    """All keys are seen by a few rows, and the backward writes all of their gradients."""
    keys, key_heads, head_dim, rows = 2**21 + 77, 8, 128, 3
    key, value = (torch.empty(1, keys, key_heads, head_dim, dtype=torch.bfloat16).normal_() for _ in range(2))
    query, dout = (torch.randn(1, rows, key_heads, head_dim).bfloat16() for _ in range(2))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = attention(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    for head in (0, key_heads - 1):  # one at a time: fp64 takes its room
        q, k, v = (leaf.detach()[0, :, head].double() for leaf in leaves)
        prob = (q @ k.mT / head_dim**0.5).softmax(-1)
        torch.testing.assert_close(out[0, :, head].double(), prob @ v, rtol=2e-2, atol=1e-4)
        d = dout[0, :, head].double()
        dprob = prob * (d @ v.mT - (d * (prob @ v)).sum(-1, keepdim=True)) / head_dim**0.5
        for got, expected in zip(gradients, (dprob @ k, dprob.mT @ q, prob.mT @ d), strict=True):
            error = (got[0, :, head].double() - expected).norm() / expected.norm()
            assert error < 2e-2, f"head {head}: relative error {error:.2e}"


@needs(40)
def test_mask_of_more_than_31_bits() -> None:
    """40 x 1024 x 65536 entries in memory; the last head reads those beyond 2^31."""
    heads, rows, keys = 40, 1024, 65536
    case = make_case(1, heads, 1, rows, keys, 32)
    mask = torch.rand(1, heads, rows, keys, dtype=torch.float16) < 0.01
    assert mask.numel() > 2**31
    got = attention(case.query, case.key, case.value, mask=mask)
    last = slice(heads - 1, heads)
    part = Case(case.query[:, :, last], case.key, case.value, case.dout[:, :, last], mask=mask[:, last])
    assert_case_close(part, {"out": got[:, :, last]})


@needs(20)
@pytest.mark.parametrize("form", ["keys", "rows", "heads"])
def test_expanded_masks_take_no_memory(form: str) -> None:
    """Views of 2 x 65536 x 65536 and more logical entries cost what they were expanded from."""
    length, heads = 65536, 2
    make = {
        "keys": lambda: torch.rand(1, 1, 1, length) < 0.01,
        "rows": lambda: torch.rand(1, 1, length, 1) < 0.01,
        "heads": lambda: torch.ones(1, 1, length, length, dtype=torch.bool).tril_().triu_(-100),
    }[form]()
    mask = make.expand(1, heads, length, length)
    bias = torch.randn(1, 1, 1, length).bfloat16().expand(1, heads, length, length)
    query, key, value, dout = (torch.randn(1, length, n, 64).bfloat16() for n in (heads, 1, 1, heads))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(*leaves, mask=mask, bias=bias)
    gradients = torch.autograd.grad(out, leaves, dout)
    taken = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in (out, *gradients))
    allowed = (length * length // 8 if form == "heads" else 0) + 600 * 2**20  # packed bits, sums, plans
    assert taken < allowed, f"{taken / 2**20:.0f} MiB beyond inputs and results"
    rows = torch.tensor([0, 7, 40000, length - 1])
    part = [tensor.detach()[:, rows] for tensor in (query, dout)]
    case = Case(part[0], key.detach(), value.detach(), part[1], mask[:, :, rows], bias[:, :, rows].contiguous())
    assert_case_close(case, {"out": out.detach()[:, rows]})


@needs(10)
def test_preparing_a_long_mask() -> None:
    """65536 x 65536 in one pass; what comes out takes bytes per key, but for the plan: lists of at most a quarter of
    the keys for every 1024 rows, and three times that while it is made."""
    length = 65536
    window = KeyIntervals.sliding_window(1000, 0, length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril_().triu_(-1000)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prepared = prepare_mask(mask)
    assert torch.cuda.max_memory_allocated() - before < 100 * length + 4 * length**2 // 1024
    assert prepared.kind == "intervals"
    assert torch.equal(prepared.intervals.begin, window.begin) and torch.equal(prepared.intervals.end, window.end)
    mask[0, 0, 40000, 39500] = False
    assert prepare_mask(mask).kind == "mask"


@pytest.mark.parametrize("window", [1, 2048, 100_000])
def test_selection_over_a_million_keys(window: int) -> None:
    scores = torch.randn(1, 1, 2**20 + 3)
    for moved in (scores, scores.round(decimals=1).bfloat16()):
        got, expected = select_keys(moved, window), select_keys(moved.cpu(), window)
        assert torch.equal(got.begin.cpu(), expected.begin) and torch.equal(got.end.cpu(), expected.end)


@needs(10)
def test_a_long_dynamic_mask_in_two_gigabytes() -> None:
    """S = 131072, H 8, Hkv 2, D 64, w 2048, selection, forward and backward; sampled rows are right."""
    length, heads, key_heads, window = 131072, 8, 2, 2048
    query, dout = (torch.randn(1, length, heads, 64).bfloat16() for _ in range(2))
    key, value = (torch.randn(1, length, key_heads, 64).bfloat16() for _ in range(2))
    bias = torch.randn(1, key_heads, length).bfloat16()
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = dynamic_mask_attention(*leaves, window)
    gradients = torch.autograd.grad(out, leaves, dout)
    taken = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in (out, *gradients))
    assert taken < 2 * GIB, f"{taken / 2**20:.0f} MiB beyond inputs and outputs"
    assert all(gradient.isfinite().all() for gradient in gradients)
    intervals = select_keys(bias, window)
    rows = torch.tensor([0, 2047, 2048, 70000, length - 1])
    mask = (intervals.begin[:, :, None] <= rows[:, None]) & (rows[:, None] < intervals.end[:, :, None])
    q, d = (tensor.detach()[:, rows] for tensor in (query, dout))
    case = Case(q, key.detach(), value.detach(), d, mask, bias.detach())
    got: dict[str, Tensor] = {"out": out.detach()[:, rows], "dquery": gradients[0][:, rows]}
    assert_case_close(case, got)
