"""Sinks, a score without a key in every row's softmax sum: against the fp64 oracle and unfused attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import (
    INF,
    NAN,
    assert_near,
    assert_same_bits,
    default_dtype,
    lse_dtype,
    make_case,
    poison_unseen,
    precise_dtype,
    relayout,
    run_library,
)
from compare import assert_case_close
from flash_dmattn import attention, dynamic_mask_attention
from flash_dmattn._sinks import with_sink
from oracle import Case, reference, visibility
from test_score_sizes import biases, integer_case
from torch_cases import leaves_of, small_case

pytestmark = pytest.mark.devices("cpu", "cuda")


def sink_case(*sizes: int, **settings: object) -> Case:
    return make_case(*sizes, **({"with_sink": True, "with_dlse": True} | settings))


def with_sinks(case: Case, *sinks: float) -> Case:
    return replace(case, sink=torch.tensor(sinks, dtype=case.sink.dtype))


def check(case: Case, **options: object) -> None:
    got = run_library(case, **options)
    if "dsink" in got:
        assert got["dsink"].shape == case.sink.shape and got["dsink"].dtype == case.sink.dtype
    assert_case_close(case, {name: got.pop(name) for name in ("out", "lse")})
    assert_case_close(case, got, few_elements=True)


@pytest.mark.parametrize("heads, key_heads", [(1, 1), (4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("sink_dtype", ["query", "float32"])
def test_head_groups(dtype: torch.dtype, heads: int, key_heads: int, sink_dtype: str) -> None:
    as_float32 = torch.float32 if sink_dtype == "float32" else None
    check(sink_case(2, heads, key_heads, dtype=dtype, sink_dtype=as_float32, is_causal=True))


@pytest.mark.parametrize("rows, keys", [(1, 1), (1, 300), (16, 1100), (65, 1), (300, 129), (47, 0), (700, 90)])
def test_lengths(dtype: torch.dtype, rows: int, keys: int) -> None:
    """Few rows and many, several chunks, splits of keys, and no keys at all."""
    check(sink_case(2, 4, 2, rows, keys, dtype=dtype, bias=(2, 2, 1, keys)))


@pytest.mark.parametrize(
    "settings",
    [
        {"mask": (2, 4, 33, 47), "bias": (2, 4, 33, 47)},
        {"mask": (2, 2, 47), "bias": (1, 2, 33, 47), "density": 0.1},
        {"mask": (33, 47), "bias": (1, 1, 1, 1), "softcap": 2.0, "density": 0.05},
        {"bias": (2, 1, 1, 47), "seqlens_k": torch.tensor([47, 0], dtype=torch.int32), "is_causal": True},
        {"bias": (33, 1), "scale": -0.3, "with_dlse": False},
    ],
    ids=["rows_and_keys", "keys", "softcap", "lengths", "negative_scale"],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_with_everything_else(dtype: torch.dtype, settings: dict, deterministic: bool) -> None:
    check(poison_unseen(sink_case(dtype=dtype, **settings)), deterministic=deterministic)


@pytest.mark.parametrize("rows", [3, 33])
@pytest.mark.parametrize("head_dim, value_dim", [(40, 33), (1, 64), (192, 128)])
def test_value_dims(dtype: torch.dtype, rows: int, head_dim: int, value_dim: int) -> None:
    check(sink_case(2, 4, 2, rows, 70, head_dim, value_dim=value_dim, dtype=dtype, is_causal=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("mask", [None, (2, 1, 70, 133)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_dims(
    dtype: torch.dtype, head_dim: int, mask: tuple[int, ...] | None, with_dlse: bool, deterministic: bool
) -> None:
    """On GPUs kernels of their own, of which float16 takes others where lse has a gradient."""
    lengths = torch.tensor([133, 50], dtype=torch.int32)
    settings = {"mask": mask, "bias": (1, 2, 133), "seqlens_k": lengths, "is_causal": True, "with_dlse": with_dlse}
    case = with_sinks(sink_case(2, 4, 2, 70, 133, head_dim, dtype=dtype, **settings), 0.5, 3.0, -2.0, 12.0)
    check(poison_unseen(case), deterministic=deterministic)


@pytest.mark.parametrize("wanted", [("sink",), ("value",), ("value", "sink"), ("query",), ("bias", "sink"), ()])
def test_each_gradient_alone(dtype: torch.dtype, wanted: tuple[str, ...]) -> None:
    case = sink_case(dtype=dtype, mask=(2, 1, 33, 47), bias=(1, 4, 1, 47))
    assert set(run_library(case, needs=wanted)) == {"out", "lse", *(f"d{name}" for name in wanted)}
    check(case, needs=wanted)


@pytest.mark.parametrize("layout", ["strided", "expanded", "offset"])
def test_layouts(dtype: torch.dtype, layout: str) -> None:
    case = sink_case(dtype=dtype)
    check(replace(case, sink=relayout(case.sink, layout)))


@pytest.mark.devices("cpu")
def test_same_bits_for_any_thread_count(dtype: torch.dtype) -> None:
    case = sink_case(2, 4, 2, 300, 310, 24, dtype=dtype, bias=(1, 4, 1, 310), is_causal=True)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run_library(case, deterministic=True))
    assert_same_bits(*results)


# ---- Sinks and rows that are not finite


def test_sinks_that_are_not_finite(dtype: torch.dtype) -> None:
    case = sink_case(dtype=dtype, mask=(2, 1, 33, 1), bias=(2, 4, 1, 47), heads=4, key_heads=4)
    check(with_sinks(case, -INF, NAN, INF, 0.5))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [None, (2, 1, 150, 170), (1, 4, 170)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_keys_that_nobody_sees_do_not_feel_a_sink(
    dtype: torch.dtype, head_dim: int, mask: tuple[int, ...] | None, deterministic: bool
) -> None:
    """Keys that are seen do: all rows of a head are spoilt. Those of the second key head have sound sinks."""
    lengths = torch.tensor([170, 99], dtype=torch.int32)
    case = sink_case(2, 4, 2, 150, 170, head_dim, dtype=dtype, mask=mask, seqlens_k=lengths, is_causal=True)
    case = poison_unseen(with_sinks(case, NAN, INF, 0.0, -1.0))
    got = run_library(case, deterministic=deterministic)
    seen = visibility(case).unflatten(1, (2, 2)).any(2).any(2).transpose(1, 2)  # (B, Sk, Hkv)
    sees = (got["lse"] != -INF).transpose(1, 2)  # (B, Sq, H)
    sees[:, :, 2:] = False
    seen[:, :, 1] = False
    for name, spoilt in (("dkey", seen), ("dvalue", seen), ("dquery", sees), ("out", sees)):
        assert got[name][spoilt].isnan().all() and not got[name][~spoilt].isnan().any(), name
    unseen = ~visibility(case).unflatten(1, (2, 2)).any(2).any(2).transpose(1, 2)
    assert not got["dkey"][unseen].any() and not got["dvalue"][unseen].any()
    assert got["dsink"].isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize("rows", [2, 33])
def test_a_sink_of_minus_infinity_changes_nothing(dtype: torch.dtype, rows: int) -> None:
    case = sink_case(rows=rows, dtype=dtype, mask=(2, 1, rows, 47), density=0.02)
    by_out = replace(case, dlse=None)
    without = run_library(replace(by_out, sink=None))
    got = run_library(with_sinks(by_out, *[-INF] * 4))
    assert not got.pop("dsink").any()
    assert_same_bits(got, without)
    # With a gradient by lse, too, a GPU adds up two that are rounded.
    got = run_library(with_sinks(case, *[-INF] * 4))
    assert not got.pop("dsink").any()
    assert_case_close(replace(case, sink=None), got, few_elements=True)


@pytest.mark.parametrize("sink", [0.0, NAN, INF, -INF])
def test_rows_without_keys_stay_zero(dtype: torch.dtype, sink: float) -> None:
    case = with_sinks(sink_case(dtype=dtype, mask=(2, 4, 33, 47), density=0.0), *[sink] * 4)
    got = run_library(poison_unseen(case))
    assert (got.pop("lse") == -INF).all()
    assert not any(tensor.any() for tensor in got.values())


@pytest.mark.parametrize("poison", [NAN, INF])
def test_visible_poison_shows(dtype: torch.dtype, poison: float) -> None:
    case = sink_case(dtype=dtype, bias=(2, 4, 33, 47))
    case.bias[0, 1, 5, 7] = poison
    got = run_library(case)
    assert_case_close(case, got)
    assert got["dsink"].isnan().tolist() == [False, True, False, False]


# ---- Large numbers


@pytest.mark.parametrize("size", [1e2, 1e5, 1e9, 3e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores(dtype: torch.dtype, size: float, sign: int) -> None:
    """The sinks lie next to the scores, above and below them, where one number is too coarse for lse."""
    bias_dtype = dtype if dtype == torch.float64 else torch.float32
    case = replace(integer_case(16, dtype), bias=biases("constant", sign * size, 150).to(bias_dtype))
    sinks = torch.tensor([sign * size, sign * size / 2, -sign * size, 0.0], dtype=bias_dtype)
    case = replace(case, sink=sinks)
    got = run_library(case)
    if dtype != torch.float64:
        return assert_case_close(case, got, float32_scores=True)
    for name, expected in reference(case).items():
        if name in got:
            assert_near(got[name], expected.value)


@pytest.mark.parametrize("sink", [-1e30, -200.0, -80.0, 30.0, 80.0, 200.0, 1e30])
@pytest.mark.parametrize("rows", [2, 33])
def test_sinks_far_from_the_scores(dtype: torch.dtype, sink: float, rows: int) -> None:
    """Nothing overflows, and the gradient through lse is the keys' own however little is left of out."""
    sink_dtype = dtype if dtype == torch.float64 else torch.float32
    case = sink_case(rows=rows, dtype=dtype, sink_dtype=sink_dtype)
    check(with_sinks(case, sink, sink / 2, 0.0, -sink))


# ---- What torch does with them


@pytest.mark.devices("cpu")
def test_gradcheck() -> None:
    case = small_case(bias=(1, 2, 5, 7), with_sink=True, softcap=2.0, mask=(2, 1, 5, 7), density=0.7)

    def function(query, key, value, bias, sink):
        out, lse = attention(query, key, value, mask=case.mask, bias=bias, sink=sink, return_lse=True, **case.options)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(function, leaves_of(case), fast_mode=True)


@pytest.mark.parametrize("sinks", [(0.3, -2.0, 1.0, 5.0), (-INF, 0.0, NAN, INF), (200.0, -200.0, 0.0, 1.0)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_composed_outside_the_operator(dtype: torch.dtype, sinks: tuple[float, ...], density: float) -> None:
    """As under vmap: the same results, up to a rounding more of out."""
    case = sink_case(dtype=dtype, heads=4, key_heads=4, mask=(2, 4, 33, 1), bias=(2, 4, 1, 47), density=density)
    case = poison_unseen(with_sinks(replace(case, sink=case.sink.to(lse_dtype(dtype))), *sinks))
    leaves = {name: getattr(case, name).requires_grad_() for name in ("query", "key", "value", "bias", "sink")}
    added = {name: leaves[name] for name in ("query", "key", "value", "bias")}
    out, lse = attention(**added, mask=case.mask, return_lse=True)
    out = with_sink(out, lse, leaves["sink"][:, None])
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), [case.dout, case.dlse])
    got = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    got |= {"out": out.detach(), "lse": lse.detach()}
    if density == 0.0:
        assert not got["out"].any() and not got["dquery"].any()
        return
    assert_case_close(case, got, few_elements=True)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_dynamic_mask_attention(dtype: torch.dtype, softcap: float | None) -> None:
    case = make_case(1, 4, 2, 40, 40, 16, dtype=dtype, bias=(1, 2, 40), with_sink=True)
    tensors = case.query, case.key, case.value, case.bias
    got = dynamic_mask_attention(*tensors, 64, sink=case.sink, softcap=softcap)
    case = replace(case, options={"is_causal": True, "softcap": softcap or 0.0})
    assert torch.equal(got, run_library(case)["out"])


@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast(sink_dtype: torch.dtype) -> None:
    """A float32 sink stays, another follows the queries."""
    case = make_case(dtype=torch.float32, with_sink=True)
    sink = case.sink.to(sink_dtype).requires_grad_()
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        got = attention(case.query, case.key, case.value, sink=sink)
    assert got.dtype == torch.bfloat16
    low = [tensor.bfloat16() for tensor in (case.query, case.key, case.value)]
    expected = attention(*low, sink=sink if sink_dtype == torch.float32 else sink.bfloat16())
    assert torch.equal(got, expected)
    got.sum().backward()
    assert sink.grad.dtype == sink_dtype and sink.grad.any()


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (torch.zeros(4, 1), "sink must have 1 dimension; got sink (4, 1)"),
        (torch.zeros(2), "sink must have the shape (H) = (4); got sink (2)"),
        (torch.zeros(4, dtype=torch.int32), "sink must have query's dtype or float32; got sink int32"),
    ],
    ids=["rank", "heads", "dtype"],
)
def test_wrong_sinks_are_refused(sink: torch.Tensor, message: str) -> None:
    case = small_case(dtype=default_dtype())
    with pytest.raises(ValueError) as error:
        attention(case.query, case.key, case.value, sink=sink.to(case.query.device))
    assert message in str(error.value)
    with pytest.raises(TypeError, match="sink must be"):
        attention(case.query, case.key, case.value, sink=[0.0] * 4)


@pytest.mark.parametrize("query_dim, sink_dim", [(0, None), (0, 0), (0, 1), (None, 0), (None, 1)])
def test_vmap(sink_dim: int | None, query_dim: int | None) -> None:
    """Sinks of every mapped element, or one of which each has a gradient: as in a loop."""
    size, dtype = 3, precise_dtype()
    query, key, value = (torch.randn(2, length, heads, 4).to(dtype) for length, heads in ((5, 4), (7, 2), (7, 2)))
    if query_dim is not None:
        query = torch.randn(size, *query.shape).to(dtype)
    sink = torch.randn(4).to(dtype)
    if sink_dim is not None:
        sink = torch.randn(*((size, 4) if sink_dim == 0 else (4, size))).to(dtype)
    mask = torch.ones(5, 7, dtype=torch.bool).tril()
    mask[0] = False

    def loss(query, sink):
        out, lse = attention(query, key, value, mask=mask, sink=sink, return_lse=True)
        return (out.float() ** 2).sum() + lse[..., 1:].float().sin().sum(), out

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1), has_aux=True), in_dims=(query_dim, sink_dim))
    (dquery, dsink), out = mapped(query, sink)
    for index in range(size):
        one_query = query if query_dim is None else query[index]
        one_sink = sink if sink_dim is None else sink.select(sink_dim, index)
        (one_dquery, one_dsink), one_out = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(one_query, one_sink)
        for got, expected in ((out, one_out), (dquery, one_dquery), (dsink, one_dsink)):
            assert_near(got[index], expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    case = small_case(bias=(1, 2, 1, 7), with_sink=True)
    leaves = leaves_of(case)

    def function(query, key, value, bias, sink):
        return attention(query, key, value, bias=bias, sink=sink, is_causal=True)

    expected = torch.autograd.grad(function(*leaves), leaves, case.dout)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for got, wanted in zip(torch.autograd.grad(compiled(*leaves), leaves, case.dout), expected, strict=True):
        assert_near(got, wanted)
