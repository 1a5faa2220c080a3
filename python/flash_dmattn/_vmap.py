"""Batching rules of the operators: the mapped dimension V is folded into the batch, (V, B, ...) -> (V * B, ...).

Folding copies nothing where V and B can be one dimension of a view, which holds whenever B is 1. An argument that is
not mapped and has B > 1 is repeated V times; a mask or bias of batch size 1 is not. A plan is one of the batch as it
was: it is dropped, and the operator makes its own. A sink has no batch: where it is mapped, or each mapped element
needs a gradient of its own, it is added outside the operator.
"""

import torch
from torch import Tensor

from ._sinks import gradients_through_sink, with_sink
from ._visibility import Visibility, argument_names, shown_name


def _leading(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """V first: (V, ...), as a view."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _fold(name: str, tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """(V, B, ...) -> (V * B, ...)."""
    if tensor is None:
        return None
    tensor = _leading(tensor, dim, size)
    if tensor.dim() < 2:
        raise ValueError(f"{name} must have a batch dimension; got {name} with 0 dimensions under vmap")
    return tensor.flatten(0, 1)


def _unfold(tensor: Tensor, size: int) -> Tensor:
    return tensor.unflatten(0, (size, tensor.shape[0] // size))


def _with_batch(tensor: Tensor) -> Tensor:
    """(V, Sq, Sk), the only form of a mask or bias without a batch, -> (V, 1, 1, Sq, Sk)."""
    return tensor[:, None, None] if tensor.dim() == 3 else tensor


def _fold_broadcast(name: str, tensor: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """A mask or bias of any of its forms, for a folded batch of size * batch."""
    if tensor is None or (dim is None and (tensor.dim() == 2 or (tensor.dim() > 2 and tensor.shape[0] == 1))):
        return tensor  # broadcasts over the folded batch as it is
    tensor = _with_batch(_leading(tensor, dim, size))
    if tensor.dim() > 1 and tensor.shape[1] == 1:
        tensor = tensor.expand(-1, batch, *tensor.shape[2:])
    return _fold(name, tensor, 0, size)


def _fold_bounds(name: str, tensor: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """Bounds of documents, (documents + 1) or (B, documents + 1), for a folded batch of size * batch."""
    if dim is None and tensor.dim() == 1:
        return tensor  # the same documents in all batch elements
    tensor = _leading(tensor, dim, size)
    if tensor.dim() == 2:
        tensor = tensor[:, None].expand(-1, batch, -1)
    return _fold(name, tensor, 0, size)


def _batch_of(query: Tensor, dim: int | None) -> int:
    sizes = list(query.shape)
    if dim is not None:
        del sizes[dim]
    return sizes[0] if sizes else 1


# Arguments with the forms of a mask or a bias: of what is seen, all but the lengths, one a batch element.
_BROADCAST = {"bias", "key_mask", *Visibility._fields} - {"seqlens_k"}

_BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")


def _fold_arguments(given: dict, dims: dict, size: int) -> dict:
    """An operator's arguments by name, in its order, for a folded batch: that of query, or of scores."""
    first = "query" if "query" in given else "scores"
    batch = _batch_of(given[first], dims[first])

    def folded(name: str, argument):
        if name == "plan":
            return None
        if name == "sink":
            return argument  # the same for every mapped element
        if not isinstance(argument, Tensor):
            return argument
        shown = shown_name(name)
        if name in _BOUNDS:
            return _fold_bounds(shown, argument, dims[name], size, batch)
        if name in _BROADCAST:
            return _fold_broadcast(shown, argument, dims[name], size, batch)
        return _fold(shown, argument, dims[name], size)

    return {name: folded(name, argument) for name, argument in given.items()}


def rule(op):
    """The rule of an operator that has no case of its own, in terms of `op` itself."""
    names = argument_names(op)

    def fold_and_call(info, in_dims, *arguments):
        # Trailing arguments may be left to their defaults.
        given, dims = (dict(zip(names, values, strict=False)) for values in (arguments, in_dims))
        results = op(*_fold_arguments(given, dims, info.batch_size).values())
        return tuple(_unfold(result, info.batch_size) for result in results), (0,) * len(results)

    return fold_and_call


def forward_rule(op):
    """The rule for flash_dmattn::attention_forward, in terms of `op` itself."""
    names, without_mapped_sink = argument_names(op), rule(op)

    def fold_and_call(info, in_dims, *arguments):
        position = names.index("sink")
        if in_dims[position] is None:
            return without_mapped_sink(info, in_dims, *arguments)
        sink = _each_sink(arguments[position], in_dims[position], info.batch_size)
        arguments, in_dims = ((*given[:position], None, *given[position + 1 :]) for given in (arguments, in_dims))
        (out, lse, row_stats), out_dims = without_mapped_sink(info, in_dims, *arguments)
        return (with_sink(out, lse, sink), lse, row_stats), out_dims

    return fold_and_call


def _each_sink(sink: Tensor, dim: int | None, size: int) -> Tensor:
    """(H) of every mapped element -> (V, 1, H, 1), for lse (V, B, H, Sq)."""
    sink = _leading(sink, dim, size)
    if sink.dim() != 2:
        raise ValueError(f"sink must have 1 dimension; got sink {tuple(sink.shape[1:])}")
    return sink[:, None, :, None]


def backward_rule(op):
    """The rule for flash_dmattn::attention_backward, in terms of `op` itself."""
    names = argument_names(op)

    def rule(info, in_dims, *arguments):
        size = info.batch_size
        given, dims = (dict(zip(names, values, strict=True)) for values in (arguments, in_dims))
        needs = [given[f"needs_d{name}"] for name in ("query", "key", "value", "bias", "sink")]
        needs_dbias, needs_dsink = needs[3:]
        bias, sink = given["bias"], given["sink"]
        dsink = None
        if needs_dsink or dims["sink"] is not None:
            dsink = _take_sink(given, dims, size)
        # A bias whose gradient is asked for is folded below, and only there: folding may copy it.
        folded = _fold_arguments(given | {"bias": None} if needs_dbias else given, dims, size)
        if needs_dbias:
            # Every mapped element has a bias gradient of its own, so that each needs a bias of its own.
            own_bias = _leading(bias, dims["bias"], size)
            folded["bias"] = _fold_bias_for_gradient(own_bias, size, _batch_of(given["query"], dims["query"]))
        *gradients, dbias, no_dsink = op(*folded.values())
        results = [
            _unfold(gradient, size) if needed else gradient
            for gradient, needed in zip(gradients, needs[:3], strict=True)
        ]
        if needs_dbias:
            dbias = _unfold(dbias, size)
            if own_bias.dim() == 3 or own_bias.shape[1] == 1:  # one bias for the whole batch
                dbias = dbias.sum(1, keepdim=True)
            dbias = dbias.reshape(own_bias.shape).to(bias.dtype)
        dsink = dsink.to(sink.dtype) if needs_dsink else no_dsink
        return (*results, dbias, dsink), tuple(0 if needed else None for needed in needs)

    return rule


def _take_sink(given: dict, dims: dict, size: int) -> Tensor:
    """Changes the backward's arguments into those without the sink, and returns the sink's gradients, (V, H)."""
    tensors = (_leading(given[name], dims[name], size) for name in ("dout", "out", "lse"))
    dout, dsink = gradients_through_sink(*tensors, _each_sink(given["sink"], dims["sink"], size))
    given |= {"dout": dout, "sink": None, "needs_dsink": False}
    dims |= {"dout": 0, "sink": None}
    return dsink.sum((1, 3))


def _fold_bias_for_gradient(bias: Tensor, size: int, batch: int) -> Tensor:
    bias = _with_batch(bias)
    if bias.shape[1] == 1 and batch != 1:
        # Gradients are summed over the batch outside the operator: in float32, as inside it.
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32)).expand(-1, batch, *bias.shape[2:])
    return bias.flatten(0, 1)
