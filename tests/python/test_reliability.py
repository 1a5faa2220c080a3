"""What happens to processes that run for long: forks, threads, signals, memory that runs out, a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from flash_dmattn import attention, dynamic_mask_attention
from launching import heed_interrupts, own_environment, run_code
from torch.utils.data import DataLoader, Dataset

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from language_model.model import ModelConfig  # noqa: E402
from language_model.text import load_text  # noqa: E402
from language_model.training import Run, TrainingConfig, train  # noqa: E402

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork, timers and limits as on Linux")


# work() is a forward and a backward of a few milliseconds, the same every time.
WORK = """
import os, signal, subprocess, sys, threading
import torch
import flash_dmattn

torch.manual_seed(0)
LENGTH = int(os.environ.get("LENGTH", 300))
ARGUMENTS = [torch.randn(2, LENGTH, heads, 32, requires_grad=True) for heads in (4, 2, 2)]
ARGUMENTS.append(torch.randn(2, 2, LENGTH, requires_grad=True))

def work():
    out = flash_dmattn.dynamic_mask_attention(*ARGUMENTS, 64, deterministic=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), ARGUMENTS)]

def same(results, expected):
    return all(map(torch.equal, results, expected))
"""

FORKS = """
torch.set_num_threads(2)
expected = work()

def child_agrees():
    child = os.fork()
    if child == 0:
        status = 2
        try:
            signal.alarm(60)  # ends a child that waits for threads which it does not have
            torch.set_num_threads(1)
            status = 0 if same(work(), expected) else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert child_agrees() == 0, "after a call"
inside = [threading.Event() for _ in range(2)]
stop = threading.Event()

def attend(running):
    query = torch.randn(1, 2000, 8, 64)
    while not stop.is_set():
        running.set()
        flash_dmattn.attention(query, query, query)

threads = [threading.Thread(target=attend, args=(running,)) for running in inside]
for thread in threads:
    thread.start()
for running in inside:
    running.wait()
codes = [child_agrees() for _ in range(5)]
stop.set()
for thread in threads:
    thread.join()
assert codes == [0] * 5, f"while calls run: {codes}"
assert same(work(), expected), "in the parent, afterwards"
"""


@linux_only
def test_forked_children_attend_on_one_thread() -> None:
    """After a call of the parent, and while its other threads are inside of calls. Where there are GPUs, autograd's
    threads for them would refuse a fork after the first backward."""
    run_code(WORK + FORKS, OMP_NUM_THREADS="2", CUDA_VISIBLE_DEVICES="")


class Attended(Dataset):
    """Results of a forward and a backward, made by the worker that is asked."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        leaves = [torch.randn(1, 60, 2, 16, generator=generator).requires_grad_() for _ in range(3)]
        out = attention(*leaves, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def attend_in_forked_workers() -> None:
    examples = Attended()
    loader = DataLoader(examples, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for index, results in enumerate(loader):
        for result, expected in zip(results, examples[index], strict=True):
            assert torch.equal(result, expected)


@linux_only
def test_forked_workers_of_a_data_loader_attend() -> None:
    """In a process of its own: autograd refuses forks of one that has compiled a backward, as other tests do."""
    run_code("import test_reliability; test_reliability.attend_in_forked_workers()")


def call_of_kind(kind: int) -> list[torch.Tensor]:
    """A forward, mostly with a backward, that takes another way through the library for every kind."""
    generator = torch.Generator().manual_seed(kind)
    query, key, value = (
        torch.randn(2, 1 if kind == 3 and heads == 4 else 160, heads, 32, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    )
    scores = torch.randn(2, 2, 160, generator=generator, requires_grad=True)
    leaves = [query, key, value]
    if kind == 0:
        mask = torch.rand(2, 1, 160, 160, generator=generator) < 0.3
        out = attention(*leaves, mask=mask, bias=scores, deterministic=True)
        leaves.append(scores)
    elif kind == 1:
        leaves.append(scores)
        out = dynamic_mask_attention(*leaves, 24, deterministic=True)
    else:  # all keys, of many rows or of one
        out = attention(*leaves, is_causal=True, deterministic=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def test_threads_get_the_bits_of_quiet_calls() -> None:
    """Four callers at once, each with another number of threads for every call, while one more changes it, too."""
    torch.set_num_threads(1)
    expected = [call_of_kind(kind) for kind in range(4)]
    stop = threading.Event()

    def change_the_number() -> None:
        while not stop.is_set():
            for threads in (1, 3, 2):
                torch.set_num_threads(threads)
                time.sleep(0.001)

    def call_often(kind: int) -> None:
        for round_ in range(12):
            torch.set_num_threads(1 + (kind + round_) % 3)
            for result, quiet in zip(call_of_kind(kind), expected[kind], strict=True):
                assert torch.equal(result, quiet), (kind, round_)

    changer = threading.Thread(target=change_the_number)
    changer.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            for caller in [pool.submit(call_often, kind) for kind in range(4)]:
                caller.result()
    finally:
        stop.set()
        changer.join()


SIGNALS = """
torch.set_num_threads(2)
expected = work()
fired = {signal.SIGALRM: 0, signal.SIGCHLD: 0}

def count(number, frame):
    fired[number] += 1

for number in fired:
    signal.signal(number, count)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for _ in range(20):
    child = subprocess.Popen(["true"])
    assert same(work(), expected), "while handlers run"
    child.wait()
signal.setitimer(signal.ITIMER_REAL, 0)
assert min(fired.values()) >= 10, fired

calls = calls_before = 0

def interrupt():
    global calls_before
    while calls < 3:  # calls are under way
        pass
    calls_before = calls
    os.kill(os.getpid(), signal.SIGINT)

for _ in range(5):
    calls = 0
    sender = threading.Thread(target=interrupt)
    try:
        sender.start()
        while True:
            calls += 1
            work()
    except KeyboardInterrupt:
        pass
    sender.join()
    # The call that ran then, and at most one more that began before the signal was sent.
    assert calls <= calls_before + 1, (calls, calls_before)
    assert same(work(), expected), "after an interrupt"
"""


@linux_only
def test_signals_do_not_disturb_calls() -> None:
    """Timers and children that end, with handlers, leave results alone; SIGINT is raised once the call has returned."""
    run_code(WORK + SIGNALS)


MEMORY = """
import resource

torch.set_num_threads(1)
expected = work()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
messages = set()
for allowed in range(0, 64 << 20, 128 << 10):  # bytes more than there are
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    try:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (now + allowed, hard))
            results = work()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        assert same(results, expected)
        break
    except (RuntimeError, MemoryError) as error:
        messages.add(f"{type(error).__name__}: {error}")
    assert same(work(), expected), "after " + str(messages)
else:
    raise AssertionError("no memory is enough")
print("\\n".join(messages))
"""


@linux_only
def test_memory_that_runs_out_in_an_operator_is_an_error() -> None:
    """Whichever allocation fails, of results, scratch memory or gradients; the next call works."""
    # Whatever is not small is mapped, and given back at once: else old blocks are used again and nothing fails. Small
    # blocks are in stock: torch 2.11 logs an operator's error with a backtrace of 60 KB, and crashes without memory
    # for that.
    mapped = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": "0"}
    stock = {"MALLOC_TOP_PAD_": str(256 << 10), "PYTHONMALLOC": "malloc"}
    printed = run_code(WORK + MEMORY, LENGTH="2400", **mapped, **stock)
    messages = set(printed.splitlines())
    ours = {message for message in messages if message.startswith("RuntimeError: allocation failed: ")}
    assert len(ours) >= 3, messages
    others = {message.split("\n")[0] for message in messages - ours}
    assert all("memory" in message or "bad_alloc" in message for message in others), others


TINY_MODEL = ModelConfig(layers=1, width=16, window=8)
TINY_TRAINING = TrainingConfig(steps=3000, context=32, batch_size=2, max_bytes=200_000)
TINY = ["--steps", "3000", "--context", "32", "--batch-size", "2", "--max-bytes", "200000", "--layers", "1"]
TINY += ["--width", "16", "--window", "8", "--device", "cpu", "--checkpoint-every", "1"]


def start_training(output: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / "train_language_model.py"), "--output", str(output), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=own_environment(), text=True, preexec_fn=heed_interrupts, **pipes)


def steps_done(checkpoint: Path) -> int:
    """Of a checkpoint that may be replaced at any time: whoever looks finds a whole one."""
    return torch.load(checkpoint, weights_only=True)["step"] if checkpoint.exists() else 0


def wait_for_steps(checkpoint: Path, more: int, process: subprocess.Popen[str]) -> int:
    began = steps_done(checkpoint)
    while (step := steps_done(checkpoint)) < began + more:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    return step


def test_training_goes_on_after_signals(tmp_path: Path) -> None:
    """Interrupted, then ended; a checkpoint for every step."""
    checkpoint = tmp_path / "checkpoint.pt"
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start_training(tmp_path, *TINY, *(["--resume"] if checkpoint.exists() else []))
        try:
            wait_for_steps(checkpoint, 3, process)
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == (1 if number == signal.SIGINT else -number), errors
        assert ("Interrupted. --resume continues" in errors) == (number == signal.SIGINT)
    steps = steps_done(checkpoint) + 5
    text = load_text(None, TINY_TRAINING.max_bytes, TINY_TRAINING.context)
    resumed, whole = Run.resume(checkpoint, "cpu"), Run.start(TINY_MODEL, TINY_TRAINING, "cpu")
    for run in (resumed, whole):
        train(run, text, steps, tmp_path / "end.pt", checkpoint_every=steps)
    assert len(resumed.losses) == steps
    torch.testing.assert_close(resumed.losses, whole.losses, rtol=1e-3, atol=1e-3)


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from language_model.model import ModelConfig
from language_model.training import Run, TrainingConfig

torch.set_num_threads(1)
checkpoint = Path(sys.argv[1])
run = Run.start(ModelConfig(layers=2, width=128), TrainingConfig(), "cpu")
sum(parameter.sum() for parameter in run.model.parameters()).backward()
run.optimizer.step()  # its state is most of a checkpoint
run.save(checkpoint)
cut_off = 0
for _ in range(40):
    child = os.fork()
    if child == 0:
        while True:
            run.step += 1
            run.save(checkpoint)
    time.sleep(random.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    cut_off += checkpoint.with_suffix(".partial").exists()
    found = Run.resume(checkpoint, "cpu")
    assert found.step >= run.step, "an older checkpoint came back"
    run.step = found.step
print(cut_off)
"""


@linux_only
def test_a_kill_while_a_checkpoint_is_written_leaves_the_last_one(tmp_path: Path) -> None:
    cut_off = run_code(KILLS, str(tmp_path / "checkpoint.pt"))
    assert int(cut_off) >= 3, "too few kills came in the middle of writing"
