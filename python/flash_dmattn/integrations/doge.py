"""Transformers' own Doge models on dynamic mask attention, in memory that is linear in the length.

    from flash_dmattn.integrations import doge

    doge.enable(model)  # or doge.enable(), for all Doge models

Every row selects the keys of highest score among those it can see, as Transformers' eager attention does with an
Sq x Sk mask ("Trainable Dynamic Mask Sparse Attention", arXiv 2508.02124).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Cache, DogeConfig, PreTrainedConfig, masking_utils
from transformers.models.doge import modeling_doge
from transformers.models.doge.modeling_doge import DogeAttention, DogeForCausalLM, DogePreTrainedModel, DogeRMSNorm

from .. import _log
from ..distributed._ranks import group_of
from ..functional import attention
from ..key_indices import KeyIndices
from ..prepared import PreparedMask
from ..selection import KeyIntervals, select_keys
from . import _doge_split, attention_interface
from ._doge_cache import CacheStep, follow_caches, key_scores
from ._inputs import cast_inputs, model_dtype, refuse_unknown, refuse_unsupported
from ._masks import (
    GrowingMask,
    check_packed,
    dense_selection,
    growing_mask,
    intervals_in,
    is_row_intervals,
    packed_documents,
    prepared_mask,
    row_intervals,
    select_within,
    within_documents,
)

__all__ = ["disable", "enable"]


def __dir__() -> list[str]:
    """What completion offers."""
    return __all__


_enabled_configs: set[type[PreTrainedConfig]] = set()
_implementations_before: WeakKeyDictionary[DogePreTrainedModel, str] = WeakKeyDictionary()


def enable(
    model_or_class: nn.Module | type[DogePreTrainedModel] | None = None, *, cp_mesh: DeviceMesh | None = None
) -> None:
    """Lets Doge models run on flash_dmattn, for training and generation. Weights and results stay what they are.

    Args:
        model_or_class: a model, or any module that holds one (of PEFT, DDP and the like). Its configuration then says
            attn_implementation "dmattn", which models share that were made from the same configuration object. A Doge
            model class, all of whose models are meant, those that exist and those to come, as long as their
            configuration class is the same. None: all Doge models.
        cp_mesh: sequences are split across its ranks (context parallelism, docs/distributed.md): the model takes this
            rank's share of input_ids and attention_mask (B, S / P), and without position_ids numbers positions through
            the whole sequence. A mesh of one dimension; needs a model. Without caches, packed sequences and windows;
            labels are the caller's to shift across shares.

    Raises:
        ValueError: there is no Doge model in it; cp_mesh without a model, or of one that it cannot be for.
        TypeError: it is neither of these.
    """
    if cp_mesh is not None and not isinstance(model_or_class, nn.Module):
        raise ValueError("cp_mesh needs a model, model_or_class: processes split the sequences of certain models")
    if model_or_class is None or isinstance(model_or_class, type):
        _enabled_configs.add(_config_class(model_or_class))
        return
    models = _models_in(model_or_class)
    if cp_mesh is not None:
        _check_split(models, cp_mesh)
    for model in models:
        if model.config._attn_implementation != attention_interface.NAME:
            _implementations_before[model] = model.config._attn_implementation
            model.set_attn_implementation(attention_interface.NAME)
        if cp_mesh is not None:
            _doge_split.split(model, cp_mesh)


def disable(model_or_class: nn.Module | type[DogePreTrainedModel] | None = None) -> None:
    """Takes `enable` with the same argument back: Transformers' own attention runs again, in a model the one that it
    had before ("eager" if it had none other).

    Raises:
        TypeError, ValueError: as in `enable`.
    """
    if model_or_class is None or isinstance(model_or_class, type):
        _enabled_configs.discard(_config_class(model_or_class))
        return
    for model in _models_in(model_or_class):
        _doge_split.unsplit(model)
        if model.config._attn_implementation == attention_interface.NAME:
            model.set_attn_implementation(_implementations_before.pop(model, "eager"))


def _config_class(model_class: type | None) -> type[PreTrainedConfig]:
    if model_class is None:
        return DogeConfig
    if not issubclass(model_class, DogePreTrainedModel):
        raise ValueError(f"model_or_class must be a Doge model or class of Transformers; got {model_class.__name__}")
    return model_class.config_class


def _check_split(models: list[DogePreTrainedModel], mesh: DeviceMesh) -> None:
    """Raises: as `group_of`; ValueError: a model is not causal, or has a sliding window."""
    group_of(mesh)
    for model in models:
        config = model.config
        if not _is_causal(config) or config.sliding_window is not None:
            raise ValueError(
                "cp_mesh needs a causal model without a sliding window; got "
                f"is_causal {_is_causal(config)}, sliding_window {config.sliding_window}"
            )


def _models_in(module: nn.Module) -> list[DogePreTrainedModel]:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"model_or_class must be a module, a class or None; got model_or_class of type {type(module).__name__}"
        )
    models = [model for model in module.modules() if isinstance(model, DogePreTrainedModel)]
    if not models:
        raise ValueError(f"model_or_class must hold a Doge model of Transformers; got {type(module).__name__}")
    return models


def _runs_here(config: PreTrainedConfig) -> bool:
    return config._attn_implementation == attention_interface.NAME or isinstance(config, tuple(_enabled_configs))


# ---- What is put in the place of Transformers' functions. For models that are not enabled it calls these.


def install() -> None:
    """Puts this module's functions before those of Transformers' Doge. Importing flash_dmattn.integrations does it."""
    if DogeAttention.forward is _forward:
        return
    DogeAttention.forward = _forward
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        setattr(modeling_doge, name, _before(getattr(modeling_doge, name)))
    # Called by generate() for static caches, ahead of the model's forward.
    their_masks = getattr(DogeForCausalLM, "create_masks_for_generate", masking_utils.create_masks_for_generate)
    DogeForCausalLM.create_masks_for_generate = staticmethod(_before(their_masks))
    follow_caches()
    _log.debug("Doge models with attn_implementation=%r, or enabled, run here", attention_interface.NAME)


def _before(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def create_mask(config: PreTrainedConfig, *args: object, **kwargs: object) -> Tensor | None:
        return (_create_mask if _runs_here(config) else theirs)(config, *args, **kwargs)

    return create_mask


def _create_mask(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Cache | None,
    position_ids: Tensor | None = None,
    **_: object,
) -> Tensor | None:
    """What the layers get as attention_mask, made once per forward.

    Returns:
        None: nothing is hidden but by the causal rule. int32 (B, 1, 1, Sk): 0 hides the key from all rows. int32
        (B or 1, 1, 2, Sk): the rows that see each key, as of `row_intervals`; documents, or windows of configurations
        that have them. Bool (B or 1, heads or 1, Sq or 1, Sk): the mask with four dimensions that was given.
    """
    rows, device, layer = inputs_embeds.shape[1], inputs_embeds.device, 0
    row_offset, keys, key_offset, documents = 0, rows, 0, None
    if past_key_values is not None:
        row_offset = past_key_values.get_query_offset(layer)
        row_offset = row_offset.to(device) if isinstance(row_offset, Tensor) else row_offset
        keys, key_offset = past_key_values.get_mask_sizes(rows, layer)
    elif attention_mask is not None:
        keys = attention_mask.shape[-1]
    elif position_ids is not None and _is_causal(config):
        position_ids = position_ids.expand(inputs_embeds.shape[0], -1)
        documents = masking_utils.find_packed_sequence_indices(position_ids)
    if attention_mask is not None:
        attention_mask = attention_mask.to(device)
        if attention_mask.dim() == 4:
            return attention_mask if attention_mask.dtype == torch.int32 else _as_bool(attention_mask, keys)
    padding = attention_interface.padding_of(attention_mask, keys, key_offset)
    if config.sliding_window is None and documents is None:
        return None if padding is None else padding[:, None, None].int()
    left, right = _window(config)
    return row_intervals(
        rows,
        keys,
        row_offset,
        key_offset,
        left=left,
        right=right,
        documents=documents,
        padding=padding,
        device=device,
    )


def _as_bool(mask: Tensor, keys: int) -> Tensor:
    """A mask that a user made, bool or 0 where visible and added to the scores, as bool. The same tensor if it is."""
    mask = mask if mask.dtype == torch.bool else mask == 0
    return mask if mask.shape[3] == keys else mask[..., :keys]


def _is_causal(config: PreTrainedConfig) -> bool:
    return getattr(config, "is_causal", True)


def _window(config: PreTrainedConfig) -> tuple[int | None, int | None]:
    """How many positions before and behind it a row sees, None: all."""
    window = config.sliding_window
    if _is_causal(config):
        return None if window is None else window - 1, 0
    return window, window


_their_forward = DogeAttention.forward


@functools.wraps(_their_forward)
def _forward(
    self: DogeAttention,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Cache | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    if not _runs_here(self.config):
        return _their_forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
    bounds = tuple(kwargs.pop(name, None) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    refuse_unsupported(self.attention_dropout if self.training else 0.0, kwargs)
    refuse_unknown(kwargs)

    lengths = hidden_states.shape[:-1]
    by_head = (*lengths, -1, self.head_dim)
    query = _normed(self.q_norm, self.q_proj(hidden_states).view(by_head))
    key = _normed(self.k_norm, self.k_proj(hidden_states).view(by_head))
    value = self.v_proj(hidden_states)
    query, key = _rotated(query, key, *position_embeddings)

    mesh, step = _doge_split.mesh_of(self), None
    if past_key_values is None or mesh is not None:
        scores, value = key_scores(self, value), value.view(by_head)
    else:
        step = CacheStep(self, past_key_values)
        key, value, scores = step.update(key, value)
    query, key, value = cast_inputs(model_dtype(self, query), query, key, value)
    if mesh is not None:
        _refuse_split_documents(bounds)
        out = _doge_split.attend(self, mesh, query, key, value, scores, attention_mask, past_key_values)
        return self.o_proj(out.reshape(*lengths, -1)), None

    rows = query.shape[1]
    if check_packed(*bounds, query.shape[0], rows, key.shape[1]):
        if step is not None:
            step.forget_best()
        visible = _visible_in_documents(self, scores, attention_mask, rows, *bounds)
        is_causal, seqlens_k = False, None
    else:
        visible, is_causal, seqlens_k = _visible_keys(self, scores, attention_mask, rows, step)
    out = attention(
        query,
        key,
        value,
        mask=visible,
        bias=scores,
        scale=self.scaling,
        is_causal=is_causal,
        seqlens_k=seqlens_k,
    )
    return self.o_proj(out.reshape(*lengths, -1)), None


_their_norm, _their_rotary = DogeRMSNorm.forward, modeling_doge.apply_rotary_pos_emb


def _normed(norm: nn.Module, states: Tensor) -> Tensor:
    """norm(states), in one operation instead of eight where it is Transformers' own and nobody looks in."""
    is_watched = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    is_theirs = type(norm) is DogeRMSNorm and DogeRMSNorm.forward is _their_norm and "forward" not in norm.__dict__
    if is_watched or not is_theirs or norm.weight.dtype != states.dtype:
        return norm(states)
    return F.rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query and key (B, S, heads, D) with the rotary embeddings cos and sin (B or 1, S, D)."""
    if modeling_doge.apply_rotary_pos_emb is not _their_rotary:  # somebody put a kernel in its place
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        query, key = modeling_doge.apply_rotary_pos_emb(query, key, cos, sin)
        return query.transpose(1, 2), key.transpose(1, 2)
    # What it does, for both at once.
    both, cos, sin = torch.cat([query, key], dim=2), cos.unsqueeze(2), sin.unsqueeze(2)
    both = torch.addcmul(both * cos, modeling_doge.rotate_half(both), sin)
    return both.split([query.shape[2], key.shape[2]], dim=2)


def _visible_keys(
    module: DogeAttention, scores: Tensor, mask: Tensor | None, rows: int, step: CacheStep | None
) -> tuple[KeyIntervals | KeyIndices | PreparedMask | Tensor | None, bool, Tensor | None]:
    """attention's mask, is_causal and seqlens_k: the best keys of every row within the mask."""
    config, window_size, keys = module.config, module.keep_window_size, scores.shape[2]
    selects = keys > window_size
    has_own_rule = mask is not None and (mask.dtype != torch.int32 or is_row_intervals(mask))
    if step is not None and has_own_rule:
        step.forget_best()
    if mask is not None and mask.dtype != torch.int32:
        mask = _as_bool(mask, keys)
        return (_select_in_mask(scores, window_size, mask, rows) if selects else prepared_mask(mask, rows)), False, None
    if is_row_intervals(mask):
        left, right = _window(config)
        if not selects or (left is not None and window_size > left + right):
            return prepared_mask(mask, rows), False, None
        return _select_in_intervals(config, scores, window_size, intervals_in(mask), rows), False, None
    is_causal, key_mask = _is_causal(config), None if mask is None else mask[:, :, 0] != 0
    seqlens_k = None if step is None else step.seqlens_k
    if not selects:
        return key_mask, is_causal, seqlens_k
    if step is not None:
        best = step.best_keys(window_size, is_causal, key_mask)
        if best is not None:
            return best, False, seqlens_k
    visible = select_keys(scores, window_size, seqlen_q=rows, causal=is_causal, key_mask=key_mask, seqlens_k=seqlens_k)
    return visible, is_causal, seqlens_k


def _visible_in_documents(
    module: DogeAttention, scores: Tensor, mask: Tensor | None, rows: int, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor
) -> KeyIntervals | Tensor:
    """attention's mask, which obeys the causal rule: the best keys of every row within its document and the mask."""
    config, window_size, keys, device = module.config, module.keep_window_size, scores.shape[2], scores.device
    key_mask = None if mask is None or mask.dtype != torch.int32 or is_row_intervals(mask) else mask[:, :, 0] != 0
    left, right = _window(config)
    if (mask is None or key_mask is not None) and left is None and keys > window_size:
        bounds = {"cu_seqlens_q": cu_seq_lens_q.to(device).int(), "cu_seqlens_k": cu_seq_lens_k.to(device).int()}
        causal = _is_causal(config)
        return select_keys(scores, window_size, seqlen_q=rows, causal=causal, key_mask=key_mask, **bounds)
    documents = packed_documents(cu_seq_lens_q, cu_seq_lens_k, rows, keys, left=left, right=right, device=device)
    if key_mask is not None:
        visible = documents.intersection(key_mask)
    elif is_row_intervals(mask):
        visible = documents.intersection(intervals_in(mask))
    else:
        visible = within_documents(documents, None if mask is None else _as_bool(mask, keys), rows)
    if keys <= window_size:
        return visible
    if isinstance(visible, KeyIntervals):
        return _select_in_intervals(config, scores, window_size, visible, rows)
    return _select_in_mask(scores, window_size, visible, rows)


def _select_in_intervals(
    config: PreTrainedConfig, scores: Tensor, window_size: int, intervals: KeyIntervals, rows: int
) -> KeyIntervals | Tensor:
    """Within the intervals of documents, or of windows in configurations that have them; rows are the keys' tokens."""
    if _window(config)[0] is not None:
        # Within a window a key that dropped out may come back, when better ones have left: no interval says that.
        return dense_selection(scores, window_size, intervals.dense_mask(rows))
    seen = intervals.begin < intervals.end
    growing = GrowingMask(_is_causal(config), seen, None, torch.where(seen, intervals.end, 0))
    return select_within(scores, window_size, growing, rows)


def _refuse_split_documents(bounds: tuple[Tensor | None, Tensor | None]) -> None:
    if any(tensor is not None for tensor in bounds):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k must be None where sequences are split across ranks (cp_mesh); got bounds"
        )


def _select_in_mask(scores: Tensor, window_size: int, mask: Tensor, rows: int) -> KeyIntervals | Tensor:
    growing = None if torch.compiler.is_compiling() else growing_mask(mask)
    if growing is None:
        return dense_selection(scores, window_size, mask)
    return select_within(scores, window_size, growing, rows)
