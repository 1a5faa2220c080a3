"""Checks of what never reaches the library: argument types, which only Python can turn into a TypeError, and layouts,
for which there are no kernels. Values are checked by the library."""

import math
import sys
import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path

import torch
from torch import Tensor

_PACKAGE = str(Path(__file__).parent) + "/"


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {name} of type {type(value).__name__}")
    check_layout(name, value)


def check_optional_tensor(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None; got {name} of type {type(value).__name__}")
    check_layout(name, value)


def check_layout(name: str, tensor: Tensor) -> None:
    """Refuses sparse, jagged and opaque tensors, for which torch's dispatcher would miss an operator."""
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise ValueError(f"{name} must be a dense tensor; got {name} with layout {layout}")


def warn_of_two_readings(name: str, tensor: Tensor, batch: int, rows: int, keys: int) -> None:
    """Warns of a mask or bias (Sq, Sk) that may be meant as (B, Sk), once for every place of a call.

    Not in compiled code, which a warning would split into several graphs.
    """
    if tensor.dim() != 2 or torch.compiler.is_compiling():
        return
    if batch == rows and rows > 1 and tensor.shape == (rows, keys):
        warnings.warn(
            f"{name} {tuple(tensor.shape)} is read as (Sq, Sk), but with B = Sq = {rows} it may be meant as (B, Sk): "
            f"give {name}[:, None, :] if so, else {name}[None, None], which says the same without this warning",
            stacklevel=_callers_stacklevel(),
        )


def _callers_stacklevel() -> int:
    """The stacklevel with which the function that calls this one warns in the name of who called the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool; got {name} of type {type(value).__name__}")


def as_int(name: str, value: object) -> int:
    """The value as an integer, which the library judges if it is one of 64 bits.

    Raises:
        TypeError: it is no integer. ValueError: it does not fit 64 bits.
    """
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int; got {name} of type {type(value).__name__}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit 64 bits; got {name} {value}")
    return int(value)


def as_size(name: str, value: object) -> int:
    """The value as a number of things.

    Raises:
        TypeError: it is no integer. ValueError: it is negative, or does not fit 64 bits.
    """
    value = as_int(name, value)
    if value < 0:
        raise ValueError(f"{name} must not be negative; got {name} {value}")
    return value


def as_length(name: str, value: object) -> int:
    """The value as a number of rows or keys.

    Raises:
        TypeError: it is no integer. ValueError: it is negative, or 2^31 or more.
    """
    value = as_int(name, value)
    if not 0 <= value < 2**31:
        raise ValueError(f"{name} must be between 0 and 2^31 - 1; got {name} {value}")
    return value


def broadcasts(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Whether all sizes are equal or 1, pair by pair."""
    return all(size == other or 1 in (size, other) for size, other in zip(sizes, others, strict=True))


def as_number(name: str, value: object) -> float:
    """The value as a float; an integer too large for one becomes an infinity, which the library refuses."""
    if isinstance(value, (float, torch.SymFloat)):
        return value
    if isinstance(value, torch.SymInt):
        return torch.sym_float(value)
    if isinstance(value, bool) or not isinstance(value, (int, Real)):
        raise TypeError(f"{name} must be a number; got {name} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def resolve_scale(scale: object, softmax_scale: object) -> float | None:
    """The one of the two names that was used, None if neither was.

    Raises:
        ValueError: both were. TypeError: it is not a number.
    """
    if softmax_scale is None:
        return None if scale is None else as_number("scale", scale)
    if scale is not None:
        raise ValueError(
            "softmax_scale is another name of scale: give only one of them; "
            f"got scale {scale!r}, softmax_scale {softmax_scale!r}"
        )
    return as_number("softmax_scale", softmax_scale)
