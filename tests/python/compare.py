"""The numerical bar of docs/semantics.md: first where inf and NaN are, then how large the errors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from oracle import Case, Expected, framework, reference
from torch import Tensor

# Eps of the dtype that is forgiven per sum of magnitudes. In fp64 the reference rounds as much as the result does.
_FLOOR = {torch.float16: 0.5, torch.bfloat16: 0.5, torch.float32: 2.0, torch.float64: 32.0}
# lse is fp32 throughout, but the exponentials of two-byte types need not be better than their products by far.
_LSE_SLACK = 1 / 1024


def assert_same_positions(name: str, got: Tensor, expected: Expected) -> None:
    """inf and NaN are exactly where the reference, rounded to `got`'s dtype, has them.

    Where a non-finite number that is seen may have spread to (`tainted`), only this is asked: what the reference says
    is not finite must not come out as a number.
    """
    rounded = expected.value.to(got.dtype)
    swallowed = ~rounded.isfinite() & got.isfinite()
    assert not swallowed.any(), f"{name}: {int(swallowed.sum())} inf/NaN swallowed, first at {_first(swallowed)}"
    sound = ~expected.tainted
    for kind, left, right in (
        ("NaN", got.isnan(), rounded.isnan()),
        ("+inf", got == torch.inf, rounded == torch.inf),
        ("-inf", got == -torch.inf, rounded == -torch.inf),
    ):
        wrong = (left != right) & sound
        assert not wrong.any(), f"{name}: {kind} differs at {int(wrong.sum())} places, first at {_first(wrong)}"


def assert_close_to_oracle(
    name: str,
    got: Tensor,
    expected: Expected,
    yardstick: Tensor,
    dtype: torch.dtype,
    slack: float = 0.0,
    few_elements: bool = False,
) -> None:
    """`got` is right in its positions of inf/NaN, its relative error in norm and its largest error.

    `yardstick` is the framework's own result; both errors may be twice its error plus the floor, which is set by the
    dtype that is computed in (a fp32 bias beside bf16 queries has a bf16 gradient's errors), plus `slack`.

    In fp64 the bar also has one eps for each unit of score and lse in an exponent; with `few_elements` one of fp32.
    Over many elements the framework's error contains it; over a handful it may be missing by luck.
    """
    assert got.shape == expected.value.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(expected.value.shape)}"
    assert_same_positions(name, got, expected)
    finite = got.isfinite() & expected.value.isfinite()
    if not finite.any():
        return
    value, magnitude = expected.value[finite], expected.magnitude[finite]
    error = (got[finite].double() - value).abs()
    # Where the framework itself overflowed it measures nothing.
    allowed = 2 * (yardstick[finite].double() - value).abs().where(yardstick[finite].isfinite(), 0.0)
    share = max(_FLOOR[dtype] * torch.finfo(dtype).eps, torch.finfo(got.dtype).eps / 2)  # or the result's own rounding
    subnormal = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    floor = share * magnitude + slack + subnormal / 2
    if dtype == torch.float64:
        # The reference's exponents are rounded, too. The framework's error does not show that: it makes the same ones.
        floor += torch.finfo(dtype).eps * expected.exponent[finite]
    if few_elements:
        floor += min(torch.finfo(torch.float32).eps, share) * expected.exponent[finite]

    excess = error - floor - allowed.max()
    worst = int(excess.argmax())
    assert excess[worst] <= 0, (
        f"{name}: error {error[worst]:.3e} at {_nth(finite, worst)} (value {value[worst]:.6e}); "
        f"twice the framework's largest is {allowed.max():.3e}, the floor {floor[worst]:.3e}"
    )
    bar = allowed.norm() + floor.norm()
    assert error.norm() <= bar, (
        f"{name}: relative error {error.norm() / value.norm():.3e} in norm; twice the framework's and the floor make "
        f"{bar / value.norm():.3e}"
    )


def assert_case_close(
    case: Case, got: dict[str, Tensor], *, few_elements: bool = False, float32_scores: bool = False
) -> None:
    """Every result in `got` ("out", "lse", "dquery", ...) meets the bar. `float32_scores`: of `oracle.reference`."""
    dtype = case.query.dtype
    with _one_thread():  # on tensors this small more threads cost more than they bring
        expected = reference(case, float32_scores=float32_scores)
        yardstick = framework(case, dtype)
        if dtype != torch.float64:
            # lse is fp32 whatever the inputs are, so it is measured against a framework that computes in fp32.
            yardstick["lse"] = framework(case, torch.float32)["lse"]
    for name, tensor in got.items():
        is_low_lse = name == "lse" and dtype != torch.float64
        slack = _LSE_SLACK * torch.finfo(dtype).eps if is_low_lse else 0.0
        computed_in = torch.float32 if is_low_lse else dtype
        assert_close_to_oracle(name, tensor, expected[name], yardstick[name], computed_in, slack, few_elements)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())


def _nth(where: Tensor, n: int) -> tuple[int, ...]:
    return tuple(where.nonzero()[n].tolist())
