"""examples/train_distributed.py: processes that share sequences learn what one learns, and go on where they stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import STEPS, train


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


def test_autocast(tmp_path: Path) -> None:
    """As on GPUs: keys are float32 then, and values bfloat16. Against one process with the same roundings, which alone
    make up to 0.02 of a loss, by the text; those that differ make 0.004, gradients that are not added up, or rows that
    do not see other ranks, 0.06."""
    of_one_process = train(tmp_path / "one", 1, "--dtype", "bfloat16")
    losses = train(tmp_path / "two", 2, "--dtype", "bfloat16", torchrun=True)
    assert losses == pytest.approx(of_one_process, abs=0.01)
