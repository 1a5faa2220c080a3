"""Scores of any finite size: forward and backward make the same probabilities of them, however large they are.

A large score is known to the rounding of float32 only, so that what is tested here are scores that have no other value:
products of integers and of powers of two, and biases to which such a product is added with one rounding, which the
oracle rounds in the same way.
"""

from __future__ import annotations

from dataclasses import replace

import flash_dmattn
import pytest
import torch
from cases import assert_near, default_dtype, dtypes, make_case, run_library
from compare import assert_case_close
from oracle import Case, reference
from torch import Tensor

pytestmark = pytest.mark.devices("cpu", "cuda")

SIZES = [1e2, 1e4, 1e9, 1e18, 1e37, torch.finfo(torch.float32).max]
SIGNS = [1, -1]


def integer_case(head_dim: int, dtype: torch.dtype, rows: int = 70, keys: int = 150, **settings: object) -> Case:
    """Products of query and key are small integers."""
    case = make_case(2, 4, 2, rows, keys, head_dim, dtype=dtype, with_dlse=True, **settings)
    generator = torch.Generator().manual_seed(1)

    def integers(like: Tensor) -> Tensor:
        ternary = torch.randint(-1, 2, like.shape, generator=generator, device="cpu").to(like)
        return ternary * (torch.rand(like.shape, generator=generator, device="cpu") < 0.3).to(like)

    return replace(case, query=integers(case.query), key=integers(case.key))


def check(case: Case, *, few_elements: bool = False, **options: object) -> None:
    # Neither the framework's scores nor gradients of query and key, which are multiples of the scale, fit float16.
    overflows = case.query.dtype == torch.float16 and abs(case.options.get("scale", 1.0)) > 100
    if overflows:
        options["needs"] = ("value",)
    got = run_library(case, **options)
    if case.query.dtype != torch.float64 and not overflows:
        return assert_case_close(case, got, few_elements=few_elements, float32_scores=True)
    expected = reference(case, gradients=not got.keys() <= {"out", "lse"}, exponents=False)
    for name, tensor in got.items():
        assert_near(tensor, expected[name].value)


def biases(kind: str, size: float, keys: int) -> Tensor:
    """(1, 4, 1, keys), or with rows of its own (1, 4, 70, keys)."""
    bias = torch.zeros(1, 4, 1, keys)
    if kind == "constant":
        bias += size
    elif kind == "first keys":  # under the causal rule the first rows see no others
        bias[..., :4] = size
    elif kind == "ties":  # the highest are many
        bias += size * (torch.arange(keys) % 7 == 3)
    elif kind == "steps":
        bias += size * ((torch.arange(keys) % 5) / 8)
    elif kind == "rows":
        bias = bias + size * (torch.arange(70)[:, None] % 3 != torch.arange(keys) % 2)
    return bias


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("mask", [None, (1, 1, 70, 1000)])
@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize("rise", [1, 5, 20, 200, -1, -5, -20, -200])
def test_scores_that_rise(
    dtype: torch.dtype, rise: int, from_last: bool, mask: tuple[int, ...] | None, head_dim: int
) -> None:
    """From 0 by `rise` every 80 keys, or fall: what was summed before becomes less likely, by little or much at a time,
    or by more than a float can say, and is rescaled by the forward."""
    keys = 1000
    case = integer_case(head_dim, dtype, keys=keys, mask=mask)
    key = torch.zeros_like(case.key)
    step = torch.arange(keys) // 80
    key[..., 0] = (rise * (step.flip(0) if from_last else step)).to(key)[None, :, None]
    query = torch.zeros_like(case.query)
    query[..., 0] = 1
    query[..., 1] = case.query[..., 1]
    key[..., 1] = case.key[..., 1]
    case = replace(case, query=query, key=key, options={**case.options, "scale": 1.0})
    # The framework's exponents are whole numbers here and have no rounding, those of powers of 2 have: where a mask
    # leaves few keys of a value that shows.
    check(case, few_elements=mask is not None, needs=())


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["constant", "first keys", "ties", "steps", "rows"])
def test_biases(dtype: torch.dtype, kind: str, size: float, sign: int) -> None:
    bias_dtype = dtype if dtype == torch.float64 else torch.float32
    case = integer_case(16, dtype, is_causal=True)
    case = replace(case, bias=biases(kind, sign * size, 150).to(bias_dtype))
    check(case)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [None, (2, 1, 70, 150)])
def test_head_dims(
    dtype: torch.dtype, head_dim: int, sign: int, deterministic: bool, mask: tuple[int, ...] | None
) -> None:
    """Every kernel, with a bias whose entries are as in a mask of -1e9, or the other way around."""
    case = integer_case(head_dim, dtype, scale=0.25, mask=mask)
    case = replace(case, bias=biases("first keys", sign * 1e9, 150) + biases("ties", 64.0, 150))
    check(case, deterministic=deterministic)


@pytest.mark.parametrize("size", [1e2, 1e5, 1e10, 1e20, 1e30, 1e36])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128, 256])
def test_scales(dtype: torch.dtype, head_dim: int, size: float) -> None:
    """Without a bias scores are not made before the softmax. Scales that are no power of two round them."""
    case = integer_case(head_dim, dtype, is_causal=True, scale=size)
    check(case)
    check(replace(case, options=case.options | {"scale": -size}))


@pytest.mark.parametrize("factor", [1.0, 1e3, 3e4])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_large_queries_and_keys(dtype: torch.dtype, head_dim: int, factor: float, deterministic: bool) -> None:
    """The backward's probabilities are those of the forward: of every row they sum to 1."""
    case = make_case(1, 2, 1, 130, 200, head_dim, dtype=torch.float32)
    ones = torch.ones_like(case.dout)
    query, key = ((tensor * factor).clamp(-6e4, 6e4).to(dtype) for tensor in (case.query, case.key))
    case = replace(case, query=query, key=key, value=torch.ones_like(case.value).to(dtype), dout=ones.to(dtype))
    got = run_library(case, deterministic=deterministic)
    for name, tensor in got.items():
        assert tensor.isfinite().all(), f"{name} is not finite"
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 1e-2)
    torch.testing.assert_close(got["out"].double(), case.dout.double(), rtol=tolerance, atol=0)
    summed = got["dvalue"].double().sum(1)
    torch.testing.assert_close(summed, torch.full_like(summed, 2 * 130), rtol=tolerance, atol=0)


@pytest.mark.parametrize("size", [2.0**27, 2.0**50])
def test_large_products(size: float) -> None:
    """query and key of a size that only float32 and float64 hold."""
    for dtype in set(dtypes()) - {torch.bfloat16, torch.float16}:
        case = integer_case(96, dtype)
        check(replace(case, query=case.query * size, key=case.key * size))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [3e2, 1e9, 1e30, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("sign", SIGNS)
def test_few_rows(dtype: torch.dtype, rows: int, size: float, sign: int) -> None:
    """A forward that splits keys puts parts together whose maxima may be large."""
    bias_dtype = dtype if dtype == torch.float64 else torch.float32
    keys = 300 if dtype == torch.float64 else 2500  # float64 has one way for all, which adds one number after the other
    for kind in ("constant", "ties"):
        case = integer_case(64, dtype, rows=rows, keys=keys)
        check(replace(case, bias=biases(kind, sign * size, keys).to(bias_dtype)))
    if size < 1e30:
        check(integer_case(64, dtype, rows=rows, keys=keys, scale=size))


@pytest.mark.parametrize("size", [1e2, 1e9, 1e30])
def test_softcaps(dtype: torch.dtype, size: float) -> None:
    """Capped scores are those that a bias is added to."""
    case = integer_case(64, dtype, softcap=8.0)
    check(replace(case, bias=biases("constant", size, 150)))


@pytest.mark.parametrize("softcap", [1e-50, 1e-40, 1e-31, 1.1e30, 1e38])
def test_softcaps_without_an_inverse(softcap: float) -> None:
    query = torch.zeros(1, 2, 1, 8, dtype=default_dtype())
    with pytest.raises(ValueError, match="softcap must be 0 or between 1e-30 and 1e30, but in float64; got softcap 1"):
        flash_dmattn.attention(query, query, query, softcap=softcap)


@pytest.mark.parametrize("softcap", [1e-30, 1e-10, 1e10, 1e30])
def test_extreme_softcaps(dtype: torch.dtype, softcap: float) -> None:
    """The smallest leave nothing of the scores, not even where they are 0; the largest change nothing."""
    case = make_case(1, 2, 1, 70, 150, dtype=dtype, softcap=softcap, with_dlse=True)
    case.query[:, 3] = 0
    assert_case_close(case, run_library(case))


def test_left_padding_as_an_additive_mask(dtype: torch.dtype) -> None:
    """Rows that a mask of -1e9 hides altogether: all their scores are the same number, as in the framework."""
    case = integer_case(64, dtype, rows=150, is_causal=False)
    row, key = torch.arange(150)[:, None], torch.arange(150)
    hidden = (key > row) | (key < 20)
    case = replace(case, bias=torch.zeros(1, 1, 150, 150).masked_fill(hidden, -1e9))
    check(case)
