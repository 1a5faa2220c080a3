"""The compiled library as the rest of the package calls it: arguments are checked, errors are Python's."""

import logging
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _log, _operators, _registrations
from ._visibility import Visibility, flatten


def _text(codes: list[int]) -> str:
    """What an operator returns as text: its bytes as integers (torch/ops.cpp says why)."""
    return bytes(codes).decode()


class CudaInfo(NamedTuple):
    """What the library was compiled with for GPUs."""

    toolkit: int
    """CUDA's version: 13000 is 13.0. 0: the library was built without CUDA."""
    architectures: list[str]
    """"90-real": machine code for GPUs of compute capability 9.0; "80-virtual": PTX, for all from 8.0 on."""


def cuda_info() -> CudaInfo:
    """Asks neither driver nor GPU. Source: flash_dmattn::cuda_info() in include/flash_dmattn/info.h."""
    toolkit, architectures = torch.ops.flash_dmattn.cuda_info()
    return CudaInfo(toolkit, _text(architectures).split())


def cuda_kernels(device: int) -> str:
    """The newest family of kernels that runs on torch's CUDA device of this index: "sm90", "sm80" or "none"."""
    return _text(torch.ops.flash_dmattn.cuda_kernels(*torch.cuda.get_device_capability(device)))


# Devices whose tensors the operators take, by the name of the backend. Meta tensors carry shapes only.
DEVICE_BACKENDS = {"cpu": "cpu", "cuda": "cuda", "meta": None}
if cuda_info().toolkit == 0:
    del DEVICE_BACKENDS["cuda"]


def device_backends() -> list[str]:
    """Names of the compiled backends, the preferred one first."""
    return [name for name in DEVICE_BACKENDS.values() if name is not None]


class CpuInfo(NamedTuple):
    """The build of the library and the kernels it chose on this CPU."""

    version: str
    isa_float: str  # float32 and float16
    isa_bfloat16: str
    compiled: list[str]
    supported: list[str]


def cpu_info() -> CpuInfo:
    """Source: flash_dmattn::cpu_info() in include/flash_dmattn/info.h."""
    version, isa_float, isa_bfloat16, compiled, supported = _text(torch.ops.flash_dmattn.cpu_info()).split("\n")
    return CpuInfo(version, isa_float, isa_bfloat16, compiled.split(), supported.split())


if _log.logs(logging.DEBUG):
    _log.debug("loaded %s: %s, %s", _operators.LIBRARY_FILE, cpu_info(), cuda_info())


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    visibility: Visibility,
    scale: float | None,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Calls the operator, by the shortest way that is safe.

    Args:
        visibility: if it has no plan, one is made here on a GPU if a backward may follow, which then uses it, too; a
            forward alone is as fast without.
        sink: (H), query's dtype or float32.

    Returns:
        out (B, Sq, H, Dv) in query's dtype, lse (B, H, Sq) in float32 (float64 with float64), and row_stats
        (B, H, Sq, 2), which is for the backward alone: no gradient flows through it.
    Raises:
        ValueError: a device, shape, dtype or number that semantics.md does not allow.
        RuntimeError: forward-mode differentiation, which does not exist.
    """
    arguments = (query, key, value, bias, sink, *visibility, scale, softcap, deterministic)
    check_devices(_operators.FORWARD_TENSORS, arguments[: len(_operators.FORWARD_TENSORS)])
    if forward_ad._current_level >= 0:
        _refuse_tangents(query=query, key=key, value=value, bias=bias, sink=sink)
    differentiable = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    )
    is_compiling = torch.compiler.is_compiling()
    is_transformed = not is_compiling and _registrations.functorch_is_active()
    makes_plan = not is_transformed and differentiable and query.is_cuda and _wants_plan(visibility)
    if _log.logs(logging.DEBUG):
        _log_call(query, key, value, bias, sink, visibility, differentiable, is_transformed, makes_plan)
    if is_transformed:
        return _registrations.Attention.apply(*arguments)
    if makes_plan:
        visibility = visibility._replace(plan=attention_plan(query, key, visibility))
        arguments = (query, key, value, bias, sink, *visibility, scale, softcap, deterministic)
    if is_compiling or differentiable:
        return _operators.call(_operators.attention_forward, *arguments)
    # Nothing to differentiate: without the autograd layer, which is written in Python and costs more than a small call.
    # That layer, made by torch.library.register_autograd, does the same in this case.
    with torch._C._AutoDispatchBelowAutograd():
        return _operators.call(_operators.attention_forward, *arguments)


def _wants_plan(visibility: Visibility) -> bool:
    return visibility.plan is None and len(visibility.planned) != 0


def _log_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    visibility: Visibility,
    differentiable: bool,
    is_transformed: bool,
    makes_plan: bool,
) -> None:
    """One message of what a call is and of the way that it takes."""
    seen = {name: value for name, value in visibility._asdict().items() if isinstance(value, Tensor) and name != "plan"}
    added = {name: tensor for name, tensor in (("bias", bias), ("sink", sink)) if tensor is not None}
    tensors = {"query": query, "key": key, "value": value, **added, **seen}
    plan = "made for the backward, too" if makes_plan else "none" if visibility.plan is None else "the prepared mask's"
    way = "by torch.func" if is_transformed else "with a backward" if differentiable else "forward alone"
    _log.debug(
        "attention on %s, %s: %s%s; plan: %s",
        query.device,
        way,
        ", ".join(f"{name} {_log.described(tensor)}" for name, tensor in tensors.items()),
        ", causal" if visibility.is_causal else "",
        plan,
    )


def attention_plan(query: Tensor, key: Tensor, visibility: Visibility) -> Tensor:
    """Calls the operator; of query and key only the shapes count. uint8 (bytes,), empty where there is nothing to plan,
    as on the CPU. Source: make_attention_plan in include/flash_dmattn/attention.h."""
    arguments = (query, key, *flatten(visibility, _operators.PLANNED_FIELDS))
    if torch.compiler.is_compiling():
        return _operators.attention_plan(*arguments)
    with torch._C._AutoDispatchBelowAutograd():  # a plan has no gradient
        return _operators.call(_operators.attention_plan, *arguments)


def select_keys(
    scores: Tensor,
    window_size: int,
    seqlen_q: int,
    causal: bool,
    key_mask: Tensor | None,
    seqlens_k: Tensor | None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Calls the operator with the scores detached.

    Returns:
        begin and end, int32 with the shape of scores.
    Raises:
        ValueError: a device, shape, dtype or number that semantics.md does not allow.
    """
    check_devices(
        ("scores", "key_mask", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k"),
        (scores, key_mask, seqlens_k, cu_seqlens_q, cu_seqlens_k),
    )
    scores = scores.detach()
    return _operators.call(
        _operators.select_keys, scores, window_size, seqlen_q, causal, key_mask, seqlens_k, cu_seqlens_q, cu_seqlens_k
    )


def append_kept_keys(
    indices: Tensor,
    scores: Tensor,
    new_scores: Tensor,
    positions: Tensor,
    lengths: Tensor | None,
    cache_scores: Tensor | None,
) -> Tensor:
    """Calls the operator, which writes to indices, scores and lengths. Source: include/flash_dmattn/kept_keys.h.

    Returns:
        lists, int32 (B, heads, S, w).
    Raises:
        ValueError: a device, shape or dtype that kept_keys.h does not allow.
    """
    names = ("indices", "scores", "new_scores", "positions", "lengths", "cache_scores")
    check_devices(names, (indices, scores, new_scores, positions, lengths, cache_scores))
    cache_scores = None if cache_scores is None else cache_scores.detach()
    lists = _operators.call(
        _operators.append_kept_keys, indices, scores, new_scores.detach(), positions, lengths, cache_scores
    )
    if not torch.compiler.is_compiling():  # compiled code does it for what it writes to
        # Torch knows by its schema that the operator writes, but leaves telling it to the operator: a graph that saved
        # any of them for its backward then raises an error. Tensors of inference mode count nothing.
        written = (indices, scores, lengths)
        torch.autograd.graph.increment_version([t for t in written if t is not None and not t.is_inference()])
    return lists


def mask_intervals(mask: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, bool]:
    """mask bool (B, heads, Sq, Sk) -> the begins and ends of the rows that see each key, int32 (B, heads, Sk), and
    whether they say the same as the mask, which waits for a GPU. Source: include/flash_dmattn/plan.h."""
    return _operators.call(_operators.mask_intervals, mask, is_causal)


def plan_report(
    query: Tensor, key: Tensor, visibility: Visibility, deterministic: bool
) -> tuple[dict[str, int], str, str]:
    """Calls the operator: its counts by name, the backend and the rule."""
    arguments = _planned_arguments(query, key, visibility)
    names, counts, backend, rule = _operators.call(_operators.plan_report, *arguments, deterministic)
    return dict(zip(_text(names).split(), counts, strict=True)), _text(backend), _text(rule)


def plan_chunks(query: Tensor, key: Tensor, visibility: Visibility, batch: int, head: int) -> tuple[Tensor, ...]:
    """Calls the operator, which is for the CPU only: chunks, keys, visible, tiles, as torch/ops.cpp says."""
    return _operators.call(_operators.plan_chunks, *_planned_arguments(query, key, visibility), batch, head)


def _planned_arguments(query: Tensor, key: Tensor, visibility: Visibility) -> tuple[object, ...]:
    """The first arguments of the operators that look at a plan, checked."""
    arguments = (query, key, *flatten(visibility, _operators.PLANNED_FIELDS))
    check_devices(_operators.PLANNED_TENSORS, arguments[: len(_operators.PLANNED_TENSORS)])
    check_data("query", query)
    return arguments


def check_data(name: str, tensor: Tensor) -> None:
    """Refuses devices without a backend, and meta tensors, of which there is nothing to read."""
    check_devices((name,), (tensor,))
    if tensor.is_meta:
        raise ValueError(f"{name} must have data; got {name} on meta")


def check_devices(names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """The first tensor decides for all."""
    first, device = names[0], tensors[0].device
    if device.type not in DEVICE_BACKENDS:
        raise ValueError(
            f"{first} must be on a device that this build has a backend for; got {first} on {device}, "
            f"available backends: {', '.join(device_backends())}"
        )
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} must be on the device of {first}; got {name} on {tensor.device}, {first} on {device}"
            )


def _refuse_tangents(**tensors: Tensor | None) -> None:
    # An operator without a rule for tangents would drop them: a wrong derivative instead of none.
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"flash_dmattn attention has no forward-mode derivative (jvp), but {name} carries a tangent; "
                "use reverse mode (backward, torch.func.grad or vjp)"
            )
