"""The numerical bar of docs/semantics.md: first where inf and NaN are, then how large the errors are."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

import torch
from oracle import Case, Expected, all_finite, framework, reference
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
    if all_finite(got) and all_finite(rounded):
        return
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
    everywhere = all_finite(got) and all_finite(expected.value)
    finite = None if everywhere else got.isfinite() & expected.value.isfinite()
    if got.numel() == 0 or not (everywhere or finite.any()):
        return

    def picked(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1) if everywhere else tensor[finite]  # which says the same, and takes far longer

    value, magnitude, measured = picked(expected.value), picked(expected.magnitude), picked(yardstick)
    error = (picked(got).double() - value).abs_()
    allowed = (measured.double() - value).abs_().mul_(2)
    if not all_finite(measured):  # where the framework itself overflowed it measures nothing
        allowed = allowed.where(measured.isfinite(), 0.0)
    share = max(_FLOOR[dtype] * torch.finfo(dtype).eps, torch.finfo(got.dtype).eps / 2)  # or the result's own rounding
    subnormal = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    floor = (share * magnitude).add_(slack + subnormal / 2)
    if dtype != torch.float64 and expected.underflow is not None:  # these probabilities may have become 0
        floor += picked(expected.underflow)
    if dtype == torch.float64:
        # The reference's exponents are rounded, too. The framework's error does not show that: it makes the same ones.
        floor += torch.finfo(dtype).eps * picked(expected.exponent)
    if few_elements:
        floor += min(torch.finfo(torch.float32).eps, share) * picked(expected.exponent)

    worst = int((error - floor).argmax())
    assert error[worst] <= floor[worst] + allowed.max(), (
        f"{name}: error {error[worst]:.3e} at {_nth(got, finite, worst)} (value {value[worst]:.6e}); "
        f"twice the framework's largest is {allowed.max():.3e}, the floor {floor[worst]:.3e}"
    )
    bar = allowed.norm() + floor.norm()
    assert error.norm() <= bar, (
        f"{name}: relative error {error.norm() / value.norm():.3e} in norm; twice the framework's and the floor make "
        f"{bar / value.norm():.3e}"
    )


def assert_case_close(
    case: Case, got: dict[str, Tensor], *, few_elements: bool | Container[str] = False, float32_scores: bool = False
) -> None:
    """Every result in `got` ("out", "lse", "dquery", ...) meets the bar. `few_elements`: all, none, or the names of
    those that are made of few; `float32_scores`: of `oracle.reference`."""
    dtype = case.query.dtype
    made_of_few = {name: few_elements if isinstance(few_elements, bool) else name in few_elements for name in got}
    gradients = not got.keys() <= {"out", "lse"}
    exponents = dtype == torch.float64 or any(made_of_few.values())
    with _one_thread():  # on tensors this small more threads cost more than they bring
        expected = reference(case, float32_scores=float32_scores, gradients=gradients, exponents=exponents)
        yardstick = framework(case, dtype, gradients=gradients)
        if dtype not in (torch.float64, torch.float32):
            # lse is fp32 whatever the inputs are, so it is measured against a framework that computes in fp32.
            yardstick["lse"] = framework(case, torch.float32, gradients=False)["lse"]
    for name, tensor in got.items():
        is_low_lse = name == "lse" and dtype != torch.float64
        slack = _LSE_SLACK * torch.finfo(dtype).eps if is_low_lse else 0.0
        computed_in = torch.float32 if is_low_lse else dtype
        assert_close_to_oracle(name, tensor, expected[name], yardstick[name], computed_in, slack, made_of_few[name])


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


def _nth(tensor: Tensor, where: Tensor | None, n: int) -> tuple[int, ...]:
    where = torch.ones_like(tensor, dtype=torch.bool) if where is None else where
    return tuple(where.nonzero()[n].tolist())
