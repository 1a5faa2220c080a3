"""Forward and backward against the fp64 oracle, feature by feature."""

from __future__ import annotations

from dataclasses import replace

import flash_dmattn
import pytest
import torch
from cases import (
    INF,
    NAN,
    assert_hidden_products_do_not_matter,
    assert_same_bits,
    default_dtype,
    dtypes,
    lse_dtype,
    make_case,
    poison_unseen,
    relayout,
    run_library,
)
from compare import assert_case_close
from oracle import visibility

pytestmark = pytest.mark.devices("cpu", "cuda")
LOW = (torch.bfloat16, torch.float16)


def lengths(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32)


@pytest.mark.parametrize("head_dim", [1, 7, 8, 32, 33, 40, 64, 80, 96, 128, 129, 192, 255, 256])
def test_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    case = make_case(head_dim=head_dim, dtype=dtype, mask=(2, 1, 33, 47), bias=(2, 4, 33, 47), with_dlse=True)
    assert_case_close(case, run_library(case))


@pytest.mark.parametrize("heads, key_heads", [(1, 1), (4, 4), (6, 2), (5, 1), (3, 3)])
def test_head_groups(dtype: torch.dtype, heads: int, key_heads: int) -> None:
    case = make_case(heads=heads, key_heads=key_heads, dtype=dtype, bias=(2, key_heads, 1, 47), is_causal=True)
    assert_case_close(case, run_library(case))


@pytest.mark.parametrize("rows, keys", [(33, 47), (47, 33), (1, 65), (65, 1), (64, 64), (5, 0), (129, 300), (300, 129)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(dtype: torch.dtype, rows: int, keys: int, is_causal: bool) -> None:
    case = make_case(rows=rows, keys=keys, dtype=dtype, bias=(2, 2, 1, keys), is_causal=is_causal, with_dlse=True)
    assert_case_close(case, run_library(case))


@pytest.mark.parametrize("rows, keys", [(20, 50_000), (50_000, 20)])
def test_long_sums(rows: int, keys: int) -> None:
    """A sum of equal terms rounds the same way again and again. One of sums of 256 terms has the error of 256 roundings
    and of as many as there are sums, at most; one of all terms in turn would have twenty times that here."""
    case = make_case(1, 2, 1, rows, keys, head_dim=16, dtype=default_dtype())
    equal = {name: torch.full_like(getattr(case, name), 0.1) for name in ("query", "key", "value", "dout")}
    got = run_library(replace(case, **equal))
    term = equal["value"][0, 0, 0, 0].double()
    single, own = torch.finfo(torch.float32).eps, torch.finfo(default_dtype()).eps
    bound = max((256 + max(rows, keys) / 256) * single, own)  # half of it if products and sums are rounded at once
    for name, expected in (("out", term), ("dvalue", 2 * rows / keys * term)):
        torch.testing.assert_close(got[name].double(), expected.expand_as(got[name]), rtol=bound, atol=0)


@pytest.mark.parametrize("shape", [(0, 7, 9, 4, 2), (2, 0, 9, 4, 2), (2, 7, 0, 4, 2), (2, 7, 9, 0, 1), (0, 0, 0, 0, 0)])
def test_zero_sizes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    batch, rows, keys, heads, key_heads = shape
    case = make_case(
        batch, heads, key_heads, rows, keys, dtype=dtype, mask=(1, 1, 1, 1), bias=(1, 1, 1, 1), density=1.0
    )
    got = run_library(case)
    assert got["out"].shape == (batch, rows, heads, 32) and not got["out"].any()
    assert got["lse"].shape == (batch, heads, rows) and (got["lse"] == -INF).all()
    for name in ("query", "key", "value", "bias"):
        gradient = got[f"d{name}"]
        assert gradient.shape == getattr(case, name).shape and not gradient.any()


@pytest.mark.parametrize("rows, keys", [(700, 700), (330, 1300), (1300, 330)])
@pytest.mark.parametrize("feature", ["causal", "window", "blocks", "random", "few_keys", "documents"])
def test_many_tiles(rows: int, keys: int, feature: str) -> None:
    """Several chunks of rows and blocks of listed keys, with the mask structures that a plan tells apart."""
    dtype = LOW[keys % 3 == 0] if feature in ("window", "few_keys") else default_dtype()
    case = make_case(1, 2, 1, rows, keys, dtype=dtype, bias=(1, 2, 1, keys), is_causal=feature == "causal")
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    mask = {
        "causal": None,
        "window": (key <= row) & (key > row - 200),
        "blocks": (torch.rand(rows // 50 + 1, keys // 30 + 1) < 0.2)
        .repeat_interleave(50, 0)
        .repeat_interleave(30, 1)[:rows, :keys],
        "random": torch.rand(rows, keys) < 0.02,
        "few_keys": (torch.rand(1, keys) < 0.4),
        "documents": row // 170 == key // 170,
    }[feature]
    case = poison_unseen(replace(case, mask=mask))
    assert_case_close(case, run_library(case))


@pytest.mark.parametrize("is_causal", [False, True])
def test_seqlens(dtype: torch.dtype, is_causal: bool) -> None:
    """Lengths end in the middle of tiles, leave no key, and are clamped to [0, Sk]."""
    counts = lengths(47, 13, 0, 1000, -5, 1)
    case = make_case(6, dtype=dtype, bias=(6, 1, 33, 47), is_causal=is_causal, seqlens_k=counts, with_dlse=True)
    case = poison_unseen(case)
    assert_case_close(case, run_library(case))


@pytest.mark.parametrize("softcap", [0.5, 2.0, 30.0])
def test_softcap(dtype: torch.dtype, softcap: float) -> None:
    case = make_case(dtype=dtype, bias=(1, 4, 33, 47), softcap=softcap, scale=0.4, with_dlse=True)
    assert_case_close(case, run_library(case))


@pytest.mark.parametrize("scale", [0.0, -0.25, 1.0, 0.3])
def test_scale(dtype: torch.dtype, scale: float) -> None:
    case = make_case(dtype=dtype, scale=scale, is_causal=True)
    assert_case_close(case, run_library(case))


FORMS = [
    *[(b, h, r, k) for b in (1, 2) for h in (1, 2, 4) for r, k in ((1, 47), (33, 1), (33, 47), (1, 1))],
    *[(1, 1, 47), (2, 2, 47), (2, 4, 47), (1, 4, 1)],
    *[(33, 47), (1, 47), (33, 1)],
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_mask_forms(form: tuple[int, ...]) -> None:
    other = FORMS[(FORMS.index(form) * 7 + 3) % len(FORMS)]
    case = poison_unseen(make_case(mask=form, bias=other, with_dlse=True))
    assert_case_close(case, run_library(case))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("bias_dtype", ["query", "float32"])
def test_bias_forms(form: tuple[int, ...], bias_dtype: str) -> None:
    dtype = dtypes()[FORMS.index(form) % len(dtypes())]
    as_float32 = torch.float32 if bias_dtype == "float32" else None
    case = make_case(dtype=dtype, bias=form, bias_dtype=as_float32, is_causal=True)
    got = run_library(case)
    assert got["dbias"].shape == form and got["dbias"].dtype == case.bias.dtype
    assert_case_close(case, got)


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "bias", "dout"])
@pytest.mark.parametrize("layout", ["transposed", "padded", "offset", "expanded", "strided"])
def test_layouts(dtype: torch.dtype, name: str, layout: str) -> None:
    case = make_case(dtype=dtype, mask=(2, 4, 33, 47), bias=(2, 4, 33, 47), head_dim=40)
    view = relayout(getattr(case, name), layout)
    before = view.clone()
    case = replace(case, **{name: view})
    got = run_library(case)
    assert torch.equal(view, before), f"{name} was written to"
    assert all(tensor.is_contiguous() for tensor in got.values())
    assert_case_close(case, got)


def test_expanded_bias_gradient_has_its_logical_shape(dtype: torch.dtype) -> None:
    bias = torch.randn(1, 1, 1, 47).to(dtype).expand(2, 4, 33, 47)
    case = replace(make_case(dtype=dtype), bias=bias)
    got = run_library(case)
    assert got["dbias"].shape == bias.shape
    assert_case_close(case, got)


@pytest.mark.parametrize(
    "wanted", [("bias",), ("query",), ("key",), ("value",), ("query", "bias"), ("key", "value"), ()]
)
def test_each_gradient_alone(dtype: torch.dtype, wanted: tuple[str, ...]) -> None:
    case = make_case(dtype=dtype, mask=(2, 1, 33, 47), bias=(1, 4, 1, 47), with_dlse=True)
    got = run_library(case, needs=wanted)
    assert set(got) == {"out", "lse", *(f"d{name}" for name in wanted)}
    assert_case_close(case, got)


def test_result_dtypes_and_shapes(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, bias=(2, 2, 47), bias_dtype=torch.float32)
    got = run_library(case)
    assert got["out"].dtype == dtype and got["out"].shape == case.query.shape
    assert got["lse"].dtype == lse_dtype(dtype) and got["lse"].shape == (2, 4, 33)
    assert got["dbias"].dtype == torch.float32
    for name in ("query", "key", "value"):
        assert got[f"d{name}"].dtype == dtype and got[f"d{name}"].shape == getattr(case, name).shape
    assert all(tensor.is_contiguous() for tensor in got.values())


def test_results_do_not_alias(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, bias=(2, 4, 33, 47))
    first, second = run_library(case), run_library(case)
    inputs = [case.query, case.key, case.value, case.bias, case.dout]
    tensors = [*first.values(), *second.values(), *inputs]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    kept = {name: tensor.clone() for name, tensor in second.items()}
    for tensor in first.values():
        tensor.fill_(7)
    assert_same_bits(second, kept)


# ---- Rows without keys and numbers that are not finite.


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("form", [(2, 4, 33, 47), (2, 2, 33, 1), (2, 1, 1, 47), (2, 4, 47), (33, 47)], ids=str)
def test_hidden_poison_touches_nothing(dtype: torch.dtype, form: tuple[int, ...], poison: float) -> None:
    case = make_case(dtype=dtype, mask=form, bias=(2, 4, 33, 47), density=0.05, is_causal=True, with_dlse=True)
    got = run_library(poison_unseen(case, poison))
    assert_case_close(poison_unseen(case, poison), got)
    assert all(tensor.isfinite().all() for name, tensor in got.items() if name != "lse")


def test_rows_without_keys(dtype: torch.dtype) -> None:
    mask = torch.ones(2, 1, 33, 1, dtype=torch.bool)
    mask[:, :, 3:30:2] = False
    case = poison_unseen(replace(make_case(dtype=dtype, with_dlse=True), mask=mask))
    got = run_library(case)
    assert not got["out"][:, 3:30:2].any() and not got["dquery"][:, 3:30:2].any()
    assert (got["lse"][:, :, 3:30:2] == -INF).all()
    assert_case_close(case, got)


def test_nothing_visible_at_all(dtype: torch.dtype) -> None:
    case = poison_unseen(make_case(dtype=dtype, mask=(1, 1, 1, 47), bias=(2, 2, 47), density=0.0, with_dlse=True))
    got = run_library(case)
    assert (got.pop("lse") == -INF).all()
    assert not any(tensor.any() for tensor in got.values())


def test_bias_of_minus_infinity(dtype: torch.dtype) -> None:
    """It hides a key without a mask; a row that has nothing else is empty."""
    bias = torch.where(torch.rand(2, 4, 33, 47) < 0.5, -INF, 0.0)
    bias[:, :, ::5] = -INF
    case = replace(make_case(dtype=dtype), bias=bias.to(dtype))
    got = run_library(case)
    assert (got["lse"][:, :, ::5] == -INF).all() and not got["out"][:, ::5].any()
    assert_case_close(case, got)


def test_bias_of_the_lowest_finite_value(dtype: torch.dtype) -> None:
    """The other habit of hiding keys: a row that has nothing else weighs its keys as they are."""
    bias = torch.zeros(2, 1, 33, 47, dtype=dtype)
    bias[:, :, :, 20:] = torch.finfo(dtype).min / 2
    bias[:, :, 5] = torch.finfo(dtype).min / 2
    case = replace(make_case(dtype=dtype), bias=bias)
    got = run_library(case, needs=("query", "key", "value"))
    assert all(tensor.isfinite().all() for tensor in got.values())
    rows = [row for row in range(33) if row != 5]
    without = replace(case, mask=bias == 0, bias=None)
    without.mask[:, :, 5] = True
    torch.testing.assert_close(got["out"][:, rows], run_library(without)["out"][:, rows])


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "dout"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_visible_poison_comes_out(dtype: torch.dtype, name: str, bad: float) -> None:
    """It reaches what sees it and may reach its (batch, key head), but no other."""
    case = make_case(dtype=dtype, bias=(2, 4, 33, 47), is_causal=True)
    tensor = getattr(case, name).clone()
    place = (1, 3, 20, 11) if name == "bias" else (1, 11, tensor.size(2) - 1, 5)
    tensor[place] = bad
    if name in ("query", "key") and bad == INF:
        tensor[place[:3]] = NAN  # one Inf may also make a score -Inf, which is a hidden key
    case = replace(case, **{name: tensor})
    got = run_library(case)
    assert_case_close(case, got)
    if name != "dout":
        assert not got["out"][1].isfinite().all()
    assert not got["dquery"][1].isfinite().all()
    for result in ("out", "dquery", "dkey", "dvalue"):
        assert got[result][0].isfinite().all(), f"{result} of another batch element"
        assert got[result][1, :, 0].isfinite().all(), f"{result} of another key head"


@pytest.mark.parametrize("deterministic", [False, True])
def test_visible_nan_comes_out_where_probabilities_underflow(dtype: torch.dtype, deterministic: bool) -> None:
    case = make_case(dtype=dtype, bias=(2, 4, 33, 47), is_causal=True, scale=1000.0)
    value = case.value.clone()
    value[1, 11, 1, 5] = NAN  # which every row sees
    got = run_library(replace(case, value=value), deterministic=deterministic)
    visible = torch.ones(33, 47, dtype=torch.bool).tril(47 - 33)
    assert got["dbias"][1, 2:, visible].isnan().all()
    assert not got["dbias"][1, 2:, ~visible].any()
    assert got["dbias"][1, :2].isfinite().all()


def test_visible_score_of_plus_infinity_breaks_its_row(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, bias=(2, 4, 33, 47))
    case.bias[0, 1, 7, 9] = INF
    got = run_library(case)
    assert got["out"][0, 7, 1].isnan().all()
    assert got["lse"][0, 1, 7].isnan() or got["lse"][0, 1, 7] == INF
    assert got["dquery"][0, 7, 1].isnan().all() and got["dvalue"][0, :, 0].isnan().all()
    others = torch.ones(2, 33, 4, dtype=torch.bool)
    others[0, 7, 1] = False
    assert got["out"][others].isfinite().all()


@pytest.mark.parametrize("bias", [None, (2, 1, 257)], ids=["plain", "biased"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hidden_products_out_of_range(dtype: torch.dtype, head_dim: int, bias: tuple[int, ...] | None) -> None:
    if dtype == torch.float16:
        pytest.skip("it has no such numbers")
    case = make_case(2, 4, 2, 270, 257, head_dim, dtype=dtype, bias=bias)
    assert_hidden_products_do_not_matter(case, run_library)


# ---- Regression cases of the original implementation.


@pytest.mark.parametrize("low", LOW, ids=str)
def test_odd_key_count_with_two_byte_types(low: torch.dtype) -> None:
    """Rows of 4095 two-byte elements are aligned to two bytes only."""
    case = make_case(1, 2, 1, 40, 4095, 64, dtype=low, mask=(1, 1, 40, 4095), bias=(1, 2, 40, 4095))
    assert_case_close(case, run_library(case))


def test_per_key_bias_bfloat16_4196() -> None:
    case = make_case(1, 4, 2, 40, 4196, 128, dtype=torch.bfloat16, bias=(1, 2, 4196), mask=(1, 2, 4196))
    assert_case_close(case, run_library(case))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("low", LOW, ids=str)
def test_single_query(low: torch.dtype, head_dim: int) -> None:
    """Decoding: one row that sees a whole cache of which only a part exists."""
    case = make_case(3, 4, 2, 1, 517, head_dim, dtype=low, is_causal=True, seqlens_k=lengths(517, 77, 1))
    case = poison_unseen(case)
    assert_case_close(case, run_library(case))


# ---- The same bits again.


@pytest.mark.parametrize("bias", [(2, 4, 130, 150), (2, 2, 1, 150), (1, 1, 130, 150), (1, 1, 1, 1)], ids=str)
def test_deterministic_for_any_thread_count(dtype: torch.dtype, bias: tuple[int, ...]) -> None:
    case = make_case(rows=130, keys=150, dtype=dtype, mask=(2, 1, 130, 150), bias=bias, with_dlse=True)
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(run_library(case, deterministic=True))
    for other in results[1:]:
        assert_same_bits(results[0], other)


def test_causal_is_the_mask_it_stands_for(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, is_causal=True, seqlens_k=lengths(47, 20))
    as_mask = replace(case, mask=visibility(case)[:, :1].clone(), options={})
    left, right = run_library(case), run_library(as_mask)
    assert_case_close(as_mask, left)
    assert_case_close(case, right)


@pytest.mark.devices("cpu")
def test_merging_partial_results_by_lse() -> None:
    """lse and its gradient are enough to join attention over two halves of the keys."""
    case = make_case(dtype=torch.float64, keys=48)
    leaves = [tensor.clone().requires_grad_() for tensor in (case.query, case.key, case.value)]

    def joined(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        halves = [
            flash_dmattn.attention(query, key[:, part], value[:, part], return_lse=True)
            for part in (slice(0, 20), slice(20, 48))
        ]
        lse = torch.stack([lse for _, lse in halves])
        weights = lse.softmax(0).transpose(2, 3)[..., None]
        return sum(weight * out for weight, (out, _) in zip(weights, halves, strict=True))

    whole, parts = flash_dmattn.attention(*leaves), joined(*leaves)
    torch.testing.assert_close(whole, parts)
    for left, right in zip(
        torch.autograd.grad(whole, leaves, case.dout), torch.autograd.grad(parts, leaves, case.dout), strict=True
    ):
        torch.testing.assert_close(left, right)
