"""The equivalence protocols of the original package: forward and backward over its configurations, in bfloat16, with
the biases that its models make.

A bias is exp(softplus(values @ projection) * A), one number a key, and the keys of highest bias are visible: biases
reach exp(87), beside which float32 keeps nothing of a product. The agreement that the protocols measure is the share of
elements within their tolerances; they ask for 95 %, here it is 99.9 %, against the fp64 oracle. On the CPU lengths and
the number of visible keys are an eighth of the protocols'.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from cases import run_library, to_device
from oracle import Case, Expected, framework, reference
from torch import Tensor

pytestmark = pytest.mark.devices("cpu", "cuda")

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
VISIBLE_KEYS = 1024
CPU_SHARE = 8
HEADS, KEY_HEADS = 2, 1
FIRST_SEED = 400  # with which no bias overflows bfloat16: attention to an infinite one is NaN by definition
AGREEMENT = 0.999


class Configuration(NamedTuple):
    seed: int
    head_dim: int
    length: int
    is_causal: bool

    def __str__(self) -> str:
        return f"D{self.head_dim}-{self.length}-{'causal' if self.is_causal else 'full'}"


def configurations(*head_dims: int) -> list[Configuration]:
    sizes = itertools.product(head_dims, LENGTHS, (False, True))
    return [Configuration(seed, *of_one) for seed, of_one in enumerate(sizes, FIRST_SEED)]


FORWARD = configurations(32, 64, 96, 128, 192, 256)
BACKWARD = configurations(32, 64, 96, 128)
assert (len(FORWARD), len(BACKWARD)) == (72, 48)


def make_inputs(configuration: Configuration, device: torch.device) -> Case:
    """Normal inputs and the bias and mask that come of the values, (1, 1, Sq, Sk) as the protocols pass them."""
    share = CPU_SHARE if device.type == "cpu" else 1
    length, window, head_dim = configuration.length // share, VISIBLE_KEYS // share, configuration.head_dim
    generator = torch.Generator().manual_seed(configuration.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").bfloat16()

    query, key, value = (normal(1, length, heads, head_dim) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    projection, growth = normal(KEY_HEADS, KEY_HEADS * head_dim), normal(KEY_HEADS)
    steps = torch.nn.functional.softplus(value.flatten(2) @ projection.mT)
    key_bias = torch.exp(steps * growth).mT[:, :, None]  # (1, 1, 1, Sk)
    assert key_bias.isfinite().all()

    lowest = torch.finfo(torch.bfloat16).min
    visible = torch.ones(length, length, dtype=torch.bool, device="cpu")
    if configuration.is_causal:
        visible = visible.tril()
    bias = key_bias.expand(-1, -1, length, -1).masked_fill(~visible, lowest)
    best = torch.zeros_like(bias, dtype=torch.bool)
    best.scatter_(-1, bias.topk(min(window, length)).indices, True)
    mask = best & visible
    case = Case(
        query,
        key,
        value,
        dout=torch.ones_like(query),
        mask=mask,
        bias=bias.masked_fill(~mask, lowest),
        options={"is_causal": configuration.is_causal, "scale": 1 / math.sqrt(head_dim)},
    )
    return Case(**to_device(vars(case)))


def agreement(got: Tensor, expected: Expected, tolerance: float) -> float:
    """The share of elements within `tolerance`, absolute and relative; a NaN is within nothing."""
    value, result = expected.value.to(torch.bfloat16).double(), got.to(torch.bfloat16).double()
    return ((value - result).abs() <= tolerance + tolerance * result.abs()).double().mean().item()


def assert_agreement(case: Case, got: dict[str, Tensor], names: Sequence[str], tolerance: float) -> None:
    expected, unfused = reference(case), framework(case, torch.float32)
    if any(agreement(unfused[name], expected[name], tolerance) < AGREEMENT for name in names):
        # What float32 rounds away of the scores decides between keys, so that no float32 attention can agree.
        expected = reference(case, float32_scores=True)
    for name in names:
        share = agreement(got[name], expected[name], tolerance)
        assert share >= AGREEMENT, (
            f"{name}: {share:.4%} of the elements agree; the highest bias is {case.bias.max().item():.2e}"
        )


@pytest.mark.parametrize("configuration", FORWARD, ids=str)
def test_forward(configuration: Configuration, device: torch.device) -> None:
    case = make_inputs(configuration, device)
    assert_agreement(case, run_library(case, needs=(), deterministic=True), ["out"], tolerance=1e-2)


@pytest.mark.parametrize("configuration", BACKWARD, ids=str)
def test_backward(configuration: Configuration, device: torch.device) -> None:
    case = make_inputs(configuration, device)
    results = run_library(case, deterministic=False)
    assert_agreement(case, results, ["out", "dquery", "dkey", "dvalue", "dbias"], tolerance=1e-1)
