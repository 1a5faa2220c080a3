"""The library's own surface: exact attention over the keys that each query sees."""

from typing import Literal, overload

import torch
from torch import Tensor

from . import _library
from ._arguments import (
    as_int,
    as_number,
    check_bool,
    check_optional_tensor,
    check_tensor,
    warn_of_two_readings,
)
from ._documents import check_cu_seqlens, first_causal_rows, packed_window_size
from ._visibility import Visibility
from .prepared import Mask, check_mask, visibility_of


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    seqlens_k: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    seqlens_k: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    seqlens_k: Tensor | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query key^T + bias) value over the visible keys.

    Time is proportional to what is visible for intervals, masks of keys and blocks, and for masks and lists by row as
    far as neighbouring rows see the same keys. A mask in which every row sees scattered keys of its own is dense work
    and, on a GPU, packed to Sq * Sk / 8 bytes.

    B batch, Sq and Sk query and key length, H query heads, Hkv key heads (query head h reads key head
    h // (H / Hkv)), D head dim of query and key, Dv of value (1 to 256 each). Any strides are read as
    they are, except that query, key and value are copied once if the stride of D or Dv is not 1. Source:
    docs/semantics.md.

    Args:
        query: (B, Sq, H, D), float16, bfloat16, float32 or float64.
        key: (B, Sk, Hkv, D), query's dtype.
        value: (B, Sk, Hkv, Dv), query's dtype.
        mask: bool, True = visible; (B or 1, H or Hkv or 1, Sq or 1, Sk or 1), per key (B or 1, H or Hkv or 1, Sk or 1),
            or (Sq or 1, Sk or 1). An expanded view is never materialised. Or KeyIntervals (B or 1, H or Hkv or 1, Sk),
            from `select_keys` for example. Or KeyIndices, lists of keys per row (B or 1, 1 or Hkv or H, Sq or 1, n). Or
            a PreparedMask, from `prepare_mask`.
        bias: added to the scores, in the forms of mask; query's dtype or float32. Its gradient has its shape, summed
            over every dimension along which it was broadcast, so pass it unexpanded.
        sink: (H), query's dtype or float32: a score without a key that every row of a head has in its softmax sum, as
            gpt-oss learns it. out shrinks accordingly, lse leaves it out.
        scale: default 1 / sqrt(D).
        is_causal: row i sees keys j <= i + n - Sq, where n keys exist.
        softcap: if > 0, scores become softcap * tanh(scale * q.k / softcap) before the bias.
        deterministic: identical bits in repeated runs, for any number of threads. None follows
            torch.are_deterministic_algorithms_enabled().
        seqlens_k: int32 (B), only the first seqlens_k[b] keys of batch element b exist.
        return_lse: also return the log-sum-exp of each row's visible scores.

    Returns:
        out (B, Sq, H, Dv) in query's dtype, and with return_lse lse (B, H, Sq) in float32 (float64 with float64). Both
        are differentiable, once. A row that sees no key has out = 0 and lse = -inf.

    Raises:
        TypeError: an argument is not a tensor, number or bool where it must be.
        ValueError: a shape, dtype, device or value breaks a rule; names the argument, the rule and the values.
        RuntimeError: a second or forward-mode derivative.
    """
    check_tensor("query", query)
    check_tensor("key", key)
    check_tensor("value", value)
    check_mask("mask", mask)
    check_optional_tensor("bias", bias)
    check_optional_tensor("sink", sink)
    check_optional_tensor("seqlens_k", seqlens_k)
    check_bool("return_lse", return_lse)
    options = _check_options(scale, softcap, is_causal, deterministic)
    visibility = visibility_of(mask, query.shape, key.shape, is_causal, seqlens_k)
    if bias is not None and query.dim() == key.dim() == 4:
        warn_of_two_readings("bias", bias, query.shape[0], query.shape[1], key.shape[1])
    out, lse, _ = _library.attention_forward(query, key, value, bias, sink, visibility, *options)
    return (out, lse) if return_lse else out


@overload
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    window_size: int,
    *,
    scores: Tensor | None = None,
    sink: Tensor | None = None,
    is_causal: bool = True,
    selection: Literal["causal", "per_key"] = "causal",
    key_mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    window_size: int,
    *,
    scores: Tensor | None = None,
    sink: Tensor | None = None,
    is_causal: bool = True,
    selection: Literal["causal", "per_key"] = "causal",
    key_mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    window_size: int,
    *,
    scores: Tensor | None = None,
    sink: Tensor | None = None,
    is_causal: bool = True,
    selection: Literal["causal", "per_key"] = "causal",
    key_mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    window_size: int,
    *,
    scores: Tensor | None = None,
    sink: Tensor | None = None,
    is_causal: bool = True,
    selection: Literal["causal", "per_key"] = "causal",
    key_mask: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every row to the `window_size` keys of highest score, with `key_bias` added to their scores.

    `select_keys` and `attention` in one call: O(Sk log window_size) for the selection, which holds two integers per key
    instead of an Sq x Sk mask, and then time proportional to what is kept. The bias is what carries a gradient to the
    scores. Source: "Trainable Dynamic Mask Sparse Attention", arXiv 2508.02124; docs/semantics.md.

    Args:
        query: (B, Sq, H, D), as in `attention`.
        key: (B, Sk, Hkv, D).
        value: (B, Sk, Hkv, Dv).
        key_bias: (B or 1, H or Hkv or 1, Sk), query's dtype or float32. Its gradient has its shape.
        window_size: keys that a row sees at most.
        scores: what to select by, detached; default key_bias. (B or 1, H or Hkv or 1, Sk), any floating dtype.
        is_causal: row i sees keys j <= i + n - Sq, where n keys exist.
        selection: "causal", each row keeps the highest among the keys it can see, which needs is_causal; or "per_key",
            the highest of all existing keys, the same for every row, of which the causal rule may then hide some.
        key_mask: bool (B or 1, heads of scores or 1, Sk); False hides the key, before the selection.
        seqlens_k: int32 (B), only the first seqlens_k[b] keys exist.
        cu_seqlens_q, cu_seqlens_k: packed documents, as in `select_keys`: rows see keys of their own document only,
            the selection restarts in each, and the causal rule is aligned to its last key. Not beside seqlens_k.
        sink, scale, softcap, deterministic, return_lse: as in `attention`; softcap None means 0 (none).

    Returns:
        As `attention`: out (B, Sq, H, Dv), and with return_lse lse (B, H, Sq).

    Raises:
        As `attention`, and ValueError: is_causal=False with selection="causal", or another selection.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value), ("key_bias", key_bias)):
        check_tensor(name, tensor)
    for name, tensor in (("scores", scores), ("sink", sink), ("key_mask", key_mask), ("seqlens_k", seqlens_k)):
        check_optional_tensor(name, tensor)
    check_cu_seqlens(cu_seqlens_q, cu_seqlens_k)
    check_bool("return_lse", return_lse)
    options = _check_options(scale, 0.0 if softcap is None else softcap, is_causal, deterministic)
    window_size = as_int("window_size", window_size)
    if selection not in ("causal", "per_key"):
        raise ValueError(f"selection must be 'causal' or 'per_key'; got selection {selection!r}")
    if selection == "causal" and not is_causal:
        raise ValueError(
            "selection 'causal' needs is_causal=True, since it chooses among the keys of a row's past; got is_causal "
            "False: choose 'per_key'"
        )
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions; got {name} {tuple(tensor.shape)}")
    _library.check_devices(
        (
            "query",
            "key",
            "value",
            "key_bias",
            "scores",
            "sink",
            "key_mask",
            "seqlens_k",
            "cu_seqlens_q",
            "cu_seqlens_k",
        ),
        (query, key, value, key_bias, scores, sink, key_mask, seqlens_k, cu_seqlens_q, cu_seqlens_k),
    )
    _check_per_key("key_bias", key_bias, query, key)
    _check_key_bias_dtype(key_bias, query)
    if scores is None:
        scores = key_bias
    else:
        _check_per_key("scores", scores, query, key)

    scores = _expand_scores(scores, query.shape[0], key_mask, seqlens_k, cu_seqlens_q)
    rows, causal, documents = query.shape[1], selection == "causal", (cu_seqlens_q, cu_seqlens_k)
    begin, end = _library.select_keys(scores, window_size, rows, causal, key_mask, seqlens_k, *documents)
    if cu_seqlens_q is not None and is_causal:
        if not causal:
            begin = torch.maximum(begin, first_causal_rows(*documents, rows, key.shape[1]))
            end = torch.maximum(begin, end)
        is_causal = False  # the intervals obey it, aligned to each document
    visibility = Visibility(
        seqlens_k=seqlens_k,
        interval_begin=begin,
        interval_end=end,
        is_causal=is_causal,
        interval_window=packed_window_size(window_size, causal, *documents),
    )
    out, lse, _ = _library.attention_forward(query, key, value, key_bias, sink, visibility, *options)
    return (out, lse) if return_lse else out


def _check_options(
    scale: object, softcap: object, is_causal: object, deterministic: object
) -> tuple[float | None, float, bool]:
    check_bool("is_causal", is_causal)
    if scale is not None:
        scale = as_number("scale", scale)
    softcap = as_number("softcap", softcap)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    else:
        check_bool("deterministic", deterministic)
    return scale, softcap, deterministic


# The rules of key_bias and scores, which the operators know as a bias, of any form, and as intervals.


def _check_per_key(name: str, tensor: Tensor, query: Tensor, key: Tensor) -> None:
    batch, _, heads, _ = query.shape
    keys, key_heads = key.shape[1:3]
    shape = tuple(tensor.shape)
    if len(shape) == 3 and shape[0] in (1, batch) and shape[1] in (1, heads, key_heads) and shape[2] == keys:
        return
    lacks_heads = shape == (batch, keys)
    raise ValueError(
        f"{name} must be (B or 1, H or Hkv or 1, Sk); got {name} {shape}, query {tuple(query.shape)}, "
        f"key {tuple(key.shape)}"
        + (f": if that is (B, Sk), make it (B, 1, Sk), {name}[:, None, :]" if lacks_heads else "")
    )


def _check_key_bias_dtype(key_bias: Tensor, query: Tensor) -> None:
    if key_bias.dtype in (query.dtype, torch.float32):
        return
    if torch.is_autocast_enabled(query.device.type) and key_bias.dtype in (torch.float16, torch.bfloat16):
        return  # autocast makes them of one dtype
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in (key_bias, query)]
    raise ValueError(f"key_bias must have query's dtype or float32; got key_bias {dtypes[0]}, query {dtypes[1]}")


def _expand_scores(
    scores: Tensor, batch: int, key_mask: Tensor | None, seqlens_k: Tensor | None, cu_seqlens_q: Tensor | None
) -> Tensor:
    """A view of scores of batch size 1 for the whole batch, if its elements hide different keys."""
    differ = seqlens_k is not None or (key_mask is not None and key_mask.shape[:1] != (1,))
    differ = differ or (cu_seqlens_q is not None and cu_seqlens_q.dim() == 2)
    return scores.expand(batch, -1, -1) if differ and scores.shape[0] == 1 else scores
