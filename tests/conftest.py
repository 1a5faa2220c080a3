"""Settings that every Python test shares, and the devices that it runs on.

A test runs on the CPU, unless `pytest.mark.devices("cpu", "cuda")` on it or its module says otherwise. What it makes
without naming a device is then on the device that it runs on, and `dtype` is one that the device's kernels take.
`pytest -m gpu` selects what runs on a GPU.
"""

from __future__ import annotations

import os
import re
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


ALL_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES = {"cpu": ALL_DTYPES, "cuda": [torch.bfloat16, torch.float16]}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "devices(*names): the devices that a test runs on, default: cpu")
    config.addinivalue_line("markers", "gpu: runs on a GPU; set by `devices`")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for every device of its mark and every dtype of the device."""
    mark = metafunc.definition.get_closest_marker("devices")
    names = mark.args if mark is not None else ("cpu",)
    if "cuda" in names and "cpu" in names and not torch.cuda.is_available():
        names = ("cpu",)
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    marks = {"cpu": (), "cuda": (pytest.mark.gpu, no_gpu)}
    given = [argument for mark in metafunc.definition.iter_markers("parametrize") for argument in mark.args[:1]]
    wants_dtype = "dtype" in metafunc.fixturenames and not any("dtype" in re.split(r"\W+", str(name)) for name in given)
    if wants_dtype:
        pairs = [pytest.param(name, dtype, marks=marks[name]) for name in names for dtype in DTYPES[name]]
        ids = [str(pair.values[1]) if names == ("cpu",) else f"{pair.values[0]}-{pair.values[1]}" for pair in pairs]
        metafunc.parametrize(("device", "dtype"), pairs, ids=ids, indirect=["device"])
    elif names != ("cpu",):
        metafunc.parametrize("device", [pytest.param(name, marks=marks[name]) for name in names], indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where tensors are made that name no device."""
    name = getattr(request, "param", "cpu")
    if name == "cpu":
        yield torch.device("cpu")
        return
    torch.set_default_device(name)
    yield torch.get_default_device()
    torch.set_default_device(None)


@pytest.fixture(scope="session", autouse=True)
def _allocator_of_other_processes() -> None:
    """Processes that tests start, some of which measure memory, have the C library's usual settings, whatever `make
    test` sets for the tests themselves."""
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        del os.environ[name]


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same seed and leaves the number of threads as it was."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the same on a CPU: torch.manual_seed would note, with a stack trace, what to do with a GPU later
        torch.default_generator.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
