"""Checks of argument types, which only Python can turn into a TypeError. Values are checked by the library."""

import math
from numbers import Integral, Real

import torch
from torch import Tensor


def check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {name} of type {type(value).__name__}")


def check_optional_tensor(name: str, value: object) -> None:
    if value is not None and not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None; got {name} of type {type(value).__name__}")


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
