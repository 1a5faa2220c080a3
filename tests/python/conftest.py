"""Settings that every Python test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("default", deadline=None, max_examples=100)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: one thread each, and for the processes they start. Tests about threads set their number.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same seed and leaves the number of threads as it was."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
