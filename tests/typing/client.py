"""A client of the package as its users write them. `make check-types` looks at it with mypy and pyright, strict, and
nothing runs it."""

from typing import assert_type

import torch
from flash_dmattn import (
    KeyIntervals,
    PlanReport,
    PreparedMask,
    attention,
    dynamic_mask_attention,
    flash_dmattn_func,
    get_available_backends,
    plan_report,
    prepare_mask,
    select_keys,
)
from flash_dmattn.distributed import shard, unshard
from torch import Tensor
from torch.distributed import ProcessGroup

query = torch.randn(1, 16, 4, 8)
key = value = torch.randn(1, 16, 2, 8)
key_bias = torch.randn(1, 2, 16)


def with_lse(return_lse: bool) -> None:
    assert_type(attention(query, key, value), Tensor)
    assert_type(attention(query, key, value, return_lse=False), Tensor)
    assert_type(attention(query, key, value, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention(query, key, value, return_lse=return_lse), Tensor | tuple[Tensor, Tensor])
    assert_type(dynamic_mask_attention(query, key, value, key_bias, 4), Tensor)
    assert_type(dynamic_mask_attention(query, key, value, key_bias, 4, return_lse=True), tuple[Tensor, Tensor])
    dynamic_mask_attention(query, key, value, key_bias, 4, selection="per_key", is_causal=False)


def drop_in() -> None:
    assert_type(flash_dmattn_func(query, key, value, is_causal=True, softmax_scale=0.5), Tensor)
    out, lse, probabilities = flash_dmattn_func(query, key, value, return_attn_probs=True)
    assert_type((out, lse, probabilities), tuple[Tensor, Tensor, Tensor])


def masks() -> None:
    intervals = select_keys(key_bias, 4)
    assert_type(intervals, KeyIntervals)
    assert_type(KeyIntervals.sliding_window(3, 0, 16), KeyIntervals)
    prepared = prepare_mask(intervals)
    assert_type(prepared, PreparedMask)
    assert_type(prepared.kind, str)
    assert_type(attention(query, key, value, mask=prepared), Tensor)
    report = plan_report(query, (1, 16, 2, 8), mask=intervals)
    assert_type(report, PlanReport)
    assert_type(report.ratio, float)
    assert_type(get_available_backends(), list[str])


def across_ranks(group: ProcessGroup) -> None:
    assert_type(unshard(shard(query, group=group), group=group), Tensor)
