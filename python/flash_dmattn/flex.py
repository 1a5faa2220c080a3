"""PyTorch's FlexAttention behind the same arguments: a fallback on other devices and a comparison."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import _log
from ._arguments import (
    as_number,
    check_bool,
    check_optional_tensor,
    check_tensor,
    resolve_scale,
    warn_of_two_readings,
)
from ._probabilities import attention_probabilities
from .prepared import Mask, check_mask, dense_mask


def flex_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | None = None,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    *,
    softmax_scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_dmattn_func` computed by torch.nn.attention.flex_attention: same arguments, shapes and meaning.

    FlexAttention's own limits hold: on CPU it has no backward and holds all scores; elsewhere it is compiled at the
    first call. Intervals are written out as a dense mask. A NaN in a hidden value may reach its result.

    Raises:
        TypeError, ValueError: wrong arguments; also deterministic=True, which FlexAttention does not promise.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions; got {name} {tuple(tensor.shape)}")
    check_mask("attn_mask", attn_mask)
    check_optional_tensor("attn_bias", attn_bias)
    for name, flag in (
        ("is_causal", is_causal),
        ("deterministic", deterministic),
        ("return_attn_probs", return_attn_probs),
    ):
        if flag is not None:
            check_bool(name, flag)
    if deterministic:
        raise ValueError("deterministic must not be asked of FlexAttention, which does not promise it; got True")
    scale = resolve_scale(scale, softmax_scale)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    softcap = 0.0 if softcap is None else as_number("softcap", softcap)
    is_causal = bool(is_causal)
    attn_mask = dense_mask(attn_mask, query.shape, key.shape, is_causal)
    if attn_bias is not None:
        warn_of_two_readings("bias", attn_bias, query.shape[0], query.shape[1], key.shape[1])

    _log.debug("FlexAttention on %s", query.device)
    heads_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    out, auxiliary = _flex_attention(query.device.type)(
        *heads_first,
        score_mod=_score_mod(query, key, attn_bias, softcap),
        block_mask=_block_mask(query, key, attn_mask, is_causal),
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
        return_aux=_lse_request(),
    )
    out = out.transpose(1, 2).contiguous()
    if not return_attn_probs:
        return out
    lse = auxiliary.lse
    return out, lse, attention_probabilities(query, key, lse, attn_mask, attn_bias, scale, softcap, is_causal)


def _flex_attention(device_type: str) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling() or device_type == "cpu":
        return flex_attention
    return _compiled_flex_attention()


@functools.cache
def _compiled_flex_attention() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _lse_request() -> object:
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


def _reader(tensor: Tensor, query: Tensor, key: Tensor) -> Callable:
    """A function of (batch, query head, row, key) that reads a mask or bias given in any of its forms."""
    batch, rows, heads, _ = query.shape
    if tensor.dim() == 2:  # (Sq, Sk)
        tensor = tensor[None, None]
    elif tensor.dim() == 3:  # (B, heads, Sk)
        tensor = tensor[:, :, None]
    own_heads = tensor.shape[1]
    group = heads // own_heads
    full = tensor.expand(batch, own_heads, rows, key.shape[1])
    return lambda b, h, i, j: full[b, h // group, i, j]


def _score_mod(query: Tensor, key: Tensor, bias: Tensor | None, softcap: float) -> Callable:
    read_bias = None if bias is None else _reader(bias, query, key)

    def score_mod(score, b, h, i, j):
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        return score if read_bias is None else score + read_bias(b, h, i, j)

    return score_mod


def _block_mask(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> object:
    """Which blocks of scores have visible ones; None if all are."""
    from torch.nn.attention.flex_attention import create_block_mask

    if mask is None and not is_causal:
        return None
    batch, rows, heads, _ = query.shape
    keys = key.shape[1]
    read_mask = None if mask is None else _reader(mask, query, key)

    def mask_mod(b, h, i, j):
        visible = j <= i + (keys - rows) if is_causal else j >= 0
        return visible if read_mask is None else visible & read_mask(b, h, i, j)

    # One plan for the whole batch, or for all heads, where the mask does not tell them apart.
    of_batch = mask is not None and mask.dim() != 2 and mask.shape[0] != 1
    of_heads = mask is not None and mask.dim() != 2 and mask.shape[1] != 1
    return create_block_mask(
        mask_mod, batch if of_batch else None, heads if of_heads else None, rows, keys, device=query.device
    )
