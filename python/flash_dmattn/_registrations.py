"""What torch has to know of the operators beside their C++ kernels: shapes for torch.compile, gradients, autocast and
vmap. Registered when this is imported."""

import torch
from torch import Tensor

from . import _operators, _vmap
from ._device_plan import plan_size
from ._visibility import unflatten

_registrations = torch.library.Library("flash_dmattn", "FRAGMENT")  # what it registers lives as long as it does


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


@torch.library.register_fake(_operators.attention_forward, lib=_registrations)
def _forward_shapes(query, key, value, *others_and_options):
    _check_given(query=query, key=key, value=value)
    _check_rank_4(query=query, value=value)
    batch, rows, heads, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty((batch, heads, rows), dtype=lse_dtype)
    return query.new_empty((batch, rows, heads, value.shape[3])), lse, lse.new_empty((batch, heads, rows, 2))


@torch.library.register_fake(_operators.attention_backward, lib=_registrations)
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


@torch.library.register_fake(_operators.attention_plan, lib=_registrations)
def _plan_shape(query, key, *others):
    visibility = unflatten(_operators.PLANNED_FIELDS, others)
    mask = visibility.mask
    _check_given(query=query, key=key)
    _check_rank_4(query=query, key=key)
    if mask is not None and not 2 <= mask.dim() <= 4:
        raise ValueError(f"mask must have 2, 3 or 4 dimensions; got mask {tuple(mask.shape)}")
    size = plan_size(query, key, visibility) if query.is_cuda else 0
    return query.new_empty((size,), dtype=torch.uint8)


@torch.library.register_fake(_operators.select_keys, lib=_registrations)
def _interval_shapes(scores, *others):
    _check_given(scores=scores)
    if scores.dim() != 3:
        raise ValueError(f"scores must have 3 dimensions; got scores {tuple(scores.shape)}")
    return tuple(scores.new_empty(scores.shape, dtype=torch.int32) for _ in ("begin", "end"))


@torch.library.register_fake(_operators.append_kept_keys, lib=_registrations)
def _list_shape(indices, scores, new_scores, positions, lengths=None, cache_scores=None):
    _check_given(indices=indices, scores=scores, new_scores=new_scores, positions=positions)
    for name, tensor in (("indices", indices), ("new_scores", new_scores)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions; got {name} {tuple(tensor.shape)}")
    batch, heads, window = indices.shape
    return indices.new_empty((batch, heads, new_scores.shape[2], window))


# ---- Gradients

_DIFFERENTIABLE = ("query", "key", "value", "bias", "sink")  # in the order of attention_backward's results
_DIFFERENTIABLE_POSITIONS = tuple(_operators.FORWARD_ARGUMENTS.index(name) for name in _DIFFERENTIABLE)
_SAVED_SINK = 3 + _operators.FORWARD_ARGUMENTS.index("sink")  # behind the forward's results


def _gradients_by_position(gradients: dict[str, Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(gradients.get(name) for name in _operators.FORWARD_ARGUMENTS)


def _save_for_backward(ctx, inputs, output):
    # In the order in which the backward takes them: the results, then the forward's arguments, tensors first.
    count = len(_operators.FORWARD_TENSORS)
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
    backward = _AttentionBackward.apply if functorch_is_active() else _operators.attention_backward
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
    forward = staticmethod(_operators.attention_backward)
    backward = staticmethod(_refuse_second_derivative)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing to keep: there is no second derivative."""


class Attention(torch.autograd.Function):
    """flash_dmattn::attention_forward for torch.func."""

    generate_vmap_rule = True
    forward = staticmethod(_operators.attention_forward)
    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_attention_backward)


def functorch_is_active() -> bool:
    """Within torch.func.grad, vmap and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


torch.library.register_autograd(
    _operators.attention_forward, _attention_backward, setup_context=_save_for_backward, lib=_registrations
)
torch.library.register_autograd(_operators.attention_backward, _refuse_second_derivative, lib=_registrations)


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
            return _operators.call(_operators.attention_forward, *tensors, *added, *others)

    return kernel


_registrations.impl("attention_forward", _autocast("cpu"), "AutocastCPU")
_registrations.impl("attention_forward", _autocast("cuda"), "AutocastCUDA")


# ---- vmap

torch.library.register_vmap(
    _operators.attention_forward, _vmap.forward_rule(_operators.attention_forward), lib=_registrations
)
torch.library.register_vmap(
    _operators.attention_backward, _vmap.backward_rule(_operators.attention_backward), lib=_registrations
)
torch.library.register_vmap(_operators.select_keys, _vmap.rule(_operators.select_keys), lib=_registrations)
