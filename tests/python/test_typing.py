"""Annotations keep up with the functions that they describe. `make check-types` looks at a client of them."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable
from pathlib import Path

import flash_dmattn
import pytest


@pytest.mark.parametrize("function", [flash_dmattn.attention, flash_dmattn.dynamic_mask_attention])
def test_overloads_take_what_the_function_takes(function: Callable) -> None:
    overloads = typing.get_overloads(function)
    assert len(overloads) == 3
    expected = dict(inspect.signature(function).parameters)
    chooses = expected.pop("return_lse")
    for overload in overloads:
        got = dict(inspect.signature(overload).parameters)
        assert got.pop("return_lse").kind is chooses.kind
        assert got == expected


def test_drop_in_overloads_take_what_the_function_takes() -> None:
    function = flash_dmattn.flash_dmattn_func
    expected = inspect.signature(function).parameters
    for overload in typing.get_overloads(function):
        got = inspect.signature(overload).parameters
        assert got.keys() == expected.keys()
        assert all(
            got[name].annotation == expected[name].annotation and got[name].default == expected[name].default
            for name in expected
            if name != "return_attn_probs"
        )


def test_package_says_that_it_is_typed() -> None:
    assert (Path(flash_dmattn.__file__).parent / "py.typed").is_file()


def test_completion_offers_public_names_only() -> None:
    offered = dir(flash_dmattn)
    assert set(flash_dmattn.__all__) <= set(offered)
    assert not [name for name in offered if name.startswith("_") and name != "__version__"]
    assert all(hasattr(flash_dmattn, name) for name in offered)


@pytest.mark.parametrize("name", ["distributed", "integrations.doge", "utils.mask"])
def test_completion_in_a_public_module_offers_its_own_names(name: str) -> None:
    module = importlib.import_module(f"flash_dmattn.{name}")
    assert dir(module) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public).__module__.startswith("flash_dmattn.")
