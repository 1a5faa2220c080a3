"""Doge models whose sequences are split across ranks: what `doge.enable(model, cp_mesh=mesh)` sets up."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Cache, DogeModel
from transformers.models.doge.modeling_doge import DogeAttention

from ..distributed import dynamic_mask_attention
from ._masks import is_row_intervals

# Of attention layers, and of the model that numbers positions: attributes, which copies of a model keep.
_MESH, _HOOK = "dmattn_cp_mesh", "dmattn_cp_hook"


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lets a causal model without a sliding window take shares."""
    unsplit(model)
    for module in model.modules():
        if isinstance(module, DogeAttention):
            setattr(module, _MESH, mesh)
        elif isinstance(module, DogeModel):
            hook = functools.partial(_prepare_inputs, mesh)
            setattr(module, _HOOK, module.register_forward_pre_hook(hook, with_kwargs=True))


def unsplit(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, _HOOK):
            getattr(module, _HOOK).remove()
            delattr(module, _HOOK)
        if hasattr(module, _MESH):
            delattr(module, _MESH)


def mesh_of(module: DogeAttention) -> DeviceMesh | None:
    return getattr(module, _MESH, None)


def attend(
    module: DogeAttention,
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    mask: Tensor | None,
    cache: Cache | None,
) -> Tensor:
    """The layer's attention. `mask`: as `doge._create_mask` makes it.

    Raises:
        ValueError: a cache; packed sequences, or a mask with four dimensions.
    """
    if cache is not None:
        raise ValueError("past_key_values must be None where sequences are split across ranks (cp_mesh)")
    if mask is not None and (mask.dtype != torch.int32 or is_row_intervals(mask)):
        raise ValueError(
            "attention_mask must be None or (B, S / P), padding, and position_ids must belong to one sequence, where "
            "sequences are split across ranks (cp_mesh)"
        )
    return dynamic_mask_attention(
        query,
        key,
        value,
        scores,
        module.keep_window_size,
        group=mesh,
        key_mask=None if mask is None else mask[:, :, 0] != 0,
        scale=module.scaling,
    )


def _prepare_inputs(
    mesh: DeviceMesh, model: DogeModel, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Before DogeModel.forward: positions of this rank's share, and no cache, where the call does not say.

    Padding gets the form that layers take it in, which `doge._create_mask` leaves as it is: all ranks have to give a
    mask or none, also those whose share has no padding.
    """
    names = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("position_ids") is None:
        tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        length = tokens.shape[1]
        first = mesh.get_local_rank() * length
        given["position_ids"] = torch.arange(first, first + length, device=tokens.device)[None]
    padding = given.get("attention_mask")
    if isinstance(padding, Tensor) and padding.dim() == 2:
        given["attention_mask"] = (padding != 0)[:, None, None].int()
    if given.get("use_cache") is None:
        given["use_cache"] = False
    return (), given
