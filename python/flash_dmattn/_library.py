"""Loads the operators `torch.ops.flash_dmattn.*` and registers what they need beside their C++ kernels: shapes for
torch.compile, gradients, autocast and vmap."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _log, _vmap
from ._device_plan import plan_size
from ._visibility import Visibility, argument_names, flatten, leading_tensors, unflatten, visibility_fields

_LIBRARY_FILE = Path(__file__).parent / "_C" / "libflash_dmattn_torch.so"

if not _LIBRARY_FILE.exists():
    raise ImportError(
        f"flash_dmattn's compiled library is missing ({_LIBRARY_FILE}): install the package with `pip install .`, or "
        "build it in place with `make library`, both in the root of the source tree"
    )
torch.ops.load_library(_LIBRARY_FILE)

_FORWARD = "flash_dmattn::attention_forward"
_BACKWARD = "flash_dmattn::attention_backward"
_PLAN = "flash_dmattn::attention_plan"
_SELECT = "flash_dmattn::select_keys"
_APPEND = "flash_dmattn::append_kept_keys"
_forward_op = torch.ops.flash_dmattn.attention_forward.default
_backward_op = torch.ops.flash_dmattn.attention_backward.default
_plan_op = torch.ops.flash_dmattn.attention_plan.default
_select_op = torch.ops.flash_dmattn.select_keys.default
_append_op = torch.ops.flash_dmattn.append_kept_keys.default
_report_op = torch.ops.flash_dmattn.plan_report.default
_chunks_op = torch.ops.flash_dmattn.plan_chunks.default
_registrations = torch.library.Library("flash_dmattn", "FRAGMENT")  # what it registers lives as long as it does


def _text(codes: list[int]) -> str:
    """What an operator returns as text: its bytes as integers (torch/ops.cpp says why)."""
    return bytes(codes).decode()


def _call(operator: Callable[..., Any], *arguments: object) -> Any:
    """Calls an operator. What the library says of an argument is a ValueError, also with torch 2.15, which makes every
    exception of an operator a RuntimeError; of a failure it says "failed: ", of an argument "; got " (status.h).
    """
    if torch.compiler.is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except RuntimeError as error:
        message = str(error)
        if type(error) is RuntimeError and "; got " in message and " failed: " not in message:
            raise ValueError(message) from None
        raise


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
    _log.debug("loaded %s: %s, %s", _LIBRARY_FILE, cpu_info(), cuda_info())

_FORWARD_ARGUMENTS = argument_names(_forward_op)
_FORWARD_TENSORS = leading_tensors(_forward_op)
_PLANNED_TENSORS = leading_tensors(_plan_op)
# Visibility without a plan, as the operators that make one take it.
_PLANNED_FIELDS = visibility_fields(_plan_op)


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
    check_devices(_FORWARD_TENSORS, arguments[: len(_FORWARD_TENSORS)])
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
    is_transformed = not is_compiling and _functorch_is_active()
    makes_plan = not is_transformed and differentiable and query.is_cuda and _wants_plan(visibility)
    if _log.logs(logging.DEBUG):
        _log_call(query, key, value, bias, sink, visibility, differentiable, is_transformed, makes_plan)
    if is_transformed:
        return _Attention.apply(*arguments)
    if makes_plan:
        visibility = visibility._replace(plan=attention_plan(query, key, visibility))
        arguments = (query, key, value, bias, sink, *visibility, scale, softcap, deterministic)
    if is_compiling or differentiable:
        return _call(_forward_op, *arguments)
    # Nothing to differentiate: without the autograd layer, which is written in Python and costs more than a small call.
    # That layer, made by torch.library.register_autograd, does the same in this case.
    with torch._C._AutoDispatchBelowAutograd():
        return _call(_forward_op, *arguments)


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
    arguments = (query, key, *flatten(visibility, _PLANNED_FIELDS))
    if torch.compiler.is_compiling():
        return _plan_op(*arguments)
    with torch._C._AutoDispatchBelowAutograd():  # a plan has no gradient
        return _call(_plan_op, *arguments)


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
    return _call(_select_op, scores, window_size, seqlen_q, causal, key_mask, seqlens_k, cu_seqlens_q, cu_seqlens_k)


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
    lists = _call(_append_op, indices, scores, new_scores.detach(), positions, lengths, cache_scores)
    if not torch.compiler.is_compiling():  # compiled code does it for what it writes to
        # Torch knows by its schema that the operator writes, but leaves telling it to the operator: a graph that saved
        # any of them for its backward then raises an error. Tensors of inference mode count nothing.
        written = (indices, scores, lengths)
        torch.autograd.graph.increment_version([t for t in written if t is not None and not t.is_inference()])
    return lists


def mask_intervals(mask: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, bool]:
    """mask bool (B, heads, Sq, Sk) -> the begins and ends of the rows that see each key, int32 (B, heads, Sk), and
    whether they say the same as the mask, which waits for a GPU. Source: include/flash_dmattn/plan.h."""
    return _call(torch.ops.flash_dmattn.mask_intervals.default, mask, is_causal)


def plan_report(
    query: Tensor, key: Tensor, visibility: Visibility, deterministic: bool
) -> tuple[dict[str, int], str, str]:
    """Calls the operator: its counts by name, the backend and the rule."""
    arguments = _planned_arguments(query, key, visibility)
    names, counts, backend, rule = _call(_report_op, *arguments, deterministic)
    return dict(zip(_text(names).split(), counts, strict=True)), _text(backend), _text(rule)


def plan_chunks(query: Tensor, key: Tensor, visibility: Visibility, batch: int, head: int) -> tuple[Tensor, ...]:
    """Calls the operator, which is for the CPU only: chunks, keys, visible, tiles, as torch/ops.cpp says."""
    return _call(_chunks_op, *_planned_arguments(query, key, visibility), batch, head)


def _planned_arguments(query: Tensor, key: Tensor, visibility: Visibility) -> tuple[object, ...]:
    """The first arguments of the operators that look at a plan, checked."""
    arguments = (query, key, *flatten(visibility, _PLANNED_FIELDS))
    check_devices(_PLANNED_TENSORS, arguments[: len(_PLANNED_TENSORS)])
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


# ---- Shapes, for torch.compile and meta tensors


def _check_given(**tensors: Tensor | None) -> None:
    # None passes for a Tensor in a direct call of an operator.
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f"{name} must be a torch.Tensor; got {name} of type NoneType")


def _check_rank_4(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions; got {name} {tuple(tensor.shape)}")


@torch.library.register_fake(_FORWARD, lib=_registrations)
def _forward_shapes(query, key, value, *others_and_options):
    _check_given(query=query, key=key, value=value)
    _check_rank_4(query=query, value=value)
    batch, rows, heads, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty((batch, heads, rows), dtype=lse_dtype)
    return query.new_empty((batch, rows, heads, value.shape[3])), lse, lse.new_empty((batch, heads, rows, 2))


@torch.library.register_fake(_BACKWARD, lib=_registrations)
def _backward_shapes(dout, dlse, out, lse, row_stats, query, key, value, bias, sink, *others_and_needs):
    _check_given(dout=dout, query=query, key=key, value=value, out=out, lse=lse, row_stats=row_stats)
    needs = others_and_needs[-5:]
    for name, tensor, needed in (("bias", bias, needs[3]), ("sink", sink, needs[4])):
        if tensor is None and needed:
            raise ValueError(f"needs_d{name} needs a {name}; got no {name}")
    inputs = (query, key, value, query if bias is None else bias, query if sink is None else sink)
    return tuple(
        tensor.new_empty(tensor.shape if needed else (0,)) for tensor, needed in zip(inputs, needs, strict=True)
    )


@torch.library.register_fake(_PLAN, lib=_registrations)
def _plan_shape(query, key, *others):
    visibility = unflatten(_PLANNED_FIELDS, others)
    mask = visibility.mask
    _check_given(query=query, key=key)
    _check_rank_4(query=query, key=key)
    if mask is not None and not 2 <= mask.dim() <= 4:
        raise ValueError(f"mask must have 2, 3 or 4 dimensions; got mask {tuple(mask.shape)}")
    size = plan_size(query, key, visibility) if query.is_cuda else 0
    return query.new_empty((size,), dtype=torch.uint8)


@torch.library.register_fake(_SELECT, lib=_registrations)
def _interval_shapes(scores, *others):
    _check_given(scores=scores)
    if scores.dim() != 3:
        raise ValueError(f"scores must have 3 dimensions; got scores {tuple(scores.shape)}")
    return tuple(scores.new_empty(scores.shape, dtype=torch.int32) for _ in ("begin", "end"))


@torch.library.register_fake(_APPEND, lib=_registrations)
def _list_shape(indices, scores, new_scores, positions, lengths=None, cache_scores=None):
    _check_given(indices=indices, scores=scores, new_scores=new_scores, positions=positions)
    for name, tensor in (("indices", indices), ("new_scores", new_scores)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions; got {name} {tuple(tensor.shape)}")
    batch, heads, window = indices.shape
    return indices.new_empty((batch, heads, new_scores.shape[2], window))


# ---- Gradients

_DIFFERENTIABLE = ("query", "key", "value", "bias", "sink")  # in the order of attention_backward's results
_DIFFERENTIABLE_POSITIONS = tuple(_FORWARD_ARGUMENTS.index(name) for name in _DIFFERENTIABLE)
_SAVED_SINK = 3 + _FORWARD_ARGUMENTS.index("sink")  # behind the forward's results


def _gradients_by_position(gradients: dict[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(gradients.get(name) for name in _FORWARD_ARGUMENTS)


def _save_for_backward(ctx, inputs, output):
    # In the order in which the backward takes them: the results, then the forward's arguments, tensors first.
    count = len(_FORWARD_TENSORS)
    ctx.save_for_backward(*output, *inputs[:count])
    ctx.options = inputs[count:]
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # without a gradient for lse the backward has less to do


def _attention_backward(ctx, dout, dlse, _):
    saved = ctx.saved_tensors
    needs = [ctx.needs_input_grad[position] for position in _DIFFERENTIABLE_POSITIONS]
    if dout is None:
        if dlse is None:
            return _gradients_by_position({})
        dout = torch.zeros_like(saved[0])
    backward = _AttentionBackward.apply if _functorch_is_active() else _backward_op
    if dlse is not None and dout.is_cuda and saved[_SAVED_SINK] is not None:
        gradients = _backward_in_parts(backward, dout, dlse, saved, ctx.options, needs)
    else:
        gradients = backward(dout, dlse, *saved, *ctx.options, *needs)
    wanted = [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]
    return _gradients_by_position(dict(zip(_DIFFERENTIABLE, wanted, strict=True)))


def _backward_in_parts(backward, dout, dlse, saved, options, needs):
    """The gradients by out and by lse apart. Kernels of GPUs make both from probabilities that the sink has shrunk, and
    where it leaves the keys a tiny share of the sum, these cannot hold that by lse, which leaves the sink out."""
    by_out = backward(dout, None, *saved, *options, *needs)
    without_sink = [*saved[:_SAVED_SINK], None, *saved[_SAVED_SINK + 1 :]]
    feels_lse = [name not in ("value", "sink") and needed for name, needed in zip(_DIFFERENTIABLE, needs, strict=True)]
    if not any(feels_lse):
        return by_out
    by_lse = backward(torch.zeros_like(dout), dlse, *without_sink, *options, *feels_lse)
    return [first + second if feels else first for first, second, feels in zip(by_out, by_lse, feels_lse, strict=True)]


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "flash_dmattn attention has no second derivative: a gradient that flash_dmattn::attention_backward computed "
        "(with create_graph=True, or torch.func.grad within grad) was itself differentiated. Detach that gradient, or "
        "use unfused attention where second derivatives are needed"
    )


class _AttentionBackward(torch.autograd.Function):
    """flash_dmattn::attention_backward for torch.func, whose transforms what register_autograd makes does not know."""

    generate_vmap_rule = True  # from those of the operators
    forward = staticmethod(_backward_op)
    backward = staticmethod(_refuse_second_derivative)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing to keep: there is no second derivative."""


class _Attention(torch.autograd.Function):
    """flash_dmattn::attention_forward for torch.func."""

    generate_vmap_rule = True
    forward = staticmethod(_forward_op)
    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_attention_backward)


def _functorch_is_active() -> bool:
    """Within torch.func.grad, vmap and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


torch.library.register_autograd(_FORWARD, _attention_backward, setup_context=_save_for_backward, lib=_registrations)
torch.library.register_autograd(_BACKWARD, _refuse_second_derivative, lib=_registrations)


# ---- Autocast


def _autocast(device_type: str):
    """The operator's kernel under autocast: query, key and value in autocast's dtype, as torch casts them for its own
    attention. A float32 bias or sink stays; one of another floating type follows query."""

    def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        # As torch's own rule: float64 is never cast.
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    def cast_unless_float32(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return tensor if tensor is None or tensor.dtype == torch.float32 else cast(tensor, dtype)

    def kernel(query, key, value, bias, sink, *others):
        dtype = torch.get_autocast_dtype(device_type)
        tensors = [cast(tensor, dtype) for tensor in (query, key, value)]
        added = [cast_unless_float32(tensor, dtype) for tensor in (bias, sink)]
        with torch.autocast(device_type, enabled=False):
            return _call(_forward_op, *tensors, *added, *others)

    return kernel


_registrations.impl("attention_forward", _autocast("cpu"), "AutocastCPU")
_registrations.impl("attention_forward", _autocast("cuda"), "AutocastCUDA")


# ---- vmap

torch.library.register_vmap(_FORWARD, _vmap.forward_rule(_forward_op), lib=_registrations)
torch.library.register_vmap(_BACKWARD, _vmap.backward_rule(_backward_op), lib=_registrations)
torch.library.register_vmap(_SELECT, _vmap.rule(_select_op), lib=_registrations)
