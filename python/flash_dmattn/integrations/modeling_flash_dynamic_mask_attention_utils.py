"""The original package's `_flash_dynamic_mask_attention_forward`: selection by a bias within a mask, then attention.

Names, arguments and the rule of selection are those of flash-dmattn 1.1.9 on PyPI; docs/transformers.md says where this
does more than the original.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments import as_int, check_optional_tensor
from ..functional import attention
from ..prepared import PreparedMask
from ..selection import KeyIntervals
from ._inputs import cast_inputs
from ._masks import GrowingMask, dense_selection, growing_mask, prepared_mask, select_within

_IMPLEMENTATIONS = (None, "flash_dmattn")


def fdma_peft_integration_check(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, target_dtype: torch.dtype | None = None
) -> tuple[Tensor | None, ...]:
    """Casts q, k, v and bias to target_dtype if q is float32, each only if it is there."""
    return cast_inputs(target_dtype, q, k, v, bias)


def _flash_dynamic_mask_attention_forward(
    query_states: Tensor,
    key_states: Tensor,
    value_states: Tensor,
    attention_mask: Tensor | None,
    attention_bias: Tensor | None,
    query_length: int,
    key_length: int,
    is_causal: bool,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    keep_window_size: int | None = None,
    deterministic: bool | None = None,
    target_dtype: torch.dtype | None = None,
    implementation: str | None = None,
    *,
    selection: str = "per_key",
    **kwargs: object,
) -> Tensor:
    """Attention of every row to the `keep_window_size` keys of highest bias, with the bias added to the scores.

    If key_length <= keep_window_size nothing is selected. Where the bias is one number per key and the mask is none, of
    the keys, causal or of packed documents, memory is linear in the length; otherwise the selection holds a bool for
    every score.

    Args:
        query_states: (B, Sq, H, D); key_states, value_states: (B, Sk, Hkv, D), as in `attention`.
        attention_mask: None; (B or 1, Sk), nonzero = visible; or bool, True = visible, per key (B or 1, H or Hkv or 1,
            Sk) or (B or 1, H or Hkv or 1, Sq or 1, Sk). What it hides takes no part in the selection.
        attention_bias: None; per key (B or 1, H or Hkv or 1, Sk); or (B or 1, H or Hkv or 1, Sq or 1, Sk). Selected by,
            detached, and added to the scores, with a gradient in its own dtype.
        query_length, key_length: Sq and Sk.
        is_causal: row i sees keys j <= i + Sk - Sq.
        softmax_scale: default 1 / sqrt(D). softcap, deterministic: as in `attention`; None is its default.
        keep_window_size: keys that a row keeps; None: all.
        target_dtype: what float32 inputs are cast to; None: nothing.
        implementation: None or "flash_dmattn".
        selection: "per_key", the original's rule: the highest of what the mask shows, though the causal rule may hide
            some of it. "causal": the highest of what mask and causal rule show, which needs is_causal.
        **kwargs: ignored, as by the original.

    Returns:
        (B, Sq, H, D) in query_states' dtype after the cast.

    Raises:
        TypeError, ValueError: as `attention`; a mask or bias of another form; a selection without a bias, of another
        name or "causal" without is_causal; another implementation.
    """
    check_optional_tensor("attention_mask", attention_mask)
    check_optional_tensor("attention_bias", attention_bias)
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or 'flash_dmattn'; got implementation {implementation!r}")
    rows, keys = query_states.shape[1], key_states.shape[1]
    if (query_length, key_length) != (rows, keys):
        raise ValueError(
            "query_length and key_length must be those of query_states and key_states; got query_length "
            f"{query_length}, key_length {key_length}, query_states {tuple(query_states.shape)}, key_states "
            f"{tuple(key_states.shape)}"
        )
    if selection not in ("per_key", "causal"):
        raise ValueError(f"selection must be 'per_key' or 'causal'; got selection {selection!r}")
    if selection == "causal" and not is_causal:
        raise ValueError(
            "selection 'causal' chooses among the keys of a row's past and needs is_causal=True; got is_causal False"
        )
    window_size = None if keep_window_size is None else as_int("keep_window_size", keep_window_size)
    selects = window_size is not None and keys > window_size
    if selects and attention_bias is None:
        raise ValueError(
            f"attention_bias must be given to select the {window_size} best of {keys} keys by; got attention_bias None"
        )
    query_states, key_states, value_states, attention_bias = fdma_peft_integration_check(
        query_states, key_states, value_states, attention_bias, target_dtype
    )
    mask, bias = _four_dims(attention_mask, keys), _per_key_if_it_is(attention_bias)
    if not selects:
        visible = None if mask is None else prepared_mask(mask, rows)
    elif bias.dim() == 3:
        visible = _select_per_key(bias, window_size, mask, rows, selection == "causal")
    else:
        if selection == "causal":
            mask = _with_causal_rule(mask, rows, keys, bias.device)
        visible = dense_selection(bias, window_size, mask)
    return attention(
        query_states,
        key_states,
        value_states,
        mask=visible,
        bias=bias,
        scale=softmax_scale,
        is_causal=is_causal,
        softcap=0.0 if softcap is None else softcap,
        deterministic=deterministic,
    )


def _four_dims(attention_mask: Tensor | None, keys: int) -> Tensor | None:
    """A padding mask, a mask of keys or a mask of scores as bool (B or 1, heads, Sq or 1, Sk)."""
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    if attention_mask.dim() == 2 and shape[1] == keys:
        return attention_mask.bool()[:, None, None]
    if attention_mask.dim() not in (3, 4) or attention_mask.dtype != torch.bool or shape[-1] not in (1, keys):
        raise ValueError(
            "attention_mask must be a padding mask (B or 1, Sk) or bool (B or 1, H or Hkv or 1, Sk) or "
            "(B or 1, H or Hkv or 1, Sq or 1, Sk); "
            f"got attention_mask {str(attention_mask.dtype).removeprefix('torch.')} {shape}, {keys} keys"
        )
    mask = attention_mask[:, :, None] if attention_mask.dim() == 3 else attention_mask
    return mask if shape[-1] == keys else mask.expand(-1, -1, -1, keys)


def _per_key_if_it_is(attention_bias: Tensor | None) -> Tensor | None:
    """The bias; one that all rows share without the dimension of rows."""
    if attention_bias is None or attention_bias.dim() == 3:
        return attention_bias
    if attention_bias.dim() != 4:
        raise ValueError(
            "attention_bias must be (B or 1, H or Hkv or 1, Sk) or (B or 1, H or Hkv or 1, Sq or 1, Sk); "
            f"got attention_bias {tuple(attention_bias.shape)}"
        )
    return attention_bias[:, :, 0] if attention_bias.shape[2] == 1 else attention_bias


def _select_per_key(
    bias: Tensor, window_size: int, mask: Tensor | None, rows: int, causal: bool
) -> KeyIntervals | PreparedMask | Tensor:
    """What a bias (B or 1, heads, Sk) selects within the mask, and within the causal rule if `causal`."""
    if mask is None:
        growing = GrowingMask(causal)
    elif torch.compiler.is_compiling() and mask.shape[2] != 1:
        growing = None  # whether it is one depends on its elements
    else:
        growing = growing_mask(mask)
        if growing is not None and causal:
            growing = _within_causal_rule(growing)
    if growing is not None:
        return select_within(bias, window_size, growing, rows)
    if causal:
        mask = _with_causal_rule(mask, rows, bias.shape[2], bias.device)
    return dense_selection(bias, window_size, mask)


def _within_causal_rule(mask: GrowingMask) -> GrowingMask | None:
    """The mask with the causal rule of the last row at the last key; None if that is no GrowingMask known here."""
    if mask.causal:
        # A mask of fewer existing keys lets rows see no more than the rule does.
        return mask
    return GrowingMask(True, mask.key_mask)


def _with_causal_rule(mask: Tensor | None, rows: int, keys: int, device: torch.device) -> Tensor:
    rule = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
    return rule[None, None] if mask is None else mask & rule
