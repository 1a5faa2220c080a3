"""Plans on a GPU, as far as Python has to know them: their size and which calls have no use for one."""

import functools

import torch
from torch import Tensor

from ._visibility import Visibility

# Constants of the C++ side, which has no code for symbolic sizes. tests/python/gpu/test_attention_plan.py compares.
# src/cuda/plan/visibility.h, device_plan.h, make_plan.h: kChunkRows and so on.
_CHUNK_ROWS = 1024
_WORD_ROWS = 32
_UNIT_ROWS = 64
_LIST_TILE = 64
_LEAST_CAPACITY = 4096
_CAPACITY_SHARE = 4  # plan_shape: a list has room for a quarter of the keys
_COPIES = 2  # PlanShape::copies of lists of keys per query
# Bytes: of elements, and what every array is rounded up to (Arena::kAlignment in src/plan/arena.h).
_CHUNK_KEYS = 8
_INT32 = 4
_UNIT_BITS = 2
_ALIGNMENT = 64
# src/cuda/decode/decode.cpp, kMostRows: a forward of so few query rows lists keys by itself and reads no plan.
MOST_DECODE_ROWS = 16

_INT32_MAX = 2**31 - 1
_CHUNK_WORDS = _CHUNK_ROWS // _WORD_ROWS
_CHUNK_UNITS = _CHUNK_ROWS // _UNIT_ROWS


def plan_size(query: Tensor, key: Tensor, visibility: Visibility) -> int:
    """How many elements the operator attention_plan gives on a GPU: what PreparedVisibility::arrange_plan in
    src/cuda/plan/prepared_visibility.cpp takes. In terms that symbolic sizes allow without guards."""
    batch, rows, heads = query.shape[:3]
    keys = key.shape[1]
    mask, indices, seqlens_k = visibility.mask, visibility.indices, visibility.seqlens_k
    views = [_distinct(view) for view in visibility.planned]
    if not views or any(size == 0 for size in (batch, rows, heads, keys)):
        return 0
    # Plans are told apart as the finest of the views tells batch elements and heads apart.
    plan_batches, plan_heads, *_ = (functools.reduce(torch.sym_max, sizes) for sizes in zip(*views, strict=True))
    if seqlens_k is not None and all(stride != 0 for stride in seqlens_k.stride()):
        plan_batches = batch
    row_chunks = _divide_up(rows, _CHUNK_ROWS)
    chunks = plan_batches * plan_heads * row_chunks
    longest, copies = torch.sym_max(keys // _CAPACITY_SHARE, _LEAST_CAPACITY), 1
    if visibility.interval_begin is not None and visibility.interval_window != 0:
        longest = visibility.interval_window + _CHUNK_ROWS
    if indices is not None:
        longest, copies = keys, _COPIES
    tile_pair = 2 * _LIST_TILE
    listed = copies * (_divide_up(torch.sym_min(longest, keys), tile_pair) + copies - 1)
    capacity = tile_pair * torch.sym_min(listed, _INT32_MAX // tile_pair)
    tiles = torch.sym_max(2 * _divide_up(keys, tile_pair), capacity // _LIST_TILE)
    arrays = [  # in bytes, as DevicePlan names them
        _CHUNK_KEYS * chunks,  # chunks
        _INT32 * chunks * capacity,  # keys
        _UNIT_BITS * chunks * tiles,  # tile_units
        _UNIT_BITS * chunks * tiles,  # tile_full
        _INT32 * chunks * _CHUNK_UNITS,  # unit_tiles
    ]
    packed = None  # (batches, heads, keys) of what is packed: lists, or a mask that differs by row
    if indices is not None:
        lists = [_distinct(view) for view in (indices, visibility.index_lengths) if view is not None]
        list_batches, list_heads, *_ = (functools.reduce(torch.sym_max, sizes) for sizes in zip(*lists, strict=True))
        packed = list_batches, list_heads, keys
    elif mask is not None and views[0][2] != 1:
        packed = views[0][0], views[0][1], views[0][3]
    if packed is not None:
        entries = packed[0] * packed[1] * row_chunks * packed[2]
        arrays += [_INT32 * entries * _CHUNK_WORDS, _INT32 * entries]  # words and units
    return _ALIGNMENT * sum(_divide_up(size, _ALIGNMENT) for size in arrays)


def _distinct(view: Tensor) -> list[int]:
    """(batch, head, row, key) sizes of a mask, or an interval bound, in any of its forms: 1 where nothing changes."""
    sizes = [1 if size == 1 or stride == 0 else size for size, stride in zip(view.shape, view.stride(), strict=True)]
    if view.dim() == 2:  # (Sq, Sk)
        return [1, 1, *sizes]
    return [*sizes[:2], 1, sizes[2]] if view.dim() == 3 else sizes


def _divide_up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit
