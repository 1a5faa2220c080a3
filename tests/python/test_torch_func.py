"""vmap and torch.func over attention: the mapped dimension is folded into the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import assert_near, precise_dtype
from flash_dmattn import attention
from torch import Tensor
from torch.func import grad, vmap

# Without a batching rule torch loops over the mapped dimension, and only says so.
pytestmark = [pytest.mark.filterwarnings("error:.*performance drop"), pytest.mark.devices("cpu", "cuda")]


VMAP_SIZE = 3
IN_DIMS = [  # of query, key, value, mask, bias, seqlens_k
    (0, 0, 0, 0, 0, 0),
    (1, 4, 2, 3, 1, 1),
    (0, None, None, None, None, None),
    (None, 0, 1, None, None, None),
    (None, None, None, 0, None, None),
    (None, None, None, None, 2, None),
    (None, None, None, None, None, 0),
    (2, None, 0, None, 0, None),
]


def mapped_inputs(in_dims: tuple, mask: tuple, bias: tuple, batch: int) -> list[Tensor]:
    sizes = [(batch, 5, 4, 4), (batch, 7, 2, 4), (batch, 7, 2, 4), mask, bias, (batch,)]
    tensors = []
    for size, dim in zip(sizes, in_dims, strict=True):
        if dim is not None:
            dim = min(dim, len(size))
            size = (*size[:dim], VMAP_SIZE, *size[dim:])
        tensors.append(torch.randn(size, dtype=precise_dtype()))
    tensors[3] = tensors[3] > -0.5
    tensors[5] = torch.randint(1, 8, tensors[5].shape, dtype=torch.int32)
    return tensors


def loop(function: Callable, in_dims: tuple, tensors: list[Tensor]) -> list[Tensor]:
    """What vmap stands for."""
    results = []
    for index in range(VMAP_SIZE):
        picked = [t if dim is None else t.select(dim, index) for t, dim in zip(tensors, in_dims, strict=True)]
        results.append(function(*picked))
    return [torch.stack(result) for result in zip(*results, strict=True)]


def mapped_attention(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, mask, bias, seqlens_k = arguments
    return attention(query, key, value, mask=mask, bias=bias, seqlens_k=seqlens_k, return_lse=True)


def clip_dims(in_dims: tuple, mask: tuple, bias: tuple) -> tuple:
    ranks = (4, 4, 4, len(mask), len(bias), 1)
    return tuple(None if dim is None else min(dim, rank) for dim, rank in zip(in_dims, ranks, strict=True))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@pytest.mark.parametrize(
    ("mask", "bias"), [(("B", 4, 5, 7), (1, 2, 1, 7)), ((5, 7), ("B", 1, 7)), ((1, 1, 7), (1, 7))], ids=str
)
def test_vmap_equals_a_loop(batch: int, in_dims: tuple, mask: tuple, bias: tuple) -> None:
    mask, bias = (tuple(batch if size == "B" else size for size in shape) for shape in (mask, bias))
    in_dims = clip_dims(in_dims, mask, bias)
    tensors = mapped_inputs(in_dims, mask, bias, batch)
    results = vmap(mapped_attention, in_dims)(*tensors)
    for result, expected in zip(results, loop(mapped_attention, in_dims, tensors), strict=True):
        assert_near(result, expected)

    def gradients(*arguments: Tensor) -> tuple[Tensor, ...]:
        def loss(*arguments: Tensor) -> Tensor:
            out, lse = mapped_attention(*arguments)
            return out.square().sum() + torch.where(lse.isinf(), 0.0, lse).sum()

        return grad(loss, argnums=(0, 1, 2, 4))(*arguments)

    results = vmap(gradients, in_dims)(*tensors)
    for result, expected in zip(results, loop(gradients, in_dims, tensors), strict=True):
        assert_near(result, expected)


def test_vmapped_lengths_are_one_a_batch_element() -> None:
    """As without vmap: they are not broadcast as a mask is."""
    query, seqlens_k = torch.randn(VMAP_SIZE, 2, 5, 4, 8, dtype=precise_dtype()), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match="seqlens_k must"):
        vmap(lambda q: attention(q, q, q, seqlens_k=seqlens_k))(query)


def test_vmap_within_grad() -> None:
    in_dims = (0, None, 0, None, None, None)
    tensors = mapped_inputs(in_dims, (5, 7), (1, 2, 1, 7), 2)

    def loss(map_function: Callable, *arguments: Tensor) -> Tensor:
        return map_function(*arguments)[0].square().sum()

    mapped = grad(lambda *t: loss(vmap(mapped_attention, in_dims), *t), argnums=(0, 1, 2, 4))(*tensors)
    looped = grad(lambda *t: loss(lambda *u: loop(mapped_attention, in_dims, u), *t), argnums=(0, 1, 2, 4))(*tensors)
    for result, expected in zip(mapped, looped, strict=True):
        assert_near(result, expected)


def test_vmap_within_vmap() -> None:
    query = torch.randn(2, 3, 1, 5, 4, 8, dtype=precise_dtype())
    mapped = vmap(vmap(lambda q: attention(q, q, q, is_causal=True)))(query)
    flat = query.reshape(6, 5, 4, 8)
    assert_near(mapped, attention(flat, flat, flat, is_causal=True).reshape(query.shape))


def test_vmapped_bias_gradient_is_summed_in_float32() -> None:
    """A half precision bias shared by the batch: its gradient is rounded once, not once for each batch element."""
    query, key, value = (torch.randn(16, 8, 2, 16).bfloat16() for _ in range(3))
    bias = torch.randn(1, 1, 8, 8).bfloat16()
    scale = torch.randn(VMAP_SIZE, 1, 1, 1, 1).bfloat16()

    def loss(bias: Tensor, scale: Tensor) -> Tensor:
        return (attention(query, key, value, bias=bias) * scale).sum(dtype=torch.float32)

    mapped = vmap(grad(loss), (None, 0))(bias, scale)
    looped = torch.stack([grad(loss)(bias, one) for one in scale])
    exact = torch.stack([grad(loss)(bias.float(), one) for one in scale])
    torch.testing.assert_close(mapped.float(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(mapped, looped, rtol=2**-7, atol=1e-6)


def test_second_derivative_within_torch_func_is_refused() -> None:
    def slope(query: Tensor) -> Tensor:
        return grad(lambda q: attention(q, q.detach(), q.detach()).square().sum())(query).sum()

    with pytest.raises(RuntimeError, match="no second derivative"):
        grad(slope)(torch.randn(1, 5, 4, 8, dtype=precise_dtype()))
