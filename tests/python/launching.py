"""Scripts of this repository as their users start them, and what a script refuses, in this process."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).parents[2]
STEPS = 20
TINY = ["--steps", str(STEPS), "--context", "252", "--window", "24", "--layers", "2", "--width", "32"]
TIMEOUT = 240  # seconds, for a script
# What most of them import, which takes an interpreter seconds.
_IMPORTS = ["torch", "torch.distributed.tensor", "transformers.models.doge.modeling_doge", "matplotlib.pyplot"]
_IMPORTS += ["flash_dmattn.distributed", "flash_dmattn.integrations.doge"]


def fresh_processes() -> ForkServerContext:
    """Processes that begin as a new interpreter does, but for modules that are imported already. What the one that asks
    has done, to its environment or to a GPU, is nothing to them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    return context


def refusal(main: Callable[[], None], *flags: str) -> str:
    """What a script's main() says of flags that it refuses, instead of a traceback. An interpreter of its own would
    take seconds to import what this one has."""
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [main.__module__, *flags]),
        contextlib.redirect_stderr(printed),
        pytest.raises(SystemExit) as caught,
    ):
        main()
    code = caught.value.code
    assert code not in (None, 0)
    return printed.getvalue() + (code if isinstance(code, str) else "")


def run_script(
    script: str, *flags: str, ranks: int | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What a script of this repository returns and prints in a process of its own; or, with `ranks`, in as many of one
    thread, which are told what torchrun tells them. Those of the first that fails, else of rank 0."""
    command, common = [str(ROOT / script), *flags], dict(environment or {})
    if ranks is not None:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = []
        for rank in range(ranks or 1):
            own = common if ranks is None else common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = (command, own, [Path(folder, f"{rank}.{name}") for name in ("out", "err")], ranks is not None)
            processes.append(fresh_processes().Process(target=_run_script, args=arguments))
            processes[-1].start()
        told = _wait(processes)
        out, err = (Path(folder, f"{told}.{name}").read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(command, processes[told].exitcode, out, err)


def _wait(processes: list[BaseProcess]) -> int:
    """Until all have ended or one has failed, which ends the others: which one tells the result."""
    deadline, running = time.monotonic() + TIMEOUT, list(processes)
    try:
        while running:
            ended = wait([process.sentinel for process in running], deadline - time.monotonic())
            assert ended, f"still running after {TIMEOUT} s"
            for process in running:
                process.join(0)
                if process.exitcode not in (None, 0):
                    return processes.index(process)
            running = [process for process in running if process.exitcode is None]
        return 0
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run_script(command: list[str], environment: dict[str, str], outputs: list[Path], one_thread: bool) -> None:
    os.environ.update(environment)
    for path, descriptor in zip(outputs, (1, 2), strict=True):
        with path.open("w") as file:
            os.dup2(file.fileno(), descriptor)
    if one_thread:
        torch.set_num_threads(1)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def heed_interrupts() -> None:
    """In a new process: where tests run in the background of a shell, SIGINT is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def own_environment(**more: str) -> dict[str, str]:
    """Of a process that is to import what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def run_code(code: str, *arguments: str, **environment: str) -> str:
    """What code prints that runs in a process of its own, which has to end by itself, and well."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=own_environment(**environment),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=heed_interrupts,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def launch(script: str, processes: int, *flags: str, on_gpus: bool = False) -> str:
    """What a script of this repository prints under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = own_environment(OMP_NUM_THREADS="1")
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [*launcher, str(ROOT / script), *flags]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def train(output: Path, processes: int, *flags: str, torchrun: bool = False, on_gpus: bool = False) -> list[float]:
    """The distributed example, small: the loss of every step so far. On GPUs always by torchrun."""
    script, flags = "examples/train_distributed.py", (*TINY, "--output", str(output), *flags)
    if torchrun or on_gpus:
        launch(script, processes, *flags, on_gpus=on_gpus)
    else:
        done = run_script(script, *flags, ranks=processes, environment={"CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode == 0, done.stderr
    return json.loads((output / "losses.json").read_text())
