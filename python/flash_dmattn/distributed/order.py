"""Which tokens of a sequence each rank holds."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from .._arguments import as_int, check_tensor
from ._ranks import group_of

Order = Literal["contiguous", "head-tail"]


def shard(tensor: Tensor, *, group: ProcessGroup | DeviceMesh, dim: int = 1, order: Order = "contiguous") -> Tensor:
    """This rank's share of a tensor that every rank has whole.

    Args:
        tensor: any, with the sequence, of S tokens, in dimension `dim`.
        group: the P ranks.
        order: "contiguous": rank r holds tokens r S / P to (r + 1) S / P - 1. "head-tail": of 2 P equal parts the r-th
            and the one that stands as far from the end. Under the causal rule every rank then has as many scores to
            compute as the others.

    Returns:
        A copy, S / P tokens in `dim`.

    Raises:
        ValueError: S is no multiple of P (2 P for "head-tail"); another order. TypeError: group.
    """
    check_tensor("tensor", tensor)
    group = group_of(group)
    dim = as_int("dim", dim)
    parts = tensor.split(part_length(tensor.shape[dim], group.size(), order), dim)
    own = parts_of(dist.get_rank(group), group.size(), order)
    return torch.cat([parts[part] for part in own], dim)


def unshard(tensor: Tensor, *, group: ProcessGroup | DeviceMesh, dim: int = 1, order: Order = "contiguous") -> Tensor:
    """The whole tensor of which every rank gives its share, on every rank, without a gradient.

    Arguments and errors as in `shard`.
    """
    check_tensor("tensor", tensor)
    group = group_of(group)
    dim = as_int("dim", dim)
    ranks = group.size()
    part_length(tensor.shape[dim] * ranks, ranks, order)
    whole = collectives.all_gather_tensor(tensor.detach().movedim(dim, 0).contiguous(), 0, group)
    places = [part for rank in range(ranks) for part in parts_of(rank, ranks, order)]
    parts = whole.chunk(len(places))
    return torch.cat([parts[places.index(part)] for part in range(len(places))]).movedim(0, dim)


def parts_of(rank: int, ranks: int, order: Order) -> list[int]:
    """The parts of the sequence that a rank holds, of as many equal ones as there are of all ranks."""
    return [rank] if order == "contiguous" else [rank, 2 * ranks - 1 - rank]


def part_length(seqlen: int, ranks: int, order: Order) -> int:
    if order not in get_args(Order):
        raise ValueError(f"order must be one of {', '.join(map(repr, get_args(Order)))}; got order {order!r}")
    parts = ranks * len(parts_of(0, ranks, order))
    if seqlen % parts != 0:
        raise ValueError(
            f"the sequence must be a multiple of {parts} tokens long for {ranks} ranks and order {order!r}; "
            f"got {seqlen} tokens"
        )
    return seqlen // parts
