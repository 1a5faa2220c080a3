"""The operators as PyTorch sees them: registration, gradients, autocast."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import assert_near
from flash_dmattn import _operators, attention
from flash_dmattn._visibility import Visibility, argument_names, leading_tensors, shown_name
from operators import (
    BACKWARD,
    FORWARD,
    PLAN,
    backward_of,
    changed,
    forward_of,
    planned_arguments,
    recording,
    visibility_of,
)
from oracle import Case, reference
from torch import Tensor
from torch.func import jvp
from torch.library import opcheck
from torch_cases import call, leaves_of, small_case

pytestmark = pytest.mark.devices("cpu", "cuda")
FORMS = [  # shapes of a mask or bias for B 2, H 4, Hkv 2, Sq 5, Sk 7
    (2, 4, 5, 7),
    (1, 2, 5, 7),
    (2, 1, 1, 7),
    (1, 4, 5, 1),
    (2, 2, 7),
    (1, 1, 7),
    (5, 7),
    (1, 7),
    (1, 1, 1, 1),
]


# ---- Registration

FIELDS = Visibility._fields
PLANNED_FIELDS = tuple(name for name in FIELDS if name != "plan")
FORWARD_NAMES = ("query", "key", "value", "bias", "sink", *FIELDS, "scale", "softcap", "deterministic")
ARGUMENTS = {
    "attention_forward": FORWARD_NAMES,
    "attention_backward": (
        *("dout", "dlse", "out", "lse", "row_stats", *FORWARD_NAMES),
        *("needs_dquery", "needs_dkey", "needs_dvalue", "needs_dbias", "needs_dsink"),
    ),
    "attention_plan": ("query", "key", *PLANNED_FIELDS),
    "plan_report": ("query", "key", *PLANNED_FIELDS, "deterministic"),
    "plan_chunks": ("query", "key", *PLANNED_FIELDS, "batch", "head"),
    "cuda_plan_bytes": ("query", "key", *PLANNED_FIELDS),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("name", "expected"), ARGUMENTS.items(), ids=ARGUMENTS.keys())
def test_operators_take_visibility_side_by_side(name: str, expected: tuple[str, ...]) -> None:
    """And tensors before all others, as the rules of autograd and devices take them."""
    operator = getattr(torch.ops.flash_dmattn, name).default
    assert argument_names(operator) == expected
    tensors = [argument.name for argument in operator._schema.arguments if "Tensor" in str(argument.type)]
    assert leading_tensors(operator) == tuple(shown_name(name) for name in tensors)


OPCHECK_CASES = {
    "plain": {},
    "everything": {"mask": (2, 1, 5, 7), "bias": (1, 2, 5, 7), "softcap": 2.0, "is_causal": True, "scale": 0.3},
    "per_key": {"bias": (2, 2, 7), "seqlens_k": torch.tensor([7, 3], dtype=torch.int32)},
    "default_dtype": {"dtype": None, "bias": (5, 7)},
    "bfloat16_float32_bias": {"dtype": torch.bfloat16, "bias": (5, 7), "bias_dtype": torch.float32},
    "sink": {"bias": (2, 2, 7), "with_sink": True},
    "float32_sink": {"dtype": torch.bfloat16, "with_sink": True, "sink_dtype": torch.float32, "is_causal": True},
    "value_dim": {"bias": (2, 2, 7), "with_sink": True, "value_dim": 3},
}


@pytest.mark.parametrize("options", OPCHECK_CASES.values(), ids=OPCHECK_CASES.keys())
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_forward(options: dict, requires_grad: bool) -> None:
    case = small_case(**options)
    if requires_grad:
        leaves_of(case)
    # Low precision differs between the traced and the eager graph by rounding of the sums only.
    tolerance = {} if case.query.dtype == torch.float64 else {"atol": 3e-2, "rtol": 3e-2}
    opcheck(FORWARD, forward_of(case), **tolerance)


@pytest.mark.parametrize(
    "needs", [(True,) * 5, (False, True, False, False), (False, False, False, True), (False,) * 4 + (True,)]
)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(needs: tuple[bool, ...], with_dlse: bool) -> None:
    case = small_case(mask=(1, 1, 5, 7), bias=(1, 2, 1, 7), with_sink=True, with_dlse=with_dlse)
    # Not test_aot_dispatch_dynamic, which differentiates: a second derivative is refused.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(BACKWARD, backward_of(case, *needs), test_utils=utils)


PLANNED_CASES = {
    "mask": {"mask": (2, 2, 5, 7)},
    "per_key": {"mask": (1, 1, 7), "is_causal": True},
    "lengths": {"mask": (1, 4, 5, 7), "seqlens_k": torch.tensor([7, 3], dtype=torch.int32)},
    "nothing": {"is_causal": True},
}


@pytest.mark.parametrize("options", PLANNED_CASES.values(), ids=PLANNED_CASES.keys())
def test_opcheck_with_a_plan(options: dict) -> None:
    case = small_case(bias=(2, 2, 7), **options)
    # Not what compares its bytes: those between the end of a list and its room are never written.
    planned = planned_arguments(case.query, case.key, visibility_of(case))
    opcheck(PLAN, planned, test_utils=("test_schema", "test_faketensor"))
    plan = PLAN(*planned)
    assert plan.dtype == torch.uint8 and (plan.numel() > 0) == (plan.is_cuda and case.mask is not None)
    forward = changed(FORWARD, forward_of(case), plan=plan)
    backward = changed(BACKWARD, backward_of(case, True, True, True, True), plan=plan)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(BACKWARD, tuple(backward), test_utils=utils)
    leaves_of(case)
    tolerance = {} if case.query.dtype == torch.float64 else {"atol": 3e-2, "rtol": 3e-2}
    opcheck(FORWARD, tuple(forward), **tolerance)


@pytest.mark.parametrize(("name", "rank"), [("query", 3), ("key", 3), ("mask", 1)])
def test_plans_of_wrong_shapes_are_refused(name: str, rank: int) -> None:
    case = small_case(mask=(5, 7))
    arguments = planned_arguments(case.query, case.key, visibility_of(case))
    arguments = changed(PLAN, arguments, **{name: getattr(case, name).new_ones((2,) * rank)})
    for device in (arguments[0].device, "meta"):
        moved = [argument.to(device) if torch.is_tensor(argument) else argument for argument in arguments]
        with pytest.raises(ValueError, match=f"{name} must have .*4 dimensions; got {name}"):
            PLAN(*moved)


def test_gradients_not_asked_for_are_not_computed() -> None:
    case = small_case(bias=(5, 7))
    for needs in itertools.product([False, True], repeat=4):
        gradients = BACKWARD(*backward_of(case, *needs))
        assert [gradient.numel() > 0 for gradient in gradients] == [*needs, False]
    case.bias = None
    with pytest.raises(ValueError, match="needs_dbias needs a bias; got no bias"):
        BACKWARD(*backward_of(case, False, False, False, True))
    with pytest.raises(ValueError, match="needs_dsink needs a sink; got no sink"):
        BACKWARD(*backward_of(case, False, False, False, False, True))


def test_results_share_no_memory() -> None:
    case = small_case(bias=(5, 7))
    arguments = backward_of(case, True, True, True, True)
    tensors = [t for t in (*arguments, *FORWARD(*forward_of(case)), *BACKWARD(*arguments)) if torch.is_tensor(t)]
    addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    assert len(set(addresses)) == len(addresses)


# ---- Gradients


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("mask", [None, (2, 1, 5, 7), (2, 2, 7)], ids=str)
@pytest.mark.parametrize("bias", [None, *FORMS], ids=str)
def test_gradcheck(mask: tuple | None, bias: tuple | None) -> None:
    case = small_case(mask=mask, bias=bias, density=0.7, is_causal=bias == (5, 7), softcap=1.5 if mask else 0.0)

    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, lse = attention(query, key, value, mask=case.mask, bias=bias, return_lse=True, **case.options)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(function, leaves_of(case), fast_mode=True)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)), ids=str)
def test_only_needed_inputs_get_gradients(needs: tuple[bool, ...]) -> None:
    case = small_case(bias=(1, 2, 5, 7), mask=(5, 7), is_causal=True)
    expected = reference(case)
    leaves = leaves_of(case)
    for leaf, needed in zip(leaves, needs, strict=True):
        leaf.requires_grad_(needed)
    out, lse = call(case)
    assert out.requires_grad == lse.requires_grad == any(needs)
    if any(needs):
        out.backward(case.dout)
    for leaf, needed, name in zip(leaves, needs, ("dquery", "dkey", "dvalue", "dbias"), strict=True):
        assert (leaf.grad is not None) == needed
        if needed:
            assert_near(leaf.grad, expected[name].value)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4))[1:], ids=str)
def test_gradients_that_nobody_needs_are_not_asked_for(
    needs: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def record(*arguments: object) -> tuple[Tensor, ...]:
        asked.append((arguments[1], *arguments[-5:]))
        return BACKWARD(*arguments)

    monkeypatch.setattr(_operators, "attention_backward", record)
    case = small_case(bias=(5, 7))
    for leaf, needed in zip(leaves_of(case), needs, strict=True):
        leaf.requires_grad_(needed)
    call(case)[0].sum().backward()
    assert asked == [(None, *needs, False)]  # nor is there a gradient for the unused lse


def test_gradient_through_lse_alone() -> None:
    case = small_case(bias=(2, 4, 5, 7), with_dlse=True)
    case.dout.zero_()
    expected = reference(case)
    leaves = leaves_of(case)
    gradients = torch.autograd.grad(call(case)[1], leaves, case.dlse)
    for gradient, name in zip(gradients, ("dquery", "dkey", "dvalue", "dbias"), strict=True):
        assert_near(gradient, expected[name].value)


@pytest.mark.parametrize("shape", FORMS, ids=str)
def test_bias_gradient_has_the_bias_own_shape(shape: tuple[int, ...]) -> None:
    case = small_case(bias=shape)
    expected = reference(case)["dbias"].value
    case.bias.requires_grad_()
    call(case)[0].backward(case.dout)
    assert case.bias.grad.shape == shape
    assert_near(case.bias.grad, expected)


def test_expanded_bias_gradient_reaches_the_unexpanded_one() -> None:
    case = small_case(bias=(1, 1, 1, 7))
    expected = reference(case)["dbias"].value
    leaf = case.bias.requires_grad_()
    case.bias = leaf.expand(2, 4, 5, 7)
    call(case)[0].backward(case.dout)
    assert_near(leaf.grad, expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda dout: dout.sum().expand(dout.shape),
        lambda dout: dout[..., :1].expand(dout.shape),
        lambda dout: dout.mT.contiguous().mT,
        lambda dout: dout.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["one number", "expanded D", "strided D", "strided B"],
)
def test_output_gradient_of_any_strides(view: Callable[[Tensor], Tensor]) -> None:
    case = small_case()
    case.dout = view(case.dout)
    expected = reference(case)
    leaves = leaves_of(case)
    gradients = torch.autograd.grad(call(case)[0], leaves, case.dout)
    for gradient, name in zip(gradients, ("dquery", "dkey", "dvalue"), strict=True):
        assert_near(gradient, expected[name].value)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_head_dim_of_any_stride(name: str) -> None:
    case = small_case(bias=(5, 7))
    expected = reference(case)
    tensor = getattr(case, name)
    strided = torch.empty(*tensor.shape, 3, dtype=tensor.dtype)[..., 1]
    strided.copy_(tensor)
    setattr(case, name, strided.requires_grad_())
    out, _ = call(case)
    assert_near(out.detach(), expected["out"].value)
    out.backward(case.dout)
    assert_near(strided.grad, expected[f"d{name}"].value)


@pytest.mark.devices("cpu")
def test_negative_and_conjugate_views() -> None:
    case = small_case()
    expected = reference(case)["out"].value
    minus = torch.complex(torch.zeros_like(case.query), -case.query).conj().imag
    assert minus.is_neg()
    assert_near(attention(minus, case.key, case.value), expected)


def test_second_derivative_is_refused() -> None:
    case = small_case(bias=(5, 7))
    for leaf in leaves_of(case):
        (gradient,) = torch.autograd.grad(call(case)[0].square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match=r"no second derivative.*attention_backward"):
            gradient.sum().backward()


def test_second_derivative_is_refused_when_the_loss_reaches_the_input_another_way() -> None:
    case = small_case()
    (query, *_) = leaves_of(case)
    (gradient,) = torch.autograd.grad(call(case)[0].sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (gradient.sum() + query.square().sum()).backward()


def test_unused_second_derivative_does_no_harm() -> None:
    case = small_case()
    expected = reference(case)["dquery"].value
    query = case.query.requires_grad_()
    (gradient,) = torch.autograd.grad(call(case)[0], query, case.dout, create_graph=True)
    assert_near(gradient.detach(), expected)


@pytest.mark.devices("cpu")
def test_forward_mode_is_refused() -> None:
    case = small_case()
    with pytest.raises(RuntimeError, match=r"no forward-mode derivative \(jvp\), but key carries a tangent"):
        jvp(lambda key: attention(case.query, key, case.value), (case.key,), (case.key,))
    with torch.autograd.forward_ad.dual_level():
        bias = torch.autograd.forward_ad.make_dual(torch.zeros(5, 7).double(), torch.ones(5, 7).double())
        with pytest.raises(RuntimeError, match="bias carries a tangent"):
            attention(case.query, case.key, case.value, bias=bias)
        assert attention(case.query, case.key, case.value).shape == case.query.shape


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded(mode: Callable) -> None:
    case = small_case(bias=(5, 7))
    expected = reference(case)["out"].value
    leaves_of(case)
    with mode():
        out, lse = call(case)
    assert not out.requires_grad and not lse.requires_grad
    assert_near(out, expected)


# ---- deterministic


@pytest.fixture
def recorded_flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """The deterministic argument of every forward call."""
    flags = []
    monkeypatch.setattr(_operators, "attention_forward", recording(FORWARD, "deterministic", flags))
    yield flags
    torch.use_deterministic_algorithms(False)


def test_deterministic_follows_torch(recorded_flags: list[bool]) -> None:
    case = small_case()
    call(case)
    torch.use_deterministic_algorithms(True)
    call(case)
    call(case, deterministic=False)
    torch.use_deterministic_algorithms(False)
    call(case, deterministic=True)
    assert recorded_flags == [False, True, False, True]


# ---- Autocast


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_inputs_but_not_a_float32_bias(dtype: torch.dtype, compiled: bool) -> None:
    def run(case: Case) -> tuple[Tensor, Tensor]:
        with torch.autocast(case.query.device.type, dtype=dtype):
            return call(case)

    torch._dynamo.reset()
    case = small_case(dtype=torch.float32, bias=(5, 7), mask=(5, 7))
    low = [tensor.to(dtype) for tensor in (case.query, case.key, case.value)]
    expected = attention(*low, bias=case.bias, mask=case.mask)
    leaves = leaves_of(case)
    out, lse = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(case)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out.detach(), expected)
    out.backward(case.dout.to(dtype))
    assert [leaf.grad.dtype for leaf in leaves] == [torch.float32] * 4
    torch._dynamo.reset()


@pytest.mark.devices("cpu")
def test_autocast_of_mixed_types() -> None:
    case = small_case(dtype=torch.float32, bias=(5, 7), bias_dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(case.query.half(), case.key, case.value.bfloat16(), bias=case.bias)
        double = attention(case.query.double(), case.key.double(), case.value.double())
        off = attention(*(tensor.float() for tensor in (case.query, case.key, case.value)))
    assert out.dtype == off.dtype == torch.bfloat16
    assert double.dtype == torch.float64  # as torch's own operators
    with torch.autocast("cpu", enabled=False):
        assert attention(case.query, case.key, case.value).dtype == torch.float32
