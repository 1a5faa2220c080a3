"""Attention in dense fp64 torch operations, written from docs/semantics.md and from nothing else.

`reference` is the truth that every kernel is judged by; `framework` is the yardstick of how wrong a plain
low-precision implementation may be. See compare.py for the bar built from the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(repr=False)
class Case:
    """One call: inputs as docs/semantics.md shapes them, options, and the cotangents of out and lse."""

    query: Tensor  # (B, Sq, H, D)
    key: Tensor  # (B, Sk, Hkv, D)
    value: Tensor  # (B, Sk, Hkv, Dv)
    dout: Tensor  # (B, Sq, H, Dv)
    mask: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None  # (H)
    dlse: Tensor | None = None  # (B, H, Sq)
    options: dict = field(default_factory=dict)  # scale, is_causal, softcap, seqlens_k

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(B, H, Hkv, Sq, Sk)"""
        return (self.query.size(0), self.query.size(2), self.key.size(2), self.query.size(1), self.key.size(1))

    def __repr__(self) -> str:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        shown = [f"{name}: {t.dtype} {tuple(t.shape)} strides {t.stride()}" for name, t in tensors.items()]
        return f"Case({', '.join(shown)}, options={self.options})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # what hypothesis prints of a failing example
        printer.text(repr(self))

    @property
    def scale(self) -> float:
        scale = self.options.get("scale")
        return 1 / math.sqrt(self.query.size(3)) if scale is None else scale


@dataclass
class Expected:
    """What one result should be, what its rounding errors are proportional to, and where a NaN may have spread to."""

    value: Tensor  # fp64
    magnitude: Tensor  # fp64, finite: the sum of magnitudes that the value is made of
    exponent: Tensor | None  # the same, each probability times the size of its score and of lse
    # The same as magnitude, of probabilities below the least normal float32 number alone; None: there are none.
    underflow: Tensor | None
    tainted: Tensor  # bool: shares a (batch, key head) with a non-finite number that some row sees


def broadcast(tensor: Tensor, case: Case) -> Tensor:
    """A mask or bias of any documented form as a (B, H, Sq, Sk) view."""
    batch, heads, key_heads, rows, keys = case.sizes
    if tensor.dim() == 2:
        tensor = tensor[None, None]
    elif tensor.dim() == 3:
        tensor = tensor[:, :, None]
    if tensor.size(1) == key_heads != 1:
        tensor = tensor.repeat_interleave(heads // key_heads, dim=1)
    return tensor.expand(batch, heads, rows, keys)


def reduce_like(tensor: Tensor, like: Tensor, case: Case) -> Tensor:
    """The transpose of `broadcast`: sums (B, H, Sq, Sk) into the shape of `like`."""
    batch, heads, key_heads, rows, keys = case.sizes
    shape = (1, 1, *like.shape) if like.dim() == 2 else like.shape
    shape = (shape[0], shape[1], 1, shape[2]) if len(shape) == 3 else shape
    if shape[1] == key_heads != 1:
        tensor = tensor.reshape(batch, key_heads, heads // key_heads, rows, keys).sum(2)
    return tensor.sum_to_size(shape).reshape(like.shape)


def visibility(case: Case) -> Tensor:
    """(B, H, Sq, Sk) bool: which key every query row sees."""
    batch, heads, _, rows, keys = case.sizes
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    count = torch.full((batch,), keys)
    if case.options.get("seqlens_k") is not None:
        count = case.options["seqlens_k"].long().clamp(0, keys)
    count = count[:, None, None, None]
    visible = (key < count).expand(batch, heads, rows, keys)
    if case.options.get("is_causal"):
        visible = visible & (key <= row + count - rows)
    return visible if case.mask is None else visible & broadcast(case.mask, case)


def all_finite(tensor: Tensor) -> bool:
    """tensor.isfinite().all() in a tenth of the time: of numbers among which there is a NaN it is both ends."""
    return tensor.numel() == 0 or all(bool(end.isfinite()) for end in tensor.aminmax())


def weighted_sum(weights: Tensor, vectors: Tensor, visible: Tensor) -> Tensor:
    """Sum over visible j of weights[..., i, j] * vectors[..., j, :]; what is hidden, and has a weight of 0, is not even
    multiplied."""
    if all_finite(vectors):
        return weights @ vectors
    finite = vectors.isfinite().all(-1, keepdim=True)
    few = (~finite).flatten(0, -3).any(0).squeeze(-1).nonzero().squeeze(-1)  # one of another head may be finite
    products = weights[..., few, None] * vectors[..., None, few, :]
    counts = visible[..., few, None] & ~finite[..., None, few, :]
    return weights @ vectors.where(finite, 0.0) + products.where(counts, 0.0).sum(-2)


def reference(
    case: Case, *, float32_scores: bool = False, gradients: bool = True, exponents: bool = True
) -> dict[str, Expected]:
    """out, lse and the gradients dquery, dkey, dvalue (and dbias and dsink, if there is a bias or sink) of `case`.

    Without `gradients`, or `exponents` of Expected, these are left out, which saves half of the work and a quarter.

    With `float32_scores` a score is rounded to float32 wherever unfused float32 attention rounds it: the product, its
    scaling, the softcap, and the sum with the bias. For scores so large that this rounding decides between keys,
    in every float32 attention alike.
    """
    batch, heads, key_heads, rows, keys = case.sizes
    group = heads // key_heads if key_heads else 1
    softcap, scale = case.options.get("softcap", 0.0), case.scale

    # Heads of a group share their keys, so that their rows are those of one longer sequence. All tensors below are
    # (B, Hkv, G * Sq, ...) or (B, Hkv, Sk, ...), G = H / Hkv, until they are results.
    def rows_of_group(tensor: Tensor) -> Tensor:  # from (B, H, Sq, ...)
        return tensor.reshape(batch, key_heads, group * rows, *tensor.shape[3:])

    def by_head(tensor: Tensor) -> Tensor:  # to (B, H, Sq, ...)
        return tensor.reshape(batch, heads, rows, *tensor.shape[3:])

    visible = rows_of_group(visibility(case))
    query, dout = (rows_of_group(tensor.double().transpose(1, 2)) for tensor in (case.query, case.dout))
    seen = visible.any(-2)[..., None]
    key, value = (tensor.double().transpose(1, 2).where(seen, 0.0) for tensor in (case.key, case.value))

    def rounded(score: Tensor) -> Tensor:
        return score.float().double() if float32_scores else score

    score, slope = rounded(scale * rounded(query @ key.mT)), None
    if softcap > 0:
        slope = 1 - torch.tanh(score / softcap) ** 2
        score = rounded(softcap * torch.tanh(score / softcap))
    if case.bias is not None:
        score = rounded(score + rows_of_group(broadcast(case.bias.double(), case)))
    score = score.where(visible, -math.inf)

    # A row is empty (nothing seen, or only -inf), broken (it sees a score of +inf or NaN) or sound.
    highest = score.amax(-1, keepdim=True) if keys else score.new_full((*score.shape[:3], 1), -math.inf)
    empty, broken = highest == -math.inf, highest.isnan() | (highest == math.inf)
    weight = (score - highest.where(highest.isfinite(), 0.0)).exp()
    total = weight.sum(-1, keepdim=True)
    prob = weight / total.where(~empty, 1.0)
    if broken.any():
        prob = prob.where(~broken | ~visible, math.nan)
    lse = (highest + total.log()).where(highest.isfinite(), highest)
    query, dout = query.where(~empty, 0.0), dout.where(~empty, 0.0)
    live = visible & ~empty

    # The sink is one more score of the row, but not for lse. `prob` is of the keys alone, `share` with the sink.
    sink = torch.full((heads,), -math.inf) if case.sink is None else case.sink
    sink = rows_of_group(sink.double()[None, :, None, None].expand(batch, heads, rows, 1))
    share, lost = prob, broken
    if case.sink is not None:
        spoilt = sink.isnan() | (sink == math.inf)
        top = torch.maximum(highest, sink).where(~empty & ~spoilt, 0.0)
        top = top.where(top.isfinite(), 0.0)
        share = (score - top).exp()
        sink_share = (sink - top).exp()
        whole = (share.sum(-1, keepdim=True) + sink_share).where(~empty, 1.0)
        lost = (broken | spoilt) & ~empty
        share = (share / whole).where(~lost | ~visible, math.nan)
        sink_share = (sink_share / whole).where(~lost, math.nan).where(~empty & (sink != -math.inf), 0.0)

    out = weighted_sum(share, value, live).where(~lost, math.nan)
    values = {"out": by_head(out).transpose(1, 2), "lse": by_head(lse.squeeze(-1))}
    if gradients:
        dprob = dout @ value.mT
        delta = (dout * out).sum(-1, keepdim=True)
        dscore = share * (dprob - delta)
        if case.dlse is not None:
            dlse = rows_of_group(case.dlse.double())[..., None].where(~empty, 0.0)
            dscore = dscore + prob * dlse
        dscore = dscore.where(live, 0.0)
        dproduct = scale * (dscore if slope is None else (dscore * slope).where(live, 0.0))
        values |= {
            "dquery": by_head(weighted_sum(dproduct, key, live)).transpose(1, 2),
            "dkey": weighted_sum(dproduct.mT, query, live.mT).transpose(1, 2),
            "dvalue": weighted_sum(share.where(live, 0.0).mT, dout, live.mT).transpose(1, 2),
        }
        if case.bias is not None:
            values["dbias"] = reduce_like(by_head(dscore), case.bias, case)
        if case.sink is not None:
            values["dsink"] = -by_head((sink_share * delta).where(sink_share != 0, 0.0)).sum((0, 2, 3))

    # Magnitudes: the same sums of absolute values. Scores are rounded before they become exponents, so that the
    # relative error of a probability is proportional to the size of its score and of lse.
    query_size, key_size, value_size, dout_size = (_size(tensor) for tensor in (query, key, value, dout))
    prob_size, out_size, lse_size = (_size(tensor) for tensor in (prob, out, lse))
    share_size = prob_size if share is prob else _size(share)
    slope_size = 1.0 if slope is None else _size(slope)
    score_size = (abs(scale) * query_size) @ key_size.mT * slope_size + _size(score)
    lse_made_of = (prob_size * visible * score_size).sum(-1) + lse_size.squeeze(-1)
    if gradients:
        dprob_size = _size(dprob)

    def carry(of_prob: Tensor, of_share: Tensor, of_sink: Tensor, out_made_of: Tensor) -> dict[str, Tensor]:
        weight = of_share * share_size
        result = {"out": by_head(weight @ value_size).transpose(1, 2), "lse": by_head(lse_made_of)}
        if not gradients:
            return result
        made_of_delta = (dout_size * out_made_of).sum(-1, keepdim=True)
        made_of = (weight * dprob_size).addcmul_(share_size, made_of_delta)
        if case.dlse is not None:
            made_of += of_prob * prob_size * _size(dlse)
        made_of *= live
        through_scale = abs(scale) * made_of * slope_size
        result |= {
            "dquery": by_head(through_scale @ key_size).transpose(1, 2),
            "dkey": (through_scale.mT @ query_size).transpose(1, 2),
            "dvalue": (weight.mT @ dout_size).transpose(1, 2),
        }
        if case.bias is not None:
            result["dbias"] = reduce_like(by_head(made_of), case.bias, case)
        if case.sink is not None:
            delta_size = (dout_size * out_size).sum(-1, keepdim=True)
            made_of_sink = _size(sink_share) * (of_sink * delta_size + made_of_delta)
            result["dsink"] = by_head(made_of_sink).sum((0, 2, 3))
        return result

    one = torch.ones_like(lse)
    magnitude, exponent = carry(one, one, one, out_size), {}
    if exponents:
        relative = visible * (score_size + lse_size)
        with_sink = relative if case.sink is None else visible * (score_size + _size(torch.logaddexp(lse, sink)))
        exponent = carry(relative, with_sink, _size(sink) + lse_size, (share_size * with_sink) @ value_size)

    def too_small(size: Tensor) -> Tensor:
        return (size < torch.finfo(torch.float32).smallest_normal) & (size > 0)

    underflow, of_prob = {}, too_small(prob_size)
    of_share = of_prob if share is prob else too_small(share_size)
    of_sink = torch.zeros_like(empty) if case.sink is None else too_small(_size(sink_share))
    if any(bool(part.any()) for part in (of_prob, of_share, of_sink)):
        underflow = carry(of_prob, of_share, of_sink, (of_share * share_size) @ value_size)
        underflow["lse"] = by_head((of_prob * prob_size).sum(-1))

    # A non-finite number that is seen may reach whatever is computed with it: its (batch, key head).
    unsound = broken | ~(dout.isfinite().all(-1) & out.isfinite().all(-1))[..., None]
    sound_keys = key.isfinite().all(-1) & value.isfinite().all(-1)
    unsound = (unsound | (visible & ~sound_keys[..., None, :]).any(-1, True)).any(-2).squeeze(-1)
    unsound_head = unsound.repeat_interleave(group, dim=1)
    tainted = dict.fromkeys(("out", "dquery"), unsound_head[:, None, :, None])
    tainted |= dict.fromkeys(("dkey", "dvalue"), unsound[:, None, :, None]) | {"lse": unsound_head[:, :, None]}
    if case.bias is not None:
        full = unsound_head[:, :, None, None].expand(batch, heads, rows, keys).double()
        tainted["dbias"] = reduce_like(full, case.bias, case) > 0
    if case.sink is not None:
        tainted["dsink"] = unsound_head.any(0)
    return {
        name: Expected(value, magnitude[name], exponent.get(name), underflow.get(name), tainted[name].expand_as(value))
        for name, value in values.items()
    }


def _size(tensor: Tensor) -> Tensor:
    return tensor.abs().nan_to_num_(0.0, 0.0, 0.0)


def framework(case: Case, dtype: torch.dtype, *, gradients: bool = True) -> dict[str, Tensor]:
    """The same results from plain torch operations and autograd in `dtype`.

    Non-finite inputs are replaced by 0 (a bias of -inf: by a hidden key): the results where `reference` is finite do
    not depend on them, and those are all that this is used for.
    """
    batch, heads, key_heads, _, keys = case.sizes
    group = heads // key_heads if key_heads else 1
    softcap = case.options.get("softcap", 0.0)

    def leaf(tensor: Tensor, to: torch.dtype) -> Tensor:
        return tensor.detach().to(to).nan_to_num(0.0, 0.0, 0.0).requires_grad_()

    leaves = {name: leaf(getattr(case, name), dtype) for name in ("query", "key", "value")}
    query, key, value = (leaves[name].transpose(1, 2) for name in leaves)
    score = query @ key.repeat_interleave(group, dim=1).mT * case.scale
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    visible = visibility(case)
    if case.bias is not None:
        leaves["bias"] = leaf(case.bias, torch.promote_types(dtype, case.bias.dtype))
        score = score + broadcast(leaves["bias"], case)
        visible = visible & ~broadcast(case.bias == -math.inf, case)
    sees = visible.any(-1, keepdim=True)
    score = score.masked_fill(~visible & sees, -math.inf)
    if case.sink is None:
        prob = score.softmax(-1)
    else:
        leaves["sink"] = leaf(case.sink, torch.promote_types(dtype, case.sink.dtype))
        sink = leaves["sink"].masked_fill(case.sink == -math.inf, -math.inf)[:, None, None]
        prob = torch.cat([score, sink.expand(*score.shape[:3], 1)], -1).softmax(-1)[..., :-1]
    prob = prob.where(sees, 0.0).to(dtype)
    out = (prob @ value.repeat_interleave(group, dim=1)).transpose(1, 2)
    lse = score.logsumexp(-1).where(sees.squeeze(-1), -math.inf)
    results = {"out": out, "lse": lse}
    if not gradients:
        return {name: tensor.detach() for name, tensor in results.items()}
    outputs, cotangents = [out], [case.dout.to(dtype).nan_to_num(0.0, 0.0, 0.0)]
    if case.dlse is not None:
        outputs.append(lse)
        cotangents.append(case.dlse.to(lse.dtype).nan_to_num(0.0, 0.0, 0.0).where(sees.squeeze(-1), 0.0))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    results |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach() for name, tensor in results.items()}
