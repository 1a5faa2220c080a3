"""Dense dynamic masks under the names of the original package (flash-dmattn 1.2.2).

They hold Sq x Sk bools, and topk_mask takes as long as torch.topk over as many scores. Where the scores are one per key
and the mask is causal, `flash_dmattn.select_keys` finds the same keys in a fraction of that (docs/selection.md).

Biases and masks come in the forms that `flash_dmattn.attention` takes: (B or 1, heads or 1, Sq or 1, Sk), per key
(B or 1, heads or 1, Sk), or (Sq or 1, Sk); they broadcast to each other in that sense. The result has the bias's form
if that can hold it (a bias and a mask that are per key give a mask that is per key), else (B, heads, Sq, Sk).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._arguments import as_int, as_number, check_optional_tensor, check_tensor, warn_of_two_readings

# Scores that are worked on together; what is needed beside the result is a small multiple of that. On the CPU they
# stay in its caches, other devices need more at a time to be busy.
_CPU_CHUNK_SCORES = 1 << 18
_DEVICE_CHUNK_SCORES = 1 << 24


__all__ = ["block_smooth", "create_mask", "relu_mask", "topk_indices", "topk_mask"]


def __dir__() -> list[str]:
    """What completion offers."""
    return __all__


def topk_indices(attention_bias: Tensor, window_size: int) -> Tensor:
    """Indices of the highest scores along the last dimension, in ascending order.

    Args:
        attention_bias: (..., Sk), floating point, of up to 4 dimensions.
        window_size: how many; clamped to [0, Sk].

    Returns:
        int64 (..., min(window_size, Sk)), detached.

    Raises:
        TypeError: attention_bias is not a tensor, window_size not an int.
        ValueError: attention_bias is not floating point, or has no or more than 4 dimensions.
    """
    _check_bias(attention_bias, 1)
    count = _clamp_window(window_size, attention_bias.size(-1))
    return attention_bias.detach().topk(count, sorted=False).indices.sort().values


def topk_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
) -> Tensor:
    """Keeps, in every row, the window_size highest scores among those that attention_mask shows.

    NaN ranks highest; which of equal scores stay is torch.topk's choice. Beside the result this needs memory for one
    chunk of rows, whatever the sizes.

    Args:
        attention_bias: the scores, floating point, in one of the module's forms.
        attention_mask: None, or bool, True = visible, in one of the module's forms.
        window_size: clamped to [0, Sk].
        min_dtype: a score equal to this counts as hidden, and so does -inf.
        block_size: afterwards smooth the mask in blocks of this many keys, see block_smooth.

    Returns:
        bool, in attention_bias's form or (B, heads, Sq, Sk), see above; detached.

    Raises:
        TypeError: an argument is not a tensor or number where it must be.
        ValueError: a shape, dtype, device or block_size breaks a rule; names the argument, the rule and the values.
    """
    bias, mask, kept = _prepare(attention_bias, attention_mask)
    lowest = torch.tensor(as_number("min_dtype", min_dtype), dtype=bias.dtype, device=bias.device)
    block_size = _check_block_size(block_size)
    count = _clamp_window(window_size, bias.size(-1))
    for chunk in _row_chunks(kept):
        # Hidden scores get a value below all others, not min_dtype, which a visible score may be below.
        scores = bias[chunk] if mask is None else bias[chunk].masked_fill(~mask[chunk], -math.inf)
        values, indices = scores.topk(count, sorted=False)
        kept[chunk].zero_().scatter_(-1, indices, (values != lowest) & (values != -math.inf))
        _smooth(kept[chunk], block_size)
    return _in_form_of(attention_bias, kept)


def relu_mask(
    attention_bias: Tensor, attention_mask: Tensor | None, min_dtype: float, block_size: int | None = None
) -> Tensor:
    """Keeps the scores above 0 among those that attention_mask shows.

    Args:
        attention_bias: the scores, floating point, in one of the module's forms.
        attention_mask: None, or bool, True = visible, in one of the module's forms.
        min_dtype: not needed, hidden scores are never kept; there because the original has it.
        block_size: afterwards smooth the mask in blocks of this many keys, see block_smooth.

    Returns:
        bool, in attention_bias's form or (B, heads, Sq, Sk), see above; detached.

    Raises:
        TypeError, ValueError: as topk_mask.
    """
    bias, mask, kept = _prepare(attention_bias, attention_mask)
    as_number("min_dtype", min_dtype)
    block_size = _check_block_size(block_size)
    torch.gt(bias, 0, out=kept)
    if mask is not None:
        kept.logical_and_(mask)
    for chunk in _row_chunks(kept) if block_size > 1 else ():
        _smooth(kept[chunk], block_size)
    return _in_form_of(attention_bias, kept)


def block_smooth(attention_mask: Tensor, key_len: int, block_size: int) -> Tensor:
    """Makes a mask constant in blocks of keys, in place: a block stays if more than half of it is kept.

    Args:
        attention_mask: bool (..., Sk), any strides; not an expanded view, whose elements share memory.
        key_len: the blocks cover the first key_len keys; what remains after the last whole one is a shorter block.
        block_size: keys in a block, at least 1.

    Returns:
        attention_mask.

    Raises:
        TypeError: attention_mask is not a tensor, a number not an int.
        ValueError: attention_mask is not bool, a scalar or an expanded view, key_len not within [0, Sk], block_size
            below 1.
    """
    check_tensor("attention_mask", attention_mask)
    _check_bool_dtype(attention_mask)
    if attention_mask.dim() == 0:
        raise ValueError("attention_mask must have at least 1 dimension; got attention_mask ()")
    layout = zip(attention_mask.shape, attention_mask.stride(), strict=True)
    if any(stride == 0 and size > 1 for size, stride in layout):
        raise ValueError(
            "attention_mask must not be an expanded view, since it is written to; got attention_mask "
            f"{tuple(attention_mask.shape)} with strides {attention_mask.stride()}"
        )
    key_len = as_int("key_len", key_len)
    if not 0 <= key_len <= attention_mask.size(-1):
        raise ValueError(
            f"key_len must be within [0, Sk]; got key_len {key_len}, attention_mask {tuple(attention_mask.shape)}"
        )
    block_size = _check_block_size(as_int("block_size", block_size))  # None is not an answer here
    for chunk in _row_chunks(attention_mask):
        _smooth(attention_mask[chunk][..., :key_len], block_size)
    return attention_mask


def create_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
    type: str = "topk",
) -> Tensor:
    """The mask of topk_mask or relu_mask, from a mask that may also be a padding mask.

    Args:
        attention_bias: the scores, floating point, in one of the module's forms.
        attention_mask: None, or bool, True = visible: (batch_size or 1, key_len); (batch_size or 1, query_len), to
            which the key_len - query_len earlier keys are added as visible; or one of the module's forms but the
            two-dimensional one.
        batch_size, query_len, key_len: B, Sq and Sk, which the tensors must agree with.
        window_size, min_dtype, block_size: as in topk_mask; window_size is not used for "relu".
        type: "topk" or "relu".

    Returns:
        bool, in attention_bias's form or (B, heads, Sq, Sk), see above; detached.

    Raises:
        TypeError, ValueError: as topk_mask; type is neither of the two, or sizes disagree.
    """
    if type not in ("topk", "relu"):
        raise ValueError(f"type must be 'topk' or 'relu'; got type {type!r}")
    sizes = {"batch_size": batch_size, "query_len": query_len, "key_len": key_len}
    sizes = {name: as_int(name, size) for name, size in sizes.items()}
    _check_bias(attention_bias)
    check_optional_tensor("attention_mask", attention_mask)
    _check_sizes("attention_bias", attention_bias, sizes)
    if attention_mask is not None:
        if attention_mask.dim() == 2:
            attention_mask = _expand_padding(attention_mask, **sizes)
        _check_sizes("attention_mask", attention_mask, sizes)
    if type == "relu":
        return relu_mask(attention_bias, attention_mask, min_dtype, block_size)
    return topk_mask(attention_bias, attention_mask, window_size, min_dtype, block_size)


def _prepare(attention_bias: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Checks both; their views of one common shape (B, heads, Sq, Sk), and an uninitialised bool tensor of it."""
    _check_bias(attention_bias)
    check_optional_tensor("attention_mask", attention_mask)
    bias, mask = _four_dims(attention_bias.detach()), None
    shape = bias.shape
    if attention_mask is not None:
        _check_bool_dtype(attention_mask)
        if not 2 <= attention_mask.dim() <= 4:
            raise ValueError(
                f"attention_mask must have 2 to 4 dimensions; got attention_mask {tuple(attention_mask.shape)}"
            )
        if attention_mask.device != bias.device:
            raise ValueError(
                f"attention_mask must be on attention_bias's device; got attention_mask on {attention_mask.device}, "
                f"attention_bias on {bias.device}"
            )
        mask = _four_dims(attention_mask.detach())
        warn_of_two_readings("attention_mask", attention_mask, shape[0], mask.shape[2], shape[3])
        if any(left != right and 1 not in (left, right) for left, right in zip(shape, mask.shape, strict=True)):
            raise ValueError(
                "attention_mask must broadcast with attention_bias; got attention_mask "
                f"{tuple(attention_mask.shape)}, attention_bias {tuple(attention_bias.shape)}"
            )
        shape = torch.broadcast_shapes(shape, mask.shape)
        mask = mask.expand(shape)
    return bias.expand(shape), mask, torch.empty(shape, dtype=torch.bool, device=bias.device)


def _four_dims(tensor: Tensor) -> Tensor:
    """One of the module's forms as (B, heads, Sq, Sk)."""
    if tensor.dim() == 2:
        return tensor[None, None]
    return tensor[:, :, None] if tensor.dim() == 3 else tensor


def _in_form_of(attention_bias: Tensor, kept: Tensor) -> Tensor:
    """`kept` (B, heads, Sq, Sk) without the dimensions that the bias's form lacks, if they are of size 1."""
    if attention_bias.dim() == 2 and kept.shape[:2] == (1, 1):
        return kept[0, 0]
    if attention_bias.dim() == 3 and kept.size(2) == 1:
        return kept[:, :, 0]
    return kept


def _row_chunks(mask: Tensor) -> Iterator[tuple[int | slice, ...]]:
    """Indices that split `mask` (..., Sk) into chunks of rows, one row at least."""
    *lengths, keys = mask.shape
    most_scores = _CPU_CHUNK_SCORES if mask.device.type == "cpu" else _DEVICE_CHUNK_SCORES
    most_rows = max(most_scores // max(keys, 1), 1)

    def split(lengths: list[int]) -> Iterator[tuple[int | slice, ...]]:
        if not lengths:
            yield ()
            return
        rows = math.prod(lengths[1:])
        if rows <= most_rows:
            step = most_rows // max(rows, 1)
            yield from ((slice(start, start + step),) for start in range(0, lengths[0], step))
        else:
            yield from ((index, *rest) for index in range(lengths[0]) for rest in split(lengths[1:]))

    return split(lengths)


def _smooth(mask: Tensor, block_size: int) -> None:
    """block_smooth without checks, all rows at once."""
    whole = mask.size(-1) // block_size * block_size
    parts = [mask[..., :whole].unflatten(-1, (whole // block_size, block_size)), mask[..., None, whole:]]
    for blocks in parts if block_size > 1 else ():
        if blocks.numel() > 0:
            kept = blocks.sum(-1, keepdim=True, dtype=torch.int32)
            blocks.copy_(2 * kept > blocks.size(-1))


def _expand_padding(attention_mask: Tensor, batch_size: int, query_len: int, key_len: int) -> Tensor:
    """A padding mask of the keys, or of the newest query_len of them, as (B or 1, 1, key_len)."""
    _check_bool_dtype(attention_mask)
    length = attention_mask.size(1)
    if length not in (key_len, min(query_len, key_len)):
        raise ValueError(
            "attention_mask with 2 dimensions must be (batch_size or 1, key_len) or (batch_size or 1, query_len) with "
            f"query_len at most key_len; got attention_mask {tuple(attention_mask.shape)}, batch_size {batch_size}, "
            f"query_len {query_len}, key_len {key_len}"
        )
    return torch.nn.functional.pad(attention_mask, (key_len - length, 0), value=True)[:, None]


# ---- Checks


def _check_bias(attention_bias: object, least_dims: int = 2, most_dims: int = 4) -> None:
    check_tensor("attention_bias", attention_bias)
    if not attention_bias.is_floating_point():
        raise ValueError(f"attention_bias must be floating point; got attention_bias {attention_bias.dtype}")
    if not least_dims <= attention_bias.dim() <= most_dims:
        raise ValueError(
            f"attention_bias must have {least_dims} to {most_dims} dimensions; "
            f"got attention_bias {tuple(attention_bias.shape)}"
        )


def _check_bool_dtype(attention_mask: Tensor) -> None:
    if attention_mask.dtype != torch.bool:
        raise ValueError(f"attention_mask must be bool, True = visible; got attention_mask {attention_mask.dtype}")


def _clamp_window(window_size: object, keys: int) -> int:
    return min(max(as_int("window_size", window_size), 0), keys)


def _check_block_size(block_size: object) -> int:
    """The size, 1 for None: blocks of one key change nothing."""
    if block_size is None:
        return 1
    block_size = as_int("block_size", block_size)
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1; got block_size {block_size}")
    return block_size


def _check_sizes(name: str, tensor: Tensor, sizes: dict[str, int]) -> None:
    """That the tensor is of the given sizes, or 1 except in Sk of the bias."""
    if not 2 <= tensor.dim() <= 4:
        return  # the error for that comes from the mask functions
    batch, _, rows, keys = _four_dims(tensor).shape
    least_keys = sizes["key_len"] if name == "attention_bias" else 1
    if (
        batch not in (1, sizes["batch_size"])
        or rows not in (1, sizes["query_len"])
        or keys not in (least_keys, sizes["key_len"])
    ):
        values = ", ".join(f"{key} {value}" for key, value in sizes.items())
        raise ValueError(
            f"{name} must agree with batch_size, query_len and key_len; got {name} {tuple(tensor.shape)}, {values}"
        )
