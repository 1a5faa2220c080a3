"""Small cases for what torch does with the operators."""

from __future__ import annotations

from cases import make_case, precise_dtype
from flash_dmattn import attention
from oracle import Case
from torch import Tensor


def small_case(**options: object) -> Case:
    settings = {"batch": 2, "heads": 4, "key_heads": 2, "rows": 5, "keys": 7, "head_dim": 4}
    return make_case(**({"dtype": precise_dtype()} | settings | options))


def leaves_of(case: Case) -> list[Tensor]:
    return [t.requires_grad_() for t in (case.query, case.key, case.value, case.bias, case.sink) if t is not None]


def call(case: Case, **others: object) -> tuple[Tensor, Tensor]:
    settings = {"mask": case.mask, "bias": case.bias, "sink": case.sink, "return_lse": True} | case.options | others
    return attention(case.query, case.key, case.value, **settings)
