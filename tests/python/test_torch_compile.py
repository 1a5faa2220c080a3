"""torch.compile, torch.export and meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cases import assert_near
from flash_dmattn import attention
from oracle import Case
from torch import Tensor
from torch_cases import call, leaves_of, small_case

pytestmark = pytest.mark.devices("cpu", "cuda")


class CountingBackend:
    """Counts how often torch.compile compiles."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, inputs)


@pytest.fixture
def backend() -> Iterator[CountingBackend]:
    torch._dynamo.reset()
    yield CountingBackend()
    torch._dynamo.reset()


def with_gradients(function: Callable[[Case], tuple[Tensor, Tensor]], case: Case) -> list[Tensor]:
    leaves = leaves_of(case)
    out, lse = function(case)
    loss = (out * case.dout).sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("mask", ["full", "row", "key", "per_key", "one"])
def test_compiles_once_for_all_lengths(backend: CountingBackend, mask: str) -> None:
    @torch.compile(fullgraph=True, backend=backend)
    def compiled(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor, seqlens_k: Tensor):
        settings = {"mask": mask, "bias": bias, "seqlens_k": seqlens_k, "is_causal": True, "return_lse": True}
        return attention(query, key, value, **settings)

    sizes = [(2, 5, 7), (3, 6, 9), (4, 7, 8), (5, 9, 16), (6, 4, 4), (2, 3, 17)]
    for batch, rows, keys in sizes:
        shapes = {"full": (batch, 4, rows, keys), "row": (1, 1, rows, 1), "key": (batch, 1, 1, keys)}
        shape = (shapes | {"per_key": (batch, 2, keys), "one": (1, 1, 1, 1)})[mask]
        bias = (1, 2, rows, keys)
        seqlens_k = torch.randint(1, keys, (batch,), dtype=torch.int32)
        case = small_case(batch=batch, rows=rows, keys=keys, mask=shape, bias=bias, density=0.8)

        def run(case: Case, function: Callable, seqlens_k: Tensor = seqlens_k) -> tuple[Tensor, Tensor]:
            return function(case.query, case.key, case.value, case.mask, case.bias, seqlens_k)

        def eager(*arguments: Tensor) -> tuple[Tensor, Tensor]:
            names = ("mask", "bias", "seqlens_k")
            named = dict(zip(names, arguments[3:], strict=True))
            return attention(*arguments[:3], **named, is_causal=True, return_lse=True)

        results = with_gradients(lambda case, run=run: run(case, compiled), case)
        expected = with_gradients(lambda case, run=run, eager=eager: run(case, eager), case)
        for result, other in zip(results, expected, strict=True):
            assert_near(result, other)
    assert backend.count <= 2  # the first with fixed sizes, the second for every size


def test_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    case = small_case(bias=(1, 2, 5, 7), is_causal=True)
    compiled = torch.compile(lambda query, key, value, bias: call(Case(query, key, value, case.dout, bias=bias)))

    def run(case: Case) -> tuple[Tensor, Tensor]:
        return compiled(case.query * 2, case.key, case.value, case.bias.exp())

    def eager(case: Case) -> tuple[Tensor, Tensor]:
        return call(Case(case.query * 2, case.key, case.value, case.dout, bias=case.bias.exp()))

    for result, other in zip(with_gradients(run, case), with_gradients(eager, case), strict=True):
        assert_near(result, other)
    torch._dynamo.reset()


def test_compiled_errors_stay_value_errors(backend: CountingBackend) -> None:
    case = small_case()
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    with pytest.raises(ValueError, match=r"key must have query's head dim; got key \(2, 7, 2, 3\)"):
        compiled(case.query, case.key[..., :3], case.value)


def test_compiled_follows_the_deterministic_flag(backend: CountingBackend) -> None:
    case = small_case()
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    compiled(case.query, case.key, case.value)
    torch.use_deterministic_algorithms(True)
    try:
        compiled(case.query, case.key, case.value)
    finally:
        torch.use_deterministic_algorithms(False)
    assert backend.count == 2  # one graph for each value of the flag


@pytest.mark.devices("cpu")
def test_exports_with_a_dynamic_length() -> None:
    class Model(torch.nn.Module):
        def forward(self, query: Tensor, mask: Tensor) -> Tensor:
            return attention(query, query, query, mask=mask.expand(-1, 4, query.shape[1], query.shape[1]))

    length = torch.export.Dim("length", min=2, max=64)
    shapes = ({1: length}, {3: length})
    example = (torch.randn(2, 5, 4, 8).double(), torch.rand(2, 1, 1, 5) < 0.7)
    program = torch.export.export(Model(), example, dynamic_shapes=shapes)
    other = (torch.randn(2, 9, 4, 8).double(), torch.rand(2, 1, 1, 9) < 0.7)
    assert_near(program.module()(*other), Model()(*other))


def test_meta_tensors_give_shapes() -> None:
    out, lse = attention(*(torch.empty(2, 3, 4, 8, device="meta", dtype=torch.half),) * 3, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == ((2, 3, 4, 8), torch.half, "meta")
    assert (lse.shape, lse.dtype) == ((2, 4, 3), torch.float32)
