"""prepare_mask: what a mask becomes, that it says the same, where it is taken and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from cases import assert_near, default_dtype, make_case, relayout, run_library, to_device
from compare import assert_case_close
from flash_dmattn import (
    KeyIntervals,
    PreparedMask,
    _operators,
    attention,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flex_dmattn_func,
    plan_report,
    prepare_mask,
    select_keys,
)
from flash_dmattn.utils.mask import topk_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import BACKWARD, FORWARD, recording
from torch import Tensor
from torch.library import opcheck
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.devices("cpu", "cuda")
ROWS, KEYS = 33, 47
CAUSAL = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(KEYS - ROWS)


def top_mask(heads: int = 2, window: int = 9) -> Tensor:
    """What users of torch.topk make: (2, heads, ROWS, KEYS)."""
    return topk_mask(torch.randn(2, heads, KEYS), to_device(CAUSAL)[None, None], window, torch.finfo(torch.float32).min)


def random_mask(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


# By name: the mask and what it becomes.
MASKS: dict[str, tuple[Callable[[], Tensor | KeyIntervals], str]] = {
    "top": (top_mask, "intervals"),
    "top_of_all_heads": (lambda: top_mask(4), "intervals"),
    "window": (lambda: KeyIntervals.sliding_window(5, 2, ROWS, KEYS).dense_mask(ROWS), "intervals"),
    "rows_and_keys": (lambda: to_device(CAUSAL), "intervals"),
    "expanded_heads": (lambda: to_device(CAUSAL).expand(2, 4, ROWS, KEYS), "intervals"),
    "strided": (lambda: relayout(top_mask(), "strided"), "intervals"),
    "transposed": (lambda: top_mask().transpose(2, 3).contiguous().transpose(2, 3), "intervals"),
    "intervals": (lambda: select_keys(torch.randn(1, 2, KEYS), 9, seqlen_q=ROWS), "intervals"),
    "per_key": (lambda: random_mask(2, 1, KEYS), "keys"),
    "per_key_of_rank_4": (lambda: random_mask(1, 4, 1, KEYS), "keys"),
    "expanded_rows": (lambda: random_mask(2, 1, 1, KEYS).expand(2, 4, ROWS, KEYS), "keys"),
    "same_for_all_rows": (lambda: random_mask(2, 1, 1, KEYS).expand(2, 4, ROWS, KEYS).contiguous(), "keys"),
    "everything": (lambda: torch.ones(1, 1, ROWS, KEYS, dtype=torch.bool), "keys"),
    "nothing": (lambda: torch.zeros(2, 1, ROWS, KEYS, dtype=torch.bool), "keys"),
    "random": (lambda: random_mask(2, 2, ROWS, KEYS), "mask"),
    "per_row": (lambda: random_mask(2, 1, ROWS, 1), "mask"),
    "expanded_keys": (lambda: random_mask(2, 1, ROWS, 1).expand(2, 1, ROWS, KEYS), "mask"),
    "one": (lambda: torch.ones(1, 1, dtype=torch.bool), "mask"),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("make", "kind"), MASKS.values(), ids=MASKS.keys())
def test_becomes_the_cheapest_form_and_says_the_same(make: Callable, kind: str, is_causal: bool) -> None:
    mask = make()
    prepared = prepare_mask(mask)
    assert prepared.kind == kind and f"PreparedMask({kind}: " in repr(prepared)
    case = make_case(bias=(2, 2, KEYS), is_causal=is_causal)
    dense = mask.dense_mask(ROWS) if isinstance(mask, KeyIntervals) else mask
    got = run_library(dataclasses.replace(case, mask=prepared))
    assert_case_close(dataclasses.replace(case, mask=dense), got)
    four = dense if dense.dim() == 4 else dense[None, None] if dense.dim() == 2 else dense[:, :, None]
    shown = prepared.dense_mask(None if prepared.seqlen_q is not None else ROWS)
    assert torch.equal(_expand_heads(shown), _expand_heads(four))


def _expand_heads(mask: Tensor) -> Tensor:
    heads = mask.shape[1]
    mask = mask if heads in (1, 4) else mask.repeat_interleave(4 // heads, 1)
    return mask.expand(2, 4, ROWS, KEYS)


@pytest.mark.parametrize("lengths", [None, torch.tensor([47, 20], dtype=torch.int32)], ids=["all_keys", "lengths"])
@pytest.mark.parametrize("shape", [(33, 47), (47, 33)], ids=str)
def test_what_the_causal_rule_hides_may_be_anything(shape: tuple[int, int], lengths: Tensor | None) -> None:
    """Also where fewer keys exist than the mask was prepared for, whose causal rule is another one."""
    rows, keys = shape
    if lengths is not None:
        lengths = to_device(lengths).clamp(max=keys)
    visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    intervals = select_keys(torch.randn(2, 2, keys), 9, seqlen_q=rows)
    cut = torch.where(visible, intervals.dense_mask(rows), random_mask(2, 2, rows, keys))
    keys_only = torch.where(visible, random_mask(2, 2, 1, keys), random_mask(2, 2, rows, keys))
    for mask, kind in ((cut, "intervals"), (keys_only, "keys")):
        assert prepare_mask(mask).kind == "mask"
        prepared = prepare_mask(mask, is_causal=True)
        assert prepared.kind == kind
        options = {"is_causal": True} | ({} if lengths is None else {"seqlens_k": lengths})
        case = make_case(rows=rows, keys=keys, **options)
        got = run_library(dataclasses.replace(case, mask=prepared))
        assert_case_close(dataclasses.replace(case, mask=mask), got)


@settings(max_examples=300)
@given(data=st.data())
def test_never_lies(data: st.DataObject) -> None:
    """Small masks, of which many are intervals."""
    rows, keys, is_causal = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)), data.draw(st.booleans())
    bits = data.draw(st.lists(st.booleans(), min_size=rows * keys, max_size=rows * keys))
    mask = torch.tensor(bits).view(rows, keys)
    prepared = prepare_mask(mask, is_causal=is_causal)
    counts = torch.ones(rows, keys, dtype=torch.bool)
    counts = counts.tril(keys - rows) if is_causal else counts
    assert not ((prepared.dense_mask(rows)[0, 0] != mask) & counts).any()
    runs = torch.where(counts, mask, False).int().diff(dim=0, prepend=torch.zeros(1, keys, dtype=torch.int)) == 1
    if rows > 1 and keys > 1:
        assert (prepared.kind == "mask") == bool((runs.sum(0) > 1).any())


def test_long_rows() -> None:
    """More keys than are read at a time."""
    intervals = select_keys(torch.randn(1, 2, 9000), 30, seqlen_q=70)
    prepared = prepare_mask(intervals.dense_mask(70))
    assert prepared.kind == "intervals" and torch.equal(prepared.dense_mask(), intervals.dense_mask(70))


# ---- Where it is taken


def test_is_taken_wherever_a_mask_is() -> None:
    mask = top_mask()
    prepared = prepare_mask(mask)
    case = make_case(bias=(2, 2, KEYS))
    tensors = (case.query, case.key, case.value)
    result = flash_dmattn_func(*tensors, prepared, case.bias, is_causal=True, return_attn_probs=True)
    expected = flash_dmattn_func(*tensors, mask, case.bias, is_causal=True, return_attn_probs=True)
    for tensor, other in zip(result, expected, strict=True):
        assert_near(tensor, other)
    bound = flash_dmattn_func_auto("cpu", attn_mask=prepared)
    assert_near(bound(*tensors, attn_bias=case.bias, is_causal=True), expected[0])
    report = plan_report(case.query, case.key, mask=prepared, is_causal=True)
    assert report.kept_scores == plan_report(case.query, case.key, mask=mask, is_causal=True).kept_scores


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("kind", ["intervals", "prepared intervals", "prepared keys", "prepared mask"])
def test_flex_takes_intervals_and_prepared_masks(kind: str) -> None:
    torch._dynamo.reset()
    case = make_case()
    intervals = select_keys(torch.randn(2, 2, KEYS), 9, seqlen_q=ROWS)
    mask = {
        "intervals": intervals,
        "prepared intervals": prepare_mask(intervals),
        "prepared keys": prepare_mask(random_mask(2, 1, KEYS)),
        "prepared mask": prepare_mask(random_mask(2, 4, ROWS, KEYS)),
    }[kind]
    tensors = (case.query, case.key, case.value)
    result = flex_dmattn_func(*tensors, mask, is_causal=True, return_attn_probs=True)
    expected = flash_dmattn_func(*tensors, mask, is_causal=True, return_attn_probs=True)
    for tensor, other in zip(result, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_shared_by_layers_and_recomputed_checkpoints() -> None:
    prepared = prepare_mask(top_mask())
    case = make_case()
    query = case.query.requires_grad_()

    def layer(query: Tensor, mask: PreparedMask) -> Tensor:
        return attention(query, case.key, case.value, mask=mask, is_causal=True, deterministic=True)

    def gradient(run: Callable[[Tensor, PreparedMask], Tensor]) -> Tensor:
        return torch.autograd.grad(run(run(query, prepared), prepared).square().sum(), query)[0]

    recomputed = gradient(lambda query, mask: checkpoint(layer, query, mask, use_reentrant=False))
    assert torch.equal(recomputed, gradient(layer))


@pytest.mark.parametrize("kind", ["intervals", "keys", "mask"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(kind: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda query, key, mask: attention(query, key, key, mask=mask, is_causal=True),
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    for rows, keys in ((5, 7), (9, 9), (6, 20)):
        query, key = (torch.randn(2, *shape, 8).to(default_dtype()) for shape in ((rows, 4), (keys, 2)))
        query.requires_grad_()
        mask = {
            "intervals": select_keys(torch.randn(2, 2, keys), 3, seqlen_q=rows).dense_mask(rows),
            "keys": random_mask(2, 1, keys),
            "mask": random_mask(2, 1, rows, keys),
        }[kind]
        prepared = prepare_mask(mask)
        assert prepared.kind == kind
        out, expected = compiled(query, key, prepared), attention(query, key, key, mask=mask, is_causal=True)
        assert_near(out, expected)
        assert_near(*(torch.autograd.grad(o.square().sum(), query)[0] for o in (out, expected)))
    torch._dynamo.reset()


def test_compiled_code_refuses_other_shapes() -> None:
    torch._dynamo.reset()
    prepared = prepare_mask(to_device(CAUSAL))
    compiled = torch.compile(lambda query: attention(query, query, query, mask=prepared), backend="aot_eager")
    with pytest.raises(ValueError, match="mask must have been prepared for these shapes"):
        compiled(torch.randn(2, ROWS, 4, 8).to(default_dtype()))
    torch._dynamo.reset()


def test_vmaps() -> None:
    masks = torch.stack([top_mask(), top_mask()])  # mapped: (2, B, heads, Sq, Sk)
    prepared = dataclasses.replace(prepare_mask(masks.flatten(0, 1)), plan=None)  # one of all masks suits none of them
    assert prepared.kind == "intervals"
    begin, end = (bound.view(2, 2, 2, KEYS) for bound in (prepared.intervals.begin, prepared.intervals.end))
    mapped = pytree.tree_unflatten([begin, end], pytree.tree_structure(prepared))
    query, key = (torch.randn(*shape, 8).to(default_dtype()) for shape in ((2, 2, ROWS, 4), (2, KEYS, 2)))

    def call(query: Tensor, mask: PreparedMask) -> Tensor:
        return attention(query, key, key, mask=mask)

    expected = torch.stack([attention(q, key, key, mask=mask) for q, mask in zip(query, masks, strict=True)])
    assert_near(torch.vmap(call)(query, mapped), expected)


# ---- As an object


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("kind", ["intervals", "keys", "mask"])
def test_is_frozen_copies_and_moves(kind: str) -> None:
    made = {"intervals": top_mask, "keys": lambda: random_mask(2, 1, KEYS), "mask": lambda: random_mask(2, 2, 33, 47)}
    mask = made[kind]()
    prepared = prepare_mask(mask)
    with pytest.raises(dataclasses.FrozenInstanceError):
        prepared.mask = None
    assert prepared.to("cpu").kind == kind and prepared.device == torch.device("cpu")
    moved = prepared.to("meta")
    assert moved.device.type == "meta" and moved.kind == kind and moved.shape == prepared.shape
    sizes = {"intervals": 2 * 2 * 2 * KEYS * 4, "keys": 2 * KEYS, "mask": mask.numel()}
    assert prepared.nbytes == sizes[kind]
    leaves, tree = pytree.tree_flatten(prepared)
    for other in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), pytree.tree_unflatten(leaves, tree)):
        assert repr(other) == repr(prepared)
        assert torch.equal(other.dense_mask(ROWS), prepared.dense_mask(ROWS))
    assert (prepared.mask is not None and prepared.mask.data_ptr() == mask.data_ptr()) == (kind != "intervals")


def test_a_mask_made_of_batch_and_keys_is_told_its_form() -> None:
    case = make_case(batch=2, rows=ROWS, keys=KEYS)
    prepared = prepare_mask(random_mask(2, KEYS))
    with pytest.raises(ValueError, match=r"made of a mask \(B, Sk\), make it of \(B, 1, Sk\), mask\[:, None, :\]"):
        attention(case.query, case.key, case.value, mask=prepared)
    with pytest.raises(ValueError, match=r"must have been prepared for these shapes; .*device=\w+(:\d)?\)$"):
        attention(case.query, case.key, case.value, mask=prepare_mask(random_mask(3, KEYS)))


@pytest.mark.parametrize(("make", "kind"), MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("is_causal", [False, True])
def test_is_loaded_as_weights_only(make: Callable, kind: str, is_causal: bool) -> None:
    prepared = prepare_mask(make(), ROWS, is_causal=is_causal)
    file = io.BytesIO()
    torch.save([prepared], file)
    file.seek(0)
    (same,) = torch.load(file, weights_only=True)
    assert type(same) is PreparedMask and repr(same) == repr(prepared)
    assert torch.equal(same.dense_mask(ROWS), prepared.dense_mask(ROWS))
    if prepared.intervals is not None:
        assert same.intervals.window_size == prepared.intervals.window_size


@pytest.fixture
def recorded_plans(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """The plans that forwards and backwards are called with."""
    plans = []
    monkeypatch.setattr(_operators, "attention_forward", recording(FORWARD, "plan", plans))
    monkeypatch.setattr(_operators, "attention_backward", recording(BACKWARD, "plan", plans))
    return plans


PLANNED_CALLS = {
    "the same": (False, {}, True),
    "causal": (True, {"is_causal": True}, True),
    "another causal rule": (False, {"is_causal": True}, False),
    "lengths": (False, {"seqlens_k": torch.tensor([KEYS, 20], dtype=torch.int32)}, False),
}


@pytest.mark.devices("cpu")  # which carries a plan along and never looks at it
@pytest.mark.parametrize("kind", ["intervals", "keys", "mask"])
@pytest.mark.parametrize(("is_causal", "options", "used"), PLANNED_CALLS.values(), ids=PLANNED_CALLS.keys())
def test_which_calls_use_its_plan(
    kind: str, is_causal: bool, options: dict, used: bool, recorded_plans: list[Tensor | None]
) -> None:
    made = {"intervals": top_mask, "keys": lambda: random_mask(2, 1, KEYS), "mask": lambda: random_mask(2, 2, 33, 47)}
    prepared = prepare_mask(made[kind](), ROWS, is_causal=is_causal)
    assert prepared.plan is None
    plan = torch.zeros(128, dtype=torch.uint8)
    prepared = dataclasses.replace(prepared, plan=plan)
    run_library(dataclasses.replace(make_case(**options), mask=prepared))
    assert len(recorded_plans) == 2
    assert all((other is not None and other.data_ptr() == plan.data_ptr()) == used for other in recorded_plans)


@pytest.mark.devices("cpu")
def test_its_plan_is_a_leaf_but_not_saved() -> None:
    without = prepare_mask(random_mask(2, 2, ROWS, KEYS))
    plan = torch.zeros(128, dtype=torch.uint8)
    prepared = dataclasses.replace(without, plan=plan)
    assert prepared.nbytes == without.nbytes + 128 and "the bool mask itself and a plan, " in repr(prepared)
    leaves, tree = pytree.tree_flatten(prepared)
    assert [leaf.data_ptr() for leaf in leaves] == [prepared.mask.data_ptr(), plan.data_ptr()]
    assert pytree.tree_unflatten(leaves, tree).plan is plan
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(prepared)[0]]
    assert paths == [".mask", ".plan"]
    assert prepared.to("cpu").plan is plan and prepared.to("meta").plan is None
    # What is loaded elsewhere, or later, plans anew: no plan on the CPU.
    for other in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert other.plan is None and torch.equal(other.mask, prepared.mask)


def test_a_tree_fits_its_plan() -> None:
    """Whose size depends on what the intervals say of their window."""
    prepared = prepare_mask(select_keys(torch.randn(1, 2, KEYS), 7, seqlen_q=ROWS), ROWS)
    leaves, tree = pytree.tree_flatten(prepared)
    again = pytree.tree_unflatten(leaves, tree)
    assert again.intervals.window_size == 7 and again.plan is prepared.plan
    query, key = torch.randn(1, ROWS, 4, 8).to(default_dtype()), torch.randn(1, KEYS, 2, 8).to(default_dtype())
    one, other = (attention(query, key, key, mask=mask, is_causal=False) for mask in (prepared, again))
    assert torch.equal(one, other)


@pytest.mark.devices("cpu")
def test_compiles_and_vmaps_with_its_plan() -> None:
    torch._dynamo.reset()
    prepared = dataclasses.replace(
        prepare_mask(random_mask(1, 2, ROWS, KEYS)), plan=torch.zeros(128, dtype=torch.uint8)
    )
    case = make_case()

    def loss(query: Tensor, mask: PreparedMask) -> Tensor:
        return attention(query, case.key, case.value, mask=mask).square().sum()

    def gradient(query: Tensor, mask: PreparedMask | Tensor) -> Tensor:
        query = query.detach().requires_grad_()
        return torch.autograd.grad(loss(query, mask), query)[0]

    expected = gradient(case.query, prepared.mask)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    query = case.query.detach().requires_grad_()
    assert_near(torch.autograd.grad(compiled(query, prepared), query)[0], expected)
    assert_near(torch.func.grad(loss)(case.query, prepared), expected)
    queries = torch.stack([case.query, -case.query])
    mapped = torch.vmap(torch.func.grad(loss), (0, None))(queries, prepared)
    assert_near(mapped, torch.stack([gradient(one, prepared.mask) for one in queries]))
    torch._dynamo.reset()


@pytest.mark.devices("cpu")
def test_repr() -> None:
    assert repr(prepare_mask(torch.ones(2, 1, 1, 3000, dtype=torch.bool), is_causal=True)) == (
        "PreparedMask(keys: one bool per key, 5.9 KiB; B 2, heads 1, Sq any, Sk 3000, is_causal=True, device=cpu)"
    )


# ---- Errors

PREPARE_ERRORS = {
    "type": (
        ([True],),
        {},
        TypeError,
        "mask must be a torch.Tensor, KeyIntervals or KeyIndices; got mask of type list",
    ),
    "dtype": ((torch.ones(3, 3),), {}, ValueError, "mask must be bool with 2, 3 or 4 dimensions; got mask float32"),
    "rank": ((torch.ones(3, dtype=torch.bool),), {}, ValueError, "mask must be bool with 2, 3 or 4 dimensions"),
    "rows": ((CAUSAL, 32), {}, ValueError, "seqlen_q must be the mask's 33 rows; got seqlen_q 32, mask (1, 1, 33, 47)"),
    "negative": ((CAUSAL, -1), {}, ValueError, "seqlen_q must be between 0 and 2^31 - 1"),
    "no_int": ((CAUSAL, 3.0), {}, TypeError, "seqlen_q must be an int"),
    "causal": ((CAUSAL,), {"is_causal": 1}, TypeError, "is_causal must be a bool"),
    "meta": ((CAUSAL.to("meta"),), {}, ValueError, "mask must have data; got mask on meta"),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"), PREPARE_ERRORS.values(), ids=PREPARE_ERRORS.keys()
)
def test_errors_of_preparing(arguments: tuple, options: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        prepare_mask(*arguments, **options)


REFUSED = {
    "rows": (lambda: prepare_mask(CAUSAL[:-1]), "mask must have been prepared for these shapes; got query (2, 33, 4"),
    "keys": (lambda: prepare_mask(CAUSAL[:, :-1]), "mask must have been prepared for these shapes; got query (2, 33,"),
    "rows_of_keys": (lambda: prepare_mask(random_mask(1, 1, KEYS), 32), "Sq 32, Sk 47"),
    "rows_of_intervals": (lambda: prepare_mask(KeyIntervals.causal(32, KEYS), 32), "Sq 32, Sk 47"),
    "batch": (lambda: prepare_mask(random_mask(3, 1, KEYS)), "mask must have been prepared for these shapes"),
    "heads": (lambda: prepare_mask(random_mask(3, ROWS, KEYS)[None]), "B 1, heads 3, Sq 33, Sk 47"),
    "causal": (lambda: prepare_mask(CAUSAL, is_causal=True), "is_causal must be True for a mask that was prepared"),
    "device": (lambda: prepare_mask(CAUSAL).to("meta"), "intervals.begin must be on the device of query"),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("function", [attention, flash_dmattn_func, flex_dmattn_func, plan_report])
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_what_it_was_not_made_for(make: Callable, message: str, function: Callable) -> None:
    if function is flex_dmattn_func and "device" in message:
        pytest.skip("FlexAttention says it in its own words")
    query, key, mask = torch.zeros(2, ROWS, 4, 8), torch.zeros(2, KEYS, 2, 8), make()
    with pytest.raises(ValueError, match=re.escape(message)):
        if function is plan_report:
            plan_report(query, key, mask=mask)
        else:
            function(query, key, key, **{"mask" if function is attention else "attn_mask": mask})


def test_dense_mask_needs_the_rows() -> None:
    prepared = prepare_mask(random_mask(1, 1, KEYS))
    with pytest.raises(ValueError, match="seqlen_q must be given for a mask that was made for any number of rows"):
        prepared.dense_mask()
    assert prepared.dense_mask(3).shape == (1, 1, 3, KEYS)
    with pytest.raises(ValueError, match="seqlen_q must be the 33 that the mask was made for; got 3"):
        prepare_mask(to_device(CAUSAL)).dense_mask(3)


def test_operator() -> None:
    operator = torch.ops.flash_dmattn.mask_intervals.default
    opcheck(operator, (top_mask(), True), test_utils="test_schema")
    with pytest.raises(ValueError, match="mask must have 4 dimensions"):
        operator(to_device(CAUSAL), False)
    with pytest.raises(ValueError, match="mask must be bool"):
        operator(torch.zeros(1, 1, 3, 3), False)
    expanded = to_device(torch.zeros((), dtype=torch.bool)).expand(1, 2**31, 4, 4)
    with pytest.raises(ValueError, match=r"mask must have fewer than 2\^31 heads .*; got mask \(1, 2147483648, 4, 4\)"):
        operator(expanded, False)
