"""What ranks must agree about, and how they find out that they do not."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

_agreed: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def group_of(group: object) -> ProcessGroup:
    """The process group of what was given as one.

    Raises:
        TypeError: neither a ProcessGroup nor a DeviceMesh. ValueError: a mesh of more than one dimension; a group that
            this rank does not belong to.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                "group must be a mesh of one dimension, along which the sequence is split; got group with dimensions "
                f"{group.mesh_dim_names or group.ndim}: take one of them, mesh['cp']"
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or a DeviceMesh; got group of type {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group must be one that this rank belongs to")
    return group


def check_agreement(group: ProcessGroup, facts: dict[str, object], check: bool) -> None:
    """Raises on every rank if facts, by the name of the argument, differ between ranks.

    At a group's first call, since the host has to wait for all ranks; at all calls if `check`, or if
    TORCH_DISTRIBUTED_DEBUG is DETAIL. Not in compiled code, which runs after a first call that is not.

    Raises:
        ValueError: ranks differ; names the arguments, the values and the ranks that have them.
    """
    if torch.compiler.is_compiling():
        return
    if group in _agreed and not check and dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return
    gathered: list[dict[str, object]] = [{} for _ in range(group.size())]
    dist.all_gather_object(gathered, facts, group=group)
    differing = []
    for name in facts:
        ranks: dict[object, list[int]] = {}
        for rank, other in enumerate(gathered):
            ranks.setdefault(other[name], []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {_listed(of)}" for value, of in ranks.items())
            differing.append(f"{name} {values}")
    if differing:
        raise ValueError("all ranks of group must give the same shapes, dtypes and values; got " + "; ".join(differing))
    _agreed.add(group)


def described(tensor: Tensor | None) -> str:
    """Dtype and shape, as a fact for check_agreement."""
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
