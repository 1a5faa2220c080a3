"""Sinks in torch operations, from what attention without them returns: under vmap, where every mapped element may have
its own. A sink is a score without a key in each row's softmax sum; docs/semantics.md says what that means.

Here a sink has any shape that broadcasts to that of lse, (..., H, Sq).
"""

import math

import torch
from torch import Tensor


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """out (..., Sq, H, Dv) and lse (..., H, Sq) of attention without the sink -> out with it, differentiable."""
    return (out * _by_rows(keys_share(lse, sink))).to(out.dtype)


def keys_share(lse: Tensor, sink: Tensor) -> Tensor:
    """The keys' part of each row's softmax sum with the sink, as lse: what is left of their probabilities.

    1 where a row sees no key, whatever the sink is; NaN where it is NaN or +inf.
    """
    distance = torch.where(lse == -math.inf, math.inf, lse - _usable(sink, lse.dtype))
    return torch.sigmoid(distance)


def gradients_through_sink(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """For a backward without the sink, given the results of a forward with it: the gradient by out that makes it give
    the gradients with the sink, and the gradient by the sink of every row, as lse."""
    sees = lse != -math.inf
    share = keys_share(lse, sink)
    sink = _usable(sink, lse.dtype)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-1, -2)
    felt = sees & (sink != -math.inf)
    dsink = torch.where(felt, -torch.sigmoid(sink - lse) * delta, 0.0)
    return (dout * _by_rows(share)).to(dout.dtype), dsink


def _by_rows(share: Tensor) -> Tensor:
    """(..., H, Sq) -> (..., Sq, H, 1)."""
    return share.transpose(-1, -2)[..., None]


def _usable(sink: Tensor, dtype: torch.dtype) -> Tensor:
    """In lse's dtype, and NaN where it is +inf: so is the gradient there."""
    sink = sink.to(dtype)
    return sink * torch.where(sink == math.inf, math.nan, 1.0)
