"""Batching rules of the operators: the mapped dimension V is folded into the batch, (V, B, ...) -> (V * B, ...).

Folding copies nothing where V and B can be one dimension of a view, which holds whenever B is 1. An argument that is
not mapped and has B > 1 is repeated V times; a mask or bias of batch size 1 is not. A plan is one of the batch as it
was: it is dropped, and the operator makes its own.
"""

import torch
from torch import Tensor


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


def _batch_of(query: Tensor, dim: int | None) -> int:
    sizes = list(query.shape)
    if dim is not None:
        del sizes[dim]
    return sizes[0] if sizes else 1


def forward_rule(op):
    """The rule for flash_dmattn::attention_forward, in terms of `op` itself."""

    def rule(info, in_dims, query, key, value, mask, bias, seqlens_k, interval_begin, interval_end, plan, *options):
        size, batch = info.batch_size, _batch_of(query, in_dims[0])
        results = op(
            _fold("query", query, in_dims[0], size),
            _fold("key", key, in_dims[1], size),
            _fold("value", value, in_dims[2], size),
            _fold_broadcast("mask", mask, in_dims[3], size, batch),
            _fold_broadcast("bias", bias, in_dims[4], size, batch),
            _fold("seqlens_k", seqlens_k, in_dims[5], size),
            _fold_broadcast("intervals.begin", interval_begin, in_dims[6], size, batch),
            _fold_broadcast("intervals.end", interval_end, in_dims[7], size, batch),
            None,
            *options,
        )
        return tuple(_unfold(result, size) for result in results), (0, 0, 0)

    return rule


def backward_rule(op):
    """The rule for flash_dmattn::attention_backward, in terms of `op` itself."""

    def rule(info, in_dims, dout, dlse, query, key, value, mask, bias, seqlens_k, interval_begin, interval_end, *rest):
        plan, out, lse, row_stats, *options_and_needs = rest
        size, batch = info.batch_size, _batch_of(query, in_dims[2])
        *_, needs_dbias = needs = options_and_needs[-4:]
        folded_bias = bias if bias is None else _leading(bias, in_dims[6], size)
        bias_shape = folded_bias.shape if needs_dbias else None
        if needs_dbias:
            # Every mapped element has a bias gradient of its own, so that each needs a bias of its own.
            folded_bias = _fold_bias_for_gradient(folded_bias, size, batch)
        else:
            folded_bias = _fold_broadcast("bias", bias, in_dims[6], size, batch)
        gradients = op(
            _fold("dout", dout, in_dims[0], size),
            _fold("dlse", dlse, in_dims[1], size),
            _fold("query", query, in_dims[2], size),
            _fold("key", key, in_dims[3], size),
            _fold("value", value, in_dims[4], size),
            _fold_broadcast("mask", mask, in_dims[5], size, batch),
            folded_bias,
            _fold("seqlens_k", seqlens_k, in_dims[7], size),
            _fold_broadcast("intervals.begin", interval_begin, in_dims[8], size, batch),
            _fold_broadcast("intervals.end", interval_end, in_dims[9], size, batch),
            None,
            _fold("out", out, in_dims[11], size),
            _fold("lse", lse, in_dims[12], size),
            _fold("row_stats", row_stats, in_dims[13], size),
            *options_and_needs,
        )
        *gradients, dbias = gradients
        results = [
            _unfold(gradient, size) if needed else gradient
            for gradient, needed in zip(gradients, needs[:3], strict=True)
        ]
        if needs_dbias:
            dbias = _unfold(dbias, size)
            if len(bias_shape) == 3 or bias_shape[1] == 1:  # one bias for the whole batch
                dbias = dbias.sum(1, keepdim=True)
            dbias = dbias.reshape(bias_shape).to(bias.dtype)
        return (*results, dbias), tuple(0 if needed else None for needed in needs)

    return rule


def select_rule(op):
    """The rule for flash_dmattn::select_keys, in terms of `op` itself."""

    def rule(info, in_dims, scores, window_size, seqlen_q, causal, key_mask, seqlens_k):
        size, batch = info.batch_size, _batch_of(scores, in_dims[0])
        begin, end = op(
            _fold("scores", scores, in_dims[0], size),
            window_size,
            seqlen_q,
            causal,
            _fold_broadcast("key_mask", key_mask, in_dims[4], size, batch),
            _fold("seqlens_k", seqlens_k, in_dims[5], size),
        )
        return (_unfold(begin, size), _unfold(end, size)), (0, 0)

    return rule


def _fold_bias_for_gradient(bias: Tensor, size: int, batch: int) -> Tensor:
    bias = _with_batch(bias)
    if bias.shape[1] == 1 and batch != 1:
        # Gradients are summed over the batch outside the operator: in float32, as inside it.
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32)).expand(-1, batch, *bias.shape[2:])
    return bias.flatten(0, 1)
