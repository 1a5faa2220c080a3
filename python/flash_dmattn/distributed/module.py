"""Dynamic-mask attention as a module, for torch.distributed.tensor.parallel.parallelize_module."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from .. import functional
from ._ranks import group_of
from .dynamic_mask import dynamic_mask_attention
from .kept_keys import GatheredKeys, gather_kept_keys


class DynamicMaskAttention(nn.Module):
    """`flash_dmattn.dynamic_mask_attention` of sequences that this process has whole, until `DynamicMaskParallel` says
    that they are split. Without parameters.

    Args:
        window_size, scale, softcap, deterministic: as in `flash_dmattn.dynamic_mask_attention`.
    """

    def __init__(
        self,
        window_size: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        deterministic: bool | None = None,
    ) -> None:
        super().__init__()
        self.window_size = window_size
        self.options = {"scale": scale, "softcap": softcap, "deterministic": deterministic}
        self.group: DeviceMesh | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor,
        *,
        scores: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        gathered: GatheredKeys | None = None,
    ) -> Tensor:
        """Arguments, result and errors as of `flash_dmattn.dynamic_mask_attention`, or with a group of
        `flash_dmattn.distributed.dynamic_mask_attention`. cu_seqlens: packed documents, of the whole sequence.
        gathered: what `gather` returned for the same arguments."""
        given = {"scores": scores, "key_mask": key_mask} | self.options
        if self.group is None:
            if gathered is not None:
                raise ValueError("gathered must be None where sequences are whole; got what gather_kept_keys returned")
            given["cu_seqlens_q"] = cu_seqlens
            return functional.dynamic_mask_attention(query, key, value, key_bias, self.window_size, **given)
        given |= {"gathered": gathered, "cu_seqlens": cu_seqlens}
        return dynamic_mask_attention(query, key, value, key_bias, self.window_size, group=self.group, **given)

    def gather(
        self,
        key: Tensor,
        value: Tensor,
        key_bias: Tensor,
        *,
        scores: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> GatheredKeys | None:
        """Starts the exchange, as `gather_kept_keys` does; None where sequences are whole, and nothing is exchanged."""
        if self.group is None:
            return None
        options = {"scores": scores, "key_mask": key_mask, "cu_seqlens": cu_seqlens, "group": self.group}
        return gather_kept_keys(key, value, key_bias, self.window_size, **options)

    def extra_repr(self) -> str:
        return f"window_size={self.window_size}" + ("" if self.group is None else f", group={self.group}")


class DynamicMaskParallel(ParallelStyle):
    """Splits the sequences of a `DynamicMaskAttention` across the ranks of a mesh of one dimension: it then takes
    shares, or DTensors, and what surrounds it works on this rank's tokens alone.

    For example: parallelize_module(model, mesh["cp"], {"layers.*.attention.inner": DynamicMaskParallel()})
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, DynamicMaskAttention):
            raise ValueError(f"DynamicMaskParallel is for DynamicMaskAttention; got {type(module).__name__}")
        group_of(device_mesh)
        module.group = device_mesh
        return module
