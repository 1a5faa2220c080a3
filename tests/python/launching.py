"""Scripts in several processes, as torchrun starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = 20
TINY = ["--steps", str(STEPS), "--context", "252", "--window", "24", "--layers", "2", "--width", "32"]


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
