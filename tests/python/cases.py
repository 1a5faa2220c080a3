"""Makes attention calls for tests and runs them through the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flash_dmattn
import torch
from oracle import Case, reduce_like, visibility
from torch import Tensor
from torch.utils import _pytree as pytree

NAN, INF = math.nan, math.inf
_INPUTS = ("query", "key", "value", "bias", "sink")


def make_case(
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    rows: int = 33,
    keys: int = 47,
    head_dim: int = 32,
    *,
    value_dim: int | None = None,
    dtype: torch.dtype | None = None,
    mask: tuple[int, ...] | None = None,
    bias: tuple[int, ...] | None = None,
    bias_dtype: torch.dtype | None = None,
    with_sink: bool = False,
    sink_dtype: torch.dtype | None = None,
    density: float = 0.5,
    with_dlse: bool = False,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Normal inputs, the same on every device; `mask` and `bias` are shapes, `density` is the mask's share of True."""
    dtype = dtype or default_dtype()
    value_dim = head_dim if value_dim is None else value_dim
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    case = Case(
        query=normal(batch, rows, heads, head_dim).to(dtype),
        key=normal(batch, keys, key_heads, head_dim).to(dtype),
        value=normal(batch, keys, key_heads, value_dim).to(dtype),
        dout=normal(batch, rows, heads, value_dim).to(dtype),
        mask=None if mask is None else torch.rand(mask, generator=generator, device="cpu") < density,
        bias=None if bias is None else normal(*bias).to(bias_dtype or dtype),
        dlse=normal(batch, heads, rows).to(lse_dtype(dtype)) if with_dlse else None,
        sink=normal(heads).to(sink_dtype or dtype) if with_sink else None,
        options=options,
    )
    return Case(**to_device(vars(case)))


def to_device(tree: Any) -> Any:
    """The same with every tensor on the device that the test runs on."""
    device = torch.get_default_device()
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def dtypes() -> list[torch.dtype]:
    """Those that the device's kernels take."""
    low = [torch.bfloat16, torch.float16]
    return [torch.float32, *low, torch.float64] if torch.get_default_device().type == "cpu" else low


def default_dtype() -> torch.dtype:
    return dtypes()[0]


def precise_dtype() -> torch.dtype:
    return dtypes()[-1] if torch.float64 in dtypes() else torch.bfloat16


def assert_near(result: Tensor, expected: Tensor) -> None:
    """For two ways to compute the same, or float64 and an exact result: equal up to rounding."""
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(result.dtype, 3e-2)
    largest = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0
    torch.testing.assert_close(result, expected.to(result.dtype), rtol=tolerance, atol=tolerance * max(1.0, largest))


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def run_library(case: Case, needs: tuple[str, ...] = _INPUTS, **options: Any) -> dict[str, Tensor]:
    """out, lse and, for every input in `needs` that the case has, its gradient, named as in `oracle.reference`."""
    leaves = {name: getattr(case, name) for name in _INPUTS}
    leaves = {name: t.detach().requires_grad_(name in needs) for name, t in leaves.items() if t is not None}
    options = {**case.options, **options}
    out, lse = flash_dmattn.attention(**leaves, mask=case.mask, return_lse=True, **options)
    wanted = [name for name in needs if name in leaves]
    results = {"out": out.detach(), "lse": lse.detach()}
    if wanted:
        outputs, cotangents = ([out], [case.dout]) if case.dlse is None else ([out, lse], [case.dout, case.dlse])
        gradients = torch.autograd.grad(outputs, [leaves[name] for name in wanted], cotangents)
        results |= {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
    return results


def assert_hidden_products_do_not_matter(case: Case, run: Callable[[Case], dict[str, Tensor]]) -> None:
    """Even rows are made to see even keys and odd rows odd keys. Products of huge values of even keys and of huge
    gradients of odd rows are infinite, but nobody sees them. `run`: results of a case, as of run_library."""
    rows, keys = (torch.arange(tensor.shape[1], device=tensor.device) for tensor in (case.query, case.key))
    mask = (rows[:, None] % 2 == keys % 2)[None, None]
    dout = torch.where((rows % 2 == 1)[:, None, None], case.dout * 1e30, case.dout)
    values = (torch.where((keys % 2 == 0)[:, None, None], case.value * by, case.value) for by in (1e30, 0.0))
    got, expected = (run(replace(case, mask=mask, dout=dout, value=value)) for value in values)
    for name, tensor in got.items():
        odd = (..., slice(1, None, 2)) if name in ("lse", "dbias") else (slice(None), slice(1, None, 2))
        assert tensor[odd].isfinite().all(), name
        assert_near(tensor[odd], expected[name][odd])


def bits(tensor: Tensor) -> Tensor:
    """Integers that are equal exactly if the elements' bits are."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name in left:
        assert torch.equal(bits(left[name]), bits(right[name])), f"{name} differs in its bits"


def relayout(tensor: Tensor, layout: str) -> Tensor:
    """The same values behind other strides (for "expanded" the values of index 0 in the first dimension)."""
    if layout == "contiguous":
        return tensor
    if layout == "transposed":  # in 4-D as if stored (B, heads, S, D)
        dims = (1, 2) if tensor.dim() == 4 else (-2, -1)
        return tensor.transpose(*dims).contiguous().transpose(*dims)
    if layout == "padded":  # rows of an odd pitch
        return torch.cat([tensor, tensor.new_zeros(*tensor.shape[:-1], 3)], -1)[..., : tensor.size(-1)]
    if layout == "offset":  # storage that begins one element later: aligned to nothing but the element
        storage = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])
        return storage[1:].view(tensor.shape)
    if layout == "expanded":
        return tensor[:1].contiguous().expand(tensor.shape)
    if layout == "strided":  # every second element of the last dimension
        return tensor.repeat_interleave(2, -1)[..., ::2]
    raise ValueError(f"unknown layout {layout!r}")


def poison_unseen(case: Case, poison: float = NAN) -> Case:
    """Overwrites everything that must touch no result: hidden keys and biases, and the rows that see no key."""
    batch, heads, key_heads, _, keys = case.sizes
    visible = visibility(case)
    seen = visible.any(2).reshape(batch, key_heads, heads // key_heads, keys).any(2).transpose(1, 2)[..., None]
    row_sees = visible.any(3)
    hidden = row_sees.transpose(1, 2)[..., None].logical_not()
    bias = case.bias
    if bias is not None:
        bias = bias.masked_fill(reduce_like(visible.double(), bias, case) == 0, poison)
    return replace(
        case,
        query=case.query.masked_fill(hidden, poison),
        key=case.key.masked_fill(~seen, poison),
        value=case.value.masked_fill(~seen, poison),
        dout=case.dout.masked_fill(hidden, poison),
        dlse=None if case.dlse is None else case.dlse.masked_fill(~row_sees, poison),
        bias=bias,
    )
