"""Deterministic backwards of several chunks of rows: on Hopper their blocks wait for one another before they add to
sums, whichever kind of keys these are of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import assert_same_bits, make_case, poison_unseen, run_library
from compare import assert_case_close
from flash_dmattn import select_keys
from torch import Tensor

pytestmark = pytest.mark.devices("cuda")

ROWS, KEYS = 2300, 2500


def window() -> Tensor:
    row, key = torch.arange(ROWS)[:, None], torch.arange(KEYS)
    return (key <= row) & (key > row - 300)


def tiles(heads: int) -> Tensor:
    """Some rows see none, and some keys are seen by none."""
    seen = torch.rand(2, heads, ROWS // 128 + 1, KEYS // 128 + 1) < 0.3
    seen[:, :, 3] = False
    seen[..., 5] = False
    return seen.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :ROWS, :KEYS]


def lists_and_ranges() -> Tensor:
    """The first 1024 rows see few keys, which are listed, others all of a range, and the last ones none."""
    mask = torch.zeros(1, 1, ROWS, KEYS, dtype=torch.bool)
    mask[:, :, :1024] = torch.rand(KEYS) < 0.1
    mask[:, :, 1024:2048, 700:2000] = True
    return mask


MASKS = {
    "none": lambda: None,
    "window": window,
    "tiles": lambda: tiles(1),
    "tiles of each head": lambda: tiles(4),
    "top": lambda: select_keys(torch.randn(2, 2, KEYS), 400, seqlen_q=ROWS).dense_mask(ROWS),
    "random of each head": lambda: torch.rand(1, 4, ROWS, KEYS) < torch.rand(KEYS) ** 8,
    "lists and ranges": lists_and_ranges,
}


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_sums_have_one_order(kind: str, is_causal: bool, head_dim: int) -> None:
    """While other work keeps the GPU's schedule from being the same."""
    case = make_case(2, 4, 2, ROWS, KEYS, head_dim, bias=(1, 4, KEYS), is_causal=is_causal, with_dlse=True)
    case = replace(case, mask=MASKS[kind]())
    got = run_library(poison_unseen(case), deterministic=True)
    assert_case_close(case, got)
    noise, stream = torch.randn(1024, 1024), torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            for _ in range(5):
                noise = (noise @ noise).clamp(-1, 1)
        assert_same_bits(got, run_library(poison_unseen(case), deterministic=True))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_keys_in_the_lists_of_many_chunks(head_dim: int) -> None:
    """Of so many key heads that one chunk's lists fill a GPU. A sum of three parts depends on their order."""
    rows = 8192
    case = make_case(1, 64, 64, rows, rows, head_dim, is_causal=True)
    case = replace(case, mask=select_keys(torch.randn(1, 64, rows), 1024))
    got = run_library(case, deterministic=True)
    for _ in range(5):
        assert_same_bits(got, run_library(case, deterministic=True))


@pytest.mark.parametrize("key_heads", [1, 2, 40])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_works_than_run_at_once(head_dim: int, key_heads: int) -> None:
    """Of more key heads than there are tracks, and of few with many chunks."""
    rows = 16384 // (8 if key_heads == 40 else 1)
    case = make_case(1, key_heads, key_heads, rows, rows, head_dim, is_causal=True)
    mask = select_keys(torch.randn(1, key_heads, rows), rows // 8)
    case = replace(case, mask=mask)
    got = run_library(case, deterministic=True)
    for _ in range(3):
        assert_same_bits(got, run_library(case, deterministic=True))
    plain = run_library(case)
    for name in got:
        torch.testing.assert_close(got[name].float(), plain[name].float(), rtol=2e-2, atol=2e-2)
