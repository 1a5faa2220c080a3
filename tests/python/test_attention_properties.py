"""Random shapes, strides, dtypes, broadcast forms, lengths and poison against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import INF, NAN, assert_same_bits, dtypes, make_case, poison_unseen, relayout, run_library
from compare import assert_case_close
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Case, broadcast, visibility

pytestmark = pytest.mark.devices("cpu", "cuda")
LAYOUTS = ["contiguous", "transposed", "padded", "offset", "strided"]
HEAD_DIMS = [1, 2, 7, 8, 16, 32, 40, 64, 65, 96, 128, 200, 256]


@st.composite
def forms(draw: st.DrawFn, batch: int, heads: int, key_heads: int, rows: int, keys: int) -> tuple[int, ...] | None:
    """The shape of a mask or bias in one of its documented forms, or None."""
    leading = [draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, key_heads, heads]))]
    row, key = draw(st.sampled_from([1, rows])), draw(st.sampled_from([1, keys]))
    shapes = [None, (*leading, row, key), (*leading, rows, keys), (*leading, key), (row, key)]
    return draw(st.sampled_from(shapes))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows = draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 130])))
    keys = draw(st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 129, 260])))
    sizes = (batch, key_heads * group, key_heads, rows, keys)
    head_dim = draw(st.sampled_from(HEAD_DIMS if rows * keys < 3000 else HEAD_DIMS[:5]))  # keeps the oracle quick
    value_dim = draw(st.sampled_from([head_dim, *HEAD_DIMS[: len(HEAD_DIMS) // 2]]))
    options = {"is_causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 5.0, 50.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, 0.1, 1.0, -0.5]))
    if draw(st.booleans()):
        counts = draw(st.lists(st.integers(-1, keys + 1), min_size=batch, max_size=batch))
        options["seqlens_k"] = torch.tensor(counts, dtype=torch.int32)
    case = make_case(
        *sizes,
        head_dim,
        value_dim=value_dim,
        dtype=draw(st.sampled_from(dtypes())),
        mask=draw(forms(*sizes)),
        bias=draw(forms(*sizes)),
        bias_dtype=draw(st.sampled_from([None, torch.float32])),
        density=draw(st.sampled_from([0.0, 0.02, 0.3, 0.7, 1.0])),
        with_sink=draw(st.booleans()),
        sink_dtype=draw(st.sampled_from([None, torch.float32])),
        with_dlse=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 16)),
        **options,
    )
    for name in ("mask", "bias"):
        if getattr(case, name) is not None and draw(st.booleans()):  # strides of 0 in place of sizes of 1
            case = replace(case, **{name: broadcast(getattr(case, name), case)})
    if case.sink is not None and draw(st.booleans()):
        place = draw(st.integers(0, case.sink.numel() - 1))
        case.sink[place] = draw(st.sampled_from([NAN, INF, -INF, 100.0, -100.0, 3e4]))
    if draw(st.booleans()):
        case = poison_unseen(case, draw(st.sampled_from([NAN, INF, -INF])))
    return case


def draw_layouts(data: st.DataObject, case: Case) -> Case:
    """The case with every input behind drawn strides."""
    moved = {}
    for name in ("query", "key", "value", "mask", "bias", "sink", "dout"):
        tensor = getattr(case, name)
        if tensor is not None and tensor.numel() > 0:
            layouts = LAYOUTS if tensor.dim() > 1 else [layout for layout in LAYOUTS if layout != "transposed"]
            moved[name] = relayout(tensor, data.draw(st.sampled_from(layouts), label=name))
    return replace(case, **moved)


@given(cases(), st.data())
@settings(max_examples=150)
def test_agrees_with_the_oracle(case: Case, data: st.DataObject) -> None:
    case = draw_layouts(data, case)
    assert_case_close(case, run_library(case), few_elements=True)


@given(cases(), st.sets(st.sampled_from(["query", "key", "value", "bias", "sink"])))
@settings(max_examples=50)
def test_gradients_do_not_depend_on_which_are_asked_for(case: Case, needs: set[str]) -> None:
    needs = {name for name in needs if getattr(case, name) is not None}
    some = run_library(case, needs=tuple(needs), deterministic=True)
    everything = run_library(case, deterministic=True)
    assert set(some) == {"out", "lse"} | {f"d{name}" for name in needs}
    assert_case_close(case, some, few_elements=True)
    assert_same_bits({name: some[name] for name in ("out", "lse")}, everything)


@given(cases())
@settings(max_examples=50)
def test_same_bits_for_any_thread_count(case: Case) -> None:
    torch.set_num_threads(1)
    one = run_library(case, deterministic=True)
    torch.set_num_threads(2)
    assert_same_bits(one, run_library(case, deterministic=True))


@given(cases())
@settings(max_examples=50)
def test_seen_by_nobody_means_no_gradient(case: Case) -> None:
    """Exactly zero, not merely small."""
    batch, heads, key_heads, rows, keys = case.sizes
    visible = visibility(case)
    got = run_library(case)
    unseen = ~visible.any(2).reshape(batch, key_heads, heads // key_heads, keys).any(2).transpose(1, 2)
    blind = ~visible.any(3).transpose(1, 2)
    assert not got["dkey"][unseen].any() and not got["dvalue"][unseen].any()
    assert not got["out"][blind].any() and not got["dquery"][blind].any()
    assert (got["lse"].transpose(1, 2)[blind] == -INF).all()


@given(cases(), st.sampled_from(["query", "key", "value", "bias"]), st.data())
@settings(max_examples=80)
def test_visible_nan_comes_out_and_stays_in_its_key_head(case: Case, name: str, data: st.DataObject) -> None:
    tensor = getattr(case, name)
    if tensor is None or tensor.numel() == 0:
        return
    tensor = tensor.clone()
    place = data.draw(st.integers(0, tensor.numel() - 1), label="place")
    tensor.view(-1)[place] = NAN
    case = replace(case, **{name: tensor})
    assert_case_close(case, run_library(case), few_elements=True)
