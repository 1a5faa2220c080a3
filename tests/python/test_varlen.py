"""varlen_attention and flash_dmattn_varlen_func: against the oracle given a mask that loops over documents made."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest
import torch
from cases import assert_near, assert_same_bits, make_case, precise_dtype, relayout
from compare import assert_case_close
from flash_dmattn import (
    KeyIntervals,
    attention,
    dynamic_mask_attention,
    flash_dmattn_varlen_func,
    varlen_attention,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Case
from packed import bounds_of, document_mask, documents, packings
from test_select_in_documents import loop
from torch import Tensor
from torch._dynamo.testing import CompileCounter

LEAVES = ("query", "key", "value", "bias")

pytestmark = pytest.mark.devices("cpu", "cuda")


def run_varlen(case: Case, bounds_q: Tensor, bounds_k: Tensor | None, **options: object) -> dict[str, Tensor]:
    """out, lse and all gradients, named and shaped as in `oracle.reference`, of a case of batch size 1."""
    leaves = {name: getattr(case, name) for name in (*LEAVES, "sink")}
    leaves = {name: t if name == "sink" else t[0] for name, t in leaves.items() if t is not None}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    arguments = dict(leaves)
    tokens = [arguments.pop(name) for name in ("query", "key", "value")]
    options = {name: value for name, value in case.options.items() if name != "is_causal"} | options
    out, lse = varlen_attention(*tokens, bounds_q, bounds_k, **arguments, **options, return_lse=True)
    outputs, cotangents = [out], [case.dout[0]]
    if case.dlse is not None:
        outputs, cotangents = [out, lse], [case.dout[0], case.dlse[0]]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    named = {name: gradient if name == "dsink" else gradient[None] for name, gradient in named.items()}
    return {"out": out.detach()[None], "lse": lse.detach()[None]} | named


def packed_case(lengths_q: list[int], lengths_k: list[int], after: tuple[int, int] = (0, 0), **settings) -> Case:
    rows, keys = sum(lengths_q) + after[0], sum(lengths_k) + after[1]
    settings = {"bias": (1, 2, keys)} | settings
    if settings["bias"] is not None:
        settings["bias"] = (*settings["bias"][:2], keys)
    return make_case(batch=1, rows=rows, keys=keys, **settings)


def seen(case: Case, bounds_q: Tensor, bounds_k: Tensor, left: int | None = None, right: int | None = None) -> Tensor:
    """bool (1, 1, Tq, Tk)"""
    mask = document_mask(bounds_q, bounds_k, case.query.shape[1], case.key.shape[1], left, right)
    return mask.to(case.query.device)[None, None]


LENGTHS = {  # of rows and keys, and how many of both follow the last document
    "equal": ([20, 1, 33], [20, 1, 33], (0, 0)),
    "empty_documents": ([0, 20, 0, 0, 13, 0], [0, 20, 0, 0, 13, 0], (0, 0)),
    "trailing_tokens": ([20, 13], [20, 13], (5, 5)),
    "chunked_prefill": ([7, 1, 16], [30, 12, 16], (0, 0)),
    "more_rows_than_keys": ([20, 9, 4], [3, 9, 0], (2, 3)),
    "rows_without_keys": ([5, 0, 8], [0, 6, 8], (0, 0)),
    "one": ([40], [40], (0, 0)),
    "none": ([], [], (4, 4)),
    "tokens_of_none": ([0], [0], (3, 2)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_equals_the_oracle(lengths: tuple, is_causal: bool) -> None:
    case = packed_case(*lengths)
    bounds_q, bounds_k = bounds_of(lengths[0]), bounds_of(lengths[1])
    expected = replace(case, mask=seen(case, bounds_q, bounds_k, right=0 if is_causal else None))
    got = run_varlen(case, bounds_q, bounds_k, is_causal=is_causal)
    assert got["dbias"].shape == case.bias.shape
    assert_case_close(expected, got)
    if lengths[0] == lengths[1]:
        assert_same_bits(got, run_varlen(case, bounds_q, None, is_causal=is_causal))


def test_every_dtype(dtype: torch.dtype) -> None:
    case = packed_case([20, 0, 70, 3], [20, 0, 70, 3], dtype=dtype, head_dim=64, bias_dtype=torch.float32)
    bounds = bounds_of([20, 0, 70, 3])
    got = run_varlen(case, bounds, None, is_causal=True)
    assert got["dbias"].dtype == torch.float32 and got["out"].dtype == dtype
    assert_case_close(replace(case, mask=seen(case, bounds, bounds, right=0)), got)


OPTIONS = {
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "lse_gradient": {"with_dlse": True},
    "bias_of_query_heads": {"bias": (1, 4, 0)},
    "bias_of_one_head": {"bias": (1, 1, 0)},
    "no_bias": {"bias": None},
    "sink": {"with_sink": True},
    "value_dim": {"value_dim": 24},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options: dict) -> None:
    lengths = LENGTHS["chunked_prefill"]
    case = packed_case(*lengths, **options)
    bounds_q, bounds_k = bounds_of(lengths[0]), bounds_of(lengths[1])
    got = run_varlen(case, bounds_q, bounds_k, is_causal=True)
    assert_case_close(replace(case, mask=seen(case, bounds_q, bounds_k, right=0)), got)


@pytest.mark.parametrize("is_causal", [False, True])
def test_is_a_loop_of_attention_over_documents(is_causal: bool) -> None:
    """Forward and gradients, of many tiny documents and a long one."""
    lengths = [*torch.randint(0, 5, (150,), device="cpu").tolist(), 300, *([2] * 50)]
    case = packed_case(lengths, lengths, dtype=precise_dtype(), with_dlse=True)
    bounds = bounds_of(lengths)
    got = run_varlen(case, bounds, None, is_causal=is_causal)
    total = case.query.shape[1]
    for rows, _ in documents(bounds, bounds, total, total):
        part = replace(
            case,
            **{name: getattr(case, name)[:, rows] for name in ("query", "key", "value", "dout")},
            bias=case.bias[..., rows],
            dlse=case.dlse[..., rows],
        )
        leaves = [getattr(part, name).detach().requires_grad_() for name in LEAVES]
        results = attention(*leaves[:3], bias=leaves[3], is_causal=is_causal, return_lse=True)
        gradients = torch.autograd.grad(results, leaves, [part.dout, part.dlse])
        for expected, (name, whole) in zip([*results, *gradients], got.items(), strict=True):
            assert_near(whole[..., rows] if name in ("lse", "dbias") else whole[:, rows], expected.detach())


def test_thousands_of_tiny_documents() -> None:
    """Rows of one document each, of one token: out is value, whatever the queries are."""
    count = 20_000
    query = torch.randn(count, 2, 16, dtype=precise_dtype())
    key, value = torch.randn(2, count, 1, 16).to(query.dtype)
    out = varlen_attention(query, key, value, torch.arange(count + 1, dtype=torch.int32), is_causal=True)
    assert_near(out, value.expand_as(out))


@pytest.mark.devices("cpu")
@settings(max_examples=60)
@given(packings(), st.booleans(), st.integers(-1, 4), st.integers(-1, 4))
def test_sliding_windows(packing: tuple, causal: bool, left: int, right: int) -> None:
    lengths_q, lengths_k, *after = packing
    case = packed_case(lengths_q, lengths_k, after, dtype=torch.float64, head_dim=8)
    bounds_q, bounds_k = bounds_of(lengths_q), bounds_of(lengths_k)
    sides = (None if left < 0 else left, 0 if causal else None if right < 0 else right)
    out = flash_dmattn_varlen_func(
        *(tensor[0] for tensor in (case.query, case.key, case.value)),
        bounds_q,
        bounds_k,
        max(lengths_q, default=0),
        max(lengths_k, default=0),
        causal=causal,
        window_size=(left, right),
        attn_bias=case.bias[0],
    )
    assert_case_close(replace(case, mask=seen(case, bounds_q, bounds_k, *sides)), {"out": out[None]})


# ---- Selection


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_selection(lengths: tuple, is_causal: bool, window: int) -> None:
    case = packed_case(*lengths)
    bounds_q, bounds_k = bounds_of(lengths[0]), bounds_of(lengths[1])
    mask = loop(case.bias, window, case.query.shape[1], bounds_q, bounds_k, causal=is_causal)
    got = run_varlen(case, bounds_q, bounds_k, is_causal=is_causal, window_size=window)
    assert_case_close(replace(case, mask=mask), got)


@pytest.mark.parametrize("heads", [1, 2])
def test_scores_of_their_own_and_a_mask_of_keys(heads: int) -> None:
    """The mask hides before the selection."""
    case, bounds = packed_case([20, 17], [20, 17], (3, 3)), bounds_of([20, 17])
    scores = torch.randint(0, 5, (heads, 40)).bfloat16()
    for mask in (torch.rand(40) < 0.6, torch.rand(1, 40) < 0.6, torch.rand(2, 40) < 0.6):
        by_head = mask.view(1, -1, 40)
        expected = loop(scores[None].expand(1, 2, 40), 4, 40, bounds, bounds, key_mask=by_head)
        got = run_varlen(case, bounds, None, is_causal=True, window_size=4, scores=scores, mask=mask)
        assert_case_close(replace(case, mask=expected), got)
        plain = run_varlen(case, bounds, None, is_causal=True, mask=mask)
        assert_case_close(replace(case, mask=seen(case, bounds, bounds, right=0) & by_head[:, :, None]), plain)


def test_intervals_hide_after_the_selection() -> None:
    case, bounds = packed_case([20, 17], [20, 17], (3, 3)), bounds_of([20, 17])
    intervals = KeyIntervals.sliding_window(6, 0, 40)
    selected = loop(case.bias, 4, 40, bounds, bounds)
    for window, expected in ((4, selected), (None, seen(case, bounds, bounds, right=0))):
        got = run_varlen(case, bounds, None, is_causal=True, window_size=window, mask=intervals)
        assert_case_close(replace(case, mask=expected & intervals.dense_mask(40)), got)


@pytest.mark.parametrize("selection", ["causal", "per_key", "per_key_not_causal"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "of_batch_elements"])
def test_dynamic_mask_attention(selection: str, own: bool) -> None:
    bounds_q = torch.tensor([[0, 9, 9, 30], [0, 20, 31, 33]], dtype=torch.int32)
    bounds_k = torch.tensor([[0, 12, 20, 47], [0, 20, 20, 40]], dtype=torch.int32)
    if not own:
        bounds_q, bounds_k = bounds_q[0], bounds_k[0]
    is_causal = selection != "per_key_not_causal"
    selection = selection.removesuffix("_not_causal")
    case = make_case(bias=(1, 2, 47))
    mask = loop(case.bias.expand(2, 2, 47), 5, 33, bounds_q, bounds_k, causal=selection == "causal")
    if is_causal:
        causal = [document_mask(bounds_q.view(-1, 4)[b], bounds_k.view(-1, 4)[b], 33, 47, right=0) for b in (0, -1)]
        mask = mask & torch.stack(causal).to(mask.device)[:, None]
    leaves = [getattr(case, name).requires_grad_() for name in LEAVES]
    options = {"selection": selection, "is_causal": is_causal, "cu_seqlens_q": bounds_q, "cu_seqlens_k": bounds_k}
    out, lse = dynamic_mask_attention(*leaves, 5, **options, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, case.dout)
    named = {f"d{name}": gradient for name, gradient in zip(LEAVES, gradients, strict=True)}
    case = replace(case, **{name: getattr(case, name).detach() for name in LEAVES}, mask=mask)
    assert_case_close(case, {"out": out.detach(), "lse": lse.detach()} | named)


# ---- Arguments


@pytest.mark.devices("cpu")
@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 24), min_size=1, max_size=6), st.booleans())
def test_wrong_contents_are_clamped(starts: list[int], selects: bool) -> None:
    case = packed_case([17], [17], dtype=torch.float64, head_dim=8)
    bounds = torch.tensor(starts, dtype=torch.int32)
    mask = loop(case.bias, 3, 17, bounds, bounds) if selects else seen(case, bounds, bounds, right=0)
    got = run_varlen(case, bounds, None, is_causal=True, window_size=3 if selects else None)
    assert_case_close(replace(case, mask=mask), got)


def test_hidden_tokens_may_hold_anything() -> None:
    case, bounds = packed_case([20, 17], [20, 17], (3, 3)), bounds_of([20, 17])
    clean = run_varlen(case, bounds, None, is_causal=True)
    for name in ("query", "key", "value", "dout"):
        getattr(case, name)[:, 37:] = torch.nan
    case.bias[..., 37:] = torch.nan
    assert_same_bits(clean, run_varlen(case, bounds, None, is_causal=True))


@pytest.mark.parametrize("layout", ["transposed", "padded", "strided"])
def test_strides(layout: str) -> None:
    case, bounds = packed_case([20, 17], [20, 17]), bounds_of([20, 17])
    tokens = {name: relayout(getattr(case, name), layout) for name in ("query", "key", "value")}
    moved = replace(case, **tokens, bias=relayout(case.bias, layout))
    options = {"is_causal": True, "window_size": 4, "deterministic": True}
    assert_same_bits(run_varlen(case, bounds, None, **options), run_varlen(moved, bounds, None, **options))


@pytest.mark.devices("cpu")
def test_gradcheck() -> None:
    case, bounds = packed_case([5, 0, 3], [5, 0, 3], dtype=torch.float64, head_dim=4), bounds_of([5, 0, 3])
    leaves = [getattr(case, name)[0].requires_grad_() for name in LEAVES]

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return varlen_attention(query, key, value, bounds, bias=bias, is_causal=True, return_lse=True)

    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize("window", [None, 3])
def test_compiles_once_for_all_totals(window: int | None) -> None:
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, bounds: Tensor) -> Tensor:
        return varlen_attention(query, key, value, bounds, bias=bias, window_size=window, is_causal=True)

    for lengths in ([3, 4], [5, 2, 9], [2, 0, 7, 30], [12, 13]):
        case, bounds = packed_case(lengths, lengths), bounds_of(lengths)
        tokens = [getattr(case, name)[0] for name in LEAVES]
        expected = varlen_attention(*tokens[:3], bounds, bias=tokens[3], window_size=window, is_causal=True)
        assert_near(attend(*tokens, bounds), expected)
    assert counter.frame_count == 1


@pytest.mark.devices("cpu")
def test_compiled_backward() -> None:
    attend = torch.compile(lambda *a: varlen_attention(*a[:4], bias=a[4], is_causal=True), backend="aot_eager")
    case, bounds = packed_case([12, 0, 9], [12, 0, 9]), bounds_of([12, 0, 9])
    leaves = [getattr(case, name)[0].requires_grad_() for name in LEAVES]
    gradients = torch.autograd.grad(attend(*leaves[:3], bounds, leaves[3]), leaves, case.dout[0])
    expected = run_varlen(case, bounds, None, is_causal=True)
    for name, gradient in zip(LEAVES, gradients, strict=True):
        assert_near(gradient, expected[f"d{name}"][0])


QUERY, KEY = torch.zeros(6, 4, 8), torch.zeros(6, 2, 8)
BOUNDS = torch.tensor([0, 2, 6], dtype=torch.int32)
ERRORS = {
    "bounds": ({"cu_seqlens_q": [0, 6]}, TypeError, "cu_seqlens_q must be a torch.Tensor; got cu_seqlens_q of type li"),
    "bounds' dtype": (
        {"cu_seqlens_q": BOUNDS.long()},
        ValueError,
        "cu_seqlens_q must be int32 (documents + 1); got cu_seqlens_q int64 (3,)",
    ),
    "bounds' rank": ({"cu_seqlens_q": BOUNDS[None]}, ValueError, "cu_seqlens_q must be int32 (documents + 1); got"),
    "bounds' shapes": (
        {"cu_seqlens_k": BOUNDS[:2]},
        ValueError,
        "cu_seqlens_k must have the shape of cu_seqlens_q = (3,); got cu_seqlens_k (2,)",
    ),
    "bounds' device": (
        {"cu_seqlens_k": BOUNDS.to("meta")},
        ValueError,
        "cu_seqlens_k must be on the device of query; got cu_seqlens_k on meta, query on cpu",
    ),
    "rank": ({"query": QUERY[None]}, ValueError, "query must have 3 dimensions; got query (1, 6, 4, 8)"),
    "heads": (
        {"query": QUERY[:, :3]},
        ValueError,
        "query must have a multiple of key's heads; got query (1, 6, 3, 8), key (1, 6, 2, 8)",
    ),
    "bias": ({"bias": torch.zeros(3, 6)}, ValueError, "bias must be (H or Hkv or 1, Tk); got bias (3, 6), query (6, 4"),
    "mask": ({"mask": [True]}, TypeError, "mask must be a torch.Tensor, KeyIntervals or None; got mask of type list"),
    "mask's dtype": ({"mask": torch.ones(6)}, ValueError, "mask must be bool; got mask float32"),
    "mask's shape": ({"mask": torch.ones(5) > 0}, ValueError, "mask must be (H or Hkv or 1, Tk); got mask (5,)"),
    "intervals": (
        {"mask": KeyIntervals.causal(6, 5)},
        ValueError,
        "mask must be KeyIntervals (1, H or Hkv or 1, Tk); got mask (1, 1, 5)",
    ),
    "window": (
        {"window_size": (3, 0), "bias": torch.zeros(1, 6)},
        TypeError,
        "window_size must be an int, how many keys of highest score a row sees; got window_size of type tuple: "
        "a sliding window (left, right) is flash_dmattn_varlen_func's",
    ),
    "window's type": ({"window_size": 2.0, "bias": torch.zeros(1, 6)}, TypeError, "window_size must be an int; got"),
    "window alone": ({"window_size": 3}, ValueError, "window_size needs scores, or a bias, to select keys by; got nei"),
    "negative window": (
        {"window_size": -1, "bias": torch.zeros(1, 6)},
        ValueError,
        "window_size must not be negative; got window_size -1",
    ),
    "scores": (
        {"scores": torch.zeros(1, 6)},
        ValueError,
        "scores must come with window_size, how many keys to select by them; got window_size None",
    ),
    "causal": ({"is_causal": None}, TypeError, "is_causal must be a bool; got is_causal of type NoneType"),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("arguments", "kind", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(arguments: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        varlen_attention(**({"query": QUERY, "key": KEY, "value": KEY, "cu_seqlens_q": BOUNDS} | arguments))


FUNC_ERRORS = {
    "dropout": (
        {"dropout_p": 0.1},
        ValueError,
        "dropout_p must be 0: probabilities are not dropped; got dropout_p 0.1",
    ),
    "alibi": ({"alibi_slopes": torch.zeros(4)}, ValueError, "alibi_slopes must be None: slopes are not supported; got"),
    "probs": ({"return_attn_probs": True}, ValueError, "return_attn_probs must be False: probabilities are never held"),
    "pages": ({"block_table": BOUNDS}, ValueError, "block_table must be None: keys are not read from pages; got block"),
    "window": (
        {"window_size": 4},
        TypeError,
        "window_size must be a sliding window (left, right); got window_size of type int: "
        "the keys of highest score, an int, are varlen_attention's",
    ),
    "window's length": ({"window_size": (1, 2, 3)}, TypeError, "a sliding window (left, right); got window_size (1, 2"),
    "window's type": ({"window_size": (1, 2.0)}, TypeError, "window_size must be an int; got window_size of type flo"),
    "window's value": ({"window_size": (-2, 0)}, ValueError, "window_size must be -1, for all keys, or more on each"),
    "mask": ({"attn_mask": torch.ones(4, 6, 6) > 0}, ValueError, "mask must be (H or Hkv or 1, Tk); got mask (4, 6, 6"),
    "bias": ({"attn_bias": torch.ones(4, 6, 6)}, ValueError, "bias must be (H or Hkv or 1, Tk); got bias (4, 6, 6)"),
    "causal": ({"causal": 1}, TypeError, "causal must be a bool; got causal of type int"),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("arguments", "kind", "message"), FUNC_ERRORS.values(), ids=FUNC_ERRORS.keys())
def test_func_errors(arguments: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        flash_dmattn_varlen_func(QUERY, KEY, KEY, BOUNDS, BOUNDS, 4, 4, **arguments)


@pytest.mark.devices("cpu")
def test_func_has_the_order_of_arguments_of_flash_attn() -> None:
    names = list(inspect.signature(flash_dmattn_varlen_func).parameters)
    assert " ".join(names) == (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap "
        "alibi_slopes deterministic return_attn_probs block_table attn_mask attn_bias learnable_sink"
    )


def test_func_hands_on_what_it_is_given() -> None:
    case, bounds = packed_case([20, 17], [20, 17], with_sink=True), bounds_of([20, 17])
    query, key, value, bias = (getattr(case, name)[0] for name in LEAVES)
    mask = torch.rand(2, 37) < 0.7
    out = flash_dmattn_varlen_func(
        query,
        key,
        value,
        bounds,
        bounds,
        20,
        20,
        0.0,
        0.3,
        True,
        [-1, 5],
        2.0,
        None,
        True,
        attn_mask=mask,
        attn_bias=bias,
        learnable_sink=case.sink,
    )
    options = {"scale": 0.3, "is_causal": True, "softcap": 2.0, "deterministic": True, "sink": case.sink}
    assert_near(out, varlen_attention(query, key, value, bounds, bounds, mask=mask, bias=bias, **options))
