"""What only GPUs have: streams, captured graphs, several devices, dtypes without kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import flash_dmattn
import pytest
import torch
from cases import assert_same_bits, make_case, poison_unseen, run_library
from compare import assert_case_close
from flash_dmattn import KeptKeys, KeyIntervals, attention, plan_report, prepare_mask, select_keys
from operators import FORWARD, forward_arguments
from oracle import Case, visibility
from torch import Tensor

pytestmark = pytest.mark.devices("cuda")
several_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")

LEAVES = ("query", "key", "value", "bias")


def dynamic(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """out, lse and all gradients of attention over the 64 highest keys, in the same bits whenever it runs."""
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    mask = select_keys(bias, 64, seqlen_q=query.shape[1])
    out, lse = attention(*leaves[:3], mask=mask, bias=leaves[3], is_causal=True, return_lse=True, deterministic=True)
    return (out, lse, *torch.autograd.grad(out, leaves, dout))


def dynamic_inputs(seed: int, rows: int = 1500) -> list[Tensor]:
    case = make_case(2, 4, 2, rows, rows, 64, bias=(2, 2, rows), seed=seed)
    return [*(getattr(case, name) for name in LEAVES), case.dout]


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out, lse = attention(*leaves, mask=mask, return_lse=True, deterministic=True)
    return (out, lse, *torch.autograd.grad(out, leaves, dout))


def masked_inputs(seed: int, rows: int = 1500) -> list[Tensor]:
    case = make_case(2, 4, 2, rows, rows, 64, mask=(2, 2, rows, rows), density=(0.3, 0.002)[seed % 2], seed=seed)
    return [case.query, case.key, case.value, case.mask, case.dout]


@pytest.mark.parametrize(("run", "inputs"), [(dynamic, dynamic_inputs), (masked, masked_inputs)], ids=["top", "mask"])
def test_graph_replays_on_other_inputs(run: Callable, inputs: Callable) -> None:
    """Selection, plan, forward and backward in one captured graph, whose replays see data that it was not made from."""
    static = inputs(0)
    torch.cuda.synchronize()
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        run(*(tensor.detach() for tensor in static))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(*(tensor.detach() for tensor in static))
    for seed in (1, 2, 0):
        fresh = inputs(seed)
        for tensor, other in zip(static, fresh, strict=True):
            tensor.detach().copy_(other.detach())
        graph.replay()
        expected = run(*(tensor.detach() for tensor in fresh))
        torch.cuda.synchronize()
        names = [str(index) for index in range(len(results))]
        got = {name: tensor.detach() for name, tensor in zip(names, results, strict=True)}
        assert_same_bits(got, {name: tensor.detach() for name, tensor in zip(names, expected, strict=True)})


def test_work_stands_in_the_current_stream() -> None:
    """Behind a long wait on another stream, whose inputs are written only then."""
    inputs = dynamic_inputs(3)
    expected = dynamic(*(tensor.clone() for tensor in inputs))
    static = [torch.zeros_like(tensor) for tensor in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for tensor, other in zip(static, inputs, strict=True):
            tensor.copy_(other)
        results = dynamic(*static)
        assert not stream.query(), "a call waited for its stream"
    torch.cuda.synchronize()
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


def decoded(step: Tensor, case: Case, kept: KeptKeys, position: Tensor) -> Tensor:
    mask = kept.append_(step[:, -1:, :2, 0].transpose(1, 2), position)
    return attention(step[:, -1:], case.key, case.value, mask=mask, scale=2)


def selected(step: Tensor, case: Case) -> Tensor:
    mask = select_keys(step[:, :, :2, 0].transpose(1, 2), 64, seqlen_q=step.shape[1])
    return attention(step, case.key, case.value, mask=mask, is_causal=True, scale=2)


def differentiated(step: Tensor, case: Case, mask: KeyIntervals | None) -> Tensor:
    query = case.query.detach().requires_grad_()
    out = attention(query, case.key, case.value, mask=mask, is_causal=True, deterministic=True)
    return torch.autograd.grad(out, query, step)[0]


@pytest.mark.parametrize("before", ["itself", "a long forward"])
@pytest.mark.parametrize("work", ["decode", "decode by a mask", "selection", "backward", "backward of a plan"])
def test_calls_wait_for_the_one_before(work: str, before: str) -> None:
    """Their first kernels may begin while its last one ends. Each takes what the one before has made, nothing between
    them. A forward of few blocks lets the next call begin at once and is done only long after."""
    rows, steps = 1 if work.startswith("decode") else 1500, 12
    case = make_case(2, 4, 2, rows, 1500, 64)
    positions = torch.arange(1500, 1500 + steps, dtype=torch.int32)[:, None].repeat(1, 2)
    window = KeyIntervals.sliding_window(300, 0, 1500, 1500) if work == "backward of a plan" else None
    mask = (torch.arange(1500) % 3 == 0).view(1, 1, 1, -1)
    long = make_case(2, 4, 2, 1, 40000, 64)
    all_keys = KeyIntervals.sliding_window(40000, 40000, max(rows, 32), 40000)

    def chain(finish: Callable[[], None]) -> Tensor:
        kept = KeptKeys.from_scores(torch.linspace(-1, 1, 6000, dtype=case.query.dtype).view(2, 2, 1500), 700)
        step, results = case.query if rows == 1 else case.dout, []
        for position in positions:
            if before == "a long forward":
                query = step.repeat(1, 32, 1, 1) if rows == 1 else step
                step = attention(query, long.key, long.value, mask=all_keys, scale=2)
            finish()
            if work == "decode":
                step = decoded(step, case, kept, position)
            elif work == "decode by a mask":
                step = attention(step[:, -1:], case.key, case.value, mask=mask, scale=2)
            else:
                step = selected(step, case) if work == "selection" else differentiated(step, case, window)
            results.append(step)
        return torch.stack(results)

    expected = chain(torch.cuda.synchronize)
    assert expected.isfinite().all() and (expected != 0).any()
    for _ in range(3):
        assert torch.equal(chain(lambda: None), expected)


def test_reports_wait_for_their_stream() -> None:
    """They answer on the host: with what was written before them, on the stream that is current."""
    window = KeyIntervals.sliding_window(30, 0, 400, 500)
    dense, mask = window.dense_mask(400), torch.zeros(1, 1, 400, 500, dtype=torch.bool)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        mask.copy_(dense)
        prepared = prepare_mask(mask)
        report = plan_report((1, 400, 2, 64), (1, 500, 1, 64), mask=mask, dtype=torch.bfloat16)
    assert prepared.kind == "intervals" and torch.equal(prepared.dense_mask(), dense)
    family = "sm80" if os.environ.get("FLASH_DMATTN_ARCH") == "sm80" else newest_family()
    assert report.kept_scores == 2 * int(dense.sum()) and report.backend == f"cuda/{family}"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature", ["window", "random", "few keys", "documents", "top"])
def test_several_chunks_of_rows(feature: str, is_causal: bool) -> None:
    """More rows than are planned together, with the mask structures that a plan tells apart."""
    rows, keys = 2300, 2500
    case = make_case(1, 2, 1, rows, keys, 64, bias=(1, 2, keys), is_causal=is_causal, with_dlse=True)
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    mask = {
        "window": lambda: (key <= row) & (key > row - 300),
        "random": lambda: torch.rand(1, 2, rows, keys) < 0.01,
        "few keys": lambda: torch.rand(1, 1, keys) < 0.2,
        "documents": lambda: row // 400 == key // 400,
        "top": lambda: select_keys(torch.randn(1, 1, keys), 200, seqlen_q=rows),
    }[feature]()
    dense = replace(case, mask=mask.dense_mask(rows) if isinstance(mask, KeyIntervals) else mask)
    got = run_library(replace(poison_unseen(dense), mask=mask))
    assert_case_close(dense, got)


@pytest.mark.parametrize("bias", [(2, 4, 1500, 1600), (1, 1, 1500, 1600), (2, 2, 1600), (1, 4, 1500, 1)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_deterministic_runs_have_the_same_bits(dtype: torch.dtype, bias: tuple[int, ...], masked: bool) -> None:
    """Sums of many blocks, while other work keeps the GPU's schedule from being the same."""
    case = make_case(2, 4, 2, 1500, 1600, 64, dtype=dtype, bias=bias, with_dlse=True, is_causal=True)
    if masked:
        case = replace(case, mask=select_keys(torch.randn(2, 2, 1600), 300, seqlen_q=1500))
    first = run_library(case, deterministic=True)
    noise, stream = torch.randn(2048, 2048), torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            for _ in range(5):
                noise = (noise @ noise).clamp(-1, 1)
        assert_same_bits(first, run_library(case, deterministic=True))
    plain = run_library(case)
    for name in first:
        torch.testing.assert_close(first[name].float(), plain[name].float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("length", [1, 100, 5000, 70000])
@pytest.mark.parametrize("kind", ["ties", "random", "rising"])
def test_selection_equals_the_cpu(length: int, kind: str) -> None:
    scores = {
        "ties": lambda: torch.randint(-3, 4, (2, 2, length)).float(),
        "random": lambda: torch.randn(2, 2, length),
        "rising": lambda: torch.randn(2, 2, length) + torch.arange(length) / 1000,
    }[kind]()
    key_mask = torch.rand(2, 1, length) < 0.9
    lengths = torch.tensor([length, length // 2], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for window in (1, 64, 2048):
            for hidden in ({}, {"key_mask": key_mask, "seqlens_k": lengths}):
                got = select_keys(scores.to(dtype), window, **hidden)
                on_host = {name: tensor.cpu() for name, tensor in hidden.items()}
                expected = select_keys(scores.to(dtype).cpu(), window, **on_host)
                assert torch.equal(got.begin.cpu(), expected.begin) and torch.equal(got.end.cpu(), expected.end)


def test_plan_counts_what_the_mask_shows_in_several_chunks() -> None:
    case = make_case(2, 4, 2, 2100, 2300, 64, mask=(1, 2, 2100, 2300), density=0.0003, is_causal=True)
    report = plan_report(case.query, case.key, mask=case.mask, is_causal=True)
    assert report.kept_scores == int(visibility(case).sum())
    assert report.keys == "list" and report.computed_scores < 2100 * 2300 * 8


# ---- Errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dtypes_without_kernels_are_refused(dtype: torch.dtype) -> None:
    query = torch.zeros(1, 3, 2, 8, dtype=dtype)
    message = f"query must be float16 or bfloat16 on CUDA; got query {str(dtype).removeprefix('torch.')}"
    for function in (
        lambda: attention(query, query, query),
        lambda: attention(query.requires_grad_(), query, query),
        lambda: plan_report(query, query),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            function()


def test_tensors_on_different_devices_are_refused() -> None:
    query = torch.zeros(1, 3, 2, 8, dtype=torch.bfloat16)
    mask = torch.ones(3, 3, dtype=torch.bool, device="cpu")
    with pytest.raises(ValueError, match=r"key must be on the device of query; got key on cpu, query on cuda:0"):
        attention(query, query.cpu(), query)
    with pytest.raises(ValueError, match=r"mask must be on the device of query; got mask on cpu, query on cuda:0"):
        attention(query, query, query, mask=mask)
    with pytest.raises(ValueError, match=r"key_mask must be on the device of scores; got key_mask on cpu"):
        select_keys(torch.zeros(1, 1, 3), 2, key_mask=mask[None])
    with pytest.raises(ValueError, match=r"value must be on the device of query; got value on cpu, query on cuda:0"):
        FORWARD(*forward_arguments(query, query, query.cpu()))


def newest_family() -> str:
    """Hopper has kernels of its own."""
    return "sm90" if torch.cuda.get_device_capability() == (9, 0) else "sm80"


def test_which_gpus_have_kernels() -> None:
    assert bytes(torch.ops.flash_dmattn.cuda_kernels(7, 5)) == b"none"
    assert flash_dmattn._library.cuda_kernels(torch.cuda.current_device()) == newest_family()
    architectures = flash_dmattn._library.cuda_info().architectures
    if any(not name.endswith("-real") for name in architectures):
        major, _ = torch.cuda.get_device_capability()
        assert bytes(torch.ops.flash_dmattn.cuda_kernels(major + 5, 0)) == b"sm80"  # by PTX


def test_info_names_gpus_and_kernels() -> None:
    command = [sys.executable, "-m", "flash_dmattn", "info", "--json"]
    facts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "cuda" in facts["backends"] and facts["cuda"]["architectures"]
    gpus = facts["cuda"]["gpus"]
    assert len(gpus) == torch.cuda.device_count()
    assert gpus[0]["name"] == torch.cuda.get_device_name(0) and gpus[0]["kernels"] == newest_family()


# ---- Several GPUs


@several_gpus
def test_other_gpus_than_the_current_one() -> None:
    case = make_case(2, 4, 2, 300, 400, 64, bias=(2, 2, 400), is_causal=True)
    scores = torch.randn(2, 2, 400)
    results = []
    for index in range(2):
        moved = {name: getattr(case, name).to(f"cuda:{index}") for name in (*LEAVES, "dout")}
        mask = select_keys(scores.to(f"cuda:{index}"), 50, seqlen_q=300)
        there = replace(case, **moved, mask=mask)
        results.append({name: tensor.cpu() for name, tensor in run_library(there, deterministic=True).items()})
        assert torch.cuda.current_device() == 0
    assert_same_bits(*results)
    with pytest.raises(ValueError, match=r"key must be on the device of query; got key on cuda:1, query on cuda:0"):
        attention(case.query, case.key.to("cuda:1"), case.value)
