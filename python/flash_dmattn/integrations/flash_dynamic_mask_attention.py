"""The original package's attention function for models written for it."""

from __future__ import annotations

from torch import Tensor, nn

from .._arguments import check_optional_tensor, check_tensor
from ._inputs import model_dtype, refuse_unsupported
from .modeling_flash_dynamic_mask_attention_utils import _flash_dynamic_mask_attention_forward


def flash_dynamic_mask_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_bias: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Dynamic mask attention with the signature of flash-dmattn 1.1.9's.

    float32 inputs are cast to the model's dtype if that is another (autocast's, the one before quantisation, else the
    dtype of the module's first Linear), with one warning.

    Args:
        module: the attention module; its keep_window_size, is_causal and config are read.
        query: (B, H, Sq, D); key, value: (B, Hkv, Sk, D).
        attention_mask: None; (B or 1, Sk), nonzero = visible; or bool (B or 1, H or Hkv or 1, Sk) or
            (B or 1, H or Hkv or 1, Sq or 1, Sk).
        attention_bias: None; (B or 1, H or Hkv or 1, Sk); or (B or 1, H or Hkv or 1, Sq or 1, Sk). The keys of highest
            bias are kept, among those that the mask shows.
        scaling: default 1 / sqrt(D). softcap: None means none.
        **kwargs: keep_window_size or window_size, how many keys a row keeps, default module.keep_window_size, None for
            all; is_causal, default module.is_causal; selection ("per_key" or "causal") and deterministic as in
            `_flash_dynamic_mask_attention_forward`. dropout must be 0, head_mask None, sliding_window None unless the
            mask has four dimensions and so includes it. Others are ignored.

    Returns:
        (out (B, Sq, H, D), None).

    Raises:
        ValueError: one of these rules is broken, and as `_flash_dynamic_mask_attention_forward`.
    """
    refuse_unsupported(kwargs.pop("dropout", None), kwargs)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions; got {name} {tuple(tensor.shape)}")
    check_optional_tensor("attention_mask", attention_mask)
    sliding_window = kwargs.pop("sliding_window", None)
    if sliding_window is not None and (attention_mask is None or attention_mask.dim() != 4):
        raise ValueError(
            "sliding_window must come as a 4-D attention_mask, which says what the window shows; "
            f"got sliding_window {sliding_window} without one"
        )
    is_causal = kwargs.pop("is_causal", None)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        raise ValueError("is_causal must be given, or be an attribute of the module; got neither")
    arguments = {
        "keep_window_size": _window_size(module, kwargs),
        "target_dtype": model_dtype(module, query),
        "implementation": "flash_dmattn",
        "layer_idx": getattr(module, "layer_idx", None),
    }
    out = _flash_dynamic_mask_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        attention_bias,
        query_length=query.shape[2],
        key_length=key.shape[2],
        is_causal=is_causal,
        softmax_scale=scaling,
        softcap=softcap,
        **(kwargs | arguments),
    )
    return out, None


def _window_size(module: nn.Module, kwargs: dict[str, object]) -> int | None:
    """The one that was given, by either name, else the module's. Takes both names out of kwargs."""
    given = {name: kwargs.pop(name) for name in ("keep_window_size", "window_size") if kwargs.get(name) is not None}
    if len(set(given.values())) > 1:
        raise ValueError(
            "keep_window_size and window_size are two names of one number; got "
            + ", ".join(f"{name} {value}" for name, value in given.items())
        )
    kwargs.pop("keep_window_size", None)
    kwargs.pop("window_size", None)
    return next(iter(given.values()), getattr(module, "keep_window_size", None))
