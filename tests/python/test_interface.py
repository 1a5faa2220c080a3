"""The names that code written for the original package uses, FlexAttention behind them, and the command line."""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys

import flash_dmattn
import pytest
import torch
from cases import make_case
from flash_dmattn import attention, flash_dmattn_func, flash_dmattn_func_auto, flash_dmattn_interface, flex_dmattn_func
from flash_dmattn.__main__ import main
from flash_dmattn.flash_dmattn_triton import triton_dmattn_func
from oracle import Case, visibility
from torch import Tensor

# On CPU torch runs FlexAttention unfused and says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")


def call(function: object, case: Case, **others: object) -> Tensor | tuple[Tensor, ...]:
    return function(case.query, case.key, case.value, case.mask, case.bias, **(case.options | others))


# ---- Names


def test_drop_in_names() -> None:
    assert flash_dmattn.CPU_AVAILABLE is True
    assert flash_dmattn.TRITON_AVAILABLE is False and flash_dmattn.triton_dmattn_func is None
    assert flash_dmattn.FLEX_AVAILABLE is True and callable(flash_dmattn.flex_dmattn_func)
    assert ("cuda" in flash_dmattn.get_available_backends()) == flash_dmattn.CUDA_AVAILABLE
    assert "cpu" in flash_dmattn.get_available_backends()
    assert flash_dmattn_interface.flash_dmattn_func is flash_dmattn_func
    assert flash_dmattn.__version__.count(".") == 2
    assert all(hasattr(flash_dmattn, name) for name in flash_dmattn.__all__)


def test_modules_of_the_original_import_without_triton() -> None:
    code = """if True:
        import sys
        sys.modules["triton"] = None
        from flash_dmattn.flash_dmattn_interface import flash_dmattn_func
        from flash_dmattn.flash_dmattn_flex import flex_attention_forward, flex_dmattn_func
        from flash_dmattn.flash_dmattn_triton import triton_dmattn_func
        import flash_dmattn
        assert flex_attention_forward is flex_dmattn_func is flash_dmattn.flex_dmattn_func
        assert flash_dmattn_func is flash_dmattn.flash_dmattn_func and callable(triton_dmattn_func)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_triton_function_computes_in_its_own_argument_order() -> None:
    case = make_case(mask=(2, 2, 33, 47), bias=(1, 4, 1, 47), is_causal=True, scale=0.2)
    expected = call(flash_dmattn_func, case)
    tensors = (case.query, case.key, case.value, case.mask, case.bias)
    assert list(inspect.signature(triton_dmattn_func).parameters)[5:] == ["is_causal", "softmax_scale", "scale"]
    assert torch.equal(triton_dmattn_func(*tensors, True, 0.2), expected)
    assert torch.equal(triton_dmattn_func(*tensors, is_causal=True, scale=0.2), expected)
    with pytest.raises(ValueError, match="softmax_scale is another name of scale"):
        triton_dmattn_func(*tensors, True, 0.2, scale=0.3)


@pytest.mark.parametrize("function", [flash_dmattn_func, flex_dmattn_func])
def test_argument_order_is_the_original_one(function: object) -> None:
    names = "query key value attn_mask attn_bias scale is_causal softcap deterministic return_attn_probs softmax_scale"
    parameters = inspect.signature(function).parameters
    assert list(parameters) == names.split()
    assert all(parameter.default is None for parameter in list(parameters.values())[3:])


def test_auto_returns_the_function_of_a_backend() -> None:
    assert flash_dmattn_func_auto() is flash_dmattn_func
    assert flash_dmattn_func_auto("cpu") is flash_dmattn_func
    assert flash_dmattn_func_auto(backend="flex") is flex_dmattn_func
    bound = flash_dmattn_func_auto("cpu", is_causal=True)
    assert isinstance(bound, functools.partial) and bound.keywords == {"is_causal": True}
    case = make_case(rows=5, keys=5)
    assert torch.equal(call(bound, case), call(flash_dmattn_func, case, is_causal=True))


# ---- flash_dmattn_func


def test_func_is_attention_under_other_names() -> None:
    case = make_case(mask=(2, 2, 33, 47), bias=(1, 4, 1, 47), softcap=3.0, is_causal=True, scale=0.2)
    expected = attention(case.query, case.key, case.value, mask=case.mask, bias=case.bias, **case.options)
    assert torch.equal(call(flash_dmattn_func, case), expected)
    positional = (case.query, case.key, case.value, case.mask, case.bias, 0.2, True, 3.0, False, False)
    assert torch.equal(flash_dmattn_func(*positional), expected)


def test_softmax_scale_is_scale() -> None:
    case = make_case()
    expected = call(flash_dmattn_func, case, scale=0.7)
    assert not torch.equal(expected, call(flash_dmattn_func, case))
    for function in (flash_dmattn_func, flex_dmattn_func):
        torch.testing.assert_close(call(function, case, softmax_scale=0.7), expected)
        with pytest.raises(ValueError, match=r"got scale 0\.7, softmax_scale 0\.5"):
            call(function, case, scale=0.7, softmax_scale=0.5)


PROBABILITY_CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "more_rows_than_keys": {"is_causal": True, "rows": 47, "keys": 33},
    "masked": {"mask": (2, 2, 33, 47), "bias": (1, 4, 33, 1), "softcap": 2.0},
    "per_key": {"mask": (1, 4, 47), "bias": (2, 2, 47), "scale": 0.5},
    "low_precision": {"dtype": torch.bfloat16, "mask": (33, 47), "bias": (33, 47)},
    "empty_rows": {"mask": (2, 1, 33, 1)},
}


@pytest.mark.parametrize("options", PROBABILITY_CASES.values(), ids=PROBABILITY_CASES.keys())
def test_probabilities(options: dict) -> None:
    case = make_case(**options)
    out, lse, probs = call(flash_dmattn_func, case, return_attn_probs=True)
    assert torch.equal(out, call(flash_dmattn_func, case))
    assert probs.shape == (*lse.shape, case.key.shape[1]) and probs.dtype == lse.dtype
    visible = visibility(case)
    assert (probs[~visible] == 0).all()
    torch.testing.assert_close(probs.sum(-1), visible.any(-1).to(probs.dtype), rtol=0, atol=1e-5)
    value = case.value.repeat_interleave(2, dim=2).to(probs.dtype)
    precision = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[out.dtype]
    expected = torch.einsum("bhij,bjhd->bihd", probs, value)
    torch.testing.assert_close(out.to(probs.dtype), expected, rtol=precision, atol=precision)


def test_probabilities_of_hidden_keys_are_zero_whatever_they_hold() -> None:
    case = make_case(mask=(2, 1, 1, 47))
    case.key.masked_fill_(~case.mask[:, 0, 0, :, None, None], torch.nan)
    probs = call(flash_dmattn_func, case, return_attn_probs=True)[2]
    assert probs.isfinite().all()


def test_attention_returns_lse_only_when_asked() -> None:
    case = make_case(mask=(33, 47))
    out, lse = attention(case.query, case.key, case.value, mask=case.mask, return_lse=True)
    assert torch.equal(attention(case.query, case.key, case.value, mask=case.mask), out)
    assert lse.shape == (2, 4, 33)


# ---- FlexAttention

FLEX_CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal_more_rows_than_keys": {"is_causal": True, "rows": 47, "keys": 33},
    "bias": {"bias": (2, 4, 33, 47), "scale": 0.3},
    "bias_of_key_heads": {"bias": (1, 2, 1, 47), "softcap": 2.0},
    "mask": {"mask": (2, 4, 33, 47)},
    "mask_of_key_heads": {"mask": (1, 2, 33, 47), "is_causal": True},
    "mask_of_rows_and_keys": {"mask": (33, 47), "bias": (33, 1)},
    "per_key": {"mask": (2, 1, 47), "bias": (2, 2, 47), "is_causal": True, "softcap": 1.0},
    "long": {"rows": 300, "keys": 400, "mask": (2, 2, 400), "is_causal": True, "heads": 2},
}


@pytest.mark.parametrize("options", FLEX_CASES.values(), ids=FLEX_CASES.keys())
def test_flex_equals_ours(options: dict) -> None:
    torch._dynamo.reset()  # it compiles for every mask; the cache of one function is limited
    case = make_case(**options)
    results = call(flex_dmattn_func, case, return_attn_probs=True)
    expected = call(flash_dmattn_func, case, return_attn_probs=True)
    for result, other in zip(results, expected, strict=True):
        assert result.is_contiguous()
        torch.testing.assert_close(result, other, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_flex_refuses_what_it_does_not_promise() -> None:
    case = make_case(rows=4, keys=4)
    with pytest.raises(ValueError, match="deterministic must not be asked of FlexAttention"):
        call(flex_dmattn_func, case, deterministic=True)
    with pytest.raises(ValueError, match=r"key must have 4 dimensions; got key \(4, 2, 32\)"):
        flex_dmattn_func(case.query, case.key[0], case.value)


# ---- Command line


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "flash_dmattn", *arguments], capture_output=True, text=True)


def test_info_as_json() -> None:
    done = run_command("info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["version"] == flash_dmattn.__version__
    assert facts["backends"] == flash_dmattn.get_available_backends()
    assert facts["torch"] == torch.__version__
    cpu = facts["cpu"]
    assert cpu["threads"] >= 1
    assert {cpu["isa_float"], cpu["isa_bfloat16"]} <= set(cpu["supported"]) <= set(cpu["compiled"])


def test_info_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"flash_dmattn {flash_dmattn.__version__}" in text
    assert torch.__version__ in text and ", ".join(flash_dmattn.get_available_backends()) in text


def test_unknown_command() -> None:
    done = run_command("no_such_command")
    assert done.returncode == 2 and "invalid choice: 'no_such_command'" in done.stderr
    assert done.stderr.startswith("python -m flash_dmattn: error: ") and done.stderr.count("\n") == 1
