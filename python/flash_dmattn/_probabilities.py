"""Attention probabilities, unfused: what debugging asks for and fused attention never holds."""

import math

import torch
from torch import Tensor

from . import _log


def as_four_dimensions(tensor: Tensor, heads: int) -> Tensor:
    """A mask or bias in any of its forms as (B or 1, H or 1, Sq or 1, Sk or 1), key heads repeated for their group."""
    if tensor.dim() == 2:  # (Sq, Sk)
        return tensor[None, None]
    if tensor.dim() == 3:  # (B, heads, Sk)
        tensor = tensor[:, :, None]
    return tensor if tensor.shape[1] in (1, heads) else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


@torch.no_grad()
def attention_probabilities(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float,
    is_causal: bool,
) -> Tensor:
    """exp(score - lse), 0 where hidden.

    Args:
        query: (B, Sq, H, D); key: (B, Sk, Hkv, D); lse: (B, H, Sq) of the same attention; the rest as in `attention`,
            which has checked it.
    Returns:
        (B, H, Sq, Sk) in lse's dtype.
    """
    rows, heads, head_dim = query.shape[1:]
    keys, key_heads = key.shape[1:3]
    _log.info("attention probabilities, unfused: %d x %d scores in each of %d heads", rows, keys, heads)
    key = key if key_heads == 0 else key.repeat_interleave(heads // key_heads, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", query.to(lse.dtype), key.to(lse.dtype))
    scores = scores * (1 / math.sqrt(head_dim) if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + as_four_dimensions(bias, heads).to(lse.dtype)
    visible = torch.ones((), dtype=torch.bool, device=query.device)
    if mask is not None:
        visible = as_four_dimensions(mask, heads)
    if is_causal:
        last = torch.arange(rows, device=query.device) + (keys - rows)  # the last key that each row sees
        visible = visible & (torch.arange(keys, device=query.device) <= last[:, None])
    visible = visible & (lse > -math.inf)[..., None]  # a row of scores -inf has no probabilities
    return torch.where(visible, torch.exp(scores - lse[..., None]), 0)
