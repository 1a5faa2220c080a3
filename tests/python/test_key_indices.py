"""KeyIndices: the class itself, and attention under lists of keys against the fp64 oracle with the same mask."""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from cases import assert_near, assert_same_bits, dtypes, make_case, poison_unseen, precise_dtype, relayout, run_library
from compare import assert_case_close
from flash_dmattn import (
    KeyIndices,
    KeyIntervals,
    attention,
    flash_dmattn_func,
    plan_report,
    prepare_mask,
    select_keys,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import FORWARD, forward_arguments
from oracle import Case
from torch import Tensor
from torch.library import opcheck
from torch.utils import _pytree as pytree

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def mask_of(lists: KeyIndices, keys: int) -> Tensor:
    """What the lists of a KeyIndices show, entry by entry; other conditions aside."""
    batch, heads, rows, _ = lists.shape
    if lists.lengths is not None:
        batch, heads, rows = torch.broadcast_shapes((batch, heads, rows), lists.lengths.shape)
    indices = lists.indices.expand(batch, heads, rows, -1).tolist()
    mask = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for row in range(rows):
                entries = indices[b][h][row]
                if lists.lengths is not None:
                    count = int(lists.lengths.expand(batch, heads, rows)[b, h, row])
                    entries = entries[: max(count, 0)]
                for entry in entries:
                    first = entry * lists.block_size
                    if 0 <= first < keys:
                        mask[b, h, row, first : first + lists.block_size] = True
    return mask


def random_lists(
    shape: tuple[int, int, int, int], keys: int, block_size: int = 1, with_lengths: bool = False, seed: int = 0
) -> KeyIndices:
    """Unsorted, with repeats and with entries outside of the keys."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-keys // block_size)
    indices = torch.randint(-2, blocks + 3, shape, generator=generator, dtype=torch.int32)
    lengths = None
    if with_lengths:
        lengths = torch.randint(-2, shape[3] + 3, shape[:3], generator=generator, dtype=torch.int32)
    return KeyIndices(indices, block_size, lengths)


def assert_lists_right(case: Case, lists: KeyIndices, shown: Tensor) -> None:
    """The call with the lists meets the bar of the oracle, which is given the mask."""
    expected = replace(case, mask=shown)
    got = run_library(replace(case, mask=lists))
    assert_case_close(expected, got, few_elements=True)


class Form(NamedTuple):
    heads: int = 1
    entries: int = 9
    block_size: int = 1
    with_lengths: bool = False
    batch: int = 2
    rows: int = 33


# For B 2, Sq 33, Sk 147, H 4, Hkv 2.
FORMS = {
    "one for all heads": Form(),
    "of key heads": Form(heads=2),
    "of heads, with lengths": Form(heads=4, with_lengths=True),
    "of one batch element": Form(batch=1),
    "one list": Form(rows=1, entries=40),
    "one list of each head": Form(rows=1, heads=4, entries=40, with_lengths=True),
    "no entries": Form(entries=0),
    "more entries than keys": Form(entries=300),
    "blocks of 16": Form(block_size=16, entries=3),
    "blocks of 64": Form(block_size=64, entries=1, heads=2),
    "blocks of 100": Form(block_size=100, entries=2, with_lengths=True),
    "blocks of 128": Form(block_size=128, entries=2),
    "blocks beyond all keys": Form(block_size=2**31 - 1, entries=3),
}


def lists_of(form: Form, keys: int = 147) -> KeyIndices:
    return random_lists((form.batch, form.heads, form.rows, form.entries), keys, form.block_size, form.with_lengths)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_agrees_with_the_oracle(form: Form, dtype: torch.dtype) -> None:
    lists = lists_of(form)
    shown = mask_of(lists, 147)
    case = make_case(2, 4, 2, 33, 147, 24, dtype=dtype, bias=(1, 4, 33, 147), with_dlse=True)
    assert_lists_right(poison_unseen(replace(case, mask=shown)), lists, shown)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 200])
@pytest.mark.parametrize("block_size", [1, 100])
def test_with_everything_else_that_hides(rows: int, block_size: int) -> None:
    """The causal rule, lengths of the keys, a mask per key and intervals; decode, one chunk of rows and several."""
    keys = 1100
    lists = random_lists((2, 2, rows, 60), keys, block_size)
    generator = torch.Generator().manual_seed(1)
    key_mask = torch.rand(2, 1, keys, generator=generator) < 0.8
    intervals = KeyIntervals.sliding_window(700, 30, rows, keys)
    shown = mask_of(lists, keys) & key_mask[:, :, None] & intervals.dense_mask(rows)
    lists = lists.intersection(intervals).intersection(key_mask)
    options = {"is_causal": True, "seqlens_k": torch.tensor([1100, 803], dtype=torch.int32)}
    case = make_case(2, 4, 2, rows, keys, 16, bias=(2, 2, keys), **options)
    assert_lists_right(poison_unseen(replace(case, mask=shown)), lists, shown)


@pytest.mark.parametrize("layout", ["transposed", "padded", "offset", "strided", "expanded"])
def test_any_strides(layout: str) -> None:
    lists = random_lists((2, 2, 33, 9), 47, with_lengths=True)
    if layout == "expanded":
        indices = lists.indices[:1, :1].expand(2, 2, 33, 9)
        moved = KeyIndices(indices, 1, lists.lengths[:, :, :1].expand(2, 2, 33))
    else:
        moved = KeyIndices(relayout(lists.indices, layout), 1, relayout(lists.lengths, layout))
    assert_lists_right(make_case(), moved, mask_of(moved, 47))


def test_rows_without_keys_are_zero() -> None:
    lists = KeyIndices(torch.full((1, 1, 33, 4), -1, dtype=torch.int32))
    got = run_library(replace(make_case(bias=(1, 4, 33, 47)), mask=lists))
    assert (got.pop("lse") == -torch.inf).all()
    assert not any(result.any() for result in got.values())


def test_large_integers_name_no_key() -> None:
    """2^32 narrowed to 32 bits would be key 0."""
    entries = torch.tensor([2**32, 2**31, -(2**32), -(2**63), 2**63 - 1, 3])
    lists = KeyIndices(entries[None, None, None])
    assert lists.indices.dtype == torch.int32
    assert lists.dense_mask(7)[0, 0, 0].nonzero().flatten().tolist() == [3]
    blocks = KeyIndices(torch.tensor([2**30, 2**26, 1], dtype=torch.int32)[None, None, None], 64)  # * 64 is 2^36, 2^32
    assert blocks.dense_mask(70)[0, 0, 0].nonzero().flatten().tolist() == list(range(64, 70))
    for shown, keys in ((lists, 7), (blocks, 70)):
        case = make_case(1, 1, 1, 4, keys, 8)
        assert_lists_right(case, shown, mask_of(shown, keys))


@st.composite
def lists_and_cases(draw: st.DrawFn) -> tuple[Case, KeyIndices]:
    batch, key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows = draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 130])))
    keys = draw(st.one_of(st.integers(0, 70), st.sampled_from([127, 129, 260])))
    heads = key_heads * group
    shape = (
        draw(st.sampled_from([1, batch])),
        draw(st.sampled_from([1, key_heads, heads])),
        draw(st.sampled_from([1, rows])),
        draw(st.integers(0, 20)),
    )
    lists = random_lists(
        shape, keys, draw(st.sampled_from([1, 1, 3, 64, 100])), draw(st.booleans()), draw(st.integers(0, 1000))
    )
    case = make_case(
        batch,
        heads,
        key_heads,
        rows,
        keys,
        draw(st.sampled_from([1, 8, 32])),
        dtype=draw(st.sampled_from(dtypes())),
        bias=draw(st.sampled_from([None, (1, 1, keys), (rows, keys)])),
        with_dlse=draw(st.booleans()),
        is_causal=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    return case, lists


@given(lists_and_cases())
@settings(max_examples=100)
def test_any_lists_agree_with_the_oracle(drawn: tuple[Case, KeyIndices]) -> None:
    case, lists = drawn
    shown = mask_of(lists, case.key.shape[1])
    assert torch.equal(lists.dense_mask(case.key.shape[1]).expand(shown.shape), shown)
    assert_lists_right(poison_unseen(replace(case, mask=shown)), lists, shown)


@given(lists_and_cases())
@settings(max_examples=30)
def test_same_bits_for_any_thread_count(drawn: tuple[Case, KeyIndices]) -> None:
    case = replace(drawn[0], mask=drawn[1])
    torch.set_num_threads(1)
    one = run_library(case, deterministic=True)
    torch.set_num_threads(2)
    assert_same_bits(one, run_library(case, deterministic=True))


# ---- The class


def test_intersection_holds_both_conditions() -> None:
    lists = random_lists((1, 2, 20, 8), 50)
    window, documents = KeyIntervals.sliding_window(9, 0, 20, 50), KeyIntervals.documents([0, 30, 50])
    first, second = torch.rand(1, 1, 50) < 0.7, torch.rand(3, 2, 50) < 0.7
    both = lists.intersection(window).intersection(first).intersection(documents).intersection(second)
    shown = mask_of(lists, 50) & window.dense_mask(20) & documents.dense_mask(20) & (first & second)[:, :, None]
    assert torch.equal(both.dense_mask(50), shown)
    one = random_lists((1, 1, 1, 8), 50).intersection(window)
    with pytest.raises(ValueError, match="seqlen_q must be given for one list with intervals; got None"):
        one.dense_mask(50)
    assert torch.equal(one.dense_mask(50, 20), mask_of(one, 50) & window.dense_mask(20))


def test_is_a_pytree() -> None:
    lists = random_lists((1, 2, 20, 8), 50, 3, True).intersection(KeyIntervals.causal(20, 50))
    leaves, spec = pytree.tree_flatten(lists)
    assert len(leaves) == 4
    again = pytree.tree_unflatten(leaves, spec)
    assert again.block_size == 3 and again.key_mask is None
    assert torch.equal(again.dense_mask(50), lists.dense_mask(50))
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(lists)[0]]
    assert names == [".indices", ".lengths", ".intervals.begin", ".intervals.end"]


@pytest.mark.parametrize("copied", ["copy", "pickle", "torch"])
def test_survives_copies(copied: str) -> None:
    lists = random_lists((1, 2, 20, 8), 50, 3, True).intersection(torch.rand(1, 1, 50) < 0.5)
    if copied == "torch":
        file = io.BytesIO()
        torch.save(lists, file)
        file.seek(0)
        again = torch.load(file)
    else:
        again = copy.deepcopy(lists) if copied == "copy" else pickle.loads(pickle.dumps(lists))
    assert torch.equal(again.dense_mask(50), lists.dense_mask(50))
    assert lists.to("cpu").shape == lists.shape and lists.to("meta").device.type == "meta"


def lists_32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2],), TypeError, "indices must be a torch.Tensor; got indices of type list"),
        ((lists_32(2, 3, 4),), ValueError, "indices must be int32 or int64 with 4 dimensions; got indices int32 (2, 3"),
        ((torch.zeros(1, 1, 1, 1),), ValueError, "indices must be int32 or int64 with 4 dimensions; got indices float"),
        ((lists_32(1, 1, 1, 1), 0), ValueError, "block_size must be between 1 and 2^31 - 1; got block_size 0"),
        ((lists_32(1, 1, 1, 1), 2**31), ValueError, "block_size must be between 1 and 2^31 - 1; got block_size 2147"),
        ((lists_32(1, 1, 1, 1), 1.5), TypeError, "block_size must be an int; got block_size of type float"),
        ((lists_32(1, 1, 1, 1), 1, lists_32(1, 1)), ValueError, "lengths must be int32 with 3 dimensions; got lengths"),
        ((lists_32(1, 1, 1, 1), 1, None, 5), TypeError, "intervals must be KeyIntervals or None; got int"),
        ((lists_32(1, 1, 1, 1), 1, None, None, lists_32(1, 1, 1)), ValueError, "key_mask must be bool with 3 dimen"),
        (
            (lists_32(1, 1, 1, 1), 1, lists_32(1, 1, 1).to("meta")),
            ValueError,
            "lengths must be on the device of indices; got lengths on meta, indices on cpu",
        ),
        (
            (lists_32(2, 4, 9, 1), 1, lists_32(2, 2, 9)),
            ValueError,
            "lengths must have as many batch elements and heads as indices, or 1; got lengths (2, 2, 9), indices (2, 4",
        ),
    ],
)
def test_mistakes_are_named(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        KeyIndices(*arguments)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (KeyIndices(lists_32(2, 3, 33, 5)), "indices must broadcast to (B, H or Hkv, Sq, n) = (2, 4 or 2, 33, n); got"),
        (KeyIndices(lists_32(2, 1, 32, 5)), "indices must broadcast to (B, H or Hkv, Sq, n) = (2, 4 or 2, 33, n); got"),
        (
            KeyIndices(lists_32(2, 1, 33, 5), 1, lists_32(2, 1, 32)),
            "indices.lengths must broadcast to (B, H or Hkv, Sq) = (2, 4 or 2, 33); got indices.lengths (2, 1, 32)",
        ),
        (
            KeyIndices(lists_32(2, 1, 33, 5)).intersection(torch.ones(2, 1, 46).bool()),
            "mask must broadcast to (B, H or Hkv, Sq, Sk) = (2, 4 or 2, 33, 47); got mask (2, 1, 46)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_named(lists: KeyIndices, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_library(replace(make_case(), mask=lists))


def test_intersection_refuses_what_is_no_condition() -> None:
    lists = random_lists((1, 1, 20, 8), 50)
    with pytest.raises(
        TypeError, match=re.escape("other must be KeyIntervals or a torch.Tensor; got other of type int")
    ):
        lists.intersection(3)
    with pytest.raises(
        ValueError, match=re.escape("other must be bool per key, with 3 dimensions; got other bool (20")
    ):
        lists.intersection(torch.ones(20, 50).bool())
    with pytest.raises(ValueError, match=re.escape("other must broadcast with the mask that is held")):
        lists.intersection(torch.ones(2, 1, 50).bool()).intersection(torch.ones(3, 1, 50).bool())
    with pytest.raises(ValueError, match="intervals must have as many batch elements and heads as indices, or 1"):
        random_lists((1, 2, 20, 8), 50).intersection(KeyIntervals(lists_32(1, 3, 50), lists_32(1, 3, 50)))


# ---- Beside the rest of the library


def test_other_functions_take_lists() -> None:
    lists = random_lists((2, 2, 33, 9), 47)
    shown = mask_of(lists, 47)
    case = make_case()
    inputs = (case.query, case.key, case.value)
    expected = attention(*inputs, mask=shown)
    assert_near(flash_dmattn_func(*inputs, lists), expected)
    out, _, probabilities = flash_dmattn_func(*inputs, lists, return_attn_probs=True)
    assert_near(out, expected)
    assert torch.equal(probabilities > 0, shown.repeat_interleave(2, 1))
    report, same = (plan_report(case.query, case.key, mask=mask) for mask in (lists, shown))
    assert report.kept_scores == same.kept_scores == 2 * int(shown.sum())
    assert report.rule.startswith("lists of keys")


def test_prepared_lists() -> None:
    lists = random_lists((2, 2, 33, 9), 47)
    prepared = prepare_mask(lists, seqlen_k=47)
    assert prepared.kind == "indices" and prepared.shape == (2, 2) and prepared.seqlen_q == 33
    assert torch.equal(prepared.dense_mask(), mask_of(lists, 47)) and "a list of keys per row" in repr(prepared)
    case = make_case()
    assert_same_bits(run_library(replace(case, mask=prepared)), run_library(replace(case, mask=lists)))
    assert prepare_mask(random_lists((2, 2, 1, 9), 47), seqlen_k=47).seqlen_q is None
    with pytest.raises(ValueError, match="seqlen_k must be given for KeyIndices"):
        prepare_mask(lists)
    with pytest.raises(ValueError, match="seqlen_q must be the 33 rows of the lists; got seqlen_q 32"):
        prepare_mask(lists, 32, seqlen_k=47)
    with pytest.raises(ValueError, match="mask must have been prepared for these shapes"):
        run_library(replace(make_case(keys=48), mask=prepared))
    again = pickle.loads(pickle.dumps(prepared))
    assert torch.equal(again.dense_mask(), prepared.dense_mask())
    leaves, spec = pytree.tree_flatten(prepared)
    assert torch.equal(pytree.tree_unflatten(leaves, spec).dense_mask(), prepared.dense_mask())


def test_opcheck() -> None:
    lists = random_lists((2, 2, 5, 3), 7, with_lengths=True)
    case = make_case(rows=5, keys=7, head_dim=4, dtype=precise_dtype(), bias=(2, 2, 7))
    from flash_dmattn.prepared import visibility_of

    visibility = visibility_of(lists, case.query.shape, case.key.shape, True)
    arguments = forward_arguments(case.query, case.key, case.value, case.bias, visibility)
    leaves = [t.requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t for t in arguments]
    opcheck(FORWARD, tuple(leaves))


def test_compiles_once_for_all_lengths() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(query: Tensor, key: Tensor, value: Tensor, indices: Tensor) -> Tensor:
        return attention(query, key, value, mask=KeyIndices(indices), is_causal=True)

    for rows, keys, entries in ((5, 9, 3), (6, 11, 4), (7, 10, 8), (9, 17, 5)):
        case = make_case(rows=rows, keys=keys, head_dim=8)
        lists = random_lists((2, 1, rows, entries), keys)
        leaves = [t.requires_grad_() for t in (case.query, case.key, case.value)]
        out = compiled(*leaves, lists.indices)
        expected = attention(*leaves, mask=mask_of(lists, keys), is_causal=True)
        assert_near(out, expected)
        for got, other in zip(
            torch.autograd.grad(out, leaves, case.dout), torch.autograd.grad(expected, leaves, case.dout), strict=True
        ):
            assert_near(got, other)
    assert backend.frame_count <= 2  # the first with fixed sizes, the second for every size
    torch._dynamo.reset()


def test_vmap() -> None:
    case = make_case(rows=5, keys=9, head_dim=8)
    lists = torch.stack([random_lists((2, 1, 5, 3), 9, seed=seed).indices for seed in range(3)])
    lengths = torch.randint(0, 4, (3, 2, 1, 5), dtype=torch.int32)

    def call(indices: Tensor, lengths: Tensor) -> Tensor:
        return attention(case.query, case.key, case.value, mask=KeyIndices(indices, 1, lengths))

    mapped = torch.vmap(call)(lists, lengths)
    for out, *arguments in zip(mapped, lists, lengths, strict=True):
        assert_near(out, call(*arguments))


def test_a_selection_as_lists() -> None:
    """The same keys as intervals and as lists."""
    scores = torch.randn(1, 2, 200)
    kept = select_keys(scores, 20)
    indices = kept.dense_mask(200).int().topk(20, dim=-1)
    lists = KeyIndices(torch.where(indices.values > 0, indices.indices, -1))
    case = make_case(1, 4, 2, 200, 200, 16, is_causal=True)
    for got, expected in zip(
        run_library(replace(case, mask=lists)).values(), run_library(replace(case, mask=kept)).values(), strict=True
    ):
        assert_near(got, expected)


LISTS_MEMORY = """
import torch
import flash_dmattn

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

def run(length, kept, head_dim=16):
    make = lambda: torch.randn(1, length, 1, head_dim, requires_grad=True)
    query, key, value = make(), make(), make()
    dout = torch.randn(1, length, 1, head_dim)
    first = (torch.arange(length, dtype=torch.int32) - kept).clamp(min=0)
    indices = first[:, None] + torch.arange(kept, dtype=torch.int32)
    before = peak()
    out = flash_dmattn.attention(query, key, value, mask=flash_dmattn.KeyIndices(indices[None, None]), is_causal=True)
    torch.autograd.grad(out, (query, key, value), dout)
    return peak() - before

torch.set_num_threads(2)
run(1024, 16)
print(run(32768, 16))
"""


@linux_only
def test_no_mask_is_made() -> None:
    """32768 x 32768: a byte for each score would be 1 GiB, a bit 128 MiB."""
    result = subprocess.run([sys.executable, "-c", LISTS_MEMORY], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    taken = int(result.stdout) / 2**20
    assert taken < 40, f"{taken:.1f} MiB beside the inputs"
