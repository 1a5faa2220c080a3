"""What calls make of faults that are not theirs: captures that are given up, streams that end early, a GPU that failed.

Each in a process of its own: what PyTorch itself keeps of a fault is no other test's concern.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from launching import own_environment, run_code

pytestmark = pytest.mark.devices("cuda")

# work() is a selection, a forward and a backward that take the GPU some milliseconds, the same every time.
WORK = """
import sys
import torch
from flash_dmattn import attention, plan_report, select_keys

torch.manual_seed(0)
options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
LEAVES = [torch.randn(1, 4096, heads, 64, **options) for heads in (8, 2, 2)]
LEAVES.append(torch.randn(1, 2, 4096, **options))
DOUT = torch.randn(1, 4096, 8, 64, **{**options, "requires_grad": False})

def work():
    leaves = [leaf.detach().requires_grad_() for leaf in LEAVES]  # whose gradients no other stream has been used for
    *tensors, bias = leaves
    mask = select_keys(bias, 512, seqlen_q=4096)
    out, lse = attention(*tensors, mask=mask, bias=bias, is_causal=True, return_lse=True, deterministic=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, DOUT)]

def same(results, others):
    return all(map(torch.equal, results, others))

expected = work()
torch.cuda.synchronize()
"""

GIVEN_UP = """
class GivenUp(Exception):
    pass

for _ in range(3):
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            work()
            raise GivenUp
    except GivenUp:
        pass
    assert same(work(), expected)
"""

# What waits for the GPU ends a capture: reports, whose answer is for the host.
WAITED = """
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        work()
        query = LEAVES[0]
        mask = torch.ones(4096, 4096, dtype=torch.bool, device="cuda")
        try:
            plan_report(query, LEAVES[1], mask=mask)
        except RuntimeError as error:
            print(error)
        else:
            sys.exit("a report was made while nothing ran")
        try:
            work()
        except RuntimeError as error:
            print(error)
        else:
            sys.exit("a capture that had ended took a call")
except RuntimeError as error:  # torch's own, of the capture's end
    print(error)
else:
    sys.exit("the capture went on")
with torch.cuda.stream(torch.cuda.Stream()):
    assert same(work(), expected)
    torch.cuda.synchronize()
"""

DESTROYED = """
from torch.cuda import cudart

runtime = cudart()
created = torch.zeros(1, dtype=torch.int64)
assert int(runtime.cudaStreamCreate(created.data_ptr())) == 0
handle = created.item()
with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
    torch.cuda._sleep(100_000_000)
    results = work()
    busy = not torch.cuda.current_stream().query()
assert int(runtime.cudaStreamDestroy(handle)) == 0
assert busy, "nothing was left to be cut off"
torch.cuda.synchronize()
assert same(results, expected)
"""

FAILED = """
def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    sys.exit("no error")

mask = torch.ones(4096, 4096, dtype=torch.bool, device="cuda")
torch._assert_async(torch.zeros(1, device="cuda"))
try:
    work()  # behind the failure, which is not known yet, or is
except RuntimeError:
    pass
print(error_of(torch.cuda.synchronize))
query, key, value, bias = LEAVES
print(error_of(lambda: attention(query, key, value, is_causal=True)))
print(error_of(lambda: select_keys(bias, 512)))
print(error_of(lambda: plan_report(query, key, mask=mask)))
# The CPU's kernels are not concerned.
print(bool(attention(*(torch.ones(1, 3, 1, 8) for _ in range(3))).isfinite().all()))
"""


def test_a_capture_that_is_given_up_leaves_nothing_behind() -> None:
    run_code(WORK + GIVEN_UP)


def test_a_capture_that_has_failed_is_an_error() -> None:
    report, call, _ = run_code(WORK + WAITED).split("\n", 2)
    assert report.startswith("CUDA failed: operation not permitted when stream is capturing")
    assert "capture" in call


def test_work_of_a_stream_that_is_destroyed_is_done() -> None:
    run_code(WORK + DESTROYED)


def test_a_gpu_that_has_failed_is_an_error() -> None:
    printed = run_code(WORK + FAILED)
    assert printed.count("device-side assert triggered") == 4, printed
    assert printed.endswith("True\n")


def test_a_kill_during_calls_is_nothing_to_other_processes() -> None:
    """Of two processes that share the GPU one is killed while its work runs."""
    endless = 'print("running", flush=True)\nwhile True:\n    work()\n'
    command = [sys.executable, "-c", WORK + endless]
    with subprocess.Popen(command, env=own_environment(), stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "running\n"
            kill = f"""
import os, signal
assert all(same(work(), expected) for _ in range(5))
os.kill({other.pid}, signal.SIGKILL)
assert all(same(work(), expected) for _ in range(20))
"""
            run_code(WORK + kill)
        finally:
            other.kill()
    assert other.returncode == -signal.SIGKILL
