"""What a Doge layer knows of the keys in its cache while tokens are generated: their scores, and which are the best.

Scores of cached keys are not computed again, and one new key can only put out one of the best. How the best are kept
depends on the device: on the CPU as `KeptKeys`, which take several new keys at once and follow caches that are cropped
or reordered; on GPUs, whose kernels for few rows read masks and no lists, as a bool for every key.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.models.doge.modeling_doge import DogeAttention

from ..kept_keys import MAX_NEW_KEYS, KeptKeys
from ..key_indices import KeyIndices
from ..selection import KeyIntervals, select_keys


def key_scores(module: DogeAttention, value: Tensor) -> Tensor:
    """What keys are selected by and what is added to attention's scores: value (B, S, Hkv D) -> (B, Hkv, S)."""
    return torch.exp(module.A * F.softplus(module.dt_proj(value))).transpose(1, 2)


@dataclass
class KnownScores:
    """What is known of a cache layer's values, as long as they are the same tensor and were not written to.

    Its tensors are written to in every step. They are made and used only where no gradients are recorded, so that no
    graph holds them.
    """

    module: ref[DogeAttention]
    values: ref[Tensor]
    versions: tuple[int, ...]
    keys: int  # how many there are, in a static cache slots
    scores: Tensor  # (B, Hkv, slots): those of the keys, then room for more. NaN is infinity here
    infinity: Tensor  # one of them
    kept: Tensor | None = None  # bool (B, Hkv, slots): the best of all keys. Slots that are not filled yet are True
    window_size: int = 0  # how many these are
    newer: int = 0  # keys that came after they were chosen
    kept_keys: KeptKeys | None = None  # on the CPU, in the place of `kept` and `window_size`
    key_mask: Tensor | None = None  # bool (B or 1, 1, keys): the keys that it was chosen from

    def hold_for(self, module: DogeAttention, layer: CacheLayerMixin) -> bool:
        if self.module() is not module:
            return False
        is_same = self.values() is layer.values and self.versions == _versions(layer)
        return is_same or (_keeps_lists(self.scores) and self._follow_crop(layer))

    def _follow_crop(self, layer: CacheLayerMixin) -> bool:
        """If nothing was done to the layer but to take keys off its end, forgets these. What they put out of the best
        comes back, which only the scores of all keys can tell: the best are chosen anew. False: more was done."""
        values, cropped = self.values(), layer.values
        if values is None or cropped is None or cropped._version != self.versions[0]:
            return False
        if cropped is not values:
            is_view = cropped._base is (values if values._base is None else values._base)
            if not is_view or cropped.data_ptr() != values.data_ptr() or cropped.stride() != values.stride():
                return False
            if cropped.shape[:2] + cropped.shape[3:] != values.shape[:2] + values.shape[3:]:
                return False
            if cropped.shape[2] > self.keys:
                return False
            self.keys = cropped.shape[2]
        # Else a static cache, whose count of keys was written to. Scores are those of slots, as values are.
        self.values, self.versions = ref(cropped), _versions(layer)
        self.kept_keys, self.newer = None, 0
        return True

    def reorder(self, layer: CacheLayerMixin, beam_idx: Tensor) -> None:
        """Follows the layer, whose values have just been reordered."""
        self.scores = self.scores.index_select(0, beam_idx)
        if self.kept_keys is not None:
            is_permuted = len(beam_idx) == self.kept_keys.shape[0]
            self.kept_keys = self.kept_keys.reorder_(beam_idx) if is_permuted else None
        if self.key_mask is not None and len(self.key_mask) > 1:
            self.key_mask = self.key_mask.index_select(0, beam_idx)
        self.values, self.versions = ref(layer.values), _versions(layer)


def _keeps_lists(tensor: Tensor) -> bool:
    """Whether the best keys are kept as lists: where attention of few rows reads them, so far on the CPU only."""
    return tensor.device.type == "cpu"


def _versions(layer: CacheLayerMixin) -> tuple[int, ...]:
    """Numbers that change when somebody writes to the layer."""
    length = getattr(layer, "cumulative_length", None)  # a tensor in static caches
    return (layer.values._version, length._version if isinstance(length, Tensor) else 0)


# Whatever changes a cache (another batch, on GPUs also reordered beams and cropping) puts other tensors into its layers
# or writes to them; then everything is computed anew. Copies of a layer have no entry here.
known_scores: WeakKeyDictionary[CacheLayerMixin, KnownScores] = WeakKeyDictionary()
# Layers of CUDA graphs, whose replays write to values without telling. Of these nothing is ever known.
_captured: WeakSet[CacheLayerMixin] = WeakSet()


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _may_remember() -> bool:
    if torch.compiler.is_compiling():
        return False
    # Tensors of inference mode do not tell when they are written to.
    return not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())


@dataclass
class _Slots:
    """Which slots of a static cache a step fills."""

    version: int  # of the tensor in which the layer counts its keys
    existing: Tensor  # int32 (B), keys after the step
    new: Tensor  # int64 (S), the slots of the step's keys
    has_room: dict[int, Tensor] = field(default_factory=dict)  # by window size: bool (B, 1, 1), if it holds all keys


_slots_of_first_layer: WeakKeyDictionary[Cache, _Slots] = WeakKeyDictionary()


class CacheStep:
    """One forward of one layer with a cache. Scores of keys that are in the cache already are not computed again."""

    def __init__(self, module: DogeAttention, cache: Cache):
        self.module, self.cache = module, cache
        self.rows = 0  # new tokens
        self.slots: _Slots | None = None  # of a static cache
        self.known: KnownScores | None = None

    @property
    def seqlens_k(self) -> Tensor | None:
        return None if self.slots is None else self.slots.existing

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """key (B, S, Hkv, D) and value (B, S, Hkv D) of new tokens -> those of all, (B, Sk, Hkv, D), and the scores of
        all, (B, Hkv, Sk)."""
        index, known, self.rows = self.module.layer_idx, self._before(value), value.shape[1]
        by_head = value.view(*value.shape[:2], -1, self.module.head_dim)
        keys, values = self.cache.update(key.transpose(1, 2), by_head.transpose(1, 2), index)
        length = self.cache.get_seq_length(index)
        if isinstance(length, Tensor):
            self.slots = self._find_slots(length, value)
        if known is None or not self._append(known, value, values):
            self._compute(values)
        return keys.transpose(1, 2), values.transpose(1, 2), self.scores

    def best_keys(
        self, window_size: int, is_causal: bool, key_mask: Tensor | None = None
    ) -> Tensor | KeyIntervals | KeyIndices | None:
        """The best keys of each of the newest rows, of which the causal rule hides none, from those of the rows before
        if these are known: a new key can only put out one of them. None: only a selection from all keys tells.

        Args:
            key_mask: bool (B or 1, 1, keys), False hides the key from all rows.
        """
        if self.known is not None and _keeps_lists(self.scores):
            can_append = self.rows <= MAX_NEW_KEYS and (is_causal or self.rows == 1)
            return self._append_to_kept(self.known, window_size, key_mask) if can_append else None
        return self._best_of_one_row(window_size) if self.rows == 1 and key_mask is None else None

    def _append_to_kept(self, known: KnownScores, window_size: int, key_mask: Tensor | None) -> KeyIndices:
        new = self._of_new_keys(self.scores)
        if self.slots is None:
            before = torch.full((new.shape[0],), known.keys - self.rows, dtype=torch.int32, device=new.device)
        else:
            before = self.slots.existing - self.rows
        if key_mask is not None:
            new = new.masked_fill(~self._of_new_keys(key_mask), -torch.inf)
        kept, is_next = known.kept_keys, known.newer == self.rows
        if kept is None or kept.window_size != window_size or not is_next or not self._hides_as_before(key_mask):
            known.kept_keys = kept = KeptKeys.from_scores(self.scores, window_size, before, key_mask=key_mask)
        known.newer, known.key_mask = 0, key_mask
        return kept.append_(new, before)

    def _of_new_keys(self, tensor: Tensor) -> Tensor:
        """(B or 1, heads, keys) -> (B or 1, heads, rows)"""
        if self.slots is None:
            return tensor[:, :, tensor.shape[2] - self.rows :]
        return tensor.index_select(2, self.slots.new)

    def _hides_as_before(self, key_mask: Tensor | None) -> bool:
        """Whether it says the same of the keys before this step as the mask that these were chosen with."""
        before = self.known.key_mask
        if before is None or key_mask is None:
            return before is key_mask
        if self.slots is None:
            old = self.known.keys - self.rows
            return torch.equal(before[:, :, :old], key_mask[:, :, :old])
        is_old = torch.arange(key_mask.shape[2], device=key_mask.device) < (self.slots.existing - self.rows)[0]
        return before.shape == key_mask.shape and not ((before != key_mask) & is_old).any()

    def _best_of_one_row(self, window_size: int) -> Tensor | KeyIntervals:
        known, slots = self.known, self.slots
        if known is None:
            return select_keys(self.scores, window_size, seqlen_q=1, causal=False, seqlens_k=self.seqlens_k)
        if known.kept is None or known.window_size != window_size or known.newer > 1:
            self._choose(known, window_size)
        kept = _first(known.kept, known.keys)
        if known.newer == 1:
            # argmin takes the first of equal scores, so that the newest stays.
            worst = torch.where(kept, self.scores, known.infinity).argmin(2, keepdim=True)
            if slots is None:
                kept.scatter_(2, worst, False)
            else:
                # The worst stays while no more keys exist than may be kept, which the host does not know.
                if window_size not in slots.has_room:
                    slots.has_room[window_size] = (slots.existing <= window_size)[:, None, None]
                kept.scatter_(2, worst, slots.has_room[window_size].expand_as(worst))
        known.newer = 0
        return kept

    def _choose(self, known: KnownScores, window_size: int) -> None:
        best = select_keys(self.scores, window_size, seqlen_q=1, causal=False, seqlens_k=self.seqlens_k)
        known.kept = torch.ones_like(known.scores, dtype=torch.bool)
        _first(known.kept, known.keys).copy_(best.begin < best.end)
        if self.slots is not None:
            empty = torch.arange(known.keys, device=best.device) >= self.slots.existing[:, None, None]
            known.kept |= empty
            known.scores.masked_fill_(empty, torch.inf)  # so that no empty slot is the worst
        known.window_size, known.newer = window_size, 0

    def _layer(self) -> CacheLayerMixin | None:
        layers, index = self.cache.layers, self.module.layer_idx
        return layers[index] if index < len(layers) else None

    def _before(self, value: Tensor) -> KnownScores | None:
        if not _may_remember():
            return None
        layer = self._layer()
        if layer is not None and _is_capturing(value):
            _captured.add(layer)
            known_scores.pop(layer, None)
        known = None if layer is None else known_scores.get(layer)
        return known if known is not None and known.hold_for(self.module, layer) else None

    def _append(self, known: KnownScores, value: Tensor, values: Tensor) -> bool:
        """Appends the scores of new keys to those that are known. False if all must be computed instead."""
        new, (rows, keys) = key_scores(self.module, value), (value.shape[1], values.shape[2])
        if new.dtype != known.scores.dtype or keys != known.keys + (rows if self.slots is None else 0):
            return False
        # To argmin NaN is the lowest. With infinity a row that sees it becomes NaN as well.
        if self.slots is not None:
            known.scores.index_copy_(2, self.slots.new, new.nan_to_num_(torch.inf, torch.inf))
        else:
            if keys > known.scores.shape[2]:
                known.scores = _with_room(known.scores, keys)
                known.kept = None if known.kept is None else _with_room(known.kept, keys)
            torch.nan_to_num(new, torch.inf, torch.inf, out=known.scores.narrow(2, known.keys, rows))
        layer = self._layer()
        known.values, known.versions = ref(layer.values), _versions(layer)
        known.keys, known.newer = keys, known.newer + rows
        self.known, self.scores = known, _first(known.scores, keys)
        return True

    def _compute(self, values: Tensor) -> None:
        """The scores of all keys, remembered if they may be."""
        self.scores = scores = key_scores(self.module, values.transpose(1, 2).flatten(2))
        layer = self._layer()
        # Layers of other kinds than dynamic and static return what they do not keep.
        if not _may_remember() or layer in _captured or layer.values is not values:
            return
        scores = scores.nan_to_num(torch.inf, torch.inf)
        scores = _with_room(scores, scores.shape[2]) if self.slots is None else scores.contiguous()
        infinity = scores.new_full((), torch.inf)
        known = KnownScores(ref(self.module), ref(values), _versions(layer), values.shape[2], scores, infinity)
        known_scores[layer] = self.known = known
        self.scores = _first(scores, known.keys)

    def _find_slots(self, length: Tensor, value: Tensor) -> _Slots:
        """length: the tensor in which the layer counts its keys, after the step."""
        if not _may_remember() or _is_capturing(value):
            return make_slots(length, 0, value)
        if self.module.layer_idx == 0:
            _slots_of_first_layer[self.cache] = slots = make_slots(length, length._version, value)
            return slots
        # All layers count alike.
        slots = _slots_of_first_layer.get(self.cache)
        if (
            slots is None
            or slots.version != length._version
            or slots.new.shape[0] != value.shape[1]
            or slots.new.device != value.device
        ):
            return make_slots(length, length._version, value)
        return slots


def make_slots(length: Tensor, version: int, value: Tensor) -> _Slots:
    batch, rows = value.shape[:2]
    length = length.to(value.device)
    new = torch.arange(-rows, 0, device=value.device) + length
    return _Slots(version, length.to(torch.int32).expand(batch), new)


LEAST_ROOM = 256


def _with_room(tensor: Tensor, keys: int) -> Tensor:
    """(B, Hkv, slots) with slots for `keys` keys and more to come, those behind the tensor's own True or infinity."""
    slots = keys + max(keys // 8, LEAST_ROOM)
    larger = tensor.new_full((*tensor.shape[:2], slots), torch.inf if tensor.is_floating_point() else True)
    larger[:, :, : tensor.shape[2]] = tensor
    return larger


def _first(tensor: Tensor, keys: int) -> Tensor:
    return tensor if tensor.shape[2] == keys else tensor.narrow(2, 0, keys)


def follow_reordered_beams() -> None:
    """Lets what is known of a layer be reordered with it, in all caches of Transformers."""
    theirs = CacheLayerMixin.reorder_cache

    @functools.wraps(theirs)
    def reorder_cache(self: CacheLayerMixin, beam_idx: Tensor) -> None:
        known = known_scores.get(self) if _may_remember() else None
        module = None if known is None else known.module()
        holds = module is not None and _keeps_lists(known.scores) and known.hold_for(module, self)
        before = self.values
        theirs(self, beam_idx)
        if holds and self.values is not before:
            known.reorder(self, beam_idx.to(known.scores.device))

    CacheLayerMixin.reorder_cache = reorder_cache
