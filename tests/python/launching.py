"""Scripts in several processes, as torchrun starts them, and what a script refuses, in this one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 20
TINY = ["--steps", str(STEPS), "--context", "252", "--window", "24", "--layers", "2", "--width", "32"]


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


def launch(script: str, processes: int, *flags: str, on_gpus: bool = False) -> str:
    """What a script of this repository prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [*launcher, str(ROOT / script), *flags]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


def train(output: Path, processes: int, *flags: str, on_gpus: bool = False) -> list[float]:
    """The distributed example, small: the loss of every step so far."""
    launch("examples/train_distributed.py", processes, *TINY, "--output", str(output), *flags, on_gpus=on_gpus)
    return json.loads((output / "losses.json").read_text())
