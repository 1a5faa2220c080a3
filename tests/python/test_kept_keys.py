"""KeptKeys: appending step by step against a selection from the whole history, and the class itself."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re

import pytest
import torch
from flash_dmattn import KeptKeys, KeyIndices, attention, select_keys
from hypothesis import event, given, settings
from hypothesis import strategies as st
from selecting import visible_keys
from torch import Tensor
from torch.library import opcheck
from torch.utils import _pytree as pytree

APPEND = torch.ops.flash_dmattn.append_kept_keys.default
INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

pytestmark = pytest.mark.devices("cpu", "cuda")


def at(*positions: int) -> Tensor:
    return torch.tensor(positions, dtype=torch.int32)


def shown_by(lists: Tensor, keys: int) -> Tensor:
    """(..., n) -> bool (..., Sk). No key stands on a list twice, and what names none is -1."""
    named = lists[lists != -1]
    assert ((named >= 0) & (named < keys)).all()
    counts = torch.zeros(*lists.shape[:-1], keys + 1, dtype=torch.int64)
    counts.scatter_add_(-1, torch.where(lists == -1, keys, lists).long(), torch.ones_like(lists, dtype=torch.int64))
    assert (counts[..., :keys] <= 1).all()
    return counts[..., :keys] == 1


def assert_holds(kept: KeptKeys, scores: Tensor, existing: Tensor | None = None) -> None:
    """The keys that a selection from all of the history keeps for its last row, with their scores."""
    keys = scores.shape[2]
    options = {} if existing is None else {"seqlens_k": existing}
    expected = select_keys(scores, kept.window_size, seqlen_q=1, **options).dense_mask(1)[:, :, 0]
    assert torch.equal(shown_by(kept.indices, keys), expected)
    if keys > 0:
        held = scores.gather(2, kept.indices.clamp(min=0).long())
        same = (kept.scores == held) | (kept.scores.isnan() & held.isnan())
        assert (same | (kept.indices < 0)).all()


def special_values(dtype: torch.dtype) -> list[float]:
    info = torch.finfo(dtype)
    return [NAN, -NAN, INF, -INF, info.min, info.max, 0.0, -0.0, 1.0, -1.0, info.smallest_normal]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Tensor, int, list[int]]:
    """Scores, the window and the sizes of the steps, most of them with many ties."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    sizes = draw(st.lists(st.integers(1, 16), max_size=6))
    keys = sum(sizes)
    dtype = draw(st.sampled_from(DTYPES))
    ties = st.sampled_from([0.0, 1.0, 2.0])
    values = draw(st.sampled_from([ties, st.sampled_from(special_values(dtype)), st.floats(-4, 4, width=16)]))
    scores = draw(st.lists(values, min_size=batch * heads * keys, max_size=batch * heads * keys))
    window = draw(st.sampled_from([0, 1, 2, 3, 7, 16, 20, keys, keys + 1]))
    return torch.tensor(scores, dtype=torch.float64).to(dtype).reshape(batch, heads, keys), window, sizes


@settings(max_examples=300)
@given(histories(), st.data())
def test_append_equals_selecting_anew(history: tuple[Tensor, int, list[int]], data: st.DataObject) -> None:
    scores, window, sizes = history
    batch, heads, keys = scores.shape
    # A prefill of some steps, then one step after another.
    steps = data.draw(st.integers(0, len(sizes)))
    done = sum(sizes[:steps])
    event(f"window {'>=' if window >= keys else '<'} keys, prefill {done > 0}")
    empty = {"dtype": scores.dtype, "device": scores.device}
    kept = KeptKeys.from_scores(scores[..., :done], window) if done else KeptKeys.empty(batch, heads, window, **empty)
    assert_holds(kept, scores[..., :done])
    expected = visible_keys(scores, window, keys)
    for size in sizes[steps:]:
        mask = kept.append_(scores[..., done : done + size], torch.full((batch,), done, dtype=torch.int32))
        assert mask.shape == (batch, heads, size, window)
        assert torch.equal(shown_by(mask.indices, keys), expected[:, :, done : done + size])
        done += size
        assert_holds(kept, scores[..., :done])


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_positions_differ_in_a_batch(rows: int) -> None:
    scores, window = torch.randint(-3, 4, (3, 2, 80)).float(), 9
    lengths = at(0, 5, 40)
    kept = KeptKeys.from_scores(scores, window, lengths)
    assert_holds(kept, scores, lengths)
    for _ in range(2):
        new = torch.stack([one[:, n : n + rows] for one, n in zip(scores, lengths.tolist(), strict=True)])
        mask, lengths = kept.append_(new, lengths), lengths + rows
        assert_holds(kept, scores, lengths)
        expected = visible_keys(scores, window, rows, seqlens_k=lengths)
        assert torch.equal(shown_by(mask.indices, 80), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_in_every_order(dtype: torch.dtype) -> None:
    values = torch.tensor(special_values(dtype), dtype=dtype)
    order = torch.cat([torch.randperm(len(values)) for _ in range(8)])
    scores = values[torch.stack([order, order.flip(0)])][None]
    for window in (1, 2, 5, 20, 60):
        kept = KeptKeys.empty(1, 2, window, dtype=dtype)
        for key in range(scores.shape[2]):
            kept.append_(scores[..., key : key + 1], at(key))
            assert_holds(kept, scores[..., : key + 1])


def test_keys_without_an_index_are_not_kept() -> None:
    kept = KeptKeys.empty(2, 1, 4)
    mask = kept.append_(torch.ones(2, 1, 3), at(-2, 2**31 - 2))
    assert sorted(kept.indices[0, 0].tolist()) == [-1, -1, -1, 0]
    assert sorted(kept.indices[1, 0].tolist()) == [-1, -1, 2**31 - 2, 2**31 - 1]
    assert (mask.indices[0, 0, :2] == -1).all()


def test_hidden_keys() -> None:
    """Padding: by key_mask in a prefill, by -inf afterwards."""
    scores, hidden = torch.randn(2, 3, 50), torch.rand(2, 1, 50) < 0.4
    kept = KeptKeys.from_scores(scores[..., :30], 8, key_mask=~hidden[..., :30])
    scores = scores.masked_fill(hidden, -INF)
    for done in (30, 40):
        kept.append_(scores[..., done : done + 10], at(done, done))
    assert_holds(kept, scores)


def test_a_copy_is_returned_and_the_state_written_to() -> None:
    scores = torch.randn(2, 2, 20)
    kept = KeptKeys.from_scores(scores, 6)
    held = kept.indices, kept.scores
    first = kept.append_(torch.full((2, 2, 1), 9.0), at(20, 20))
    before = first.indices.clone()
    kept.append_(torch.full((2, 2, 1), 9.0), at(21, 21))
    assert torch.equal(first.indices, before) and not torch.equal(kept.indices, before[:, :, 0])
    assert (kept.indices, kept.scores) == held  # the same tensors
    assert (kept.indices == 21).any(2).all()


@pytest.mark.devices("cpu")  # on other devices keys stand by rank
def test_a_new_key_takes_the_place_of_the_one_it_puts_out() -> None:
    kept = KeptKeys.empty(1, 1, 3)
    for position, (score, places) in enumerate([(2, [0, -1, -1]), (1, [0, 1, -1]), (1, [0, 1, 2]), (1, [0, 3, 2])]):
        kept.append_(torch.full((1, 1, 1), float(score)), at(position))
        assert kept.indices.flatten().tolist() == places


def test_strides_and_threads_change_nothing() -> None:
    scores = torch.randint(0, 50, (3, 4, 3000)).float()
    new = torch.randint(0, 60, (3, 4, 16)).float()
    results = []
    for threads, view in ((1, new), (2, new.mT.contiguous().mT), (2, new.repeat_interleave(2, 2)[..., ::2])):
        torch.set_num_threads(threads)
        kept = KeptKeys.from_scores(scores, 2500)
        results.append((kept.append_(view, at(3000, 3000, 3000)).indices, kept.indices, kept.scores))
    for result in results[1:]:
        assert all(torch.equal(*both) for both in zip(result, results[0], strict=True))


def test_crop_begins_again_from_the_scores_that_are_left() -> None:
    """What better keys had put out comes back."""
    scores = torch.cat([torch.randn(1, 2, 30), torch.full((1, 2, 10), 9.0)], 2)
    kept = KeptKeys.from_scores(scores[..., :30], 8)
    kept.append_(scores[..., 30:], at(30))
    assert (kept.indices >= 30).all()
    kept = KeptKeys.from_scores(scores[..., :35], 8)
    again = scores[..., :4]
    kept.append_(again, at(35))
    assert_holds(kept, torch.cat([scores[..., :35], again], 2))


def test_crop_is_found_on_the_device() -> None:
    """Where the scores of all keys are given: by head and batch element, whatever the host has been told."""
    scores, window = torch.randint(-9, 10, (3, 2, 200)).float(), 12
    kept, lengths = KeptKeys.from_scores(scores[..., :60], window), at(60, 60, 60)
    for step in range(12):
        change = step % 4
        if change == 1:
            kept.append_(torch.full((3, 2, 5), 99.0), lengths, scores)  # that are taken back
        elif change == 2:
            lengths = lengths + at(0, 3, -7)  # some came otherwise, others are taken back
        elif change == 3:
            kept.lengths.fill_(-1)
            kept.indices.fill_(5)
        rows = 1 + step % 3
        new = torch.stack([one[:, n : n + rows] for one, n in zip(scores, lengths.tolist(), strict=True)])
        mask, lengths = kept.append_(new, lengths, scores), lengths + rows
        assert torch.equal(kept.lengths, lengths[:, None].expand(3, 2))
        assert_holds(kept, scores, lengths)
        assert torch.equal(shown_by(mask.indices, 200), visible_keys(scores, window, rows, seqlens_k=lengths))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choosing_anew_equals_a_selection(dtype: torch.dtype) -> None:
    """With special values and ties, from scores of any strides, more or fewer than are kept."""
    values = torch.tensor(special_values(dtype), dtype=dtype)
    scores = values[torch.randint(0, len(values), (2, 700, 3))].transpose(1, 2)
    for keys in (0, 1, 300, 700):
        for window in (0, 1, 40, 299, 800):
            kept = KeptKeys.empty(2, 3, window, dtype=dtype)
            kept.lengths.fill_(-1)
            kept.append_(scores[..., :0], at(keys, keys), scores)
            assert_holds(kept, scores, at(keys, keys))


def test_lengths_say_what_is_kept() -> None:
    assert KeptKeys.empty(2, 3, 4).lengths.tolist() == [[0] * 3] * 2
    scores = torch.randn(2, 3, 20)
    assert KeptKeys.from_scores(scores, 4).lengths.tolist() == [[20] * 3] * 2
    kept = KeptKeys.from_scores(scores, 4, at(25, 7))
    assert kept.lengths.tolist() == [[20] * 3, [7] * 3]
    kept.reorder_(at(1, 0))
    kept.append_(scores[..., :5], at(7, 20))
    assert kept.lengths.tolist() == [[12] * 3, [25] * 3]
    unknown = KeptKeys(kept.indices, kept.scores)
    unknown.append_(scores[..., :1], at(12, 25))
    assert unknown.lengths is None


def test_reorder() -> None:
    scores = torch.randn(3, 2, 40)
    kept = KeptKeys.from_scores(scores, 7)
    held, beams = kept.indices, torch.tensor([2, 0, 2])
    assert kept.reorder_(beams) is kept and kept.indices is held
    assert_holds(kept, scores[beams])
    kept.reorder_(at(0, 0, 1))
    assert_holds(kept, scores[beams][[0, 0, 1]])


# ---- With attention


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_under_the_mask(rows: int, is_causal: bool) -> None:
    """Of the newest rows, as under a selection from all keys: of a cache that is full, and of one with room."""
    keys, window, room = 200, 24, 30
    query, (key, value) = torch.randn(2, rows, 4, 16), torch.randn(2, 2, keys + room, 2, 16)
    scores = torch.randint(-5, 6, (2, 2, keys + room)) / 4
    kept = KeptKeys.from_scores(scores[..., : keys - rows], window)
    mask = kept.append_(scores[..., keys - rows : keys], at(keys - rows, keys - rows))
    inputs = {"query": query, "key": key[:, :keys], "value": value[:, :keys], "bias": scores[..., :keys]}
    expected = attention(**inputs, mask=select_keys(scores[..., :keys], window, seqlen_q=rows), is_causal=True)
    torch.testing.assert_close(attention(**inputs, mask=mask, is_causal=is_causal), expected)
    with_room = {"query": query, "key": key, "value": value, "bias": scores}
    for options in ({}, {"seqlens_k": at(keys, keys)}):
        got = attention(**with_room, mask=mask, is_causal=is_causal, **options)
        torch.testing.assert_close(got, expected)


@pytest.mark.devices("cpu")
def test_graphs_notice_what_is_written_to() -> None:
    kept = KeptKeys.from_scores(torch.randn(1, 2, 20), 6)
    query, (key, value) = torch.randn(1, 1, 4, 8, requires_grad=True), torch.randn(2, 1, 22, 2, 8)
    copied = kept.append_(torch.full((1, 2, 1), 5.0), at(20))
    outs = [attention(query, key, value, mask=mask) for mask in (copied, KeyIndices(kept.indices[:, :, None]))]
    kept.append_(torch.full((1, 2, 1), 5.0), at(21))
    outs[0].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outs[1].sum().backward()


def test_new_scores_are_detached() -> None:
    kept = KeptKeys.empty(1, 2, 4)
    mask = kept.append_(torch.randn(1, 2, 3, requires_grad=True), at(0))
    assert not mask.indices.requires_grad and not kept.scores.requires_grad
    assert not KeptKeys.from_scores(torch.randn(1, 2, 3, requires_grad=True), 2).scores.requires_grad


def test_inference_mode() -> None:
    with torch.inference_mode():
        scores = torch.randn(1, 2, 12)
        kept = KeptKeys.from_scores(scores[..., :10], 4)
        kept.append_(scores[..., 10:], at(10))
        assert_holds(kept, scores)


# ---- As an operator


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(rows: int, dtype: torch.dtype) -> None:
    kept = KeptKeys.from_scores(torch.randn(2, 3, 9).to(dtype), 4)
    state = kept.indices, kept.scores, torch.randn(2, 3, rows).to(dtype), at(9, 9)
    opcheck(APPEND, state)
    opcheck(APPEND, (*state, kept.lengths, torch.randn(2, 3, 30).to(dtype)))


def test_compiles_once_for_all_lengths() -> None:
    """Whatever the position is, which the graph never sees; for each window and number of rows one graph."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(kept: KeptKeys, new_scores: Tensor, positions: Tensor) -> KeyIndices:
        return kept.append_(new_scores * 2, positions)

    scores = torch.randint(-5, 6, (2, 3, 90)).float()
    kept = KeptKeys.from_scores(scores[..., :50] * 2, 8)
    step(kept, scores[..., 50:51], at(50, 50))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for done in range(51, 90):
            mask = step(kept, scores[..., done : done + 1], at(done, done))
            assert isinstance(mask, KeyIndices)
            assert_holds(kept, scores[..., : done + 1] * 2)
            assert torch.equal(shown_by(mask.indices[:, :, 0], 90), shown_by(kept.indices, 90))
    torch._dynamo.reset()


def test_compiles_from_scores() -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def begin(scores: Tensor, lengths: Tensor) -> KeptKeys:
        return KeptKeys.from_scores(scores, 5, lengths)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for keys in (9, 20, 31):
            scores, lengths = torch.randn(2, 3, keys), at(keys, keys - 3)
            assert_holds(begin(scores, lengths), scores, lengths)
    torch._dynamo.reset()


def test_is_a_pytree() -> None:
    kept = KeptKeys.empty(1, 2, 3)
    leaves, spec = pytree.tree_flatten(kept)
    assert [id(leaf) for leaf in leaves] == [id(kept.indices), id(kept.scores), id(kept.lengths)]
    other = pytree.tree_unflatten(leaves, spec)
    assert isinstance(other, KeptKeys) and other.lengths is kept.lengths
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(kept)[0]]
    assert names == [".indices", ".scores", ".lengths"]
    without = pytree.tree_map(torch.clone, KeptKeys(kept.indices, kept.scores))
    assert without.lengths is None and without.shape == (1, 2, 3)


@pytest.mark.parametrize("copied", ["copy", "pickle", "torch", "to"])
def test_survives_copies(copied: str) -> None:
    kept = KeptKeys.from_scores(torch.randn(1, 2, 9), 4)
    if copied == "torch":
        buffer = io.BytesIO()
        torch.save(kept, buffer)
        buffer.seek(0)
        other = torch.load(buffer)
    else:
        ways = {
            "copy": copy.deepcopy,
            "pickle": lambda kept: pickle.loads(pickle.dumps(kept)),
            "to": lambda kept: kept.to("cpu"),
        }
        other = ways[copied](kept)
    assert isinstance(other, KeptKeys) and other.shape == (1, 2, 4)
    assert torch.equal(other.indices, kept.indices.to(other.device))
    assert torch.equal(other.scores, kept.scores.to(other.device))
    assert torch.equal(other.lengths, kept.lengths.to(other.device))


# ---- Errors


def state(**changes: object) -> KeptKeys:
    indices, scores = torch.full((2, 3, 4), -1, dtype=torch.int32), torch.zeros(2, 3, 4)
    return KeptKeys(**({"indices": indices, "scores": scores} | changes))


WRONG_STATES = {
    "indices type": ({"indices": [1]}, TypeError, "indices must be a torch.Tensor; got indices of type list"),
    "scores type": ({"scores": None}, TypeError, "scores must be a torch.Tensor; got scores of type NoneType"),
    "indices dtype": (
        {"indices": torch.zeros(2, 3, 4)},
        ValueError,
        "indices must be int32 with 3 dimensions; got indices float32 (2, 3, 4)",
    ),
    "indices rank": (
        {"indices": torch.zeros(2, 3, dtype=torch.int32)},
        ValueError,
        "indices must be int32 with 3 dimensions; got indices int32 (2, 3)",
    ),
    "scores dtype": (
        {"scores": torch.zeros(2, 3, 4, dtype=torch.int32)},
        ValueError,
        "scores must be float16, bfloat16, float32 or float64; got scores int32 (2, 3, 4)",
    ),
    "shapes": (
        {"scores": torch.zeros(2, 3, 5)},
        ValueError,
        "indices and scores must have one shape; got indices (2, 3, 4), scores (2, 3, 5)",
    ),
    "devices": (
        {"scores": torch.zeros(2, 3, 4, device="meta")},
        ValueError,
        "indices and scores must be on one device; got indices on cpu, scores on meta",
    ),
    "gradient": ({"scores": torch.zeros(2, 3, 4, requires_grad=True)}, ValueError, "scores must not require a gradie"),
    "lengths type": ({"lengths": 4}, TypeError, "lengths must be a torch.Tensor or None; got lengths of type int"),
    "lengths dtype": ({"lengths": torch.zeros(2, 3)}, ValueError, "lengths must be int32 (B, heads) for indices"),
    "lengths shape": (
        {"lengths": torch.zeros(2, dtype=torch.int32)},
        ValueError,
        "lengths must be int32 (B, heads) for indices (B, heads, w); got lengths int32 (2,), indices (2, 3, 4)",
    ),
    "lengths device": (
        {"lengths": torch.zeros(2, 3, dtype=torch.int32, device="meta")},
        ValueError,
        "lengths must be on the device of indices; got lengths on meta, indices on cpu",
    ),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("changes", "kind", "message"), WRONG_STATES.values(), ids=WRONG_STATES.keys())
def test_wrong_states_are_named(changes: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        state(**changes)


WRONG_STEPS = {
    "dtype": (
        {"new_scores": torch.zeros(2, 3, 1).half()},
        "new_scores must have the dtype of scores; got new_scores float16",
    ),
    "heads": (
        {"new_scores": torch.zeros(2, 1, 1)},
        "new_scores must be (B, heads, S) for indices (B, heads, w), with S at most 16; "
        "got new_scores (2, 1, 1), indices (2, 3, 4)",
    ),
    "many": ({"new_scores": torch.zeros(2, 3, 17)}, "with S at most 16; got new_scores (2, 3, 17), indices (2, 3, 4)"),
    "positions dtype": ({"positions": torch.zeros(2).long()}, "positions must be int32"),
    "positions shape": ({"positions": at(1)}, "positions must "),
    "device": (
        {"positions": at(1, 1).to("meta")},
        "positions must be on the device of indices; got positions on meta, indices on cpu",
    ),
    "no lengths": (
        {"cache_scores": torch.zeros(2, 3, 9)},
        "cache_scores needs the lengths of the kept keys; got cache_scores (2, 3, 9)",
    ),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("changes", "message"), WRONG_STEPS.values(), ids=WRONG_STEPS.keys())
def test_wrong_steps_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        state().append_(**({"new_scores": torch.zeros(2, 3, 1), "positions": at(0, 0)} | changes))


@pytest.mark.devices("cpu")
def test_mistakes_are_named() -> None:
    kept = state()
    with pytest.raises(TypeError, match=r"new_scores must be a torch.Tensor; got new_scores of type float"):
        kept.append_(1.0, at(0, 0))
    with pytest.raises(TypeError, match=r"positions must be a torch.Tensor; got positions of type int"):
        kept.append_(torch.zeros(2, 3, 1), 4)
    with pytest.raises(ValueError, match=r"indices must be contiguous; got indices \(2, 3, 4\) with strides"):
        state(indices=at(-1).expand(2, 3, 4)).append_(torch.zeros(2, 3, 1), at(0, 0))
    with pytest.raises(ValueError, match=r"new_scores must have 3 dimensions; got new_scores \(2, 3\)"):
        kept.append_(torch.zeros(2, 3), at(0, 0))
    with pytest.raises(ValueError, match=r"beam_idx must be int32 or int64 with the shape \(B\) = \(2\); got beam_idx"):
        kept.reorder_(torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match=r"window_size must not be negative; got window_size -1"):
        KeptKeys.empty(1, 1, -1)
    with pytest.raises(ValueError, match=r"dtype must be float16, bfloat16, float32 or float64; got dtype torch.int32"):
        KeptKeys.empty(1, 1, 1, dtype=torch.int32)
    for refused in (
        lambda: KeptKeys.empty(1, 1, 4, sliding_window=100),
        lambda: KeptKeys.from_scores(torch.zeros(1, 1, 9), 4, sliding_window=100),
    ):
        with pytest.raises(ValueError, match=r"sliding_window must be None: .*; got sliding_window 100"):
            refused()
