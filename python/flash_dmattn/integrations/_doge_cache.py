"""What a Doge layer knows of the keys in its cache while tokens are generated: their scores, and which are the best.

Scores of cached keys are not computed again, and a new key can only put out one of the best (`KeptKeys`). In eager code
what is known of a layer holds as long as its values are the same tensor and count no write but those of the layer
itself. Compiled code cannot ask for that. For static caches all is in tensors that stay where they are (`SlotScores`,
an attribute of the cache's layer); how many keys it is true of is one of them, and where the cache has another number
the best are chosen anew, on the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, StaticLayer
from transformers.models.doge.modeling_doge import DogeAttention

from ..kept_keys import MAX_NEW_KEYS, KeptKeys
from ..key_indices import KeyIndices
from ..selection import KeyIntervals, select_keys


def key_scores(module: DogeAttention, value: Tensor) -> Tensor:
    """What keys are selected by and what is added to attention's scores: value (B, S, Hkv D) -> (B, Hkv, S)."""
    return torch.exp(module.A * F.softplus(module.dt_proj(value))).transpose(1, 2)


@dataclass(eq=False)
class Best:
    """The best keys of a layer."""

    kept: KeptKeys
    key_mask: Tensor | None = None  # bool (B or 1, 1, keys): the keys that they were chosen from, None: all
    room: Tensor | None = None  # of a static cache: bool (B, 1, slots), where the mask is put

    @classmethod
    def unknown(cls, scores: Tensor, window_size: int) -> Best:
        """To be chosen by the first step that asks for them. scores: (B, Hkv, keys)"""
        batch, heads = scores.shape[:2]
        best = cls(KeptKeys.empty(batch, heads, window_size, dtype=scores.dtype, device=scores.device))
        best.forget()
        return best

    def forget(self, key_mask: Tensor | None = None) -> None:
        """key_mask: of the step that knows no best keys."""
        self.kept.lengths.fill_(-1)
        self.hold_mask(key_mask)

    def hold_mask(self, key_mask: Tensor | None) -> None:
        self.key_mask = key_mask
        if key_mask is not None and self.room is not None:
            self.key_mask = self.room.copy_(key_mask)

    def reorder(self, beam_idx: Tensor) -> None:
        self.kept.reorder_(beam_idx)
        if self.key_mask is not None and len(self.key_mask) > 1:
            self.hold_mask(self.key_mask.index_select(0, beam_idx))


@dataclass(eq=False)
class SlotScores:
    """Of a static cache's layer: scores of its slots, those of keys, and the best of these. Steps in eager code and in
    compiled code write to the same tensors. It holds as long as nobody but the layer itself and methods of the cache
    write to the layer's tensors."""

    module: ref[DogeAttention]  # whose scores these are
    values: ref[Tensor]
    scores: Tensor  # (B, Hkv, slots)
    best: Best
    is_stepping: bool = False  # the layer itself puts keys into the cache
    is_known: bool = True  # nobody else has

    def is_of(self, module: DogeAttention, layer: CacheLayerMixin) -> bool:
        # Compiled code is kept for the modules that it was made for if their numbers are compared (of which it makes
        # guards, and of `is` none), for the tensors in either way.
        return id(self.module()) == id(module) and self.values() is layer.values

    def take(self, module: DogeAttention, values: Tensor, scores: Tensor) -> bool:
        """Becomes what is known of these values, where tensors of the same sizes are wanted."""
        same = self.scores.shape == scores.shape and self.scores.dtype == scores.dtype
        if not same or self.scores.device != scores.device:
            return False
        self.module, self.values = ref(module), ref(values)
        self.fill(scores)
        return True

    def fill(self, scores: Tensor) -> None:
        self.scores.copy_(scores)
        self.best.forget()
        self.is_known = True

    def reorder(self, values: Tensor, beam_idx: Tensor) -> None:
        """Follows the layer, whose reordered values these are."""
        self.scores.copy_(self.scores.index_select(0, beam_idx))
        self.best.reorder(beam_idx)
        self.values = ref(values)

    def __reduce__(self) -> tuple:
        """Copies of a cache know nothing: what is known is of certain tensors and of a certain module."""
        return _nothing, ()


def _nothing() -> None:
    return None


_SLOT_SCORES = "flash_dmattn_slot_scores"


def slot_scores_of(layer: CacheLayerMixin | None) -> SlotScores | None:
    return getattr(layer, _SLOT_SCORES, None)


@dataclass
class KnownScores:
    """What eager code knows of a cache layer's values, as long as they are the same tensor and were not written to.

    Its tensors are written to in every step. They are made and used only where no gradients are recorded, so that no
    graph holds them.
    """

    module: ref[DogeAttention]
    values: ref[Tensor]
    versions: tuple[int, ...]
    keys: int  # how many there are, in a static cache slots
    scores: Tensor  # (B, Hkv, slots): those of the keys, then room for more
    best: Best | None = None

    def hold_for(self, module: DogeAttention, layer: CacheLayerMixin) -> bool:
        if self.module() is not module:
            return False
        is_same = self.values() is layer.values and self.versions == _versions(layer)
        return is_same or self._follow_crop(layer)

    def _follow_crop(self, layer: CacheLayerMixin) -> bool:
        """If nothing was done to the layer but to take keys off its end, forgets their scores. (That what they put out
        of the best comes back the next step finds by the number of keys.) False: more was done."""
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
        return True

    def reorder(self, layer: CacheLayerMixin, beam_idx: Tensor) -> None:
        """Follows the layer of a dynamic cache, whose values have just been reordered."""
        self.scores = self.scores.index_select(0, beam_idx)
        if self.best is not None and len(beam_idx) == self.best.kept.shape[0]:
            self.best.reorder(beam_idx)
        else:
            self.best = None
        self.values, self.versions = ref(layer.values), _versions(layer)


def _versions(layer: CacheLayerMixin) -> tuple[int, ...]:
    """Numbers that change when somebody writes to the layer."""
    length = getattr(layer, "cumulative_length", None)  # a tensor in static caches
    return (layer.values._version, length._version if isinstance(length, Tensor) else 0)


# Whatever changes a cache (another batch, writing to it) puts other tensors into its layers or writes to them; then
# everything is computed anew. Copies of a layer have no entry here.
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


_slots_of_first_layer: WeakKeyDictionary[Cache, _Slots] = WeakKeyDictionary()


class CacheStep:
    """One forward of one layer with a cache. Scores of keys that are in the cache already are not computed again."""

    def __init__(self, module: DogeAttention, cache: Cache):
        self.module, self.cache = module, cache
        self.rows = 0  # new tokens
        self.slots: _Slots | None = None  # of a static cache
        self.best: Best | None = None  # of the keys before the step; None: these are not known

    @property
    def seqlens_k(self) -> Tensor | None:
        return None if self.slots is None else self.slots.existing

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """key (B, S, Hkv, D) and value (B, S, Hkv D) of new tokens -> those of all, (B, Sk, Hkv, D), and the scores of
        all, (B, Hkv, Sk)."""
        index, known, self.rows = self.module.layer_idx, self._before(value), value.shape[1]
        by_head = value.view(*value.shape[:2], -1, self.module.head_dim)
        of_slots = slot_scores_of(self._layer())
        if of_slots is not None:
            of_slots.is_stepping = True
        keys, values = self.cache.update(key.transpose(1, 2), by_head.transpose(1, 2), index)
        if of_slots is not None:
            of_slots.is_stepping = False
        length = self.cache.get_seq_length(index)
        if isinstance(length, Tensor):
            self.slots = self._find_slots(length, value)
        if of_slots is not None and torch.compiler.is_compiling():
            self._update_slots(of_slots, value, values)
        elif known is None or not self._append(known, value, values):
            self._compute(values)
        return keys.transpose(1, 2), values.transpose(1, 2), self.scores

    def best_keys(
        self, window_size: int, is_causal: bool, key_mask: Tensor | None = None
    ) -> KeyIntervals | KeyIndices | None:
        """The best keys of each of the newest rows, of which the causal rule hides none, from those of the rows before
        if these are known: a new key can only put out one of them. None: only a selection from all keys tells.

        Args:
            key_mask: bool (B or 1, 1, keys), False hides the key from all rows.
        """
        best = self.best
        if best is not None and best.kept.window_size != window_size and not torch.compiler.is_compiling():
            best.kept = Best.unknown(self.scores, window_size).kept
        takes_rows = self.rows <= MAX_NEW_KEYS and (is_causal or self.rows == 1)
        if best is not None and best.kept.window_size == window_size and takes_rows:
            return self._append_to_best(best, key_mask)
        self.forget_best(key_mask)
        if self.rows > 1 or key_mask is not None:
            return None
        return select_keys(self.scores, window_size, seqlen_q=1, causal=False, seqlens_k=self.seqlens_k)

    def forget_best(self, key_mask: Tensor | None = None) -> None:
        """For steps that do not ask for the best keys, so that the next one that does will not take those before this
        step for those before it."""
        if self.best is not None:
            self.best.forget(key_mask)

    def _append_to_best(self, best: Best, key_mask: Tensor | None) -> KeyIndices:
        new, scores = self._of_new_keys(self.scores), self.scores
        if self.slots is None:
            before = torch.full((new.shape[0],), scores.shape[2] - self.rows, dtype=torch.int32, device=new.device)
        else:
            before = self.slots.existing - self.rows
        lengths = best.kept.lengths
        if (best.key_mask is None) != (key_mask is None):
            lengths.fill_(-1)
        if key_mask is not None:
            if best.key_mask is not None:
                lengths.masked_fill_(self._hides_otherwise(best.key_mask, key_mask), -1)
            new = new.masked_fill(~self._of_new_keys(key_mask), -torch.inf)
            # On a GPU, whose host would have to wait to know, masking is cheap.
            can_ask = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
            is_known = can_ask and torch.equal(lengths, before[:, None].expand_as(lengths))
            scores = None if is_known else scores.masked_fill(~key_mask, -torch.inf)
        best.hold_mask(key_mask)
        return best.kept.append_(new, before, scores)

    def _of_new_keys(self, tensor: Tensor) -> Tensor:
        """(B or 1, heads, keys) -> (B or 1, heads, rows)"""
        if self.slots is None:
            return tensor[:, :, tensor.shape[2] - self.rows :]
        return tensor.index_select(2, self.slots.new)

    def _hides_otherwise(self, before: Tensor, key_mask: Tensor) -> Tensor:
        """Whether it says something else of the keys before this step than the mask that these were chosen with:
        bool (B or 1, 1)."""
        if self.slots is None:
            old = key_mask.shape[2] - self.rows
            return (before[:, :, :old] != key_mask[:, :, :old]).any(2)
        existing = (self.slots.existing - self.rows)[:, None, None]
        is_old = torch.arange(key_mask.shape[2], device=key_mask.device) < existing
        return ((before != key_mask) & is_old).any(2)

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
        if self.slots is not None:
            known.scores.index_copy_(2, self.slots.new, new)
        else:
            if keys > known.scores.shape[2]:
                known.scores = _with_room(known.scores, keys)
            known.scores.narrow(2, known.keys, rows).copy_(new)
        layer = self._layer()
        known.values, known.versions, known.keys = ref(layer.values), _versions(layer), keys
        self.scores = _first(known.scores, keys)
        self.best = known.best = self._best_in(known)
        return True

    def _best_in(self, known: KnownScores) -> Best | None:
        """Of a dynamic cache they are made where a step might use them."""
        if known.best is None and self.rows <= MAX_NEW_KEYS:
            return Best.unknown(known.scores, self.module.keep_window_size)
        return known.best

    def _compute(self, values: Tensor) -> None:
        """The scores of all keys, remembered if they may be."""
        self.scores = scores = key_scores(self.module, values.transpose(1, 2).flatten(2))
        layer = self._layer()
        if torch.compiler.is_compiling():
            return
        # Layers of other kinds than dynamic and static return what they do not keep.
        if not _may_remember() or layer in _captured or layer.values is not values:
            if slot_scores_of(layer) is not None:
                delattr(layer, _SLOT_SCORES)
            return
        known = KnownScores(ref(self.module), ref(values), _versions(layer), values.shape[2], scores)
        if self.slots is None:
            known.scores = _with_room(scores, scores.shape[2])
        else:
            of_slots = slot_scores_of(layer)
            if of_slots is None or not of_slots.take(self.module, values, scores):
                of_slots = self._make_slot_scores(values, scores)
                setattr(layer, _SLOT_SCORES, of_slots)
            known.scores, known.best = of_slots.scores, of_slots.best
        known_scores[layer] = known
        self.scores, self.best = _first(known.scores, known.keys), known.best

    def _make_slot_scores(self, values: Tensor, scores: Tensor) -> SlotScores:
        scores = scores.contiguous()
        best = Best.unknown(scores, self.module.keep_window_size)
        best.room = torch.empty((scores.shape[0], 1, scores.shape[2]), dtype=torch.bool, device=scores.device)
        # As those of the layer: CUDA graphs of compiled code write to them.
        for tensor in (scores, best.kept.indices, best.kept.scores, best.kept.lengths, best.room):
            torch._dynamo.mark_static_address(tensor)
        return SlotScores(ref(self.module), ref(values), scores, best)

    def _update_slots(self, of_slots: SlotScores, value: Tensor, values: Tensor) -> None:
        """In compiled code: puts the scores of new keys with those of all slots."""
        if not of_slots.is_of(self.module, self._layer()):
            of_slots.is_known = False  # keys come whose scores it will not have
            self._compute(values)
        elif torch.is_grad_enabled() or not of_slots.is_known:  # with gradients all scores depend on weights
            self._compute(values)
            of_slots.fill(self.scores.detach())
        else:
            of_slots.scores.index_copy_(2, self.slots.new, key_scores(self.module, value).to(of_slots.scores.dtype))
            self.scores, self.best = of_slots.scores, of_slots.best

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


def _with_room(scores: Tensor, keys: int) -> Tensor:
    """(B, Hkv, slots) with slots for `keys` keys and more to come."""
    larger = scores.new_empty((*scores.shape[:2], keys + max(keys // 8, LEAST_ROOM)))
    larger[:, :, : scores.shape[2]] = scores
    return larger


def _first(tensor: Tensor, keys: int) -> Tensor:
    return tensor if tensor.shape[2] == keys else tensor.narrow(2, 0, keys)


def follow_caches() -> None:
    """Lets what is known of a layer be reordered with it, and be forgotten when others put keys into it, in all caches
    of Transformers."""
    their_reorder, their_update = CacheLayerMixin.reorder_cache, StaticLayer.update

    @functools.wraps(their_reorder)
    def reorder_cache(self: CacheLayerMixin, beam_idx: Tensor) -> None:
        known, of_slots = known_scores.get(self) if _may_remember() else None, slot_scores_of(self)
        module, before = None if known is None else known.module(), self.values
        known = known if module is not None and known.hold_for(module, self) else None
        their_reorder(self, beam_idx)
        if self.values is before:
            return
        is_permuted = of_slots is not None and of_slots.values() is before and len(beam_idx) == len(of_slots.scores)
        if is_permuted:
            of_slots.reorder(self.values, beam_idx.to(of_slots.scores.device))
        if known is not None and of_slots is None:
            known.reorder(self, beam_idx.to(known.scores.device))
        elif known is not None and is_permuted:
            known.values, known.versions = ref(self.values), _versions(self)

    @functools.wraps(their_update)
    def update(
        self: StaticLayer, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        of_slots = slot_scores_of(self)
        if of_slots is not None and not of_slots.is_stepping:
            of_slots.is_known = False
        return their_update(self, key_states, value_states, *args, **kwargs)

    CacheLayerMixin.reorder_cache, StaticLayer.update = reorder_cache, update
