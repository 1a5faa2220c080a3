"""Memory stays linear in the lengths, no call keeps any, and offsets beyond 2^31 elements reach the right bytes."""

from __future__ import annotations

import ctypes
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


VALUE_DIMS = """
import sys
import torch
import flash_dmattn

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

def run(length, head_dim, value_dim, rows=64):
    query, key = torch.randn(1, rows, 1, head_dim), torch.randn(1, length, 1, head_dim)
    value, dout = torch.randn(1, length, 1, value_dim), torch.randn(1, rows, 1, value_dim)
    # The gradient of the narrower one, whose sums take little.
    narrow = (value if value_dim < head_dim else key).requires_grad_()
    before = peak()
    out = flash_dmattn.attention(query, key, value)
    (gradient,) = torch.autograd.grad(out, narrow, dout)
    assert out.isfinite().all() and gradient.isfinite().all()
    return peak() - before - gradient.nbytes

torch.set_num_threads(2)
sizes = int(sys.argv[1]), int(sys.argv[2])
run(512, *sizes)
print(run(65536, *sizes))
"""


@linux_only
@pytest.mark.parametrize("head_dim, value_dim", [(256, 8), (8, 256)])
def test_other_value_dims_are_not_padded(head_dim: int, value_dim: int) -> None:
    """Of keys and values one has 64 MiB and the other 2, which would be 64, too, as wide as the first."""
    arguments = [sys.executable, "-c", VALUE_DIMS, str(head_dim), str(value_dim)]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    taken = int(result.stdout) / 2**20
    assert taken < 24, f"{taken:.1f} MiB beyond inputs and gradients"


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


EVERY_OPERATOR = """
import ctypes
import gc
import torch
import flash_dmattn

class Allocated(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in _names]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Allocated

def allocated():
    info = mallinfo2()
    return info.uordblks + info.hblkhd  # bytes that were asked for and not given back

torch.set_num_threads(1)
operators = torch.ops.flash_dmattn
query, key = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 1, 8)
mask, bias = torch.rand(1, 1, 6, 6) < 0.5, torch.randn(1, 2, 1, 6)
lengths, scores = torch.tensor([5], dtype=torch.int32), torch.randn(1, 1, 6)
bounds = torch.zeros(1, 1, 6, dtype=torch.int32), torch.full((1, 1, 6), 6, dtype=torch.int32)
lists = torch.zeros(1, 1, 6, 3, dtype=torch.int32), torch.ones(1, 1, 6, dtype=torch.int32)
sink = torch.randn(2)
attended = key, bias, sink, mask, lengths, *bounds, *lists, None, True, 0, 2, None, 0.0, False
out, lse, row_stats = operators.attention_forward(query, key, *attended)
dout, dlse = torch.randn(1, 6, 2, 8), torch.randn(1, 2, 6)
visibility = mask, lengths, *bounds, *lists, True, 0, 2
kept = torch.full((1, 1, 3), -1, dtype=torch.int32), torch.zeros(1, 1, 3)
new = torch.randn(1, 1, 2), torch.tensor([6], dtype=torch.int32)
# How each is called, and how it is refused.
wrong = torch.zeros(1, 6, 1, 4)
calls = {
    "attention_forward": ((query, key, *attended), (query, wrong, *attended)),
    "attention_backward": (
        (dout, dlse, out, lse, row_stats, query, key, *attended, True, True, True, True, True),
        (dout, dlse, out, lse[:, :1], row_stats, query, key, *attended, True, True, True, True, True),
    ),
    "attention_plan": ((query, key, *visibility), (query, wrong, *visibility)),
    "select_keys": ((scores, 2, 6, True, None, lengths), (scores, -2, 6, True, None, lengths)),
    "append_kept_keys": ((*kept, *new), (*kept, new[0], lengths.expand(2))),
    "mask_intervals": ((mask, True), (scores, True)),
    "plan_report": ((query, key, *visibility, False), (query, wrong, *visibility, False)),
    "plan_chunks": ((query, key, *visibility, 0, 0), (query, key, *visibility, 0, 2)),
    "cpu_info": ((), None),
    "cuda_info": ((), None),
    "cuda_kernels": ((9, 0), (-1, 0)),
    "cuda_plan_bytes": ((query, key, *visibility), (query, wrong, *visibility)),
}
every = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("flash_dmattn::")}
assert every == {f"flash_dmattn::{name}" for name in calls}, every

def call(name, arguments):
    try:
        getattr(operators, name)(*arguments)
    except ValueError:
        return False
    return True

for name, (right, refused) in calls.items():
    assert call(name, right) or name == "cuda_plan_bytes", name  # which a build without CUDA refuses
    assert refused is None or not call(name, refused), name
    for arguments in (right, refused):
        if arguments is None:
            continue
        for _ in range(200):
            call(name, arguments)
        gc.collect()
        # A call that leaks does so in both halves. What is allocated once, as by a thread of another library that a
        # busy machine lets begin late, is found in one of them.
        left = []
        for _ in range(2):
            before = allocated()
            for _ in range(5000):
                call(name, arguments)
            gc.collect()
            left.append(allocated() - before)
        print(name, min(left))
"""


@linux_only
def test_no_operator_keeps_memory() -> None:
    """Right calls and refused ones: what 5,000 of them leave allocated, each time that they are made."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("the C library does not tell what is allocated")
    result = subprocess.run([sys.executable, "-c", EVERY_OPERATOR], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    kept = [line.split() for line in result.stdout.splitlines()]
    assert len(kept) == 22
    assert all(int(size) < 5000 for _, size in kept), f"bytes kept by 5,000 calls: {kept}"


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
