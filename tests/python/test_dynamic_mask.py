"""dynamic_mask_attention, and attention over KeyIntervals: against the oracle given brute force's dense mask."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from cases import assert_near, assert_same_bits, bits, default_dtype, make_case, precise_dtype, run_library, to_device
from compare import assert_case_close
from flash_dmattn import KeyIntervals, attention, dynamic_mask_attention, flash_dmattn_func, select_keys
from flash_dmattn._visibility import Visibility
from flash_dmattn.flash_dmattn_interface import flash_dmattn_func_auto
from operators import BACKWARD, FORWARD, backward_arguments, forward_arguments, forward_of
from oracle import Case, reference
from selecting import visible_keys
from torch import Tensor
from torch.library import opcheck

LEAVES = ("query", "key", "value", "bias")

pytestmark = pytest.mark.devices("cpu", "cuda")


def run_dynamic(case: Case, window: int, **options: object) -> dict[str, Tensor]:
    """out, lse and all gradients, named as in `oracle.reference`; case.bias is the key's bias."""
    leaves = [getattr(case, name).detach().requires_grad_() for name in LEAVES]
    out, lse = dynamic_mask_attention(*leaves, window, return_lse=True, **to_device(case.options | options))
    outputs, cotangents = ([out], [case.dout]) if case.dlse is None else ([out, lse], [case.dout, case.dlse])
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    named = {f"d{name}": gradient for name, gradient in zip(LEAVES, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach()} | named


def selected(
    case: Case, window: int, scores: Tensor | None = None, selection: str = "causal", **hidden: Tensor
) -> Case:
    """The same case with brute force's selection as its dense mask."""
    scores, hidden = case.bias if scores is None else scores, to_device(hidden)
    if any(hidden.get(name) is not None for name in ("key_mask", "seqlens_k")):
        scores = scores.expand(case.query.shape[0], -1, -1)
    mask = visible_keys(scores, window, case.query.shape[1], causal=selection == "causal", **hidden)
    lengths = {"seqlens_k": hidden["seqlens_k"]} if "seqlens_k" in hidden else {}
    return replace(case, mask=mask, options=case.options | lengths)


PADDED = torch.arange(47) >= torch.tensor([[[0]], [[9]]])  # padding on the left of the second
LENGTHS = torch.tensor([47, 20], dtype=torch.int32)
CASES = {  # settings of make_case, options of dynamic_mask_attention
    "plain": ({"bias": (2, 2, 47)}, {}),
    "query_heads": ({"bias": (2, 4, 47)}, {}),
    "one_head": ({"bias": (2, 1, 47), "key_heads": 1}, {}),
    "one_bias_for_the_batch": ({"bias": (1, 2, 47)}, {"seqlens_k": LENGTHS}),
    "more_rows_than_keys": ({"bias": (2, 2, 47), "rows": 60}, {}),
    "decode": ({"bias": (2, 2, 47), "rows": 1}, {}),
    "softcap": ({"bias": (2, 2, 47), "softcap": 2.0, "scale": 0.3}, {}),
    "lse_gradient": ({"bias": (2, 2, 47), "with_dlse": True}, {}),
    "padding": ({"bias": (2, 2, 47)}, {"key_mask": PADDED}),
    "lengths": ({"bias": (2, 2, 47), "rows": 47}, {"seqlens_k": LENGTHS}),
    "padding_and_lengths": ({"bias": (2, 2, 47)}, {"key_mask": PADDED[1:], "seqlens_k": LENGTHS}),
    "per_key": ({"bias": (2, 2, 47)}, {"selection": "per_key"}),
    "per_key_not_causal": ({"bias": (2, 2, 47), "is_causal": False}, {"selection": "per_key"}),
    "per_key_padding": ({"bias": (2, 2, 47)}, {"selection": "per_key", "key_mask": PADDED, "seqlens_k": LENGTHS}),
}


@pytest.mark.parametrize("window", [0, 1, 6, 47])
@pytest.mark.parametrize(("settings", "options"), CASES.values(), ids=CASES.keys())
def test_equals_the_oracle(settings: dict, options: dict, window: int) -> None:
    case = make_case(**({"is_causal": True} | settings))
    got = run_dynamic(case, window, **options)
    assert got["dbias"].shape == case.bias.shape
    assert_case_close(selected(case, window, **options), got)


@pytest.mark.parametrize("bias_dtype", ["own", torch.float32], ids=str)
def test_every_dtype(dtype: torch.dtype, bias_dtype: torch.dtype | str) -> None:
    bias_dtype = dtype if bias_dtype == "own" else bias_dtype
    case = make_case(dtype=dtype, bias=(2, 2, 47), bias_dtype=bias_dtype, is_causal=True, head_dim=64)
    got = run_dynamic(case, 9)
    assert got["dbias"].dtype == bias_dtype
    assert_case_close(selected(case, 9), got)


def test_ties_and_special_scores() -> None:
    """Scores that a training run starts with (all equal) or breaks with; the bias itself stays sound."""
    case = make_case(bias=(2, 2, 47), is_causal=True)
    lowest, inf = torch.finfo(torch.float32).min, torch.inf
    for values in ([0.0], [0.0, -0.0, 1.0], [lowest, -inf, 2.0, inf, torch.nan]):
        scores = torch.tensor(values)[torch.randint(0, len(values), (2, 2, 47))]
        assert_case_close(selected(case, 8, scores), run_dynamic(case, 8, scores=scores))


def test_bias_that_hides() -> None:
    """-inf and the lowest value in the bias that is selected by: such keys touch nothing."""
    case = make_case(bias=(2, 2, 47), is_causal=True)
    case.bias[0, :, 3:30:4] = -torch.inf
    case.bias[1, :, 2:20] = torch.finfo(torch.float32).min
    case.key[0, 3:30:4] = torch.nan
    case.value[1, 2:20] = torch.inf
    assert_case_close(selected(case, 20), run_dynamic(case, 20))


def test_scores_of_their_own() -> None:
    case = make_case(bias=(2, 2, 47), is_causal=True)
    for shape, kind in (((2, 4, 47), torch.float32), ((1, 1, 47), torch.bfloat16), ((2, 2, 47), torch.float64)):
        scores = torch.randn(shape).to(kind).requires_grad_()
        assert_case_close(selected(case, 8, scores.detach()), run_dynamic(case, 8, scores=scores))
    scores, mask = torch.randn(1, 1, 47), to_device(PADDED).expand(2, 1, 47)
    got = run_dynamic(case, 8, scores=scores, key_mask=mask)
    assert_case_close(selected(case, 8, scores, key_mask=mask), got)


@pytest.mark.devices("cpu")
def test_gradcheck() -> None:
    case = make_case(rows=5, keys=7, head_dim=4, dtype=torch.float64, bias=(2, 2, 7))
    scores = torch.randn(2, 2, 7)  # not the bias, whose small changes would change the selection
    leaves = [getattr(case, name).requires_grad_() for name in LEAVES]

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        return dynamic_mask_attention(*leaves, 3, scores=scores, softcap=1.5, return_lse=True)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_is_select_keys_and_attention() -> None:
    case = make_case(bias=(2, 2, 47), is_causal=True)
    hidden = to_device({"key_mask": PADDED, "seqlens_k": LENGTHS})
    intervals = select_keys(case.bias, 9, seqlen_q=33, **hidden)
    by_hand = run_library(replace(case, mask=intervals), seqlens_k=hidden["seqlens_k"], deterministic=True)
    at_once = run_dynamic(case, 9, **hidden, deterministic=True)
    assert_same_bits(at_once, by_hand)


def test_longer_sequences() -> None:
    case = make_case(1, 2, 1, 700, 900, 32, bias=(1, 1, 900), is_causal=True)
    assert_case_close(selected(case, 100), run_dynamic(case, 100))


# ---- Errors

ERRORS = {
    "selection": ({"is_causal": False}, ValueError, "selection 'causal' needs is_causal=True"),
    "no selection": (
        {"selection": "topk"},
        ValueError,
        "selection must be 'causal' or 'per_key'; got selection 'topk'",
    ),
    "query rank": ({"query": torch.zeros(3, 4, 8)}, ValueError, "query must have 4 dimensions; got query (3, 4, 8)"),
    "key rank": ({"key": torch.zeros(())}, ValueError, "key must have 4 dimensions; got key ()"),
    "key type": ({"key": None}, TypeError, "key must be a torch.Tensor; got key of type NoneType"),
    "bias rank": (
        {"key_bias": torch.zeros(2, 2, 1, 5)},
        ValueError,
        "key_bias must be (B or 1, H or Hkv or 1, Sk); got key_bias (2, 2, 1, 5), query (2, 3, 4, 8), key (2, 5, 2, 8)",
    ),
    "bias of batch and keys": (
        {"key_bias": torch.zeros(2, 5)},
        ValueError,
        "key (2, 5, 2, 8): if that is (B, Sk), make it (B, 1, Sk), key_bias[:, None, :]",
    ),
    "bias batch": ({"key_bias": torch.zeros(3, 2, 5)}, ValueError, "key_bias must be (B or 1, H or Hkv or 1, Sk)"),
    "bias keys": ({"key_bias": torch.zeros(2, 2, 1)}, ValueError, "key_bias must be (B or 1, H or Hkv or 1, Sk)"),
    "bias heads": ({"key_bias": torch.zeros(2, 3, 5)}, ValueError, "key_bias must be (B or 1, H or Hkv or 1, Sk)"),
    "bias dtype": (
        {"key_bias": torch.zeros(2, 2, 5).half()},
        ValueError,
        "key_bias must have query's dtype or float32; got key_bias float16, query float32",
    ),
    "bias integer": (
        {"key_bias": torch.zeros(2, 2, 5, dtype=torch.int64)},
        ValueError,
        "key_bias must have query's dtype or float32; got key_bias int64, query float32",
    ),
    "bias type": ({"key_bias": None}, TypeError, "key_bias must be a torch.Tensor; got key_bias of type NoneType"),
    "bias device": (
        {"key_bias": torch.zeros(2, 2, 5, device="meta")},
        ValueError,
        "key_bias must be on the device of query; got key_bias on meta, query on cpu",
    ),
    "scores keys": ({"scores": torch.zeros(2, 2, 4)}, ValueError, "scores must be (B or 1, H or Hkv or 1, Sk)"),
    "scores heads": ({"scores": torch.zeros(2, 3, 5)}, ValueError, "scores must be (B or 1, H or Hkv or 1, Sk)"),
    "scores batch": ({"scores": torch.zeros(3, 2, 5)}, ValueError, "scores must be (B or 1, H or Hkv or 1, Sk)"),
    "scores device": (
        {"scores": torch.zeros(2, 2, 5, device="meta")},
        ValueError,
        "scores must be on the device of query; got scores on meta, query on cpu",
    ),
    "scores type": ({"scores": 1.0}, TypeError, "scores must be a torch.Tensor or None; got scores of type float"),
    "window": ({"window_size": -3}, ValueError, "window_size must not be negative; got window_size -3"),
    "window type": ({"window_size": None}, TypeError, "window_size must be an int; got window_size of type NoneType"),
    "key_mask": (
        {"key_mask": torch.ones(2, 5) > 0},
        ValueError,
        "key_mask must have 3 dimensions; got key_mask (2, 5): if that is (B, Sk), make it (B, 1, Sk), in Python",
    ),
    "key_mask type": ({"key_mask": True}, TypeError, "key_mask must be a torch.Tensor or None; got key_mask of type"),
    "scale": ({"scale": torch.nan}, ValueError, "scale must be finite; got scale nan"),
    "return_lse": ({"return_lse": None}, TypeError, "return_lse must be a bool"),
    "deterministic": ({"deterministic": 1}, TypeError, "deterministic must be a bool"),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(changes: dict, kind: type, message: str) -> None:
    arguments = {"query": torch.zeros(2, 3, 4, 8), "key": torch.zeros(2, 5, 2, 8), "value": torch.zeros(2, 5, 2, 8)}
    arguments |= {"key_bias": torch.zeros(2, 2, 5), "window_size": 3}
    with pytest.raises(kind, match=re.escape(message)):
        dynamic_mask_attention(**(arguments | changes))


def test_empty_sizes() -> None:
    for batch, rows, keys in ((0, 3, 5), (2, 0, 5), (2, 3, 0)):
        query, key = (torch.zeros(batch, *shape, 8, dtype=default_dtype()) for shape in ((rows, 4), (keys, 2)))
        bias = torch.zeros(batch, 2, keys, requires_grad=True)
        out = dynamic_mask_attention(query, key, key, bias, 3)
        assert out.shape == query.shape and (out == 0).all()
        out.sum().backward()
        assert bias.grad.shape == bias.shape and (bias.grad == 0).all()


# ---- KeyIntervals as a mask


def intervals_of(name: str) -> KeyIntervals:
    """For B 2, H 4, Hkv 2, Sq 33, Sk 47."""
    if name == "random":  # any begin and end, beyond the rows and empty ones included
        return KeyIntervals(*torch.randint(-10, 45, (2, 2, 4, 47), dtype=torch.int32))
    if name == "key_heads":
        return select_keys(torch.randn(1, 2, 47), 9, seqlen_q=33)
    if name == "expanded":
        one = KeyIntervals.documents([0, 11, 12, 40])
        return KeyIntervals(*(bound[..., :1].expand(2, 2, 47) for bound in (one.begin, one.end)))
    return {
        "causal": KeyIntervals.causal(33, 47),
        "window": KeyIntervals.sliding_window(5, 2, 33, 47),
        "lengths": KeyIntervals.sliding_window(9, 0, 33, 47, seqlens_k=to_device(LENGTHS)),
        "prefix": KeyIntervals.prefix(20, 33, 47),
    }[name]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["random", "key_heads", "expanded", "causal", "window", "lengths", "prefix"])
def test_intervals_equal_their_dense_mask(name: str, is_causal: bool) -> None:
    intervals = intervals_of(name)
    case = make_case(bias=(1, 4, 33, 47), is_causal=is_causal)
    got = run_library(replace(case, mask=intervals))
    assert_case_close(replace(case, mask=intervals.dense_mask(33)), got)
    lengths = {"seqlens_k": to_device(LENGTHS)}
    got = run_library(replace(case, mask=intervals, bias=None, options=case.options | lengths))
    dense = replace(case, mask=intervals.dense_mask(33), bias=None, options=case.options | lengths)
    assert_case_close(dense, got)


def test_flash_dmattn_func_takes_intervals() -> None:
    case, intervals = make_case(bias=(2, 2, 47)), intervals_of("random")
    dense = (case.query, case.key, case.value, intervals.dense_mask(33), case.bias)
    result = flash_dmattn_func(case.query, case.key, case.value, intervals, case.bias, return_attn_probs=True)
    for tensor, expected in zip(result, flash_dmattn_func(*dense, return_attn_probs=True), strict=True):
        assert_near(tensor, expected)
    assert torch.equal(flash_dmattn_func_auto("cpu", attn_mask=intervals)(*dense[:3], attn_bias=case.bias), result[0])


INTERVAL_ERRORS = {
    "keys": (KeyIntervals.causal(3, 6), "intervals.begin must have one entry for each of the 5 keys; got intervals"),
    "heads": (select_keys(torch.zeros(2, 3, 5), 2, seqlen_q=3), "intervals.begin must broadcast to"),
    "batch": (select_keys(torch.zeros(3, 1, 5), 2, seqlen_q=3), "intervals.begin must broadcast to"),
    "device": (KeyIntervals.causal(3, 5, device="meta"), "intervals.begin must be on the device of query; got"),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("mask", "message"), INTERVAL_ERRORS.values(), ids=INTERVAL_ERRORS.keys())
def test_intervals_of_other_shapes_are_refused(mask: KeyIntervals, message: str) -> None:
    query, key = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(query, key, key, mask=mask)


@pytest.mark.devices("cpu")
def test_operator_wants_both_bounds() -> None:
    query, begin = torch.zeros(1, 3, 2, 8), torch.zeros(1, 1, 3, dtype=torch.int32)

    def forward(begin: Tensor | None, end: Tensor | None, window: int = 0) -> None:
        visibility = Visibility(interval_begin=begin, interval_end=end, interval_window=window)
        FORWARD(*forward_arguments(query, query, query, None, visibility))

    for bounds in ((begin, None), (None, begin)):
        with pytest.raises(ValueError, match=r"intervals\.(begin|end) must be given"):
            forward(*bounds)
    with pytest.raises(ValueError, match=r"intervals\.end must be int32; got intervals\.end int64"):
        forward(begin, begin.long())
    with pytest.raises(ValueError, match=r"intervals\.window_size must be at least 0; got -1"):
        forward(begin, begin, -1)


# ---- With the rest of PyTorch


@pytest.mark.parametrize("with_mask", [False, True])
def test_opcheck_with_intervals(with_mask: bool) -> None:
    case = make_case(rows=5, keys=7, head_dim=4, dtype=precise_dtype(), bias=(2, 2, 7))
    intervals = select_keys(case.bias, 3, seqlen_q=5)
    mask = torch.rand(2, 1, 5, 7) < 0.7 if with_mask else None
    visibility = Visibility(
        mask, interval_begin=intervals.begin, interval_end=intervals.end, is_causal=True, interval_window=3
    )
    arguments = forward_of(case, visibility)
    leaves = [t.requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t for t in arguments]
    tolerance = {} if case.query.dtype == torch.float64 else {"atol": 3e-2, "rtol": 3e-2}
    opcheck(FORWARD, tuple(leaves), **tolerance)
    arguments = tuple(t.detach() if torch.is_tensor(t) else t for t in arguments)
    arguments = backward_arguments(case.dout, None, FORWARD(*arguments), arguments)
    opcheck(BACKWARD, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.fixture
def compile_once() -> Iterator[Callable]:
    """Compiles for symbolic sizes; a second compilation is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield lambda function: torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("selection", ["causal", "per_key"])
def test_compiles_once_for_all_lengths_and_windows(compile_once: Callable, selection: str) -> None:
    @compile_once
    def compiled(*leaves: Tensor, window: int, **hidden: Tensor) -> tuple[Tensor, Tensor]:
        return dynamic_mask_attention(*leaves, window, selection=selection, return_lse=True, **hidden)

    for batch, rows, keys, window in ((3, 5, 7, 6), (2, 9, 9, 4), (5, 6, 20, 7), (6, 12, 8, 20)):
        case = make_case(batch, rows=rows, keys=keys, head_dim=4, dtype=precise_dtype(), bias=(batch, 2, keys))
        hidden = {"key_mask": torch.rand(batch, 1, keys) < 0.8}
        hidden["seqlens_k"] = torch.randint(2, keys, (batch,), dtype=torch.int32)
        expected = run_dynamic(case, window, selection=selection, **hidden)
        leaves = [getattr(case, name).requires_grad_() for name in LEAVES]
        out, lse = compiled(*leaves, window=window, **hidden)
        gradients = torch.autograd.grad(out, leaves, case.dout)
        for result, name in zip((out, lse, *gradients), expected, strict=True):
            assert_near(result.detach(), expected[name])


def test_compiles_with_intervals_from_outside(compile_once: Callable) -> None:
    compiled = compile_once(lambda query, key, mask: attention(query, key, key, mask=mask, is_causal=True))
    for rows, keys in ((5, 7), (9, 9), (6, 20)):
        query, key = (torch.randn(2, *shape, 8).to(default_dtype()) for shape in ((rows, 4), (keys, 2)))
        mask = select_keys(torch.randn(2, 2, keys), 3, seqlen_q=rows)
        assert_near(compiled(query, key, mask), attention(query, key, key, mask=mask, is_causal=True))


@pytest.mark.devices("cpu")
def test_exports() -> None:
    class Model(torch.nn.Module):
        def forward(self, query: Tensor, key_bias: Tensor, mask: KeyIntervals) -> tuple[Tensor, Tensor, KeyIntervals]:
            dynamic = dynamic_mask_attention(query, query, query, key_bias, 3)
            rows = query.shape[1]
            return dynamic, attention(query, query, query, mask=mask), select_keys(key_bias, 3, seqlen_q=rows)

    length = torch.export.Dim("length", min=2, max=64)
    shapes = ({1: length}, {2: length}, [{2: length}, {2: length}])
    example = (torch.randn(2, 5, 4, 8), torch.randn(2, 4, 5), KeyIntervals.causal(5))
    program = torch.export.export(Model(), example, dynamic_shapes=shapes)
    other = (torch.randn(2, 9, 4, 8), torch.randn(2, 4, 9), KeyIntervals.sliding_window(2, 0, 9))
    *results, intervals = program.module()(*other)
    *expected, expected_intervals = Model()(*other)
    for result, tensor in zip(results, expected, strict=True):
        torch.testing.assert_close(result, tensor)
    assert torch.equal(intervals.end, expected_intervals.end)


@pytest.mark.filterwarnings("error:.*performance drop")
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (0, None, None, None), (None, 1, 2, None), (None, None, None, 0)])
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap_equals_a_loop(in_dims: tuple, batch: int) -> None:
    sizes = [(batch, 5, 4, 8), (batch, 7, 2, 8), (batch, 7, 2, 8), (batch, 2, 7)]
    shapes = [s if dim is None else (*s[:dim], 3, *s[dim:]) for s, dim in zip(sizes, in_dims, strict=True)]
    tensors = [torch.randn(shape, dtype=precise_dtype()) for shape in shapes]

    def gradients(*leaves: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *t: dynamic_mask_attention(*t, 3).square().sum(), argnums=(0, 1, 2, 3))(*leaves)

    def both(*leaves: Tensor) -> tuple[Tensor, ...]:
        return dynamic_mask_attention(*leaves, 3), *gradients(*leaves)

    mapped = torch.vmap(both, in_dims)(*tensors)
    for index in range(3):
        picked = [t if dim is None else t.select(dim, index) for t, dim in zip(tensors, in_dims, strict=True)]
        for result, expected in zip(mapped, both(*picked), strict=True):
            assert_near(result[index], expected)


@pytest.mark.filterwarnings("error:.*performance drop")
@pytest.mark.parametrize("mask_dim", [0, None])
def test_vmap_over_intervals(mask_dim: int | None) -> None:
    query, key = (torch.randn(3, 2, *shape, 8).to(default_dtype()) for shape in ((5, 4), (7, 2)))
    scores = torch.randn(2, 2, 7) if mask_dim is None else torch.randn(3, 2, 2, 7)
    mask = select_keys(scores, 3, seqlen_q=5) if mask_dim is None else torch.vmap(_select_three)(scores)
    mapped = torch.vmap(lambda q, k, m: attention(q, k, k, mask=m), (0, 0, mask_dim))(query, key, mask)
    for index in range(3):
        one = mask if mask_dim is None else KeyIntervals(mask.begin[index], mask.end[index])
        assert_near(mapped[index], attention(query[index], key[index], key[index], mask=one))


@pytest.mark.parametrize("dims", [(0, None), (None, 1)], ids=str)
def test_vmap_over_one_bound(dims: tuple[int | None, int | None]) -> None:
    query, key = (torch.randn(3, 2, *shape, 8).to(default_dtype()) for shape in ((5, 4), (7, 2)))
    shapes = {None: (2, 2, 7), 0: (3, 2, 2, 7), 1: (2, 3, 2, 7)}
    bounds = [torch.randint(0, 6, shapes[dim]).int() for dim in dims]

    def gradient(query: Tensor, key: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        mask = KeyIntervals(begin.expand_as(end), end.expand_as(begin))
        return torch.func.grad(lambda q: attention(q, key, key, mask=mask).square().sum())(query)

    mapped = torch.vmap(gradient, (0, 0, *dims))(query, key, *bounds)
    for index in range(3):
        picked = [b if dim is None else b.select(dim, index) for b, dim in zip(bounds, dims, strict=True)]
        assert_near(mapped[index], gradient(query[index], key[index], *picked))


def _select_three(scores: Tensor) -> KeyIntervals:
    return select_keys(scores, 3, seqlen_q=5)


def test_autocast_selects_by_the_unrounded_scores() -> None:
    case = make_case(bias=(2, 2, 47), dtype=torch.float32, is_causal=True)
    case.bias.mul_(1e-6).add_(1)  # all equal once rounded to bfloat16
    with torch.autocast(case.query.device.type, dtype=torch.bfloat16):
        out = dynamic_mask_attention(case.query, case.key, case.value, case.bias, 5)
    low = [tensor.bfloat16() for tensor in (case.query, case.key, case.value)]
    mask = select_keys(case.bias, 5, seqlen_q=33)
    assert out.dtype == torch.bfloat16 and torch.equal(out, attention(*low, mask=mask, bias=case.bias, is_causal=True))


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_takes_a_bias_of_any_dtype_that_it_casts(bias_dtype: torch.dtype) -> None:
    tensors = [torch.randn(2, 5, 2, 8) for _ in range(3)]
    key_bias = torch.randn(2, 2, 5).to(bias_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert dynamic_mask_attention(*tensors, key_bias, 3).dtype == torch.bfloat16
    message = "key_bias must have query's dtype or float32; got key_bias float64"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=message):
        dynamic_mask_attention(*tensors, key_bias.double(), 3)


def test_meta_tensors_give_shapes() -> None:
    query, key = torch.empty(2, 3, 4, 8, device="meta"), torch.empty(2, 5, 2, 8, device="meta")
    out = dynamic_mask_attention(query, key, key, torch.empty(2, 2, 5, device="meta"), 3)
    assert out.shape == query.shape and out.device.type == "meta"


@pytest.mark.devices("cpu")
def test_forward_mode_and_second_derivatives_are_refused() -> None:
    case = make_case(rows=5, keys=7, head_dim=4, dtype=torch.float64, bias=(2, 2, 7))

    def by_bias(bias: Tensor) -> Tensor:
        return dynamic_mask_attention(case.query, case.key, case.value, bias, 3)

    with pytest.raises(RuntimeError, match=r"no forward-mode derivative \(jvp\), but bias carries a tangent"):
        torch.func.jvp(by_bias, (case.bias,), (case.bias,))
    bias = case.bias.requires_grad_()
    (gradient,) = torch.autograd.grad(by_bias(bias).square().sum(), bias, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def test_deterministic_is_the_same_for_any_number_of_threads() -> None:
    case = make_case(2, 4, 2, 300, 400, 32, bias=(2, 2, 400), is_causal=True)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run_dynamic(case, 40, deterministic=True))
    assert_same_bits(*results)


@pytest.mark.devices("cpu")
def test_only_the_bias_may_need_a_gradient() -> None:
    case = make_case(rows=5, keys=7, head_dim=4, dtype=torch.float64, bias=(2, 2, 7), is_causal=True)
    expected = reference(selected(case, 3))["dbias"].value
    bias = case.bias.requires_grad_()
    out = dynamic_mask_attention(case.query, case.key, case.value, bias, 3)
    out.backward(case.dout)
    torch.testing.assert_close(bias.grad, expected, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        quiet = dynamic_mask_attention(case.query, case.key, case.value, bias, 3)
    assert not quiet.requires_grad and torch.equal(bits(quiet), bits(out.detach()))
