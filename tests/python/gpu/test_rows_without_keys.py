"""Blocks of rows that see no key at all, of which there are many."""

from __future__ import annotations

import math

import pytest
import torch
from flash_dmattn import attention

pytestmark = pytest.mark.devices("cuda")


@pytest.mark.parametrize("hidden_by", ["mask", "lengths"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_queries_do_not_come_out(head_dim: int, hidden_by: str) -> None:
    """Results are put where queries arrive, which nothing waits for if there is no key: some are late."""
    query = torch.full((4, 4096, 32, head_dim), math.nan, dtype=torch.bfloat16)
    key = torch.randn(4, 256, 32, head_dim, dtype=torch.bfloat16)
    hides = {
        "mask": {"mask": torch.zeros(1, 1, 4096, 256, dtype=torch.bool)},
        "lengths": {"seqlens_k": torch.zeros(4, dtype=torch.int32)},
    }[hidden_by]
    out, lse = attention(query, key, key, **hides, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
