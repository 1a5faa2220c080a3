"""The lists of keys that models of Transformers choose for every query, as what attention takes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..key_indices import KeyIndices
from ..prepared import PreparedMask
from ..selection import KeyIntervals


def lists_of_keys(
    module: nn.Module, query: Tensor, key: Tensor, indices: Tensor | None, block_indices: Tensor | None
) -> KeyIndices | None:
    """The lists that an attention module passes, None if it passes none.

    Args:
        module: with block_indices, module.indexer.block_size is how many keys a block has.
        query: (B, H, Sq, D); key: (B, Hkv, Sk, D).
        indices: int32 or int64 (B or 1, Sq, n), keys of each row, for all heads.
        block_indices: int32 or int64 (B or 1, heads, Sq, n), blocks of keys of each row, -1 for none; heads divide H.

    Raises:
        ValueError: both are given; other dimensions or heads; a module that does not tell the block size.
    """
    if indices is not None:
        if block_indices is not None:
            raise ValueError("indices and block_indices are two forms of one argument; got both")
        _check_shape("indices", indices, 3, "(B or 1, Sq, n)", query)
        return KeyIndices(indices[:, None])
    if block_indices is None:
        return None
    _check_shape("block_indices", block_indices, 4, "(B or 1, heads, Sq, n)", query)
    block_size = getattr(getattr(module, "indexer", None), "block_size", None)
    if block_size is None:
        raise ValueError(
            "block_indices must come from a module that tells the size of blocks as indexer.block_size; "
            f"got module {type(module).__name__}"
        )
    heads, query_heads = block_indices.shape[1], query.shape[1]
    if heads not in (1, key.shape[1], query_heads):
        if heads == 0 or query_heads % heads != 0:
            raise ValueError(f"block_indices' heads must divide the {query_heads} of query; got {heads}")
        block_indices = block_indices.repeat_interleave(query_heads // heads, 1)
    return KeyIndices(block_indices, block_size)


def _check_shape(name: str, tensor: Tensor, dimensions: int, form: str, query: Tensor) -> None:
    if tensor.dim() != dimensions or tensor.shape[-2] != query.shape[2]:
        raise ValueError(
            f"{name} must be {form} with query's rows; got {name} {tuple(tensor.shape)}, query {tuple(query.shape)}"
        )


def within_mask(
    lists: KeyIndices, mask: PreparedMask | KeyIntervals | Tensor | None, rows: int, keys: int
) -> KeyIndices:
    """The listed keys that the mask shows, too. Nothing of the size Sq * Sk is made.

    Args:
        lists: what `lists_of_keys` returned, which holds indices and nothing else.
        mask: bool (B or 1, heads, Sq or 1, Sk or 1), intervals, either of them prepared, or None.
        rows, keys: Sq and Sk.
    """
    if mask is None:
        return lists
    if isinstance(mask, PreparedMask):
        mask = mask.held
    if 1 < lists.shape[1] < mask.shape[1]:
        lists = replace(lists, indices=lists.indices.repeat_interleave(mask.shape[1] // lists.shape[1], 1))
    if isinstance(mask, KeyIntervals):
        return lists.intersection(mask)
    if mask.shape[2] not in (1, rows) or mask.shape[3] not in (1, keys):
        raise ValueError(
            f"attention_mask must have Sq or 1 rows and Sk or 1 keys, ({rows}, {keys}); got {tuple(mask.shape)}"
        )
    if mask.shape[2] == 1:
        return lists.intersection(mask[:, :, 0].expand(-1, -1, keys))
    return _shown_keys(lists, mask.expand(-1, -1, -1, keys))


def _shown_keys(lists: KeyIndices, mask: Tensor) -> KeyIndices:
    """The listed keys one by one, without those that a mask (B or 1, heads, Sq, Sk) hides: n * block_size for a row."""
    keys = mask.shape[3]
    begin = lists.indices.long()[..., None] * lists.block_size
    # A block is no longer than the keys. What lies outside of them names none, whatever the mask shows in its place.
    key = (begin + torch.arange(min(lists.block_size, keys), device=begin.device)).flatten(3)
    shown = torch.take_along_dim(mask, key.clamp(0, keys - 1), 3)
    return KeyIndices(torch.where(shown, key, -1))
