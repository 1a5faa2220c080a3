"""DTensors as shares: the sequence split along a mesh of one dimension."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ._ranks import token_dim


def to_shares(tensors: dict[str, Tensor | None], group: object) -> tuple[dict[str, Tensor | None], DeviceMesh | None]:
    """The local parts of DTensors, and their mesh; plain tensors as they are, and None.

    Tokens (B, S, heads, D) are to be split in dimension 1, what is per key (B, heads, S) in dimension 2.

    Raises:
        TypeError: some are DTensors and some are not. ValueError: another placement; another mesh than `group`.
    """
    first = next((tensor for tensor in tensors.values() if isinstance(tensor, DTensor)), None)
    if first is None:
        return tensors, None
    mesh = first.device_mesh
    if group is not None and group != mesh:
        raise ValueError(f"group must be the mesh of the DTensors, or not given; got group {group}, mesh {mesh}")
    shares: dict[str, Tensor | None] = {}
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, DTensor):
            raise TypeError(f"{name} must be a DTensor where others are; got {name} of type {type(tensor).__name__}")
        if tensor is not None:
            wanted = (Shard(token_dim(tensor)),)
            if tensor.device_mesh != mesh or tensor.placements != wanted:
                raise ValueError(
                    f"{name} must be split along the sequence, {wanted}, on the mesh of the others; "
                    f"got {name} with {tensor.placements} on {tensor.device_mesh}"
                )
        shares[name] = None if tensor is None else tensor.to_local()
    return shares, mesh


def from_share(out: Tensor, mesh: DeviceMesh) -> DTensor:
    """The DTensor of tokens (B, S, heads, D) of which every rank has its part."""
    return DTensor.from_local(out, mesh, [Shard(1)], run_check=False)
