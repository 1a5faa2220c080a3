"""Gradients of queries that many blocks add up, of several batch elements and heads, in memory that held NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import make_case, run_library
from compare import assert_case_close
from flash_dmattn import KeyIndices, KeyIntervals
from torch import Tensor

pytestmark = pytest.mark.devices("cuda")

BATCH, HEADS, KEY_HEADS, TOKENS = 4, 8, 4, 1024  # 16 MiB of sums at head dim 128, from which on dquery may be stored


def tiles() -> Tensor:
    """Some tiles of rows meet one tile of keys."""
    shown = torch.rand(1, KEY_HEADS, TOKENS // 128, TOKENS // 128) < 0.12
    return shown.repeat_interleave(128, 2).repeat_interleave(128, 3)


def documents() -> KeyIntervals:
    return KeyIntervals.documents([0, 5, 130, 642, 750, TOKENS], TOKENS, is_causal=True)


MASKS: dict[str, Callable[[], Tensor | KeyIntervals | KeyIndices | None]] = {
    "none": lambda: None,
    "documents": documents,
    "window": lambda: KeyIntervals.sliding_window(200, 0, TOKENS),
    "tiles": tiles,
    "of_batch_elements": lambda: torch.rand(BATCH, 1, 1, TOKENS) < 0.1,
    "lists": lambda: KeyIndices(torch.randint(TOKENS, (1, KEY_HEADS, TOKENS, 100), dtype=torch.int32)),
}


@pytest.fixture(autouse=True)
def _fill_free_memory() -> None:
    """Scratch memory is NaN where nobody writes it."""
    torch.cuda.empty_cache()
    torch.full((2**26,), torch.nan)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim, value_dim", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_every_sum_is_cleared_before_it_is_added_to(head_dim: int, value_dim: int, is_causal: bool, mask: str) -> None:
    sizes = (BATCH, HEADS, KEY_HEADS, TOKENS, TOKENS, head_dim)
    case = make_case(*sizes, value_dim=value_dim, dtype=torch.bfloat16, is_causal=is_causal)
    given = MASKS[mask]()
    shown = given if given is None or isinstance(given, Tensor) else given.dense_mask(TOKENS)
    assert_case_close(replace(case, mask=shown), run_library(replace(case, mask=given)))


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("keys", [600, 700])
def test_few_tiles_of_keys(mask: bool, keys: int) -> None:
    """Hardly any works, and many rows."""
    case = make_case(1, 4, 4, 4096, keys, 128, dtype=torch.bfloat16)
    if mask:
        case = replace(case, mask=torch.rand(1, 1, 4096, keys) < 0.5)
    assert_case_close(case, run_library(case))
