"""What operations that look back a few tokens need of the rank before."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from .._arguments import as_int, check_tensor
from ._ranks import group_of


def previous_tokens(tensor: Tensor, count: int, *, group: ProcessGroup | DeviceMesh, dim: int = 1) -> Tensor:
    """The last tokens of the previous rank's share, for short convolutions and the like; zeros on the first rank.

    Every rank sends `count` tokens to all others, and gets their gradients back: if one rank runs the backward, all
    have to.

    Args:
        tensor: this rank's share, contiguous in the sequence, of one shape on every rank.
        count: at most the share's tokens.
        group: the ranks, in the order of the sequence; or a mesh of one dimension.
        dim: of the tokens.

    Returns:
        As `tensor`, with `count` tokens.

    Raises:
        ValueError: count is negative or above the share's tokens. TypeError: group.
    """
    check_tensor("tensor", tensor)
    count, dim, group = as_int("count", count), as_int("dim", dim), group_of(group)
    if not 0 <= count <= tensor.shape[dim]:
        raise ValueError(f"count must be between 0 and the share's {tensor.shape[dim]} tokens; got count {count}")
    rows = tensor.movedim(dim, 0)
    last = rows[rows.shape[0] - count :].contiguous()
    # Of the first rank, too, the result depends on what came, so that it joins the backward.
    last_of_all = collectives.all_gather_tensor_autograd(last, 0, group)
    before = torch.cat([torch.zeros_like(last), last_of_all])
    return before.narrow(0, dist.get_rank(group) * count, count).movedim(0, dim)
