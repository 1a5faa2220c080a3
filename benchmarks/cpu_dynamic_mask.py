"""Measures attention over dynamically selected keys on the CPU, against PyTorch and against this library's dense rate.

    python benchmarks/cpu_dynamic_mask.py                             every case, some minutes on two cores
    python benchmarks/cpu_dynamic_mask.py --only speed --json out.json
    python benchmarks/cpu_dynamic_mask.py --quick                     small sizes, to check this script only

What PyTorch does is what the original package's users do: torch.topk over the causal scores of every row, scattered
into a mask, then scaled_dot_product_attention with the bias where the mask is true. Its mask wants no gradient, since
it would leave its fused kernel; the backward here computes the bias's gradient too. Every figure is a time, except how
many scores are computed for each one kept, which plan_report tells. docs/benchmarks.md says how to read the table,
docs/selection.md what is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from common import (
    benchmark_parser,
    compare_samples,
    compare_times,
    measure_samples,
    milliseconds,
    run_cases,
    sample_seconds,
)
from cpu_problems import DTYPE, DynamicProblem, key_scores
from flash_dmattn import plan_report, prepare_mask, select_keys
from report import Comparison, Report, describe_machine, print_machine
from rich.console import Console

# The shape of every case but the selection's.
HEADS, KEY_HEADS, HEAD_DIM = 2, 1, 64
SHAPE = f"H{HEADS} Hkv{KEY_HEADS} D{HEAD_DIM}"

WINDOW = 1024


@dataclass(frozen=True)
class Settings:
    repeats: int
    threads: int
    quick: bool

    def length(self, length: int) -> int:
        return length // 16 if self.quick else length

    def problem(self, length: int, window: int, drift: float = 0.0) -> DynamicProblem:
        return DynamicProblem(self.length(length), self.length(window), drift)


def speed(settings: Settings) -> Iterator[Comparison]:
    """Against PyTorch at S 8192, w 1024."""
    problem = settings.problem(8192, WINDOW)
    case = f"S{problem.length} w{problem.window} {SHAPE}"
    intervals, mask = problem.select(), problem.their_mask()
    problem.check(intervals, mask)
    compare = partial(compare_times, case, dtype=DTYPE, repeats=settings.repeats)
    with torch.no_grad():
        yield compare(
            what="selection + forward",
            ours=problem.ours_selected,
            theirs=lambda: problem.theirs(problem.their_mask()),
            goal=30.0,
            other="topk mask + SDPA",
        )
        yield compare(
            what="forward",
            ours=lambda: problem.ours(intervals),
            theirs=lambda: problem.theirs(mask),
            goal=5.0,
            other="SDPA given the mask",
        )
    yield compare(
        what="backward",
        ours=problem.backward_of(problem.ours(intervals), problem.our_leaves(), problem.dout),
        theirs=problem.backward_of(problem.theirs(mask), problem.their_inputs, problem.their_dout),
        goal=5.0,
        other="SDPA given the mask",
    )


def rate(settings: Settings) -> Iterator[Comparison]:
    """Time per kept score against that of a dense causal call, which has no bias."""
    for drift, scores in ((0.0, "random"), (4.0, "rising")):
        problem = settings.problem(32768, 2048, drift)
        case = f"S{problem.length} w{problem.window} {SHAPE}, {scores} scores"
        yield from compare_rates(case, problem, min(settings.repeats, 5))


def compare_rates(case: str, problem: DynamicProblem, repeats: int) -> Iterator[Comparison]:
    intervals = problem.select()
    kept = intervals.kept_scores() * HEADS // KEY_HEADS
    dense = problem.length * (problem.length + 1) // 2 * HEADS

    def per_score(function: Callable[[], object], scores: int) -> Callable[[], float]:
        return lambda: 1e9 * sample_seconds(function, 1) / scores

    compare = partial(compare_samples, case, dtype=DTYPE, unit="ns/score", repeats=repeats, goal=0.85)
    compare = partial(compare, other="own dense causal")
    with torch.no_grad():
        ours = per_score(lambda: problem.ours(intervals), kept)
        yield compare(what="forward", ours=ours, theirs=per_score(problem.our_dense, dense))
    backward = problem.backward_of(problem.ours(intervals), problem.our_leaves(), problem.dout)
    dense_backward = problem.backward_of(problem.our_dense(), problem.our_leaves()[:3], problem.dout)
    yield compare(what="backward", ours=per_score(backward, kept), theirs=per_score(dense_backward, dense))


def plan(settings: Settings) -> Iterator[Comparison]:
    """Scores that the forward computes for each one that it keeps: the price of tiles."""
    for length, window, limit in ((8192, 1024, 1.25), (32768, 2048, 1.12)):
        for drift, scores in ((0.0, "random"), (4.0, "rising")):
            problem = settings.problem(length, window, drift)
            report = plan_report(problem.query, problem.key, mask=problem.select(), is_causal=True)
            yield measure_samples(
                f"S{problem.length} w{problem.window} {SHAPE}, {scores} scores",
                "computed / kept",
                DTYPE,
                "x",
                lambda report=report: report.ratio,
                repeats=1,
                limit=limit,
            )


def prepared(settings: Settings) -> Iterator[Comparison]:
    """A dense bool mask of the highest scores, prepared once, against the same mask as it is."""
    problem = settings.problem(8192, WINDOW)
    mask = problem.select().dense_mask(problem.length)
    ready = prepare_mask(mask)
    torch.testing.assert_close(problem.ours(ready), problem.ours(mask), atol=1e-5, rtol=1e-5)
    case = f"S{problem.length} w{problem.window} {SHAPE}, bool mask"
    compare = partial(compare_times, case, dtype=DTYPE, repeats=settings.repeats, other="not prepared")
    with torch.no_grad():
        yield compare(what="forward", ours=lambda: problem.ours(ready), theirs=lambda: problem.ours(mask))
    ours, theirs = (
        problem.backward_of(problem.ours(form), problem.our_leaves(), problem.dout) for form in (ready, mask)
    )
    yield compare(what="backward", ours=ours, theirs=theirs)
    once = milliseconds(lambda: prepare_mask(mask))
    yield measure_samples(case, "prepare_mask, once", DTYPE, "ms", once, repeats=settings.repeats)


def growth(settings: Settings) -> Iterator[Comparison]:
    """How much longer a step takes on four times the length: 4 is linear."""
    short, long = settings.problem(16384, WINDOW), settings.problem(65536, WINDOW)
    yield measure_samples(
        f"S{short.length} to S{long.length}, w{short.window} {SHAPE}",
        "growth of selection + forward + backward",
        DTYPE,
        "x",
        lambda: sample_seconds(long.our_step, 1) / sample_seconds(short.our_step, 1),
        repeats=settings.repeats,
        limit=4.4,
    )


def selection(settings: Settings) -> Iterator[Comparison]:
    """The selection alone, on one core."""
    torch.set_num_threads(1)
    window = settings.length(WINDOW)
    for length in (settings.length(65536), settings.length(1 << 20)):
        seconds = partial(sample_seconds, partial(select_keys, key_scores(length), window), 1)
        yield measure_samples(
            f"{length} keys w{window}, one head and thread",
            "selection",
            DTYPE,
            "M keys/s",
            lambda length=length, seconds=seconds: length / 1e6 / seconds(),
            repeats=settings.repeats,
            least=10.0,
        )


CASES = {
    "plan": plan,
    "speed": speed,
    "prepared": prepared,
    "rate": rate,
    "growth": growth,
    "selection": selection,
}


def main() -> int:
    description = "samples per line; at most 5 where one takes long"
    arguments = benchmark_parser(__doc__.split("\n")[0], CASES, description).parse_args()
    torch.set_num_threads(arguments.threads)
    machine = describe_machine()
    settings = Settings(repeats=arguments.repeats, threads=arguments.threads, quick=arguments.quick)
    console = Console(width=None if sys.stdout.isatty() else 180)
    report = Report(machine, title="Dynamic masks; ratio = other / flash_dmattn (its quartiles)")
    print_machine(report, console)
    return run_cases(CASES, settings, report, console, arguments)


if __name__ == "__main__":
    sys.exit(main())
