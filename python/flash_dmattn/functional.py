"""The library's own surface: exact attention over the keys that each query sees."""

import torch
from torch import Tensor

from . import _library
from ._arguments import as_number, check_bool, check_optional_tensor, check_tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query key^T + bias) value over the visible keys, in time proportional to what is visible.

    B batch, Sq and Sk query and key length, H query heads, Hkv key heads (query head h reads key head
    h // (H / Hkv)), D head dim (1 to 256). Any strides are read as they are, except that query, key and value are
    copied once if D's stride is not 1. Source: docs/semantics.md.

    Args:
        query: (B, Sq, H, D), float16, bfloat16, float32 or float64.
        key, value: (B, Sk, Hkv, D), query's dtype.
        mask: bool, True = visible; (B or 1, H or Hkv or 1, Sq or 1, Sk or 1), per key (B or 1, H or Hkv or 1, Sk or 1),
            or (Sq or 1, Sk or 1). An expanded view is never materialised.
        bias: added to the scores, in the forms of mask; query's dtype or float32. Its gradient has its shape, summed
            over every dimension along which it was broadcast, so pass it unexpanded.
        scale: default 1 / sqrt(D).
        is_causal: row i sees keys j <= i + n - Sq, where n keys exist.
        softcap: if > 0, scores become softcap * tanh(scale * q.k / softcap) before the bias.
        deterministic: identical bits in repeated runs, for any number of threads. None follows
            torch.are_deterministic_algorithms_enabled().
        seqlens_k: int32 (B), only the first seqlens_k[b] keys of batch element b exist.
        return_lse: also return the log-sum-exp of each row's visible scores.

    Returns:
        out (B, Sq, H, D) in query's dtype, and with return_lse lse (B, H, Sq) in float32 (float64 with float64). Both
        are differentiable, once. A row that sees no key has out = 0 and lse = -inf.

    Raises:
        TypeError: an argument is not a tensor, number or bool where it must be.
        ValueError: a shape, dtype, device or value breaks a rule; names the argument, the rule and the values.
        RuntimeError: a second or forward-mode derivative.
    """
    check_tensor("query", query)
    check_tensor("key", key)
    check_tensor("value", value)
    check_optional_tensor("mask", mask)
    check_optional_tensor("bias", bias)
    check_optional_tensor("seqlens_k", seqlens_k)
    check_bool("is_causal", is_causal)
    check_bool("return_lse", return_lse)
    if scale is not None:
        scale = as_number("scale", scale)
    softcap = as_number("softcap", softcap)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    else:
        check_bool("deterministic", deterministic)
    out, lse = _library.attention_forward(
        query, key, value, mask, bias, seqlens_k, scale, softcap, is_causal, deterministic
    )
    return (out, lse) if return_lse else out
