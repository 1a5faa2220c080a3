"""Calls of a few query rows over many keys, which have a forward of their own: keys are split, and the parts merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import INF, NAN, assert_same_bits, default_dtype, make_case, poison_unseen, relayout, run_library
from compare import assert_case_close
from flash_dmattn import select_keys
from flash_dmattn._visibility import Visibility
from operators import FORWARD, forward_of
from oracle import Case, broadcast

# More than two splits of the CPU's, whose last one is odd.
KEYS = 2501


def decode_case(rows: int = 1, keys: int = KEYS, head_dim: int = 64, **settings: object) -> Case:
    return make_case(**({"batch": 2, "heads": 4, "key_heads": 2} | settings), rows=rows, keys=keys, head_dim=head_dim)


def check(case: Case) -> None:
    """The forward holds the bar as it is. An element of a gradient is often made of one row's probability here, whose
    rounding the framework's few elements may lack by luck."""
    got = run_library(case)
    assert_case_close(case, got, few_elements=got.keys() - {"out", "lse"})


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 13, 16, 17])
def test_rows(dtype: torch.dtype, rows: int, is_causal: bool) -> None:
    check(decode_case(rows, dtype=dtype, is_causal=is_causal, with_dlse=True))


@pytest.mark.parametrize("keys", [1, 2, 63, 64, 65, 255, 257, 1023, 1024, 1025, 4097, 17000])
def test_lengths(dtype: torch.dtype, keys: int) -> None:
    check(decode_case(3, keys, 32, dtype=dtype, is_causal=True))


@pytest.mark.parametrize("head_dim", [1, 2, 7, 8, 15, 16, 17, 24, 40, 63, 65, 96, 127, 128, 129, 200, 255, 256])
def test_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    check(decode_case(2, 1100, head_dim, dtype=dtype, mask=(2, 1, 1, 1100)))


@pytest.mark.devices("cpu", "cuda")
@pytest.mark.parametrize(
    "head_dim, value_dim", [(1, 256), (40, 33), (64, 8), (128, 192), (192, 128), (256, 1), (256, 96)]
)
@pytest.mark.parametrize("rows", [1, 16])
def test_value_dims(dtype: torch.dtype, rows: int, head_dim: int, value_dim: int) -> None:
    check(decode_case(rows, 1100, head_dim, value_dim=value_dim, dtype=dtype, mask=(2, 2, 1100), softcap=4.0))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "heads, key_heads", [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (7, 1), (8, 1), (8, 8), (20, 10), (64, 1)]
)
def test_head_groups(dtype: torch.dtype, heads: int, key_heads: int, rows: int) -> None:
    check(decode_case(rows, 1100, dtype=dtype, batch=1, heads=heads, key_heads=key_heads))


FORMS = [
    *[(b, h, r, k) for b in (1, 2) for h in (1, 2, 4) for r, k in ((1, KEYS), (3, 1), (3, KEYS), (1, 1))],
    *[(1, 1, KEYS), (2, 2, KEYS), (2, 4, KEYS), (3, KEYS), (1, KEYS)],
]


@pytest.mark.parametrize("density", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_mask_forms(form: tuple[int, ...], density: float) -> None:
    """Nothing of a hidden key is read into a result."""
    other = FORMS[(FORMS.index(form) * 7 + 3) % len(FORMS)]
    check(poison_unseen(decode_case(3, mask=form, bias=other, density=density, with_dlse=True)))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("bias_dtype", ["query", "float32"])
def test_bias_forms(dtype: torch.dtype, form: tuple[int, ...], bias_dtype: str) -> None:
    as_float32 = torch.float32 if bias_dtype == "float32" else None
    check(decode_case(3, 2501, 16, dtype=dtype, bias=form, bias_dtype=as_float32, is_causal=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_seqlens(dtype: torch.dtype, rows: int, is_causal: bool) -> None:
    """Lengths leave splits empty, end in the middle of one, leave no key and fewer than there are rows."""
    counts = torch.tensor([KEYS, 1024, 1500, 0, 2, 10000, -3], dtype=torch.int32)
    check(poison_unseen(decode_case(rows, batch=7, dtype=dtype, is_causal=is_causal, seqlens_k=counts)))


@pytest.mark.parametrize("softcap", [0.5, 2.0, 30.0])
def test_softcap(dtype: torch.dtype, softcap: float) -> None:
    check(decode_case(3, dtype=dtype, bias=(1, 4, 3, KEYS), softcap=softcap, scale=0.4, mask=(1, 2, 1, KEYS)))


@pytest.mark.parametrize("scale", [0.0, -0.25, 0.5])
def test_scale(dtype: torch.dtype, scale: float) -> None:
    check(decode_case(2, dtype=dtype, scale=scale))


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "bias"])
@pytest.mark.parametrize("layout", ["transposed", "padded", "offset", "expanded", "strided"])
def test_layouts(dtype: torch.dtype, name: str, layout: str) -> None:
    case = decode_case(3, 1300, 40, dtype=dtype, mask=(2, 4, 3, 1300), bias=(2, 4, 3, 1300))
    view = relayout(getattr(case, name), layout)
    case = replace(case, **{name: view})
    check(case)
    # Strides decide how memory is walked, and nothing else.
    assert_same_bits(run_library(case), run_library(replace(case, **{name: view.contiguous()})))


@pytest.mark.parametrize("rows", [1, 2, 9, 16])
@pytest.mark.parametrize("with_mask", [False, True])
def test_intervals(dtype: torch.dtype, rows: int, with_mask: bool) -> None:
    """The w highest scores, differently for every row, as intervals and as the mask that these stand for."""
    case = decode_case(rows, dtype=dtype, is_causal=True, mask=(2, 1, rows, KEYS) if with_mask else None, density=0.7)
    kept = select_keys(torch.randn(2, 2, KEYS), 300, seqlen_q=rows)
    visibility = Visibility(case.mask, interval_begin=kept.begin, interval_end=kept.end, is_causal=True)
    out, lse, _ = FORWARD(*forward_of(case, visibility))
    dense = broadcast(kept.dense_mask(rows), case)
    dense = dense if case.mask is None else dense & case.mask
    assert_case_close(replace(case, mask=dense), {"out": out, "lse": lse})


@pytest.mark.parametrize("rows", [1, 8])
def test_rows_without_keys(dtype: torch.dtype, rows: int) -> None:
    mask = torch.zeros(2, 4, rows, KEYS, dtype=torch.bool)
    mask[0, 1, 0, 2100] = mask[1, 3, rows - 1, 7] = mask[1, 2, 0, 1024:2048] = True
    case = poison_unseen(replace(decode_case(rows, dtype=dtype, with_dlse=True), mask=mask))
    check(case)
    assert (run_library(case)["lse"].isfinite() == mask.any(-1)).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["query", "key", "value", "bias"])
def test_visible_poison_comes_out(dtype: torch.dtype, name: str, bad: float) -> None:
    """In every split, the first, one in the middle and the last; and nowhere else."""
    for place in (11, 1500, KEYS - 1):
        case = decode_case(2, dtype=dtype, bias=(2, 4, 2, KEYS))
        tensor = getattr(case, name).clone()
        where = {"query": (1, 1, 3), "bias": (1, 3, 1, place)}.get(name, (1, place, 1))
        tensor[where] = bad
        if name in ("query", "key"):
            tensor[where] = NAN  # infinities may make a score -Inf, which is a hidden key
        case = replace(case, **{name: tensor})
        got = run_library(case, needs=())
        assert_case_close(case, got)
        if (name, bad) != ("bias", -INF):
            assert not got["out"][1, 1, 3].isfinite().all()
        assert got["out"][0].isfinite().all() and got["out"][1, :, :2].isfinite().all()


@pytest.mark.parametrize("rows, heads", [(1, 8), (3, 2), (16, 4)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_same_bits_for_any_thread_count(dtype: torch.dtype, rows: int, heads: int, deterministic: bool) -> None:
    case = decode_case(rows, 9000, 128, dtype=dtype, heads=heads, mask=(2, 2, 1, 9000))
    results = []
    for threads in (1, 2, 5, 3, 2):
        torch.set_num_threads(threads)
        results.append(run_library(case, needs=(), deterministic=deterministic))
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.parametrize("factor", [1.0, 1e3, 3e4])
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize("rows, heads", [(1, 4), (6, 4), (16, 2)])
def test_the_backward_finds_the_same_probabilities(
    dtype: torch.dtype, rows: int, heads: int, head_dim: int, factor: float
) -> None:
    """However large the products are: of every row they sum to 1."""
    case = decode_case(rows, 1500, head_dim, batch=1, heads=heads, key_heads=2, dtype=torch.float32)
    query, key = ((tensor * factor).clamp(-6e4, 6e4).to(dtype) for tensor in (case.query, case.key))
    ones = torch.ones_like(case.value).to(dtype)
    case = replace(case, query=query, key=key, value=ones, dout=torch.ones_like(case.dout).to(dtype))
    got = run_library(case)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 1e-2)
    torch.testing.assert_close(got["out"].double(), case.dout.double(), rtol=tolerance, atol=0)
    summed = got["dvalue"].double().sum(1)
    torch.testing.assert_close(summed, torch.full_like(summed, rows * heads / 2), rtol=tolerance, atol=0)


def test_long_sums_do_not_drift() -> None:
    """Values that are all positive, whose sum over 65536 keys rounds at every step."""
    case = decode_case(1, 65536, 16, dtype=default_dtype(), batch=1, heads=2, key_heads=1)
    case = replace(case, query=case.query * 0.01, value=case.value.abs() + 1)
    assert_case_close(case, run_library(case, needs=()))
