"""Attention within packed documents: sequences of any lengths behind one another, without padding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _library
from ._arguments import as_int, check_bool, check_layout, check_optional_tensor, check_tensor
from ._documents import check_cu_seqlens, rows_of_documents
from .functional import attention
from .selection import KeyIntervals, select_keys


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    mask: Tensor | KeyIntervals | None = None,
    bias: Tensor | None = None,
    window_size: int | None = None,
    scores: Tensor | None = None,
    sink: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` in which row i of document d sees keys of document d only.

    Document d has the rows cu_seqlens_q[d] to cu_seqlens_q[d + 1] - 1 and the keys cu_seqlens_k[d] to
    cu_seqlens_k[d + 1] - 1. Tokens before the first bound and from the last one on belong to none: rows are 0, keys
    hidden. Documents may be empty. Bounds are never read by the host, and contents that are wrong are clamped as in
    `KeyIntervals.documents`. Source: docs/semantics.md, "Packed sequences".

    Tq and Tk rows and keys of all documents, H query heads, Hkv key heads, D and Dv head dims (1 to 256).

    Args:
        query: (Tq, H, D), float16, bfloat16, float32 or float64.
        key, value: (Tk, Hkv, D) and (Tk, Hkv, Dv), query's dtype.
        cu_seqlens_q: int32 (documents + 1), where the rows of each document begin and the last end.
        cu_seqlens_k: the same of keys, where documents have other numbers of keys; default cu_seqlens_q.
        mask: per key, bool (Tk) or (H or Hkv or 1, Tk), True = visible; or KeyIntervals (1, H or Hkv or 1, Tk), whose
            rows are those of query.
        bias: per key, added to the scores, (H or Hkv or 1, Tk), query's dtype or float32. Its gradient has its shape.
        window_size: each row sees the so many keys of highest score of its document at most, as with `select_keys`:
            with is_causal of those in its past, else of all. A mask of keys hides before the selection, KeyIntervals
            after it. None: no selection. A sliding window (left, right) is `flash_dmattn_varlen_func`'s.
        scores: what to select by, detached; default bias. (H or Hkv or 1, Tk), any floating dtype.
        is_causal: the causal rule in each document, aligned to its last row and key.
        sink, scale, softcap, deterministic, return_lse: as in `attention`.

    Returns:
        out (Tq, H, Dv) in query's dtype, and with return_lse lse (H, Tq), as in `attention`.

    Raises:
        TypeError: as `attention`; window_size is not an int.
        ValueError: as `attention`; bounds of another shape, dtype or device; a mask or bias of another form;
            window_size with nothing to select by, or scores without window_size.
        RuntimeError: as `attention`.
    """
    _check_tokens(query, key, value, cu_seqlens_q, cu_seqlens_k)
    _check_mask(mask, query, key)
    for name, tensor in (("bias", bias), ("scores", scores)):
        check_optional_tensor(name, tensor)
        if tensor is not None:
            _check_per_key(name, tensor, query, key)
    check_bool("is_causal", is_causal)
    selected_by = _selected_by(window_size, scores, bias)
    call = _Packed(query, key, value, bias, sink, cu_seqlens_q, cu_seqlens_k)
    if selected_by is None:
        visible = _within(call.visible(None, 0 if is_causal else None), mask)
    else:
        visible = _selection(call, selected_by, as_int("window_size", window_size), mask, is_causal)
    return call.attend(visible, scale, softcap, deterministic, return_lse)


def flash_dmattn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    attn_mask: Tensor | KeyIntervals | None = None,
    attn_bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor:
    """`varlen_attention` with the names and order of arguments of flash-attn's `flash_attn_varlen_func`.

    Args:
        q: (Tq, H, D), called query in error messages.
        k, v: (Tk, Hkv, D) and (Tk, Hkv, Dv), called key and value there.
        cu_seqlens_q, cu_seqlens_k: int32 (documents + 1).
        max_seqlen_q, max_seqlen_k: not used: nothing here depends on the longest document.
        softmax_scale: default 1 / sqrt(D).
        causal: the causal rule in each document, aligned to its last row and key.
        window_size: a sliding window (left, right): a row sees keys from `left` positions before its own to `right`
            behind it; -1: all on that side. The keys of highest score, window_size an int, are `varlen_attention`'s.
        softcap, deterministic: as in `attention`; False follows torch.are_deterministic_algorithms_enabled().
        attn_mask, attn_bias, learnable_sink: mask, bias and sink of `varlen_attention`, called so in error messages.
        dropout_p, alibi_slopes, return_attn_probs, block_table: must be 0, None, False and None.

    Returns:
        out (Tq, H, Dv).

    Raises:
        TypeError: as `varlen_attention`; window_size is not two ints.
        ValueError: as `varlen_attention`; an argument that must be left out.
        RuntimeError: as `attention`.
    """
    _refuse_unsupported(dropout_p, alibi_slopes, return_attn_probs, block_table)
    left, right = _sliding_window(window_size)
    _check_tokens(q, k, v, cu_seqlens_q, cu_seqlens_k)
    _check_mask(attn_mask, q, k)
    check_optional_tensor("bias", attn_bias)
    if attn_bias is not None:
        _check_per_key("bias", attn_bias, q, k)
    check_bool("causal", causal)
    check_bool("deterministic", deterministic)
    call = _Packed(q, k, v, attn_bias, learnable_sink, cu_seqlens_q, cu_seqlens_k)
    visible = _within(call.visible(left, 0 if causal else right), attn_mask)
    return call.attend(visible, softmax_scale, softcap, deterministic or None, False)


class _Packed(NamedTuple):
    """Checked arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sink: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None

    def visible(self, left: int | None, right: int | None) -> KeyIntervals:
        """Every row its own document, from `left` keys before its own place to `right` behind it; None: all."""
        bounds_k = self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k
        lengths = self.query.shape[0], self.key.shape[0]
        return KeyIntervals(*rows_of_documents(self.cu_seqlens_q, bounds_k, *lengths, left=left, right=right))

    def attend(
        self, visible: KeyIntervals, scale: float | None, softcap: float, deterministic: bool | None, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        result = attention(
            self.query[None],
            self.key[None],
            self.value[None],
            mask=visible,
            bias=None if self.bias is None else self.bias[None],
            sink=self.sink,
            scale=scale,
            softcap=softcap,
            deterministic=deterministic,
            return_lse=return_lse,
        )
        # Not by an index, whose backward would fill a tensor of zeros and copy the gradient there.
        return (result[0].squeeze(0), result[1].squeeze(0)) if return_lse else result.squeeze(0)


def _selection(
    call: _Packed, scores: Tensor, window_size: int, mask: Tensor | KeyIntervals | None, is_causal: bool
) -> KeyIntervals:
    key_mask = _by_head(mask) if isinstance(mask, Tensor) else None
    scores = scores[None]
    if key_mask is not None and scores.shape[1] == 1:
        scores = scores.expand(-1, key_mask.shape[1], -1)
    selected = select_keys(
        scores,
        window_size,
        seqlen_q=call.query.shape[0],
        causal=is_causal,
        key_mask=key_mask,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
    )
    return _within(selected, mask if isinstance(mask, KeyIntervals) else None)


def _within(visible: KeyIntervals, mask: Tensor | KeyIntervals | None) -> KeyIntervals:
    """What both show."""
    if mask is None:
        return visible
    return visible.intersection(mask if isinstance(mask, KeyIntervals) else _by_head(mask))


def _by_head(mask: Tensor) -> Tensor:
    """(Tk) or (heads, Tk) -> (1, heads, Tk)."""
    return mask.view(1, -1, mask.shape[-1]) if mask.dim() == 1 else mask[None]


# ---- Arguments


def _check_tokens(query: object, key: object, value: object, cu_seqlens_q: object, cu_seqlens_k: object) -> None:
    tokens = {"query": query, "key": key, "value": value}
    for name, tensor in tokens.items():
        check_tensor(name, tensor)
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions; got {name} {tuple(tensor.shape)}")
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    check_cu_seqlens(cu_seqlens_q, cu_seqlens_k)
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _library.check_devices((*tokens, *bounds), (*tokens.values(), *bounds.values()))
    for name, tensor in bounds.items():
        if tensor is not None and (tensor.dtype != torch.int32 or tensor.dim() != 1 or len(tensor) == 0):
            raise ValueError(
                f"{name} must be int32 (documents + 1); got {name} "
                f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            )
    if cu_seqlens_k is not None and cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k must have the shape of cu_seqlens_q = {tuple(cu_seqlens_q.shape)}; "
            f"got cu_seqlens_k {tuple(cu_seqlens_k.shape)}"
        )


def _check_per_key(name: str, tensor: Tensor, query: Tensor, key: Tensor) -> None:
    heads, key_heads, keys = query.shape[1], key.shape[1], key.shape[0]
    shape = tuple(tensor.shape)
    if len(shape) != 2 or shape[0] not in (1, heads, key_heads) or shape[1] != keys:
        raise ValueError(
            f"{name} must be (H or Hkv or 1, Tk); "
            f"got {name} {shape}, query {tuple(query.shape)}, key {tuple(key.shape)}"
        )


def _check_mask(mask: object, query: Tensor, key: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, (Tensor, KeyIntervals)):
        raise TypeError(f"mask must be a torch.Tensor, KeyIntervals or None; got mask of type {type(mask).__name__}")
    if isinstance(mask, KeyIntervals):
        if mask.shape[0] != 1 or mask.shape[1] not in (1, query.shape[1], key.shape[1]) or mask.shape[2] != len(key):
            raise ValueError(
                "mask must be KeyIntervals (1, H or Hkv or 1, Tk); "
                f"got mask {tuple(mask.shape)}, query {tuple(query.shape)}, key {tuple(key.shape)}"
            )
        return
    check_layout("mask", mask)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool; got mask {str(mask.dtype).removeprefix('torch.')}")
    if mask.dim() != 1 or len(mask) != len(key):
        _check_per_key("mask", mask, query, key)


def _selected_by(window_size: object, scores: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The scores to select by; None: there is no selection."""
    if window_size is None:
        if scores is not None:
            raise ValueError("scores must come with window_size, how many keys to select by them; got window_size None")
        return None
    if isinstance(window_size, (tuple, list)):
        raise TypeError(
            "window_size must be an int, how many keys of highest score a row sees; got window_size of type "
            f"{type(window_size).__name__}: a sliding window (left, right) is flash_dmattn_varlen_func's"
        )
    as_int("window_size", window_size)
    if scores is None and bias is None:
        raise ValueError("window_size needs scores, or a bias, to select keys by; got neither")
    return bias if scores is None else scores


def _sliding_window(window_size: object) -> tuple[int | None, int | None]:
    """left and right, None: all on that side."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(
            "window_size must be a sliding window (left, right); got window_size "
            + (
                f"of type {type(window_size).__name__}: the keys of highest score, an int, are varlen_attention's"
                if not isinstance(window_size, (tuple, list))
                else f"{window_size!r}"
            )
        )
    sides = [as_int("window_size", side) for side in window_size]
    if not all(-1 <= side < 2**31 for side in sides):
        raise ValueError(f"window_size must be -1, for all keys, or more on each side; got window_size {window_size!r}")
    return tuple(None if side == -1 else side for side in sides)


def _refuse_unsupported(
    dropout_p: object, alibi_slopes: object, return_attn_probs: object, block_table: object
) -> None:
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0: probabilities are not dropped; got dropout_p {dropout_p!r}")
    if alibi_slopes is not None:
        raise ValueError(
            "alibi_slopes must be None: slopes are not supported; "
            f"got alibi_slopes of type {type(alibi_slopes).__name__}"
        )
    if return_attn_probs:
        raise ValueError(
            "return_attn_probs must be False: probabilities are never held (varlen_attention returns lse); "
            f"got return_attn_probs {return_attn_probs!r}"
        )
    if block_table is not None:
        raise ValueError(
            "block_table must be None: keys are not read from pages; "
            f"got block_table of type {type(block_table).__name__}"
        )
