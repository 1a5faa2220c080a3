"""Plans that outlive a call: the same results with less work, wherever they come from."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from cases import assert_near, assert_same_bits, make_case, run_library
from flash_dmattn import KeyIntervals, _library, _operators, attention, prepare_mask, select_keys
from flash_dmattn._device_plan import MOST_DECODE_ROWS, plan_size
from flash_dmattn._visibility import Visibility
from operators import (
    BACKWARD,
    FORWARD,
    PLAN,
    backward_arguments,
    forward_arguments,
    planned_arguments,
    recording,
)
from oracle import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.library import opcheck

pytestmark = pytest.mark.devices("cuda")
needs_kernels = pytest.mark.skipif(_library.cuda_info().toolkit == 0, reason="the library was built without CUDA")
ROWS, KEYS = 1500, 1700  # two chunks of rows, lists and ranges


def random_mask(*shape: int, density: float = 0.05) -> Tensor:
    return torch.rand(shape) < density


def random_lists(*shape: int) -> Tensor:
    return torch.randint(-3, KEYS + 3, shape, dtype=torch.int32)


def lengths() -> Tensor:
    return torch.tensor([KEYS, 900], dtype=torch.int32)


def bounds(*shape: int) -> tuple[Tensor, Tensor]:
    intervals = select_keys(torch.randn(shape), 200, seqlen_q=ROWS)
    return intervals.begin, intervals.end


def masked(mask: Tensor, is_causal: bool = False, seqlens_k: Tensor | None = None) -> Visibility:
    return Visibility(mask=mask, seqlens_k=seqlens_k, is_causal=is_causal)


def within(begin: Tensor, end: Tensor, is_causal: bool = True, **others: object) -> Visibility:
    return Visibility(interval_begin=begin, interval_end=end, is_causal=is_causal, **others)


# For B 2, H 4, Hkv 2.
VISIBLE: dict[str, Callable[[], Visibility]] = {
    "mask": lambda: masked(random_mask(2, 4, ROWS, KEYS)),
    "mask of key heads": lambda: masked(random_mask(1, 2, ROWS, KEYS), True),
    "mask of rows and keys": lambda: masked(random_mask(ROWS, KEYS)),
    "mask of rows": lambda: masked(random_mask(2, 1, ROWS, 1, density=0.5)),
    "expanded mask": lambda: masked(random_mask(2, 1, ROWS, KEYS).expand(2, 4, ROWS, KEYS)),
    "dense mask": lambda: masked(random_mask(1, 1, ROWS, KEYS, density=0.9), True),
    "per key": lambda: masked(random_mask(2, 2, KEYS, density=0.3), True),
    "lengths": lambda: masked(random_mask(1, 1, KEYS, density=0.3), True, lengths()),
    "intervals": lambda: within(*bounds(2, 2, KEYS)),
    "intervals of all": lambda: within(*bounds(1, 1, KEYS), seqlens_k=lengths()),
    "both": lambda: within(*bounds(1, 4, KEYS), mask=random_mask(2, 1, ROWS, KEYS, density=0.5)),
    "lists": lambda: Visibility(indices=random_lists(2, 2, ROWS, 90)),
    "lists of blocks": lambda: Visibility(indices=random_lists(1, 1, ROWS, 3), index_block_size=64, is_causal=True),
    "one list, with lengths": lambda: Visibility(
        indices=random_lists(2, 1, 1, 90), index_lengths=torch.randint(-1, 100, (1, 4, ROWS), dtype=torch.int32)
    ),
    "lists within intervals": lambda: within(*bounds(1, 4, KEYS), indices=random_lists(2, 1, ROWS, 500)),
}


def both_directions(case: Case, visibility: Visibility, plan: Tensor | None) -> dict[str, Tensor]:
    visibility = visibility._replace(plan=plan)
    forward = forward_arguments(case.query, case.key, case.value, case.bias, visibility, deterministic=True)
    results = FORWARD(*forward)
    *gradients, _ = BACKWARD(*backward_arguments(case.dout, None, results, forward))
    names = ("out", "lse", "row_stats", "dquery", "dkey", "dvalue", "dbias")
    return dict(zip(names, (*results, *gradients), strict=True))


def plan_of(case: Case, visibility: Visibility) -> Tensor:
    return PLAN(*planned_arguments(case.query, case.key, visibility))


@pytest.mark.parametrize("make", VISIBLE.values(), ids=VISIBLE.keys())
def test_a_plan_changes_no_bit(dtype: torch.dtype, make: Callable[[], Visibility]) -> None:
    case = make_case(2, 4, 2, ROWS, KEYS, 64, dtype=dtype, bias=(1, 2, KEYS))
    visibility = make()
    plan = plan_of(case, visibility)
    assert plan.numel() == plan_size(case.query, case.key, visibility)
    expected = both_directions(case, visibility, None)
    assert_same_bits(expected, both_directions(case, visibility, plan))
    assert_same_bits(expected, both_directions(case, visibility, plan.clone()))  # it holds no pointers to itself


@pytest.mark.parametrize("window", [50, 5000])
def test_long_lists(window: int) -> None:
    """More keys than a block orders in shared memory: the plan is made with scratch memory, and kept without."""
    rows, keys = 1100, 30000
    case = make_case(1, 2, 1, rows, keys, 64, bias=(1, 1, keys))
    intervals = select_keys(torch.randn(1, 1, keys), window, seqlen_q=rows)
    visibility = within(intervals.begin, intervals.end)
    plan = plan_of(case, visibility)
    assert plan.numel() == plan_size(case.query, case.key, visibility)
    assert_same_bits(both_directions(case, visibility, None), both_directions(case, visibility, plan))


@pytest.mark.parametrize("said", [50, 2000, 5000])
def test_a_window_makes_plans_smaller(said: int) -> None:
    """Of what keeps 2000 keys; where less is said, lists become ranges."""
    rows, keys = 1500, 30000
    case = make_case(1, 2, 1, rows, keys, 64, bias=(1, 1, keys))
    intervals = select_keys(torch.randn(1, 1, keys), 2000, seqlen_q=rows)
    unsaid = within(intervals.begin, intervals.end)
    visibility = unsaid._replace(interval_window=said)
    plan, smaller = plan_of(case, unsaid), plan_of(case, visibility)
    assert smaller.numel() == plan_size(case.query, case.key, visibility)
    lists = [2 * 4 * capacity for capacity in (7552, -(-(said + 1024) // 128) * 128)]
    assert plan.numel() - smaller.numel() == lists[0] - lists[1]
    expected = both_directions(case, unsaid, None)
    for given in (smaller, None):
        got = both_directions(case, visibility, given)
        if said == 50:  # in another order of keys, which decides what a row's sum is relative to, too
            for name in got.keys() - {"row_stats"}:
                torch.testing.assert_close(got[name], expected[name], atol=0.02, rtol=0.02)
        else:
            assert_same_bits(expected, got)


@pytest.mark.parametrize("rows", [1, MOST_DECODE_ROWS])
def test_few_rows(rows: int) -> None:
    """The forward lists keys by itself and reads no plan; the backward does."""
    keys = 700
    case = make_case(2, 4, 2, rows, keys, 64, bias=(1, 2, keys))
    visibility = masked(random_mask(2, 1, 1, keys, density=0.3), True)
    plan = plan_of(case, visibility)
    expected = both_directions(case, visibility, None)
    assert_same_bits(expected, both_directions(case, visibility, plan))
    unread = visibility._replace(plan=torch.full_like(plan, 255))
    out, *_ = FORWARD(*forward_arguments(case.query, case.key, case.value, case.bias, unread, deterministic=True))
    assert torch.equal(out, expected["out"])


def peak_of(call: Callable) -> int:
    """Bytes that a call asks for beside what is there."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.parametrize("name", ["mask", "intervals"])
def test_nothing_is_planned_again(name: str) -> None:
    """With a plan a call takes less scratch memory, by exactly what the plan holds."""
    case = make_case(2, 4, 2, ROWS, KEYS, 64, bias=(1, 2, KEYS))
    visibility = VISIBLE[name]()
    plan = plan_of(case, visibility)

    def peaks(given: Tensor | None) -> list[int]:
        forward = forward_arguments(case.query, case.key, case.value, case.bias, visibility._replace(plan=given))
        backward = backward_arguments(case.dout, None, FORWARD(*forward), forward)
        return [peak_of(lambda: FORWARD(*forward)), peak_of(lambda: BACKWARD(*backward))]

    for without, with_plan in zip(peaks(None), peaks(plan), strict=True):
        assert without - with_plan == plan.numel()


@pytest.mark.parametrize("rows", [MOST_DECODE_ROWS, MOST_DECODE_ROWS + 1])
def test_how_few_rows_need_no_plan(rows: int) -> None:
    case = make_case(2, 4, 2, rows, KEYS, 64)
    visibility = masked(random_mask(2, 1, KEYS))
    plan = plan_of(case, visibility)

    def peak(given: Tensor | None) -> int:
        forward = forward_arguments(case.query, case.key, case.value, None, visibility._replace(plan=given))
        return peak_of(lambda: FORWARD(*forward))

    assert peak(None) - peak(plan) == (plan.numel() if rows > MOST_DECODE_ROWS else 0)


def test_a_plan_of_another_size_is_refused() -> None:
    case = make_case(2, 4, 2, ROWS, KEYS, 64, bias=(1, 2, KEYS))
    visibility = VISIBLE["mask of key heads"]()
    plan = plan_of(case, visibility)
    for wrong in (plan[:-64], torch.cat([plan, plan])):
        with pytest.raises(
            ValueError, match=f"plan must have the {plan.numel()} bytes of a plan for this call; got plan"
        ):
            both_directions(case, visibility, wrong)
    with pytest.raises(ValueError, match="plan must be on the device of query; got plan on cpu, query on cuda:0"):
        both_directions(case, visibility, plan.cpu())


def test_opcheck() -> None:
    case = make_case(2, 4, 2, 40, 300, 32)
    bound = torch.zeros(1, 2, 300, dtype=torch.int32)
    for visibility in (
        masked(random_mask(2, 1, 40, 300)),
        masked(random_mask(1, 1, 1, 300).expand(2, 4, 40, 300), True),
        within(bound, bound, seqlens_k=torch.tensor([300, 3], dtype=torch.int32)),
        Visibility(is_causal=True),
    ):
        arguments = planned_arguments(case.query, case.key, visibility)
        opcheck(PLAN, arguments, test_utils=("test_schema", "test_faketensor"))


# ---- Calls that make their own


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    """The plans that were made, and those that forwards and backwards were called with."""
    plans: dict[str, list] = {"made": [], "forward": [], "backward": []}

    monkeypatch.setattr(_operators, "attention_plan", recording(PLAN, None, plans["made"]))
    monkeypatch.setattr(_operators, "attention_forward", recording(FORWARD, "plan", plans["forward"]))
    monkeypatch.setattr(_operators, "attention_backward", recording(BACKWARD, "plan", plans["backward"]))
    return plans


def same_memory(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape


@pytest.mark.parametrize("name", ["mask", "intervals"])
def test_the_backward_uses_the_plan_of_the_forward(name: str, recorded: dict[str, list]) -> None:
    case = make_case(2, 4, 2, ROWS, KEYS, 64)
    seen = VISIBLE[name]()
    mask = KeyIntervals(seen.interval_begin, seen.interval_end) if seen.mask is None else seen.mask
    run_library(dataclasses.replace(case, mask=mask), is_causal=seen.is_causal)
    (made,), (forward,), (backward,) = recorded.values()
    assert made.numel() > 0 and same_memory(made, forward) and same_memory(made, backward)


def test_plans_that_nobody_needs_are_not_made(recorded: dict[str, list]) -> None:
    case = make_case(2, 4, 2, ROWS, KEYS, 64)
    mask = VISIBLE["mask"]().mask
    run_library(case, is_causal=True)  # arithmetic
    attention(case.query, case.key, case.value, mask=mask)  # no backward: the forward's own will do
    with torch.no_grad():
        attention(case.query.requires_grad_(), case.key, case.value, mask=mask)
    assert not recorded["made"] and recorded["forward"] == [None] * 3 and recorded["backward"] == [None]


def test_under_autocast_and_torch_func() -> None:
    """float32 inputs, cast behind the plan; and a batch that vmap folds, for which a plan given is of no use."""
    case = make_case(2, 4, 2, 200, 300, 64, dtype=torch.float32)
    mask = random_mask(2, 1, 200, 300)
    query = case.query.requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attention(query, case.key, case.value, mask=mask)
    low = [tensor.detach().bfloat16() for tensor in (query, case.key, case.value)]
    assert torch.equal(out, attention(*low, mask=mask))
    (gradient,) = torch.autograd.grad(out.float().square().sum(), query)

    def loss(query: Tensor, mask: Tensor) -> Tensor:
        return attention(query, *low[1:], mask=mask).float().square().sum()

    assert_near(torch.func.grad(loss)(low[0], mask), gradient)
    prepared = prepare_mask(mask)
    assert prepared.plan is not None
    queries = torch.stack([low[0], -low[0], low[0] / 2])
    mapped = torch.vmap(torch.func.grad(loss), (0, None))(queries, prepared)
    assert_near(mapped, torch.stack([torch.func.grad(loss)(one, mask) for one in queries]))


@pytest.mark.parametrize("form", ["full", "expanded", "per key", "intervals", "prepared"])
def test_compiles_with_inductor_for_all_lengths(form: str) -> None:
    torch._dynamo.reset()

    def function(query: Tensor, key: Tensor, mask: object) -> Tensor:
        if form == "expanded":  # in the graph, where strides of 0 are the compiler's
            mask = mask.logical_and(mask).expand(-1, query.shape[2], -1, -1)
        return attention(query * 2, key, key, mask=mask, is_causal=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows, keys in ((100, 300), (1500, 1600), (300, 9000)):
        query = torch.randn(2, rows, 4, 64).bfloat16().requires_grad_()
        key = torch.randn(2, keys, 2, 64).bfloat16()
        mask = {
            "full": lambda rows=rows, keys=keys: random_mask(2, 2, rows, keys),
            "expanded": lambda rows=rows, keys=keys: random_mask(2, 1, rows, keys),
            "per key": lambda keys=keys: random_mask(1, 1, keys, density=0.3),
            "intervals": lambda rows=rows, keys=keys: select_keys(torch.randn(2, 2, keys), 60, seqlen_q=rows),
            "prepared": lambda rows=rows, keys=keys: prepare_mask(random_mask(1, 2, rows, keys), is_causal=True),
        }[form]()
        out, expected = compiled(query, key, mask), function(query, key, mask)
        assert torch.equal(out, expected)
        assert_near(*(torch.autograd.grad(result.float().square().sum(), query)[0] for result in (out, expected)))
    torch._dynamo.reset()


def test_compiled_into_cuda_graphs() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, mask: attention(q, k, k, mask=mask), fullgraph=True, mode="reduce-overhead")
    query = torch.randn(2, 300, 4, 64).bfloat16().requires_grad_()
    key = torch.randn(2, 400, 2, 64).bfloat16()
    for _ in range(5):
        mask = random_mask(2, 1, 300, 400)
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(query, key, mask)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), query)
        expected = attention(query, key, key, mask=mask)
        assert torch.equal(out, expected)
        assert_near(gradient, torch.autograd.grad(expected.float().square().sum(), query)[0])
    torch._dynamo.reset()


# ---- Prepared masks

PREPARED: dict[str, Callable[[], Tensor | KeyIntervals]] = {
    "mask": lambda: random_mask(2, 4, ROWS, KEYS),
    "mask of key heads": lambda: random_mask(2, 2, ROWS, KEYS),
    "mask of all": lambda: random_mask(ROWS, KEYS),
    "expanded mask": lambda: random_mask(2, 1, ROWS, KEYS).expand(2, 4, ROWS, KEYS),
    "keys": lambda: random_mask(2, 2, KEYS, density=0.3),
    "keys of all": lambda: random_mask(1, 1, KEYS, density=0.3),
    "intervals": lambda: select_keys(torch.randn(2, 4, KEYS), 200, seqlen_q=ROWS),
    "intervals of key heads": lambda: select_keys(torch.randn(1, 2, KEYS), 200, seqlen_q=ROWS),
    "intervals of all": lambda: select_keys(torch.randn(1, 1, KEYS), 200, seqlen_q=ROWS),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("make", PREPARED.values(), ids=PREPARED.keys())
def test_prepared_masks_are_planned_once(make: Callable, is_causal: bool, recorded: dict[str, list]) -> None:
    """For the batch and heads that the mask tells apart, which suits calls with more of both."""
    mask = make()
    prepared = prepare_mask(mask, ROWS, is_causal=is_causal)
    unplanned = dataclasses.replace(prepared, plan=None)
    assert prepared.nbytes == unplanned.nbytes + prepared.plan.numel() and " and a plan, " in repr(prepared)
    recorded["made"].clear()
    case = make_case(2, 4, 2, ROWS, KEYS, 64, is_causal=is_causal)
    got = run_library(dataclasses.replace(case, mask=prepared), deterministic=True)
    assert not recorded["made"] and same_memory(recorded["backward"][0], prepared.plan)
    assert_same_bits(got, run_library(dataclasses.replace(case, mask=unplanned), deterministic=True))
    assert len(recorded["made"]) == 1


def test_calls_of_another_visibility_plan_for_themselves(recorded: dict[str, list]) -> None:
    prepared = prepare_mask(random_mask(1, 2, ROWS, KEYS))
    assert prepared.plan is not None and prepared.kind == "mask"
    recorded["made"].clear()
    case = make_case(2, 4, 2, ROWS, KEYS, 64)
    for count, options in enumerate(({"is_causal": True}, {"seqlens_k": lengths()}), 1):
        got = run_library(dataclasses.replace(case, mask=prepared), deterministic=True, **options)
        assert_same_bits(got, run_library(dataclasses.replace(case, mask=prepared.mask), deterministic=True, **options))
        assert len(recorded["made"]) == 2 * count
        assert not any(same_memory(plan, prepared.plan) for plan in recorded["backward"])


def test_lengths_must_be_known_to_plan() -> None:
    assert prepare_mask(random_mask(2, 1, KEYS)).plan is None
    assert prepare_mask(select_keys(torch.randn(1, 1, KEYS), 9, seqlen_q=ROWS)).plan is None
    assert prepare_mask(random_mask(2, 1, ROWS, 1)).plan is None
    assert prepare_mask(random_mask(2, 1, KEYS), ROWS).plan is not None


def test_prepared_masks_move() -> None:
    prepared = prepare_mask(random_mask(1, 2, ROWS, KEYS))
    assert prepared.to("cuda:0").plan is not None
    on_cpu = prepared.to("cpu")
    assert on_cpu.plan is None
    back = on_cpu.to("cuda")
    assert back.plan.shape == prepared.plan.shape
    case = make_case(2, 4, 2, ROWS, KEYS, 64)
    got = [run_library(dataclasses.replace(case, mask=mask), deterministic=True) for mask in (prepared, back)]
    assert_same_bits(*got)


def test_a_captured_graph_replays_a_prepared_mask() -> None:
    prepared = prepare_mask(random_mask(1, 2, ROWS, KEYS))
    case = make_case(2, 4, 2, ROWS, KEYS, 64, mask=None)
    static = dataclasses.replace(case, mask=prepared)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_library(static, deterministic=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_library(static, deterministic=True)
    for seed in (1, 2):
        fresh = make_case(2, 4, 2, ROWS, KEYS, 64, seed=seed)
        for name in ("query", "key", "value", "dout"):
            getattr(case, name).copy_(getattr(fresh, name))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, run_library(dataclasses.replace(fresh, mask=prepared.mask), deterministic=True))


# ---- Sizes, which need no GPU


def any_view(shape: list[int], rank: int, dtype: torch.dtype, draw: random.Random) -> Tensor:
    """A (batch, heads, rows, keys) shape in the form of `rank`, with dimensions of size 1 and expanded ones."""
    kept = {2: shape[2:], 3: [*shape[:2], shape[3]], 4: shape}[rank]
    sizes = [draw.choice((1, size)) for size in kept]
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    strides = [draw.choice((0, 1, 1)) for _ in sizes]  # nothing is read
    return torch.empty(1 + sum(sizes), dtype=dtype).as_strided(sizes, strides)


def any_planned_call(draw: random.Random) -> tuple[Tensor, Tensor, Visibility]:
    """query, key and what is seen, on both sides of all that the layout depends on."""
    key_heads, rows = draw.choice((1, 2, 4)), draw.choice((0, 1, 5, 64, 1023, 1024, 1025, 3000))
    batch, heads = draw.choice((0, 1, 2, 3)), key_heads * draw.choice((1, 2, 4))
    keys = draw.choice((0, 1, 7, 128, 129, 4095, 4097, 17000, 21000, 40000))
    one = torch.empty((), dtype=torch.bfloat16)
    query, key = one.expand(batch, rows, heads, 8), one.expand(batch, keys, key_heads, 8)

    def view(rank: int, dtype: torch.dtype) -> Tensor:
        return any_view([batch, draw.choice((key_heads, heads)), rows, keys], rank, dtype, draw)

    mask = draw.choice((None, view(draw.choice((2, 3, 4)), torch.bool)))
    begin, end = (view(3, torch.int32) for _ in range(2))
    if draw.choice((True, False)) or {begin.shape[2], end.shape[2]} != {keys}:  # a bound has every key
        begin = end = None
    seqlens_k = draw.choice((None, torch.zeros(batch).int(), torch.zeros(1).int().expand(batch)))
    window = draw.choice((0, 1, 1000, 4000, 100000))
    visibility = within(begin, end, False, mask=mask, seqlens_k=seqlens_k, interval_window=window)
    if draw.choice((True, False)):
        return query, key, visibility
    # Lists of keys, beside which a mask is the same for every row.
    shape = [batch, draw.choice((key_heads, heads)), rows, draw.choice((0, 1, 30))]
    if mask is not None and mask.dim() != 3:
        visibility = visibility._replace(mask=None)
    lengths = draw.choice((None, any_view([*shape[:2], 1, rows], 3, torch.int32, draw)))
    return query, key, visibility._replace(indices=any_view(shape, 4, torch.int32, draw), index_lengths=lengths)


@needs_kernels
@pytest.mark.devices("cpu")
def test_sizes_are_those_that_the_library_takes() -> None:
    draw, planned = random.Random(0), 0
    for _ in range(5000):
        call = any_planned_call(draw)
        size, arguments = plan_size(*call), planned_arguments(*call)
        described = [(t.shape, t.stride()) if isinstance(t, Tensor) else t for t in arguments]
        assert size == torch.ops.flash_dmattn.cuda_plan_bytes(*arguments), described
        planned += size > 0
    assert planned > 1000


@needs_kernels
@pytest.mark.devices("cpu")
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_plan_is_of_the_batch_and_heads_of_its_mask(batch: int, heads: int) -> None:
    """As a prepared mask makes it, for calls with 3 batch elements and 8 heads, 2 of keys."""
    own, full = (
        (torch.empty(b, 1500, h, 8), torch.empty(b, 1700, k, 8)) for b, h, k in ((batch, heads, heads), (3, 8, 2))
    )
    bound = torch.zeros(batch, heads, 1700, dtype=torch.int32)
    for visibility in (
        masked(torch.ones(batch, heads, 1500, 1700, dtype=torch.bool)),
        masked(torch.ones(batch, heads, 1700, dtype=torch.bool)),
        within(bound, bound, False),
    ):
        calls = [planned_arguments(*shape, visibility) for shape in (own, full)]
        sizes = [torch.ops.flash_dmattn.cuda_plan_bytes(*call) for call in calls]
        assert sizes[0] == sizes[1] > 0


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("shape", [(2, 4, 1500, 7000), (2, 1, 1500, 1), (1, 2, 7000), (1500, 7000)], ids=str)
@pytest.mark.parametrize("expanded", [False, True])
def test_symbolic_sizes_need_no_guards(shape: tuple[int, ...], expanded: bool) -> None:
    query, key = torch.empty(2, 1500, 4, 8), torch.empty(2, 7000, 2, 8)
    mask = torch.ones((), dtype=torch.bool).expand(shape) if expanded else torch.ones(shape, dtype=torch.bool)
    bound = torch.zeros(1, 2, 7000, dtype=torch.int32)

    def plan_sizes(query: Tensor, key: Tensor, mask: Tensor, bound: Tensor) -> list[int]:
        seen = masked(mask)
        return [plan_size(query, key, v) for v in (seen, seen._replace(interval_begin=bound, interval_end=bound))]

    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment, static_shapes=False) as mode:

        def symbolic(tensor: Tensor) -> Tensor:
            sizes = [DimDynamic.STATIC if size == 1 else DimDynamic.DYNAMIC for size in tensor.shape]
            return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

        sizes = plan_sizes(*map(symbolic, (query, key, mask, bound)))
    assert all(isinstance(size, torch.SymInt) for size in sizes) and not environment.guards
    expected = plan_sizes(query, key, mask, bound)
    assert [size.node.hint for size in sizes] == expected
