"""The original flash_dmattn functions, under their own names and argument order."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Literal, overload

from torch import Tensor

from . import _library, _log
from ._arguments import check_bool, check_optional_tensor, resolve_scale
from ._probabilities import attention_probabilities
from .flex import flex_dmattn_func as _flex_dmattn_func
from .functional import attention
from .prepared import Mask, check_mask, dense_mask

CPU_AVAILABLE = "cpu" in _library.device_backends()
CUDA_AVAILABLE = "cuda" in _library.device_backends()
# There is no Triton backend; the names stay importable for code that asks before it calls.
TRITON_AVAILABLE = False
triton_dmattn_func = None
FLEX_AVAILABLE = importlib.util.find_spec("torch.nn.attention.flex_attention") is not None
flex_dmattn_func = _flex_dmattn_func if FLEX_AVAILABLE else None

_KNOWN_BACKENDS = ("cuda", "cpu", "triton", "flex")


@overload
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | None = None,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    *,
    return_attn_probs: Literal[True],
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | None = None,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: Literal[False] | None = None,
    *,
    softmax_scale: float | None = None,
) -> Tensor: ...
@overload
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | None = None,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    *,
    return_attn_probs: bool,
    softmax_scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...
def flash_dmattn_func(
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
    """Dynamic-mask attention with the signature of the original; see `attention` for shapes, dtypes and errors.

    Args:
        query: (B, Sq, H, D).
        key: (B, Sk, Hkv, D).
        value: (B, Sk, Hkv, Dv).
        attn_mask: bool, True = visible, KeyIntervals, KeyIndices or PreparedMask; called mask in error messages.
        attn_bias: called bias there.
        scale, softmax_scale: two names of one number, default 1 / sqrt(D).
        is_causal: None means False.
        softcap: None means 0 (none).
        deterministic: None follows torch.are_deterministic_algorithms_enabled().
        return_attn_probs: for debugging. Also computes the attention probabilities, unfused: (B, H, Sq, Sk) numbers.

    Returns:
        out (B, Sq, H, Dv), or with return_attn_probs (out, lse, probs): lse (B, H, Sq), and probs (B, H, Sq, Sk) in
        lse's dtype, each visible row summing to 1 and hidden keys 0. probs is not differentiable.
    """
    check_mask("attn_mask", attn_mask)
    check_optional_tensor("attn_bias", attn_bias)
    scale = resolve_scale(scale, softmax_scale)
    if return_attn_probs is not None:
        check_bool("return_attn_probs", return_attn_probs)
    is_causal = False if is_causal is None else is_causal
    softcap = 0.0 if softcap is None else softcap
    result = attention(
        query,
        key,
        value,
        mask=attn_mask,
        bias=attn_bias,
        scale=scale,
        is_causal=is_causal,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=bool(return_attn_probs),
    )
    if not return_attn_probs:
        return result
    out, lse = result
    attn_mask = dense_mask(attn_mask, query.shape, key.shape, is_causal)
    probs = attention_probabilities(query, key, lse, attn_mask, attn_bias, scale, softcap, is_causal)
    return out, lse, probs


def get_available_backends() -> list[str]:
    """Names that `flash_dmattn_func_auto` takes on this build, the preferred one first."""
    return _library.device_backends() + (["flex"] if FLEX_AVAILABLE else [])


def flash_dmattn_func_auto(backend: str | None = None, **kwargs: object) -> Callable:
    """The attention function of a backend.

    Args:
        backend: "cpu", "cuda" or "flex"; None takes `flash_dmattn_func`, which goes by the tensors' device.
        **kwargs: arguments to bind to the function.

    Raises:
        ValueError: no backend has that name.
        RuntimeError: this build does not have it.
    """
    if backend is not None and backend not in _KNOWN_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_KNOWN_BACKENDS)} or None; got backend {backend!r}")
    if backend is not None and backend not in get_available_backends():
        raise RuntimeError(
            f"backend {backend!r} is not available in this build; available are {', '.join(get_available_backends())}"
        )
    function = flex_dmattn_func if backend == "flex" else flash_dmattn_func
    _log.debug("backend %s: %s", backend or "by device", function.__name__)
    return functools.partial(function, **kwargs) if kwargs else function
