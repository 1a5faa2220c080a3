"""What ranks must agree about, and how they find out that they do not."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# By group: the functions in which its ranks have agreed once.
_agreed: weakref.WeakKeyDictionary[ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


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


def check_agreement(
    group: ProcessGroup,
    function: str,
    tensors: dict[str, Tensor | None],
    options: dict[str, object],
    check: bool,
) -> None:
    """Raises on every rank if arguments of `function` differ between ranks: dtypes and shapes of tensors, and values of
    options. To be called before anything is refused: what one rank alone has wrong is then an error on all of them, and
    nobody waits for it.

    At the function's first call in a group, since the host has to wait for all ranks; at all calls if `check`, or if
    TORCH_DISTRIBUTED_DEBUG is DETAIL. Not in compiled code, which runs after a first call that is not.

    Raises:
        ValueError: ranks differ; names the arguments, the values and the ranks that have them.
    """
    if torch.compiler.is_compiling():
        return
    agreed = _agreed.setdefault(group, set())
    if function in agreed and not check and dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return
    facts = {name: _described(tensor) for name, tensor in tensors.items()} | options
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
    agreed.add(function)


def wants_gradient(tensors: dict[str, Tensor | None]) -> bool:
    """Whether a backward may follow, which all ranks have to join."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors.values())


def check_shares(tokens: dict[str, Tensor]) -> None:
    """That they are tokens (B, S / P, heads, D), by name, of one length."""
    for name, tensor in tokens.items():
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions; got {name} {tuple(tensor.shape)}")
    if len({tensor.shape[1] for tensor in tokens.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tokens.items())
        raise ValueError(f"{' and '.join(tokens)} must be shares of one sequence, of one length; got {shapes}")


def token_dim(tensor: Tensor) -> int:
    """Where tokens (B, S, heads, D) and what is per key (B, heads, S) have the sequence."""
    return 1 if tensor.dim() == 4 else 2


def _described(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
