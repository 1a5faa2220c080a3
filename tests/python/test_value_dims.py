"""Values of another head dim than queries and keys, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import NAN, assert_near, assert_same_bits, make_case, poison_unseen, relayout, run_library
from compare import assert_case_close
from flash_dmattn import KeyIntervals, attention, dynamic_mask_attention, flash_dmattn_func, prepare_mask, select_keys
from torch_cases import leaves_of

pytestmark = pytest.mark.devices("cpu", "cuda")
HEAD_DIMS = [1, 40, 64, 128, 192, 256]
VALUE_DIMS = [1, 8, 33, 64, 96, 128, 192, 256]


@pytest.mark.parametrize("value_dim", VALUE_DIMS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    bias = (2, 4, 33, 47) if value_dim % 64 else (2, 1, 1, 47)
    case = make_case(
        head_dim=head_dim, value_dim=value_dim, dtype=dtype, mask=(2, 1, 33, 47), bias=bias, with_dlse=True
    )
    got = run_library(case)
    assert got["out"].shape == (2, 33, 4, value_dim) and got["dvalue"].shape == (2, 47, 2, value_dim)
    assert_case_close(case, got)


@pytest.mark.parametrize(
    "head_dim, value_dim", [(192, 128), (64, 128), (128, 64), (40, 72), (96, 32), (256, 8), (7, 5)]
)
@pytest.mark.parametrize("shown", ["all", "causal", "lengths", "mask", "key mask", "selection"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_several_tiles(dtype: torch.dtype, head_dim: int, value_dim: int, shown: str, deterministic: bool) -> None:
    """With a bias that is the same for every row, since GPUs have other kernels for one that is not."""
    rows, keys = 270, 257
    options = {"is_causal": shown in ("causal", "lengths")}
    if shown == "lengths":
        options["seqlens_k"] = torch.tensor([140], dtype=torch.int32)
    mask = {"mask": (1, 1, rows, keys), "key mask": (1, 1, keys)}.get(shown)
    case = make_case(
        1, 2, 1, rows, keys, head_dim, value_dim=value_dim, dtype=dtype, mask=mask, bias=(1, 1, keys), **options
    )
    kept = None
    if shown == "selection":
        kept = select_keys(case.bias, 50, seqlen_q=rows)
        case = replace(case, mask=kept.dense_mask(rows))
    case = poison_unseen(case)
    got = run_library(case if kept is None else replace(case, mask=kept), deterministic=deterministic)
    assert_case_close(case, got, few_elements=min(head_dim, value_dim) < 32)


@pytest.mark.parametrize("heads, key_heads", [(1, 1), (6, 2)])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"mask": (2, 1, 150, 170)}, {"mask": (1, 1, 170)}, {}])
@pytest.mark.parametrize("deterministic", [False, True])
def test_several_chunks(dtype: torch.dtype, heads: int, key_heads: int, options: dict, deterministic: bool) -> None:
    case = make_case(
        2, heads, key_heads, 150, 170, 24, value_dim=56, dtype=dtype, bias=(2, 1, 170), density=0.2, **options
    )
    assert_case_close(case, run_library(case, deterministic=deterministic))


@pytest.mark.parametrize("name", ["query", "key", "value", "dout"])
@pytest.mark.parametrize("layout", ["transposed", "padded", "offset", "expanded", "strided"])
def test_layouts(dtype: torch.dtype, name: str, layout: str) -> None:
    case = make_case(dtype=dtype, head_dim=40, value_dim=24, bias=(2, 4, 33, 47))
    case = replace(case, **{name: relayout(getattr(case, name), layout)})
    got = run_library(case)
    assert all(tensor.is_contiguous() for tensor in got.values())
    assert_case_close(case, got)


@pytest.mark.parametrize("head_dim, value_dim", [(24, 40), (40, 24)])
def test_hidden_poison_touches_nothing(dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    case = make_case(
        head_dim=head_dim, value_dim=value_dim, dtype=dtype, mask=(2, 4, 33, 47), density=0.05, with_dlse=True
    )
    case = poison_unseen(case, NAN)
    got = run_library(case)
    assert_case_close(case, got)
    assert all(tensor.isfinite().all() for name, tensor in got.items() if name != "lse")


@pytest.mark.parametrize("wanted", [("bias",), ("query",), ("key",), ("value",), ("key", "value")])
def test_each_gradient_alone(dtype: torch.dtype, wanted: tuple[str, ...]) -> None:
    case = make_case(dtype=dtype, head_dim=48, value_dim=20, bias=(1, 4, 1, 47), with_dlse=True)
    assert_case_close(case, run_library(case, needs=wanted))


def test_same_bits_for_any_thread_count(dtype: torch.dtype) -> None:
    case = make_case(2, 4, 2, 300, 310, 24, value_dim=40, dtype=dtype, bias=(1, 4, 1, 310), is_causal=True)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run_library(case, deterministic=True))
    assert_same_bits(*results)


def test_zero_sizes(dtype: torch.dtype) -> None:
    for sizes in ((0, 4, 2, 7, 9), (2, 4, 2, 0, 9), (2, 4, 2, 7, 0), (2, 0, 1, 7, 9)):
        batch, heads, key_heads, rows, keys = sizes
        got = run_library(make_case(*sizes, 8, value_dim=24, dtype=dtype))
        assert got["out"].shape == (batch, rows, heads, 24) and not got["out"].any()
        assert got["dvalue"].shape == (batch, keys, key_heads, 24) and not got["dvalue"].any()


@pytest.mark.devices("cpu")
def test_gradcheck() -> None:
    case = make_case(1, 4, 2, 5, 7, 4, value_dim=3, dtype=torch.float64, bias=(1, 2, 5, 7))

    def function(query, key, value, bias):
        return attention(query, key, value, bias=bias, is_causal=True, return_lse=True)

    assert torch.autograd.gradcheck(function, leaves_of(case), fast_mode=True)


@pytest.mark.parametrize("head_dim, value_dim", [(24, 40), (192, 128)])
def test_every_surface(head_dim: int, value_dim: int) -> None:
    """Intervals, prepared masks and dynamic masks, and the original's function, which adds the probabilities."""
    case = make_case(1, 4, 2, 33, 33, head_dim, value_dim=value_dim, bias=(1, 2, 33))
    tensors = case.query, case.key, case.value
    intervals = KeyIntervals.sliding_window(4, 0, 33, 33)
    mask = intervals.dense_mask(33)
    assert_case_close(replace(case, mask=mask), run_library(replace(case, mask=intervals)))
    assert_case_close(replace(case, mask=mask), run_library(replace(case, mask=prepare_mask(mask))))
    out, _, probs = flash_dmattn_func(*tensors, attn_mask=mask, attn_bias=case.bias, return_attn_probs=True)
    assert_near(out, attention(*tensors, mask=mask, bias=case.bias))
    value = case.value.repeat_interleave(2, 2).to(probs.dtype)
    assert_near(out, torch.einsum("bhij,bjhd->bihd", probs, value))
    out = dynamic_mask_attention(*tensors, case.bias, 64)
    assert_near(out, attention(*tensors, bias=case.bias, is_causal=True))
