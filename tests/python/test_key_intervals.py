"""KeyIntervals: patterns, intersections, and the class itself."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import re

import pytest
import torch
from flash_dmattn import KeyIntervals, select_keys
from torch import Tensor
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.devices("cpu", "cuda")


def position_mask(rows: int, keys: int, existing: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Every row's position, every key's, and which keys exist."""
    existing = keys if existing is None else existing
    key = torch.arange(keys)
    return torch.arange(rows)[:, None] + existing - rows, key, (key < existing).expand(rows, keys)


@pytest.mark.parametrize(("rows", "keys"), [(7, 7), (3, 7), (7, 3), (1, 7), (0, 4), (4, 0)])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (2, 0), (0, 0), (2, 1), (None, None), (0, None), (9, 9)])
def test_sliding_window(rows: int, keys: int, left: int | None, right: int | None) -> None:
    lengths = [keys, max(keys - 2, 0), 0]
    expected = []
    for existing in lengths:
        row, key, visible = position_mask(rows, keys, existing)
        visible = visible if left is None else visible & (key >= row - left)
        expected.append(visible if right is None else visible & (key <= row + right))
    one = KeyIntervals.sliding_window(left, right, rows, keys)
    assert one.shape == (1, 1, keys) and torch.equal(one.dense_mask(rows)[0, 0], expected[0])
    many = KeyIntervals.sliding_window(left, right, rows, keys, seqlens_k=torch.tensor(lengths, dtype=torch.int32))
    assert torch.equal(many.dense_mask(rows)[:, 0], torch.stack(expected))
    assert many.kept_scores() == sum(int(mask.sum()) for mask in expected)
    if (left, right) == (None, 0):
        assert torch.equal(KeyIntervals.causal(rows, keys).dense_mask(rows), one.dense_mask(rows))


def test_sequence_lengths_default_to_squares() -> None:
    assert torch.equal(KeyIntervals.causal(4).dense_mask(4)[0, 0], torch.ones(4, 4).tril().bool())


def test_causal_is_the_window_that_keeps_everything() -> None:
    for rows, keys in ((6, 6), (2, 6), (6, 2)):
        everything = select_keys(torch.randn(1, 1, keys), keys, seqlen_q=rows)
        assert torch.equal(everything.dense_mask(rows), KeyIntervals.causal(rows, keys).dense_mask(rows))


@pytest.mark.parametrize(("rows", "keys"), [(7, 7), (3, 7), (7, 3)])
def test_prefix(rows: int, keys: int) -> None:
    prefixes = torch.tensor([0, 1, 2, 9])
    lengths = torch.tensor([keys, keys - 1, 0, keys], dtype=torch.int32)
    many = KeyIntervals.prefix(prefixes, rows, keys, seqlens_k=lengths).dense_mask(rows)
    for index, (prefix, existing) in enumerate(zip(prefixes.tolist(), lengths.tolist(), strict=True)):
        row, key, visible = position_mask(rows, keys, existing)
        assert torch.equal(many[index, 0], visible & ((key <= row) | (key < prefix)))
        row, key, _ = position_mask(rows, keys)
        one = KeyIntervals.prefix(prefix, rows, keys).dense_mask(rows)
        assert torch.equal(one[0, 0], (key <= row) | (key < prefix))


def test_documents() -> None:
    document = torch.tensor([0, 0, 0, 2, 3, 3, 3, 3])  # the second is empty
    expected = document[:, None] == document
    for cu_seqlens in ([0, 3, 3, 4, 8], torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32, device="cpu")):
        packed = KeyIntervals.documents(cu_seqlens, device=expected.device)
        assert packed.shape == (1, 1, 8) and torch.equal(packed.dense_mask(8)[0, 0], expected)
    padded = KeyIntervals.documents([0, 3, 3, 4, 8], 10).dense_mask(10)[0, 0]
    assert torch.equal(padded[:8, :8], expected) and not padded[8:].any() and not padded[:, 8:].any()
    assert KeyIntervals.documents([0]).shape == (1, 1, 0)


def test_dense_mask_and_kept_scores_clamp() -> None:
    intervals = KeyIntervals(torch.tensor([[[-5, 2, 3, -9]]]).int(), torch.tensor([[[2, 99, 1, -1]]]).int())
    assert intervals.dense_mask(4)[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
    assert intervals.kept_scores(4) == 4
    wide = torch.tensor([[[2**31 - 1]]], dtype=torch.int32)
    assert KeyIntervals(-wide, wide).kept_scores() == 2**31 - 1


# ---- Intersection


def test_intersection_of_intervals() -> None:
    select = select_keys(torch.randn(2, 3, 20), 5, seqlen_q=12)
    for other in (KeyIntervals.documents([0, 7, 13, 20]), KeyIntervals.sliding_window(4, 0, 12, 20), select):
        for left, right in ((select, other), (other, select)):
            both = left.intersection(right)
            assert both.shape == select.shape
            assert torch.equal(both.dense_mask(12), select.dense_mask(12) & other.dense_mask(12))
            assert both.kept_scores() == int(both.dense_mask(12).sum())
            assert both.window_size == 5  # of the only one that is known, or the least


@pytest.mark.parametrize("shape", [(2, 3, 20), (1, 1, 20), (2, 1, 1, 20), (1, 20)], ids=str)
def test_intersection_with_a_mask_of_keys(shape: tuple[int, ...]) -> None:
    select = select_keys(torch.randn(2, 3, 20), 5, seqlen_q=12)
    mask = torch.rand(shape) < 0.5
    dense = mask[..., None, :] if mask.dim() == 3 else mask
    assert torch.equal(select.intersection(mask).dense_mask(12), select.dense_mask(12) & dense)
    assert select.intersection(mask).window_size == 5
    assert KeyIntervals.causal(12, 20).intersection(mask).shape[-1] == 20


def test_intersection_with_a_mask_of_rows_and_keys() -> None:
    select = select_keys(torch.randn(2, 3, 20), 5, seqlen_q=12)
    lengths = torch.randint(0, 13, (2, 1, 1, 20))
    mask = torch.arange(12)[:, None] < lengths  # each key's own last row: ranges of rows
    assert torch.equal(select.intersection(mask).dense_mask(12), select.dense_mask(12) & mask)
    assert torch.equal(select.intersection(mask[0, 0]).dense_mask(12), select.dense_mask(12) & mask[:1])
    torn = torch.ones(12, 20, dtype=torch.bool)
    torn[5, 17] = False
    with pytest.raises(ValueError, match=r"one range of rows; got gaps in the rows of key 17 \(batch 0, head 0\)"):
        KeyIntervals.sliding_window(None, None, 12, 20).intersection(torn)


INTERSECTION_ERRORS = {
    "type": ([True], TypeError, "other must be KeyIntervals or a torch.Tensor; got other of type list"),
    "heads": (KeyIntervals.causal(5).intersection(torch.ones(2, 3, 5) > 0), ValueError, "other must broadcast to"),
    "keys": (KeyIntervals.causal(6), ValueError, "other must have 5 keys; got (1, 1, 6)"),
    "mask heads": (torch.ones(2, 4, 5) > 0, ValueError, "other must broadcast to (2, 2, 5), (B, heads, Sk)"),
    "mask keys": (torch.ones(4, 1) > 0, ValueError, "other must have 5 keys"),
    "mask dtype": (torch.ones(2, 2, 5), ValueError, "other must be a bool mask with 2, 3 or 4 dimensions; got other f"),
    "mask rank": (torch.ones(5) > 0, ValueError, "other must be a bool mask with 2, 3 or 4 dimensions; got other bool"),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("other", "kind", "message"), INTERSECTION_ERRORS.values(), ids=INTERSECTION_ERRORS.keys())
def test_intersection_errors(other: object, kind: type, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        select_keys(torch.zeros(2, 2, 5), 2).intersection(other)


# ---- The class itself

BOUND = torch.zeros(1, 1, 3, dtype=torch.int32)
CONSTRUCTOR_ERRORS = {
    "type": (lambda: KeyIntervals([0], BOUND), TypeError, "begin must be a torch.Tensor; got begin of type list"),
    "dtype": (lambda: KeyIntervals(BOUND, BOUND.long()), ValueError, "end must be int32; got end int64"),
    "rank": (lambda: KeyIntervals(BOUND[0], BOUND), ValueError, "begin must have 3 dimensions; got begin (1, 3)"),
    "shapes": (lambda: KeyIntervals(BOUND, BOUND[..., :2]), ValueError, "begin and end must have one shape; got begin"),
    "devices": (lambda: KeyIntervals(BOUND, BOUND.to("meta")), ValueError, "begin and end must be on one device; got"),
    "length": (lambda: KeyIntervals.causal(-1), ValueError, "seqlen_q must be between 0 and 2^31 - 1; got seqlen_q -1"),
    "length type": (lambda: KeyIntervals.causal(1.5), TypeError, "seqlen_q must be an int; got seqlen_q of type float"),
    "keys": (lambda: KeyIntervals.causal(1, 2**31), ValueError, "seqlen_k must be between 0 and 2^31 - 1"),
    "left": (lambda: KeyIntervals.sliding_window(-1, 0, 4), ValueError, "left must be between 0 and 2^31 - 1; got lef"),
    "seqlens": (
        lambda: KeyIntervals.causal(3, seqlens_k=torch.ones(2)),
        ValueError,
        "seqlens_k must be int32 (B); got seqlens_k float32 (2,)",
    ),
    "prefix": (
        lambda: KeyIntervals.prefix(torch.ones(1, 2).int(), 4),
        ValueError,
        "prefix_length must be an int or an integer tensor (B); got prefix_length int32 (1, 2)",
    ),
    "window": (
        lambda: KeyIntervals(BOUND, BOUND, -1),
        ValueError,
        "window_size must be at least 0; got window_size -1",
    ),
    "window huge": (
        lambda: KeyIntervals(BOUND, BOUND, 2**63),
        ValueError,
        "window_size must fit 64 bits; got window_size 9223372036854775808",
    ),
    "length huge": (
        lambda: KeyIntervals.causal(2**63),
        ValueError,
        "seqlen_q must fit 64 bits; got seqlen_q 922337203",
    ),
    "documents huge": (
        lambda: KeyIntervals.documents([0, 2**63]),
        ValueError,
        "cu_seqlens must make a tensor of integers; got cu_seqlens [0, 9223372036854775808]",
    ),
    "documents long": (
        lambda: KeyIntervals.documents([0, 2**40]),
        ValueError,
        "cu_seqlens must end below 2^31; got 1099511627776 at the end",
    ),
    "documents rank": (lambda: KeyIntervals.documents([[0, 2]]), ValueError, "cu_seqlens must be integers of 1 dim"),
    "documents dtype": (lambda: KeyIntervals.documents([0.0, 2.0]), ValueError, "got cu_seqlens float32 (2,)"),
    "documents empty": (lambda: KeyIntervals.documents([]), ValueError, "cu_seqlens must be integers of 1 dimension"),
    "documents start": (
        lambda: KeyIntervals.documents([1, 2]),
        ValueError,
        "cu_seqlens must begin with 0 and never fall; got [1, 2]",
    ),
    "documents order": (lambda: KeyIntervals.documents([0, 3, 2]), ValueError, "never fall; got [0, 3, 2]"),
    "documents end": (
        lambda: KeyIntervals.documents([0, 9], 8),
        ValueError,
        "cu_seqlens must end within the 8 keys; got 9",
    ),
}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize(("make", "kind", "message"), CONSTRUCTOR_ERRORS.values(), ids=CONSTRUCTOR_ERRORS.keys())
def test_constructor_errors(make: object, kind: type, message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        make()


@pytest.mark.devices("cpu")
def test_is_frozen_printable_and_moves() -> None:
    intervals = KeyIntervals.sliding_window(1, 0, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        intervals.begin = BOUND
    assert "begin=tensor([[[0, 1, 2]]]" in repr(intervals) and "end=tensor([[[2, 3, 3]]]" in repr(intervals)
    assert intervals.device == torch.device("cpu") and intervals.to("meta").device.type == "meta"
    assert intervals.window_size == intervals.to("meta").window_size == 2
    assert KeyIntervals.causal(3, device="meta").device.type == "meta"
    for same in (copy.deepcopy(intervals), pickle.loads(pickle.dumps(intervals))):
        assert torch.equal(same.begin, intervals.begin) and torch.equal(same.end, intervals.end)


def test_is_loaded_as_weights_only() -> None:
    intervals = select_keys(torch.randn(2, 3, 20), 5)
    file = io.BytesIO()
    torch.save({"intervals": intervals}, file)
    file.seek(0)
    same = torch.load(file, weights_only=True)["intervals"]
    assert type(same) is KeyIntervals and same.device == intervals.device
    assert torch.equal(same.begin, intervals.begin) and torch.equal(same.end, intervals.end)
    assert same.window_size == intervals.window_size == 5


def test_is_a_pytree() -> None:
    intervals = select_keys(torch.randn(2, 3, 20), 5)
    leaves, spec = pytree.tree_flatten({"mask": intervals})
    assert leaves[0] is intervals.begin and leaves[1] is intervals.end
    again = pytree.tree_unflatten(leaves, spec)["mask"]
    assert isinstance(again, KeyIntervals) and again.end is intervals.end and again.window_size == 0
    assert pytree.tree_map(lambda bound: bound.shape, intervals).begin == (2, 3, 20)  # leaves may be anything
