"""Memory stays linear in the lengths, and offsets beyond 2^31 elements reach the right bytes."""

from __future__ import annotations

import mmap
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cases import make_case, run_library
from compare import assert_case_close

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

# Runs in a process of its own, because a peak never goes down again.
EXPANDED_MASK = """
import torch
import flash_dmattn

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

def run(length, kept, heads=2, head_dim=32):
    make = lambda heads: torch.randn(1, length, heads, head_dim, requires_grad=True)
    query, key, value = make(heads), make(1), make(1)
    dout = torch.randn(1, length, heads, head_dim)
    per_key = torch.zeros(1, 1, 1, length, dtype=torch.bool)
    per_key[..., torch.randperm(length)[:kept]] = True
    mask = per_key.expand(1, heads, length, length)
    before = peak()
    out, lse = flash_dmattn.attention(query, key, value, mask=mask, return_lse=True)
    forward = peak() - before - sum(tensor.nbytes for tensor in (out, lse))
    gradients = torch.autograd.grad(out, (query, key, value), dout)
    backward = peak() - before - sum(tensor.nbytes for tensor in (out, lse, *gradients))
    return forward, backward, out

torch.set_num_threads(2)
run(512, 64)
forward, backward, out = run(65536, 512)
assert out.isfinite().all() and out.any()
print(forward, backward)
"""


@linux_only
def test_expanded_mask_takes_a_few_megabytes() -> None:
    """(1, 1, 1, 65536) expanded to (1, 2, 65536, 65536): 8 GiB if anything materialised it."""
    result = subprocess.run([sys.executable, "-c", EXPANDED_MASK], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    forward, backward = (int(number) / 2**20 for number in result.stdout.split())
    assert forward < 8, f"{forward:.1f} MiB beyond inputs and results"
    sums = 2 * 4 * 65536 * 32 * 4 / 2**20  # dK and dV in fp32, twice for each of two workers
    assert backward < sums + 8, f"{backward:.1f} MiB beyond inputs, results and gradients"


DYNAMIC_MASK = """
import sys
import torch
import flash_dmattn

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

def run(length, window=1024, head_dim=32):
    make = lambda: torch.randn(1, length, 1, head_dim, requires_grad=True)
    query, key, value = make(), make(), make()
    bias = torch.randn(1, 1, length, requires_grad=True)
    dout = torch.randn(1, length, 1, head_dim)
    before = peak()
    out = flash_dmattn.dynamic_mask_attention(query, key, value, bias, window)
    gradients = torch.autograd.grad(out, (query, key, value, bias), dout)
    assert all(gradient.isfinite().all() for gradient in gradients)
    return peak() - before

torch.set_num_threads(2)
run(2048)
print(run(int(sys.argv[1])))
"""


@linux_only
def test_dynamic_mask_memory_grows_linearly() -> None:
    """Selection, forward and backward: what they take beyond their inputs, at three lengths."""
    taken = []
    for length in (65536, 131072, 262144):
        result = subprocess.run(
            [sys.executable, "-c", DYNAMIC_MASK, str(length)], capture_output=True, text=True, timeout=240
        )
        assert result.returncode == 0, result.stderr
        taken.append(int(result.stdout) / length)
    # Results, gradients and two sums of dK and dV are some 1050 bytes a key; a mask would be `length` bytes.
    assert max(taken) < 1500, f"{taken} bytes a key"
    assert taken[2] < 1.2 * taken[0], f"{taken} bytes a key"


PREPARED_MASK = """
import torch
import flash_dmattn

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

def top_mask(length):
    mask = torch.zeros(1, 1, length, length, dtype=torch.bool)
    mask[0, 0] = True
    return mask.tril_().triu_(-500)

torch.set_num_threads(2)
flash_dmattn.prepare_mask(top_mask(512))
mask = top_mask(8192)
before = peak()
prepared = flash_dmattn.prepare_mask(mask)
assert prepared.kind == "intervals", prepared
print(peak() - before)
"""


@linux_only
def test_preparing_a_mask_takes_bytes_per_key() -> None:
    """8192 x 8192, 64 MiB: its intervals are 64 KiB."""
    result = subprocess.run([sys.executable, "-c", PREPARED_MASK], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    taken = int(result.stdout) / 2**20
    assert taken < 4, f"{taken:.1f} MiB beside the mask"


def sparse_memory(length: int) -> memoryview:
    """Address space of which only what is touched becomes memory."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    return memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve))


def far_apart(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values with the entries of `dim` more than 2^31 elements apart."""
    stride = (1 << 31) + 24
    strides = list(tensor.contiguous().stride())
    strides[dim] = stride
    elements = stride * (tensor.size(dim) - 1) + tensor.numel()
    storage = torch.frombuffer(sparse_memory(elements * tensor.element_size()), dtype=tensor.dtype)
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


@linux_only
@pytest.mark.skipif(sys.maxsize < 2**33, reason="needs a 64-bit address space")
@pytest.mark.parametrize(
    "name, dim",
    [("query", 0), ("query", 1), ("key", 1), ("key", 2), ("value", 0), ("value", 1), ("dout", 1)]
    + [("mask", dim) for dim in range(4)]
    + [("bias", dim) for dim in range(4)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_offsets_beyond_31_bits(dtype: torch.dtype, name: str, dim: int) -> None:
    shape = (2, 2, 3, 5)
    case = make_case(2, 2, 2, 3, 5, 8, dtype=dtype, mask=shape, bias=shape, density=0.7, is_causal=True)
    far = replace(case, **{name: far_apart(getattr(case, name), dim)})
    assert_case_close(case, run_library(far))
