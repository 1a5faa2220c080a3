"""Processes that are the ranks of a process group, for tests of flash_dmattn.distributed."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = 60  # seconds, for a collective: a test that hangs ends in torch's error


class Ranks:
    """As many processes as there are ranks, which stay for many functions."""

    def __init__(self, pool: ProcessPoolExecutor, size: int) -> None:
        self._pool, self.size = pool, size

    def run(self, function: Callable[..., object], *arguments: object) -> list[object]:
        """What function(*arguments) returns on every rank, in their order. It finds its rank in torch.distributed."""
        futures = [self._pool.submit(_run, function, arguments) for _ in range(self.size)]
        return [result for _, result in sorted((future.result() for future in futures), key=lambda pair: pair[0])]


@contextlib.contextmanager
def start_ranks(size: int, folder: Path) -> Iterator[Ranks]:
    """`folder`: an empty one, where they find each other."""
    context = multiprocessing.get_context("spawn")
    next_rank = context.Value("i", 0)
    with ProcessPoolExecutor(size, context, _join, (next_rank, size, folder.as_uri() + "/store")) as pool:
        yield Ranks(pool, size)


def _join(next_rank: Synchronized[int], size: int, store: str) -> None:
    with next_rank.get_lock():
        rank = next_rank.value
        next_rank.value += 1
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)


def _run(function: Callable[..., object], arguments: tuple[object, ...]) -> tuple[int, object]:
    dist.barrier()  # each process takes one of the calls: it waits here for the others
    return dist.get_rank(), function(*arguments)
