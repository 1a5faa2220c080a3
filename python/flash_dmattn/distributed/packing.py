"""Tensors by head, and what is kept of them as the bytes that a rank sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ._ranks import token_dim

_ALIGNMENT = 16  # bytes, of the tensors in what a rank sends


def by_head(tensor: Tensor) -> Tensor:
    """(B, S, heads, D) as (B, heads, S, D), and back; (B, heads, S) as it is."""
    return tensor.movedim(token_dim(tensor), 2)


def with_tokens(tensor: Tensor, count: int) -> torch.Size:
    return torch.Size((*tensor.shape[:2], count, *tensor.shape[3:]))


def of_ranks(tensor: Tensor, rank: int, count: int) -> Tensor:
    """(rank, B, heads, count, ...): a view of the keys of each earlier rank."""
    return tensor[:, :, : rank * count].unflatten(2, (rank, count)).movedim(2, 0)


def pack(tensors: Sequence[Tensor], kept: Tensor) -> Tensor:
    """uint8 (bytes,): what is kept of each tensor (B, heads, S, ...), one after the other, aligned; where nothing is,
    any other key, and -inf per key, which no selection keeps."""
    length = tensors[0].shape[2]
    places, is_empty = kept.clamp(max=length - 1), kept == length
    parts = []
    for tensor in tensors:
        index = places.expand(*tensor.shape[:2], -1)
        if tensor.dim() == 4:
            taken = tensor.gather(2, index[..., None].expand(-1, -1, -1, tensor.shape[3]))
        else:
            taken = tensor.gather(2, index).masked_fill(is_empty, -torch.inf)
        parts.append(taken.view(-1).view(torch.uint8))
        if padding := _padded(taken.nbytes) - taken.nbytes:
            parts.append(parts[-1].new_zeros(padding))
    return torch.cat(parts)


def unpack(received: Tensor, tensors: Sequence[Tensor], count: int, ranks: int) -> Iterator[Tensor]:
    """(P, B, heads, kept, ...) of each of the tensors that all ranks packed."""
    received, first = received.view(ranks, -1), 0
    for tensor in tensors:
        shape = with_tokens(tensor, count)
        nbytes = shape.numel() * tensor.element_size()
        yield received[:, first : first + nbytes].view(tensor.dtype).unflatten(1, shape)
        first += _padded(nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
