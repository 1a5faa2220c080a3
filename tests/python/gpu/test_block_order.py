"""Calls of so many blocks that they do not all run at once: the last are started longest first, and on Hopper blocks
stay for several works."""

from __future__ import annotations

import pytest
import torch
from cases import assert_near, assert_same_bits, make_case, run_library
from compare import assert_case_close
from oracle import Case, reference
from torch import Tensor

pytestmark = pytest.mark.devices("cuda")


def unequal_tiles(heads: int, rows: int, keys: int) -> Tensor:
    """bool (1, heads, rows, keys) of 64 x 64 tiles, of which some rows of tiles see none and others all."""
    density = torch.rand(1, heads, rows // 64, 1) ** 3
    tiles = torch.rand(1, heads, rows // 64, keys // 64) < density
    tiles[:, :, 0] = False
    return tiles.repeat_interleave(64, 2).repeat_interleave(64, 3)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("mask_heads", [1, 32])
@pytest.mark.parametrize("keys", [256, 6144])
def test_every_block_runs_once(mask_heads: int, keys: int, head_dim: int) -> None:
    """32 x 4 heads of 8 tiles of rows, and of keys in ranges, or in lists as few of many keys are seen."""
    case = make_case(4, 32, 32, 1024, keys, head_dim, bias=(1, 32, keys))
    mask = unequal_tiles(mask_heads, 1024, 256)
    if keys > 256:
        mask = torch.cat([mask, torch.zeros(*mask.shape[:3], keys - 256, dtype=torch.bool)], dim=3)
        mask = mask[..., torch.randperm(keys)]
    case = Case(**{**vars(case), "mask": mask})
    got = run_library(case)
    for first in range(0, 32, 2):  # a few at a time, as the reference holds many arrays of scores
        heads = slice(first, first + 2)
        assert_case_close(_part(case, heads), {name: _heads_of(name, tensor, heads) for name, tensor in got.items()})


def _part(case: Case, heads: slice) -> Case:
    """Of as many query as key heads."""
    tokens = {name: getattr(case, name)[:, :, heads] for name in ("query", "key", "value", "dout")}
    mask = case.mask[:, heads] if case.mask.shape[1] > 1 else case.mask
    return Case(**tokens, mask=mask, bias=case.bias[:, heads])


def _heads_of(name: str, result: Tensor, heads: slice) -> Tensor:
    return result[:, heads] if name in ("lse", "dbias") else result[:, :, heads]


@pytest.mark.parametrize("batches, mask_heads, key_heads", [(1, 1, 12), (2, 1, 12), (1, 12, 12), (1, 1, 6), (1, 1, 5)])
@pytest.mark.parametrize("head_dim, value_dim", [(64, 64), (128, 128), (192, 128)])
def test_many_works_of_lists(batches: int, mask_heads: int, key_heads: int, head_dim: int, value_dim: int) -> None:
    """More works than blocks take in one round: lists of keys for every 128 rows, which all heads and batch elements
    share or not."""
    rows, keys, pool = 2048, 6000, 1000
    case = make_case(2, key_heads, key_heads, rows, keys, head_dim, value_dim=value_dim, bias=(1, key_heads, keys))
    scores = torch.rand(batches, mask_heads, rows // 128, keys)
    pools = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(pool).indices, True)
    seen = pools.repeat_interleave(128, 2) & (torch.rand(batches, mask_heads, rows, keys) < 0.7)
    case = Case(**{**vars(case), "mask": seen})
    got = run_library(case)
    for first in range(0, key_heads, 3):  # a few at a time, as the reference holds many arrays of scores
        heads = slice(first, min(first + 3, key_heads))
        assert_case_close(_part(case, heads), {name: _heads_of(name, tensor, heads) for name, tensor in got.items()})


@pytest.mark.parametrize("key_heads", [2, 32])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("kind", ["full", "causal", "lengths", "tiles", "lists"])
def test_huge_rows_among_others(kind: str, head_dim: int, key_heads: int) -> None:
    """Rows with huge scores are computed again, wherever they are among the works of a block: here in every third head
    those of one tile or, for some, of all."""
    heads, rows, keys = 32, 900, 700
    case = make_case(2, heads, key_heads, rows, keys, head_dim)
    query = case.query.clone()
    query[0, 130:200, ::3] *= 2.0**16
    query[1, :, ::6] *= 2.0**16
    case = Case(**{**vars(case), "query": query})
    if kind == "tiles":
        case = Case(**{**vars(case), "mask": unequal_tiles(1, 1024, 704)[:, :, :rows, :keys]})
    elif kind == "lists":
        case = Case(**{**vars(case), "mask": torch.rand(1, key_heads, rows, keys) < torch.rand(keys) ** 8})
    else:
        lengths = torch.tensor([keys, 300], dtype=torch.int32) if kind == "lengths" else None
        options = {**case.options, "is_causal": kind == "causal", "seqlens_k": lengths}
        case = Case(**{**vars(case), "options": options})
    got = run_library(case, needs=())
    expected = reference(case)
    for name in ("out", "lse"):
        assert_near(got[name], expected[name].value)


@pytest.mark.parametrize("head_dim", [32, 128])
def test_order_does_not_change_the_result(head_dim: int) -> None:
    case = make_case(4, 32, 8, 2048, 2048, head_dim)
    whole = Case(**{**vars(case), "mask": unequal_tiles(1, 2048, 2048)})
    got = run_library(whole, deterministic=True)
    for first in range(0, 32, 4):  # of so few that they are not ordered
        heads, key_heads = slice(first, first + 4), slice(first // 4, first // 4 + 1)
        for batch in (slice(0, 1), slice(3, 4)):
            rows = (batch, slice(None), heads)
            part = Case(
                whole.query[rows],
                whole.key[batch, :, key_heads],
                whole.value[batch, :, key_heads],
                whole.dout[rows],
                mask=whole.mask,
            )
            got_part = run_library(part, deterministic=True)
            expected = {"out": got["out"][rows], "lse": got["lse"][batch, heads], "dquery": got["dquery"][rows]}
            assert_case_close(part, {**got_part, "dquery": expected["dquery"]})
            # Not of keys, nor where blocks take turns at the sums of queries, as on Hopper above head dim 32: how such
            # sums are grouped depends on how many heads there are.
            if head_dim > 32 and torch.cuda.get_device_capability() == (9, 0):
                del expected["dquery"]
            assert_same_bits(expected, got_part)
