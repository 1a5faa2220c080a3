"""What the cases of gpu_distributed.py share: timing across ranks, and the attention of a layer that they split."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from common import add_theirs, peak_memory_mib, quartiles
from flash_dmattn import distributed as split
from flash_dmattn import dynamic_mask_attention
from gpu_common import check_equal, seconds_between_events
from progress import PROGRESS
from report import Comparison
from torch import Tensor
from torch.distributed import ProcessGroup

DTYPE = torch.bfloat16
Work = Callable[[], object]  # enqueues work on the current stream

SMALLER = 1024  # times, with --quick
WARM_UPS = 3
# Keeps the device busy for about 6 ms while the host gets ahead of it, as it is in training.
HEAD_START_CYCLES = 12_000_000
NAMES = ("query", "key", "value", "key_bias")
PROJECTION = "projection"

# ---- Timing


def seconds(work: Work, token: Tensor) -> float:
    """Of one call, on this rank's device. All ranks call it.

    GPUs meet after the host's head start, by adding up their tokens: under load their clocks differ by several percent,
    so that they are through with it at times that differ by some tenths of a millisecond.
    """
    if token.device.type == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    return seconds_between_events(work, HEAD_START_CYCLES, before=partial(dist.all_reduce, token))


def _nothing() -> None:
    """The work of a rank that lacks one."""


@dataclass
class Bench:
    repeats: int
    quick: bool
    device: torch.device
    rank: int = field(default_factory=dist.get_rank)
    ranks: int = field(default_factory=dist.get_world_size)

    def size(self, size: int) -> int:
        return size // SMALLER if self.quick else size

    def aim(self, by_ranks: dict[int, float], ranks: int | None = None) -> float | None:
        """The aim for so many ranks, by default all, if there is one: they are for H200, and sizes without --quick."""
        is_meant = not self.quick and self.device.type == "cuda"
        return by_ranks.get(self.ranks if ranks is None else ranks) if is_meant else None

    def measure(self, works: dict[str, Work]) -> dict[str, list[list[float]]]:
        """Milliseconds of every work on every rank, (ranks, samples). All ranks begin each sample together, and one
        that lacks a work waits: its samples are NaN. Works take turns, in another order each time: after a long one
        clocks are lower for a while."""
        every_rank: list[list[str]] = [[] for _ in range(self.ranks)]
        dist.all_gather_object(every_rank, list(works))
        names = list(dict.fromkeys(name for names in every_rank for name in names))
        samples: dict[str, list[float]] = {name: [] for name in names}
        token, order = torch.zeros(1, device=self.device), random.Random(0)  # the same on every rank
        warm_ups = 1 if self.quick else WARM_UPS
        for repeat in range(warm_ups + self.repeats):
            if self.rank == 0:
                PROGRESS.show(", ".join(names), max(repeat - warm_ups, 0), self.repeats)
            for name in order.sample(names, len(names)):
                dist.barrier()
                taken = seconds(works.get(name, _nothing), token) * 1e3
                if repeat >= warm_ups:
                    samples[name].append(taken if name in works else math.nan)
        every: list[dict[str, list[float]]] = [{} for _ in range(self.ranks)]
        dist.all_gather_object(every, samples)
        return {name: [of_rank[name] for of_rank in every] for name in names}

    def peak_mib(self, work: Work) -> float:
        """What torch's allocator hands out at most while `work` runs, beyond what is allocated before. NCCL has
        memory of its own."""
        if self.device.type == "cpu":
            return peak_memory_mib(work)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def free(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()  # nothing without a GPU


def slowest(samples: list[list[float]]) -> list[float]:
    """Of all ranks that took part, sample by sample."""
    return [max(taken for taken in of_sample if not math.isnan(taken)) for of_sample in zip(*samples, strict=True)]


def line(case: str, what: str, figure: float, unit: str = "ms", **aims: float | None) -> Comparison:
    return Comparison(case, what, "bfloat16", unit, figure, **aims)


def compared(
    case: str, what: str, ours: list[float], theirs: list[float], other: str, goal: float | None = None
) -> Comparison:
    """Times, and how many times shorter ours are, sample by sample."""
    made = timed(case, what, ours)
    made.other, made.goal = other, goal
    add_theirs(made, ours, theirs)
    return made


def timed(case: str, what: str, samples: list[float]) -> Comparison:
    """Times, compared with nothing."""
    low, middle, high = quartiles(samples)
    made = line(case, what, middle)
    made.samples, made.ours_low, made.ours_high = len(samples), low, high
    return made


def scaling(
    case: str, tokens: int, samples: dict[int, list[float]], share: Callable[[int], float], goals: dict[int, float]
) -> Iterator[Comparison]:
    """What so many ranks take against one, and against what docs/distributed.md expects.

    Args:
        samples: milliseconds by ranks, 1 among them.
        share: a rank's part of what one rank does, by ranks.
        goals: for the ratio to one rank's time, by ranks.
    """
    for ranks, taken in sorted(samples.items()):
        what = f"forward + backward, {ranks} rank{'s' if ranks > 1 else ''}"
        made = [timed(case, what, taken)]
        if ranks > 1:
            expected = [alone * share(ranks) + exchange_milliseconds(ranks) for alone in samples[1]]
            made = [compared(case, what, taken, samples[1], "1 rank", goals.get(ranks))]
            made.append(compared(case, what, taken, expected, PROJECTION))
        for each in made:
            each.sizes = {"ranks": ranks, "tokens": tokens}
            yield each


def exchange_milliseconds(ranks: int) -> float:
    """Of the larger problem, forward and backward: "How far it scales" of docs/distributed.md. The other sends less."""
    return 0.1 * (ranks - 1) + 0.2


# ---- Problems


@dataclass
class Problem:
    """Dynamic-mask attention of one layer, forward and backward, over a sequence that every rank can make whole."""

    bench: Bench
    shape: tuple[int, int, int, int]
    length: int

    @property
    def window(self) -> int:
        return self.bench.size(self.shape[3])

    @property
    def name(self) -> str:
        heads, key_heads, head_dim, _ = self.shape
        return f"H{heads} Hkv{key_heads} D{head_dim} w{self.window} S{self.length}"

    def whole(self) -> dict[str, Tensor]:
        """Leaves, and dout; the same on every rank."""
        heads, key_heads, head_dim, _ = self.shape
        generator = torch.Generator(self.bench.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.bench.device, dtype=DTYPE, generator=generator)

        tensors = {"query": normal(1, self.length, heads, head_dim)}
        tensors |= {name: normal(1, self.length, key_heads, head_dim) for name in ("key", "value")}
        tensors["key_bias"] = normal(1, key_heads, self.length)
        for name in NAMES:
            tensors[name].requires_grad_()
        return tensors | {"dout": normal(1, self.length, heads, head_dim)}

    def shares(self, whole: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
        shares = {
            name: tensor.detach().chunk(ranks, 2 if tensor.dim() == 3 else 1)[rank].clone()
            for name, tensor in whole.items()
        }
        for name in NAMES:
            shares[name].requires_grad_()
        return shares

    def forward(self, tensors: dict[str, Tensor], group: ProcessGroup | None = None) -> Tensor:
        """Whole sequences without a group."""
        given = [tensors[name] for name in NAMES]
        if group is None:
            return dynamic_mask_attention(*given, self.window)
        return split.dynamic_mask_attention(*given, self.window, group=group)

    def step(self, tensors: dict[str, Tensor], group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(tensors, group), [tensors[name] for name in NAMES], tensors["dout"])

    def check(self, whole: dict[str, Tensor], shares: dict[str, Tensor], group: ProcessGroup) -> None:
        """Raises AssertionError if the split result and its gradients are not those of the whole sequence."""
        rank, ranks = dist.get_rank(group), group.size()
        with torch.no_grad():
            check_equal(self.forward(shares, group), self.forward(whole).chunk(ranks, 1)[rank])
        for name, ours, theirs in zip(NAMES, self.step(shares, group), self.step(whole), strict=True):
            check_equal(ours, theirs.chunk(ranks, 2 if name == "key_bias" else 1)[rank])
