"""Direct calls of the operators, whose arguments are known here by name and elsewhere not at all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from flash_dmattn._visibility import Visibility, argument_names, flatten, visibility_fields
from oracle import Case
from torch import Tensor

FORWARD = torch.ops.flash_dmattn.attention_forward.default
BACKWARD = torch.ops.flash_dmattn.attention_backward.default
PLAN = torch.ops.flash_dmattn.attention_plan.default
EVERYTHING = Visibility()


def forward_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    visibility: Visibility = EVERYTHING,
    scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sink: Tensor | None = None,
) -> tuple[object, ...]:
    """What attention_forward takes."""
    return query, key, value, bias, sink, *visibility, scale, softcap, deterministic


def backward_arguments(
    dout: Tensor,
    dlse: Tensor | None,
    results: tuple[Tensor, ...],
    forward: tuple[object, ...],
    needs: tuple[bool, ...] = (True, True, True, True),
) -> tuple[object, ...]:
    """What attention_backward takes, given the forward's arguments and results; dsink need not be spoken of."""
    return dout, dlse, *results, *forward, *needs, *(False,) * (5 - len(needs))


def planned_arguments(query: Tensor, key: Tensor, visibility: Visibility = EVERYTHING) -> tuple[object, ...]:
    """What attention_plan takes."""
    return query, key, *flatten(visibility, visibility_fields(PLAN))


def visibility_of(case: Case) -> Visibility:
    options = case.options
    return Visibility(mask=case.mask, seqlens_k=options.get("seqlens_k"), is_causal=options.get("is_causal", False))


def forward_of(case: Case, visibility: Visibility | None = None) -> tuple[object, ...]:
    """What attention_forward takes for a case."""
    settings = {name: value for name, value in case.options.items() if name in ("scale", "softcap", "deterministic")}
    visibility = visibility_of(case) if visibility is None else visibility
    return forward_arguments(case.query, case.key, case.value, case.bias, visibility, sink=case.sink, **settings)


def backward_of(case: Case, *needs: bool) -> tuple[object, ...]:
    """What attention_backward takes for a case."""
    forward = forward_of(case)
    results = tuple(result.detach() for result in FORWARD(*forward))
    return backward_arguments(case.dout, case.dlse, results, forward, needs)


def changed(op: Callable, arguments: tuple[object, ...], **changes: object) -> list[object]:
    """An operator's arguments with others in place of those named."""
    names = argument_names(op)
    return list((dict(zip(names, arguments, strict=True)) | changes).values())


def recording(op: Callable, name: str | None, seen: list) -> Callable:
    """The operator, which notes the argument of that name, or its result, of every call."""

    def call(*arguments: object) -> object:
        result = op(*arguments)
        seen.append(result if name is None else arguments[argument_names(op).index(name)])
        return result

    return call
