"""examples/train_distributed.py: processes that share sequences learn what one learns, and go on where they stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_distributed.py"
STEPS = 20
TINY = ["--steps", str(STEPS), "--context", "252", "--window", "24", "--layers", "2", "--width", "32"]


def train(output: Path, processes: int, *flags: str) -> list[float]:
    """The loss of every step so far."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [*launcher, str(SCRIPT), *TINY, "--output", str(output), *flags]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return json.loads((output / "losses.json").read_text())


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("one"), 1)


def test_processes_learn_what_one_learns(of_one_process: list[float], tmp_path: Path) -> None:
    losses = train(tmp_path, 3)
    assert len(losses) == STEPS and losses[-1] < losses[0] - 2
    assert losses == pytest.approx(of_one_process, abs=1e-3)


def test_other_processes_resume(of_one_process: list[float], tmp_path: Path) -> None:
    assert len(train(tmp_path, 2, "--pause-at", "11")) == 11
    assert train(tmp_path, 1, "--resume") == pytest.approx(of_one_process, abs=1e-3)
