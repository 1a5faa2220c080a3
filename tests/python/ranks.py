"""Processes that are the ranks of a process group, for tests of flash_dmattn.distributed."""

from __future__ import annotations

import atexit
import contextlib
import datetime
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from launching import fresh_processes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = 60  # seconds, for a collective: a test that hangs ends in torch's error

Backend = Literal["gloo", "nccl"]


class Ranks:
    """As many processes as there are ranks, which stay for many functions."""

    def __init__(self, pool: ProcessPoolExecutor, size: int) -> None:
        self._pool, self.size = pool, size

    def run(self, function: Callable[..., object], *arguments: object) -> list[object]:
        """What function(*arguments) returns on every rank, in their order. It finds its rank in torch.distributed, and
        results are to be on the CPU."""
        futures = [self._pool.submit(_run, function, arguments) for _ in range(self.size)]
        return [result for _, result in sorted((future.result() for future in futures), key=lambda pair: pair[0])]


@contextlib.contextmanager
def start_ranks(size: int, folder: Path, backend: Backend = "gloo") -> Iterator[Ranks]:
    """`folder`: an empty one, where they find each other. With "nccl" each rank has the GPU of its number."""
    context = fresh_processes()
    next_rank = context.Value("i", 0)
    with ProcessPoolExecutor(size, context, _join, (next_rank, size, folder.as_uri() + "/store", backend)) as pool:
        yield Ranks(pool, size)


def rank_device() -> torch.device:
    """Where this rank's tensors are, and what its group sends."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """All ranks; `sizes` of its dimensions, default one."""
    return init_device_mesh(rank_device().type, sizes or (dist.get_world_size(),), mesh_dim_names=names)


def _join(next_rank: Synchronized[int], size: int, store: str, backend: Backend) -> None:
    with next_rank.get_lock():
        rank = next_rank.value
        next_rank.value += 1
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        atexit.register(dist.destroy_process_group)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timeout, device_id=device)


def _run(function: Callable[..., object], arguments: tuple[object, ...]) -> tuple[int, object]:
    dist.barrier()  # each process takes one of the calls: it waits here for the others
    return dist.get_rank(), function(*arguments)
