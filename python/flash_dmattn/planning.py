"""What a call of `attention` would do, without doing it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _library
from ._arguments import as_int, check_bool, check_layout, check_optional_tensor
from .prepared import Mask, check_mask, visibility_of


@dataclass(frozen=True)
class PlanReport:
    """The plan of one forward call and the work that is left. A score is one query row x one key of one head."""

    kept_scores: int
    """Visible scores."""
    computed_scores: int
    """Scores whose product is evaluated: those of all tiles with a visible one."""
    tiles_empty: int
    """Tiles of the dense problem that are never touched."""
    tiles_partial: int
    """Tiles that are computed and masked."""
    tiles_full: int
    """Tiles that are computed and need no mask."""
    copied_keys: int
    """Keys copied into tiles, once for every plan that lists them."""
    plan_bytes: int
    """Scratch memory of plans, of all workers together."""
    plans: int
    """Plans of a chunk of query rows, once for all query heads that share one."""
    lists: int
    """Of those, plans whose keys are a list; the other plans' keys are a range."""
    bitmaps: int
    """Of those, plans with a bit for every row and key; in the others every row sees a prefix of the keys."""
    chunk_rows: int
    """Query rows that are planned together."""
    row_tile: int
    """Rows of a tile."""
    key_tile: int
    """Keys of a tile."""
    shared_heads: int
    """Query heads that share a plan and copied keys."""
    backend: str
    """The kernels that would run: "cpu/avx512"."""
    rule: str
    """How keys are listed and rows told apart, in words."""

    @property
    def ratio(self) -> float:
        """Computed per kept score, at best 1; NaN if none is kept."""
        return self.computed_scores / self.kept_scores if self.kept_scores else math.nan

    @property
    def keys(self) -> str:
        """How keys are given: "range", "list" or "range and list"; "none" if nothing is planned."""
        return _either(self.plans - self.lists, "range", self.lists, "list")

    @property
    def visibility(self) -> str:
        """How rows are told apart: "prefix", "bitmap" or "prefix and bitmap"; "none" if nothing is planned."""
        return _either(self.plans - self.bitmaps, "prefix", self.bitmaps, "bitmap")

    def __str__(self) -> str:
        return (
            f"{self.backend}: {self.kept_scores} scores kept, {self.computed_scores} computed ({self.ratio:.3f}x)\n"
            f"tiles of {self.row_tile} rows x {self.key_tile} keys: {self.tiles_empty} empty, "
            f"{self.tiles_partial} partial, {self.tiles_full} full\n"
            f"{self.plans} plans of {self.chunk_rows} rows x {self.shared_heads} heads: {self.keys} of keys, "
            f"{self.visibility} of rows, {self.copied_keys} keys copied, {self.plan_bytes} bytes\n"
            f"rule: {self.rule}"
        )


def plan_report(
    query: Tensor | Sequence[int],
    key: Tensor | Sequence[int],
    *,
    mask: Mask | None = None,
    is_causal: bool = False,
    seqlens_k: Tensor | None = None,
    deterministic: bool | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> PlanReport:
    """Plans the forward of `attention` with these arguments, counts its work, and computes nothing.

    Args:
        query, key: (B, Sq, H, D) and (B, Sk, Hkv, D), tensors, whose elements are not read, or their shapes.
        mask, is_causal, seqlens_k, deterministic: as in `attention`. They and torch.get_num_threads() decide what is
            visible and how it is cut up; bias, scale and softcap do not.
        dtype, device: of query and key, where shapes are given. Default device: that of another argument, else torch's.

    Raises:
        TypeError, ValueError: as in `attention`.
    """
    query, key = _stand_ins(query, key, mask, seqlens_k, dtype, device)
    check_mask("mask", mask)
    check_optional_tensor("seqlens_k", seqlens_k)
    check_bool("is_causal", is_causal)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    else:
        check_bool("deterministic", deterministic)
    visibility = visibility_of(mask, query.shape, key.shape, is_causal, seqlens_k)
    counts, backend, rule = _library.plan_report(query, key, visibility, deterministic)
    return PlanReport(**counts, backend=backend, rule=rule)


@dataclass(frozen=True)
class PlannedChunk:
    """The plan of some neighbouring query rows of one head: the keys that any of them sees, in the order in which
    attention walks over them."""

    row_begin: int
    rows: int
    is_list: bool
    has_bitmap: bool
    row_tile: int
    key_tile: int
    keys: Tensor
    """(listed,) int32"""
    visible: Tensor
    """(rows, listed) bool"""
    tiles: Tensor
    """(row tiles, key tiles) uint8: 0 empty, 1 partial, 2 full"""


def plan_chunks(
    query: Tensor | Sequence[int],
    key: Tensor | Sequence[int],
    *,
    mask: Mask | None = None,
    is_causal: bool = False,
    seqlens_k: Tensor | None = None,
    batch: int = 0,
    head: int = 0,
) -> list[PlannedChunk]:
    """The CPU's plan of one query head, written out: Sq x listed keys elements. As `attention` with deterministic=True
    plans it, whatever the number of threads; other arguments as in `plan_report`."""
    query, key = _stand_ins(query, key, mask, seqlens_k, torch.float32, "cpu")
    visibility = visibility_of(mask, query.shape, key.shape, is_causal, seqlens_k)
    batch, head = as_int("batch", batch), as_int("head", head)
    table, keys, visible, tiles = _library.plan_chunks(query, key, visibility, batch, head)
    chunks = []
    at_key = at_visible = at_tile = 0
    for row_begin, rows, listed, is_list, has_bitmap, row_tile, key_tile in table.view(-1, 7).tolist():
        shape = -(-rows // row_tile), -(-listed // key_tile)
        ends = at_key + listed, at_visible + rows * listed, at_tile + math.prod(shape)
        chunks.append(
            PlannedChunk(
                row_begin,
                rows,
                bool(is_list),
                bool(has_bitmap),
                row_tile,
                key_tile,
                keys[at_key : ends[0]],
                visible[at_visible : ends[1]].view(rows, listed),
                tiles[at_tile : ends[2]].view(shape),
            )
        )
        at_key, at_visible, at_tile = ends
    return chunks


def _either(first: int, first_name: str, second: int, second_name: str) -> str:
    return " and ".join(name for count, name in ((first, first_name), (second, second_name)) if count) or "none"


def _stand_ins(
    query: object, key: object, mask: object, seqlens_k: object, dtype: torch.dtype, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """query and key, or tensors of their shapes that take no memory."""
    if device is None:
        others = [other for other in (query, key, mask, seqlens_k) if hasattr(other, "device")]
        device = others[0].device if others else None
    made = []
    for name, value in (("query", query), ("key", key)):
        if not isinstance(value, Tensor):
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError(f"{name} must be a torch.Tensor or a shape; got {name} of type {type(value).__name__}")
            shape = [as_int(name, size) for size in value]
            if len(shape) != 4 or min(shape) < 0:
                raise ValueError(f"{name} must have 4 dimensions, none negative; got {name} {tuple(shape)}")
            if math.prod(shape) >= 2**63:
                raise ValueError(f"{name} must have fewer than 2^63 elements; got {name} {tuple(shape)}")
            value = torch.empty((), dtype=dtype, device=device).expand(shape)
        check_layout(name, value)
        made.append(value)
    return made[0], made[1]
