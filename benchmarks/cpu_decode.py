"""Measures a step of generation on the CPU: one query row over a cache of keys, dense and keeping 2048 of them.

    python benchmarks/cpu_decode.py                             every case, some minutes on two cores
    python benchmarks/cpu_decode.py --only step --json out.json
    python benchmarks/cpu_decode.py --quick                     small sizes, to check this script only

A step has little to compute: what counts is how fast K and V are read. So it is compared with copying the two, which
reads them once and writes as much, and with PyTorch's scaled_dot_product_attention. docs/benchmarks.md says how to read
the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from common import (
    benchmark_parser,
    compare_all,
    compare_samples,
    milliseconds,
    run_cases,
    sample_seconds,
)
from flash_dmattn import KeptKeys, KeyIndices, KeyIntervals, attention, select_keys
from report import Comparison, Report, describe_machine, print_machine
from rich.console import Console
from torch import Tensor

HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 128
KEPT = 2048
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Step:
    """Query rows over a cache, in the layouts that the two libraries want: (B, S, H, D) here, (B, H, S, D) in torch."""

    batch: int
    keys: int
    kept: int
    dtype: torch.dtype
    rows: int = 1
    query: Tensor = field(init=False)
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)
    scores: Tensor = field(init=False)
    mask: Tensor = field(init=False)
    intervals: KeyIntervals = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(length: int, heads: int) -> Tensor:
            return torch.randn(self.batch, length, heads, HEAD_DIM, generator=generator, dtype=self.dtype)

        self.query = normal(self.rows, HEADS)
        self.key, self.value = normal(self.keys, KEY_HEADS), normal(self.keys, KEY_HEADS)
        self.their_inputs = [t.transpose(1, 2).contiguous() for t in (self.query, self.key, self.value)]
        self.scores = torch.randn(self.batch, KEY_HEADS, self.keys, generator=generator)
        self.intervals = select_keys(self.scores, self.kept, seqlen_q=self.rows, causal=False)
        self.mask = self.intervals.dense_mask(self.rows)[:, :, :1]  # the same for all rows
        their_mask = self.mask.repeat_interleave(HEADS // KEY_HEADS, dim=1)
        for mask, theirs in ((None, None), (self.mask, their_mask)):
            tolerance = 1e-4 if self.dtype == torch.float32 else 4e-2
            expected = self.theirs(theirs).transpose(1, 2)
            torch.testing.assert_close(self.ours(mask), expected, atol=tolerance, rtol=tolerance, check_stride=False)

    @property
    def case(self) -> str:
        return f"B{self.batch} H{HEADS} Hkv{KEY_HEADS} D{HEAD_DIM} Sq{self.rows} Sk{self.keys}"

    def ours(self, mask: Tensor | KeyIndices | KeyIntervals | None = None) -> Tensor:
        return attention(self.query, self.key, self.value, mask=mask)

    def appending(self) -> Callable[[], Tensor]:
        """A step of generation that keeps the best keys from step to step. Its new key is found not to be one of them,
        as most are, so that every call finds the same keys kept."""
        kept = KeptKeys.from_scores(self.scores, self.kept)
        new = torch.full((self.batch, KEY_HEADS, self.rows), torch.finfo(torch.float32).min / 2)
        positions = torch.full((self.batch,), self.keys - self.rows, dtype=torch.int32)
        return lambda: self.ours(kept.append_(new, positions))

    def theirs(self, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.their_inputs
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    @cached_property
    def copies(self) -> tuple[Tensor, Tensor]:
        return torch.empty_like(self.key), torch.empty_like(self.value)

    def copy(self) -> None:
        self.copies[0].copy_(self.key)
        self.copies[1].copy_(self.value)


@dataclass(frozen=True)
class Settings:
    repeats: int
    quick: bool
    notes: list[str]

    def step(self, batch: int, keys: int, dtype: torch.dtype, rows: int = 1) -> Step:
        factor = 16 if self.quick else 1
        return Step(batch, keys // factor, KEPT // factor, dtype, rows)

    def compare(
        self,
        step: Step,
        what: str,
        ours: Callable[[], object],
        theirs: Callable[[], float],
        other: str,
        goal: float | None = None,
    ) -> Comparison:
        return compare_samples(
            step.case, what, step.dtype, "ms", milliseconds(ours), theirs, repeats=self.repeats, goal=goal, other=other
        )


def compare_step(settings: Settings, step: Step, *, with_aims: bool) -> Iterator[Comparison]:
    """Calls alternate with the other's, or with a dense step, so that the cache does not hold what they read."""
    copying = milliseconds(step.copy)
    sdpa = milliseconds(step.theirs)
    compare = partial(settings.compare, step)
    yield compare("dense", step.ours, copying, "copying K and V", 1 / 1.5 if with_aims else None)
    yield compare("dense", step.ours, sdpa, "SDPA", 3.0 if with_aims else None)
    dense = milliseconds(step.ours)
    name = f"keeping {step.kept}"
    yield compare(f"{name}, bool mask", lambda: step.ours(step.mask), dense, "dense", 8.0 if with_aims else None)
    yield compare(f"{name}, intervals", lambda: step.ours(step.intervals), dense, "dense")
    yield compare(f"{name}, append_", step.appending(), dense, "dense")


def step(settings: Settings) -> Iterator[Comparison]:
    """One sequence, 32k keys: what the aims are about."""
    for dtype in DTYPES:
        yield from compare_step(settings, settings.step(1, 32768, dtype), with_aims=not settings.quick)


def gather(settings: Settings) -> Iterator[Comparison]:
    """What keeping costs beside the reading: one list for all heads, against index_select of its rows of K and V."""
    for dtype in DTYPES:
        one = settings.step(1, 32768, dtype)
        kept = one.mask[0, 0, 0].nonzero().flatten()
        mask = one.mask[:, :1]

        def select(one: Step = one, kept: Tensor = kept) -> object:
            return one.key.index_select(1, kept), one.value.index_select(1, kept)

        def alternating(function: Callable[[], object], one: Step = one) -> Callable[[], float]:
            def sample() -> float:
                one.copy()  # leaves nothing of the kept rows in the cache
                return 1e3 * sample_seconds(function, 1)

            return sample

        yield compare_samples(
            one.case,
            f"keeping {one.kept}, one list for all heads",
            dtype,
            "ms",
            alternating(lambda one=one, mask=mask: one.ours(mask)),
            alternating(select),
            repeats=settings.repeats,
            other="index_select of K and V",
        )


def lengths(settings: Settings) -> Iterator[Comparison]:
    """Other lengths and batches."""
    for batch, keys in ((1, 4096), (1, 65536), (8, 4096), (8, 32768)):
        for dtype in DTYPES:
            yield from compare_step(settings, settings.step(batch, keys, dtype), with_aims=False)


def rows(settings: Settings) -> Iterator[Comparison]:
    """More query rows, as when several tokens are verified at once."""
    for count in (4, 16):
        for dtype in DTYPES:
            one = settings.step(1, 32768, dtype, count)
            yield settings.compare(one, "dense", one.ours, milliseconds(one.theirs), "SDPA")


def batches(settings: Settings) -> Iterator[Comparison]:
    """Batches over short and long caches, dense and kept: what plot.py draws."""
    dtype = torch.bfloat16
    for keys in (4096, 65536, 524288):
        for batch in (1, 8, 32):
            # K and V, in the layouts of both.
            needed = 2 * 2 * batch * keys * KEY_HEADS * HEAD_DIM * dtype.itemsize
            if not settings.quick and 1.25 * needed > available_bytes():
                settings.notes.append(f"batch {batch} over {keys} keys: left out, K and V take {needed >> 30} GiB")
                continue
            one = settings.step(batch, keys, dtype)
            dense, repeats = milliseconds(one.ours), min(settings.repeats, 5)
            sizes = {"batch": batch, "keys": one.keys, "kept": one.kept}
            compare = partial(compare_all, one.case, dtype=dtype, unit="ms", repeats=repeats, sizes=sizes)
            yield from compare(what="dense", ours=dense, others={"SDPA": milliseconds(one.theirs)})
            # In turn with a dense step, which leaves nothing of the kept keys in the cache.
            kept = milliseconds(lambda one=one: one.ours(one.mask))
            yield from compare(what="kept", ours=kept, others={"dense": dense})


def available_bytes() -> int:
    """What a process can allocate without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


CASES = {"step": step, "gather": gather, "lengths": lengths, "rows": rows, "batches": batches}


def main() -> int:
    arguments = benchmark_parser(__doc__.split("\n")[0], CASES, "pairs of samples per line").parse_args()
    torch.set_num_threads(arguments.threads)
    machine = describe_machine()
    console = Console(width=None if sys.stdout.isatty() else 180)
    report = Report(machine, title="Decode; ratio = other / flash_dmattn (its quartiles)")
    print_machine(report, console)
    settings = Settings(arguments.repeats, arguments.quick, report.notes)
    with torch.no_grad():
        return run_cases(CASES, settings, report, console, arguments)


if __name__ == "__main__":
    sys.exit(main())
