"""One small call of every kernel, forward and backward: what `make test-sanitize` reruns under compute-sanitizer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import make_case, poison_unseen, run_library
from compare import assert_case_close
from flash_dmattn import prepare_mask, select_keys

pytestmark = pytest.mark.devices("cuda")
HEAD_DIMS = [24, 64, 96, 128, 192, 256]  # one in every bucket, the first with padding


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("row_bias", [False, True])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention(dtype: torch.dtype, head_dim: int, planned: bool, row_bias: bool, deterministic: bool) -> None:
    rows, keys = 70, 133
    bias = (1, 2, rows, keys) if row_bias else (2, 1, keys)
    lengths = torch.tensor([keys, 77], dtype=torch.int32)
    case = make_case(
        2, 2, 1, rows, keys, head_dim, dtype=dtype, bias=bias, seqlens_k=lengths, is_causal=True, with_dlse=True
    )
    if planned:
        case = replace(case, mask=torch.rand(2, 1, rows, keys) < 0.3)
    case = poison_unseen(case)
    assert_case_close(case, run_library(case, deterministic=deterministic))


@pytest.mark.parametrize("form", ["key", "row and key", "transposed", "intervals"])
def test_masks(form: str) -> None:
    """Both ways to read a mask, lists and ranges, over two chunks of rows."""
    rows, keys = 1100, 200
    case = make_case(1, 2, 1, rows, keys, 32, bias=(1, 1, keys))
    mask = {
        "key": lambda: torch.rand(1, 1, keys) < 0.3,
        "row and key": lambda: torch.rand(1, 1, rows, keys) < 0.01,
        "transposed": lambda: torch.rand(1, 1, keys, rows).mT < 0.01,
        "intervals": lambda: select_keys(torch.randn(1, 1, keys), 20, seqlen_q=rows),
    }[form]()
    dense = mask.dense_mask(rows) if form == "intervals" else mask
    assert_case_close(replace(case, mask=dense), run_library(replace(case, mask=mask)))
    if form != "key":
        assert prepare_mask(dense).kind == ("intervals" if form == "intervals" else "mask")


@pytest.mark.parametrize("keys", [50, 3000, 40000])
@pytest.mark.parametrize("scores", [torch.float32, torch.bfloat16], ids=str)
def test_selection(keys: int, scores: torch.dtype) -> None:
    values = torch.randn(1, 2, keys).to(scores)
    got, expected = select_keys(values, 33), select_keys(values.cpu(), 33)
    assert torch.equal(got.end.cpu(), expected.end)
