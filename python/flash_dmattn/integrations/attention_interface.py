"""The attention "dmattn" for Transformers' models: `attn_implementation="dmattn"`.

Transformers asks for a mask once per forward (`dmattn_mask`) and for attention in every layer
(`dmattn_attention_forward`). Here the mask is, wherever it can be, two integers per key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, masking_utils
from transformers.utils.import_utils import is_tracing

from .. import _log
from .._sinks import with_sink
from ..functional import attention
from ..prepared import PreparedMask, prepare_mask
from ..selection import KeyIntervals
from ._inputs import cast_inputs, model_dtype, refuse_unknown, refuse_unsupported
from ._lists import lists_of_keys, within_mask
from ._masks import (
    check_packed,
    is_row_intervals,
    packed_documents,
    prepared_mask,
    row_intervals,
    within_documents,
)
from ._models import dense_mask_form, needs_causal_mask

NAME = "dmattn"


def register() -> None:
    """Makes Transformers know the name. Importing flash_dmattn.integrations does it."""
    AttentionInterface.register(NAME, dmattn_attention_forward)
    AttentionMaskInterface.register(NAME, dmattn_mask)
    _log.debug("attn_implementation=%r is known to Transformers", NAME)


# ---- Attention


def dmattn_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What Transformers' AttentionInterface calls in every layer.

    Args:
        query: (B, H, Sq, D); key: (B, Hkv, Sk, D); value: (B, Hkv, Sk, Dv).
        attention_mask: what `dmattn_mask` made: int32 (B or 1, 1, 2, Sk), the rows that see each key; or a mask that a
            user made: bool (B or 1, H or Hkv or 1, Sq or 1, Sk), True = visible, or floating point of these shapes,
            added to the scores; or None, then causal if is_causal and Sq > 1. Without a mask, Sk > Sq > 1 and is_causal
            the keys from Sq on are not filled yet, as for Transformers' sdpa.
        dropout: must be 0.
        scaling: default 1 / sqrt(D).
        is_causal: used without a mask only; default module.is_causal, else True.
        softcap: as in `attention`; None means none.
        sliding_window: keys that a row sees at most, used without a mask only: masks include the window.
        s_aux: attention sinks (H), the logit of one more key that has no value.
        position_bias: added to the scores (B or 1, H or 1, Sq or 1, Sk), with a gradient.
        sinks: as s_aux, with a logit for every row (B or 1, H, Sq or 1, 1).
        deterministic: True: the same bits in every run; else torch's own setting decides.
        cu_seq_lens_q, cu_seq_lens_k: int (documents + 1), where the documents that are packed into one sequence begin
            and the last ends. Rows see keys of their own only, whatever the mask says; without a mask the causal rule
            and the window are those of each document. Contents are clamped and never read by the host.
        indices: the keys that each row sees, int32 or int64 (B or 1, Sq, n), in any order. What mask, window, documents
            or the causal rule hide of them stays hidden, and is not computed.
        block_indices: the same as blocks of module.indexer.block_size keys (B or 1, heads, Sq, n), -1 for none; heads
            divide H.
        **kwargs: what changes nothing here, `_inputs.HARMLESS`, and others that are None or False.

    Returns:
        (out (B, Sq, H, Dv), None).

    Raises:
        ValueError: dropout, head_mask, a keyword that is not known, two kinds of sinks or lists, a mask or lists of
            another form, documents in several sequences, with keys of a cache or without one of the bounds, and as
            `attention`.
    """
    refuse_unsupported(dropout, kwargs)
    refuse_unknown(kwargs)
    rows = query.shape[2]
    is_packed = check_packed(cu_seq_lens_q, cu_seq_lens_k, query.shape[0], rows, key.shape[2])
    if s_aux is not None and sinks is not None:
        raise ValueError("s_aux and sinks are two forms of one argument; got both")
    if attention_mask is None:
        is_causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        is_causal = is_causal and rows > 1
        if is_causal and key.shape[2] > rows:
            key, value = key[:, :, :rows], value[:, :, :rows]
            position_bias = None if position_bias is None else position_bias[..., :rows]
        mask = _window(sliding_window, rows, key) if is_causal and not is_packed else None
    else:
        is_causal = False
        mask, additive = _split_mask(attention_mask, rows)
        if additive is not None:
            position_bias = additive if position_bias is None else position_bias + additive
    lists = lists_of_keys(module, query, key, indices, block_indices)
    if lists is not None:
        mask = within_mask(lists, mask, rows, key.shape[2])
    if is_packed:
        left = sliding_window - 1 if is_causal and sliding_window is not None else None
        documents = packed_documents(
            cu_seq_lens_q,
            cu_seq_lens_k,
            rows,
            key.shape[2],
            left=left,
            right=0 if is_causal else None,
            device=query.device,
        )
        mask, is_causal = within_documents(documents, mask, rows), False

    query, key, value, position_bias = cast_inputs(model_dtype(module, query), query, key, value, position_bias)
    position_bias, s_aux = (_in_a_dtype_of(query, tensor) for tensor in (position_bias, s_aux))
    out = attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        mask=mask,
        bias=position_bias,
        sink=s_aux,
        scale=scaling,
        is_causal=is_causal,
        softcap=0.0 if softcap is None else softcap,
        deterministic=deterministic or None,
        return_lse=sinks is not None,
    )
    if sinks is not None:
        out, lse = out
        out = with_sink(out, lse, sinks[..., 0])
    return out, None


def _in_a_dtype_of(query: Tensor, added: Tensor | None) -> Tensor | None:
    """What is added to scores, in query's dtype unless it is float32."""
    return added if added is None or added.dtype in (query.dtype, torch.float32) else added.to(query.dtype)


def _window(sliding_window: int | None, rows: int, key: Tensor) -> KeyIntervals | None:
    if sliding_window is None or sliding_window >= key.shape[2]:
        return None
    return KeyIntervals.sliding_window(sliding_window - 1, 0, rows, key.shape[2], device=key.device)


def _split_mask(mask: Tensor, rows: int) -> tuple[PreparedMask | KeyIntervals | Tensor, Tensor | None]:
    """A mask for `attention`, and what is to be added to the scores."""
    if is_row_intervals(mask):
        return prepared_mask(mask, rows), None
    if mask.dim() == 4 and mask.dtype == torch.bool:
        return prepared_mask(mask, rows), None
    if mask.dim() == 4 and mask.is_floating_point():
        # Entries that hide are skipped, not only made small.
        return mask > torch.finfo(mask.dtype).min, mask
    raise ValueError(
        "attention_mask must be bool or floating point with 4 dimensions; "
        f"got attention_mask {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
    )


# ---- Masks


def dmattn_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: object,
) -> Tensor | None:
    """What Transformers' AttentionMaskInterface calls once per forward and kind of layer.

    Causal masks, sliding windows, packed sequences and padding become intervals without a mask ever being made. For any
    other mask function Transformers makes its 4-D mask, which becomes intervals if every key's rows follow one another.

    Args:
        q_offset, kv_offset: positions of the first query and key, ints or (for static caches) tensors.
        mask_function: (batch, head, query position, key position) -> bool.
        attention_mask: bool (B, keys so far), False is padding.
        allow_is_causal_skip, allow_is_bidirectional_skip: None may be returned if it says the same.
        use_vmap: mask_function takes single indices only.
        config: the model's configuration. Some models do more with a mask than hand it on (`_models.dense_mask_form`)
            and get a 4-D one of Transformers.
        dtype: of a mask of numbers.

    Returns:
        None; int32 (B or 1, 1, 2, kv_length), the rows that see each key; bool (B, 1, q_length, kv_length); or, for
        models that need it, numbers (B, 1, q_length, kv_length), which are added to the scores.
    """
    pattern = _pattern_of(mask_function)
    form = dense_mask_form(config, has_window=pattern is not None and pattern.left is not None)
    if form is not None or pattern is None:
        arguments = {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
            "use_vmap": use_vmap,
            "device": device,
        }
        if form is not None:
            _log.info("%s: a dense mask of %s, which its models read or edit", type(config).__name__, form)
        if form == "numbers":
            return masking_utils.eager_mask(
                **arguments, dtype=dtype, allow_is_bidirectional_skip=allow_is_bidirectional_skip
            )
        mask = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
        return mask if form == "bool" or is_tracing(mask) else _as_intervals(mask, q_length)
    padding = padding_of(attention_mask, kv_length, kv_offset)
    if pattern.right is None:
        may_skip = allow_is_bidirectional_skip
    else:
        may_skip = allow_is_causal_skip and not needs_causal_mask(config)
    if may_skip and padding is None and _says_nothing(pattern, q_length, kv_length, q_offset, kv_offset):
        return None
    if q_length == 1 and pattern.left is None and pattern.right is None and pattern.documents is None:
        # Models that ask for the mask of one row have others see the same.
        visible = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device) if padding is None else padding
        return visible[:, None, None]
    return row_intervals(
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        left=pattern.left,
        right=pattern.right,
        documents=pattern.documents,
        padding=padding,
        device=device,
    )


def padding_of(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """A 2-D mask of Transformers (B, tokens so far) -> bool (B, kv_length), None if nothing is hidden.

    Whether anything is hidden is read from the mask, unless code is being traced.
    """
    if attention_mask is None:
        return None
    attention_mask = attention_mask.bool()
    if not is_tracing(attention_mask) and attention_mask.all():
        return None
    # Static caches have slots for tokens to come, which the mask does not know.
    missing = max(kv_offset + kv_length - attention_mask.shape[1], 0)
    return F.pad(attention_mask, (0, missing))[:, kv_offset : kv_offset + kv_length]


@dataclass(frozen=True)
class _Pattern:
    """A row sees the keys from `left` positions before it to `right` behind it, and of its own document only."""

    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None
    by_document: bool = False  # positions count from the beginning of a document


def _pattern_of(mask_function: Callable) -> _Pattern | None:
    """What a mask function of Transformers says, None if that is no pattern of this kind or it is somebody else's.

    Transformers makes mask functions as closures. One is recognised by its code, which has to be that of the factory
    in masking_utils, so that nothing is guessed.
    """
    pattern = _read_pattern(mask_function)
    if pattern is None or (pattern.by_document and pattern.documents is None):
        return None
    return pattern


# The code of the closures that are understood, and the names of the functions in masking_utils that make them.
_MADE_BY = {
    const: name
    for name in (
        "and_masks",
        "sliding_window_overlay",
        "sliding_window_bidirectional_overlay",
        "packed_sequence_mask_function",
        "remap_positions_for_packed_sequence",  # from 5.18 on
    )
    if hasattr(masking_utils, name)
    for const in getattr(masking_utils, name).__code__.co_consts
    if isinstance(const, CodeType)
}


def _read_pattern(mask_function: Callable) -> _Pattern | None:
    if mask_function is masking_utils.causal_mask_function:
        return _Pattern(right=0)
    if mask_function is masking_utils.bidirectional_mask_function:
        return _Pattern()
    code = getattr(mask_function, "__code__", None)
    made_by = _MADE_BY.get(code)
    if made_by is None:
        return None
    values = [cell.cell_contents for cell in mask_function.__closure__]
    held = dict(zip(code.co_freevars, values, strict=True))
    if made_by == "and_masks":
        return _intersection([_read_pattern(part) for part in held["mask_functions"]])
    if made_by == "sliding_window_overlay":
        return _Pattern(left=held["sliding_window"] - 1)
    if made_by == "sliding_window_bidirectional_overlay":
        return _Pattern(left=held["sliding_window"], right=held["sliding_window"])
    if made_by == "packed_sequence_mask_function":
        return _Pattern(documents=held["packed_sequence_mask"])
    inner = _read_pattern(held["mask_function"])  # remap_positions_for_packed_sequence
    return None if inner is None else replace(inner, by_document=True)


def _intersection(patterns: list[_Pattern | None]) -> _Pattern | None:
    if None in patterns or sum(pattern.documents is not None for pattern in patterns) > 1:
        return None
    lefts = [pattern.left for pattern in patterns if pattern.left is not None]
    rights = [pattern.right for pattern in patterns if pattern.right is not None]
    return _Pattern(
        left=min(lefts, default=None),
        right=min(rights, default=None),
        documents=next((pattern.documents for pattern in patterns if pattern.documents is not None), None),
        by_document=any(pattern.by_document for pattern in patterns),
    )


def _says_nothing(pattern: _Pattern, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int) -> bool:
    """Whether attention without a mask does the same (see `dmattn_attention_forward`), which needs no reading."""
    if isinstance(q_offset, Tensor) or pattern.documents is not None or pattern.right not in (None, 0):
        return False
    if pattern.left is not None and pattern.left < kv_length - 1:
        return False
    if pattern.right is None:
        return True
    # Causal: the rows are the last tokens, and all or one of them.
    return q_offset + q_length == kv_offset + kv_length and q_length in (1, kv_length)


def _as_intervals(mask: Tensor, rows: int) -> Tensor:
    """mask bool (B, 1, rows, keys) -> int32 (B, 1, 2, keys) if that can say the same, else the mask."""
    prepared = prepare_mask(mask, rows)
    if prepared.kind == "intervals":
        return torch.stack([prepared.intervals.begin, prepared.intervals.end], dim=2)
    if prepared.kind == "keys":
        return F.pad(prepared.mask.int() * rows, (0, 0, 1, 0))
    _log.info("a mask that no interval of rows per key can say stays dense: bool %s", tuple(mask.shape))
    return mask
