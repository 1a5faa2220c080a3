"""Runs examples/train_distributed.py, small, as torchrun does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "train_distributed.py"
STEPS = 20
TINY = ["--steps", str(STEPS), "--context", "252", "--window", "24", "--layers", "2", "--width", "32"]


def train(output: Path, processes: int, *flags: str, on_gpus: bool = False) -> list[float]:
    """The loss of every step so far."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [*launcher, str(SCRIPT), *TINY, "--output", str(output), *flags]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return json.loads((output / "losses.json").read_text())
