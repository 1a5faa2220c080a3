"""Fair timing of this library against others, and how every benchmark script runs its cases."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from progress import PROGRESS
from report import Comparison, Report
from rich.console import Console

OURS = "flash_dmattn"
Settings = TypeVar("Settings")  # what each script gives its cases


def compare_times(
    case: str,
    what: str,
    dtype: torch.dtype,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    repeats: int,
    calls: int = 1,
    unit: str = "ms",
    goal: float | None = None,
    limit: float | None = None,
    other: str = "PyTorch",
) -> Comparison:
    """Times of one call each; a sample averages over `calls` of them."""
    per_second = {"ms": 1e3, "us": 1e6}[unit]

    def sampler(function: Callable[[], object]) -> Callable[[], float]:
        return lambda: sample_seconds(function, calls) * per_second

    samples = sampler(ours), sampler(theirs)
    return compare_samples(case, what, dtype, unit, *samples, repeats=repeats, goal=goal, limit=limit, other=other)


def compare_samples(
    case: str,
    what: str,
    dtype: torch.dtype,
    unit: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    *,
    repeats: int,
    goal: float | None = None,
    limit: float | None = None,
    other: str = "PyTorch",
) -> Comparison:
    """Medians over `repeats` samples of each, as compare_all takes them."""
    goals = None if goal is None else {other: goal}
    (line,) = compare_all(case, what, dtype, unit, ours, {other: theirs}, repeats=repeats, goals=goals, limit=limit)
    return line


def compare_all(
    case: str,
    what: str,
    dtype: torch.dtype,
    unit: str,
    ours: Callable[[], float],
    others: Mapping[str, Callable[[], float] | str],
    *,
    repeats: int,
    goals: Mapping[str, float] | None = None,
    limit: float | None = None,
    least: float | None = None,
    sizes: Mapping[str, float | str] | None = None,
) -> list[Comparison]:
    """Medians over `repeats` samples of each after a warm-up: one line for each other, or one of ours alone.

    The samples alternate (ours, the others', ours, ...): whatever else the machine does then hits all alike, and the
    ratio is the median of the ratios of neighbours.

    Args:
        others: by name; of one that cannot do this, or is not there, the reason.
        goals: for the ratio to an other; limit, least: for our figure.
    """
    samplers = {OURS: ours, **{name: sampler for name, sampler in others.items() if not isinstance(sampler, str)}}
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for repeat in range(-1, repeats):
        PROGRESS.show(f"{case}, {what}", max(repeat, 0), repeats)
        for name, sampler in samplers.items():
            sample = sampler()
            if repeat >= 0:
                samples[name].append(sample)
    low, middle, high = quartiles(samples[OURS])
    line = Comparison(case, what, str(dtype).removeprefix("torch."), unit, middle, ours_low=low, ours_high=high)
    line.samples, line.sizes, line.limit, line.least = repeats, dict(sizes or {}), limit, least
    lines = []
    for name, sampler in others.items():
        lines.append(replace(line, other=name, goal=(goals or {}).get(name)))
        if isinstance(sampler, str):
            lines[-1].missing = sampler
        else:
            add_theirs(lines[-1], samples[OURS], samples[name])
    return lines or [line]


def add_theirs(line: Comparison, ours: Sequence[float], theirs: Sequence[float], scale: float = 1.0) -> None:
    """Gives the line the figures of the other; `scale`: how many times ours did what the other did."""
    line.theirs_low, line.theirs, line.theirs_high = quartiles(theirs)
    ratios = [scale * second / first for first, second in zip(ours, theirs, strict=True)]
    line.ratio_low, line.ratio, line.ratio_high = quartiles(ratios)


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def measure_samples(
    case: str,
    what: str,
    dtype: torch.dtype,
    unit: str,
    sample: Callable[[], float],
    *,
    repeats: int,
    limit: float | None = None,
    least: float | None = None,
) -> Comparison:
    """The median over `repeats` samples after a warm-up, compared with nothing."""
    (line,) = compare_all(case, what, dtype, unit, sample, {}, repeats=repeats, limit=limit, least=least)
    return line


def milliseconds(function: Callable[[], object], calls: int = 1) -> Callable[[], float]:
    """A sampler of one call, averaged over `calls`."""
    return lambda: 1e3 * sample_seconds(function, calls)


def sample_seconds(function: Callable[[], object], calls: int) -> float:
    """Seconds of one call, averaged over `calls`."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def peak_memory_mib(function: Callable[[], object]) -> float:
    """How far resident memory rises above its present size while the function runs.

    The kernel's high-water mark belongs to the whole process, so each measurement wants a process of its own.

    Raises:
        OSError: the system is not Linux, or forbids resetting the mark.
    """
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to the present size
    before = _status_kib("VmRSS")
    result = function()
    peak = _status_kib("VmHWM")
    del result  # lived until here: results count
    return (peak - before) / 1024


def _status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


def run_case(
    name: str, case: Iterable[Comparison], notes: list[str], console: Console
) -> tuple[list[Comparison], bool]:
    """The lines of a case, printed as they come, as far as it came, and whether it came to its end. What ended it early
    is added to `notes`: one failing case must not cost the others, which took minutes."""
    lines: list[Comparison] = []
    start = time.perf_counter()
    PROGRESS.show(name)
    try:
        for line in case:
            line.group = name
            lines.append(line)
            with PROGRESS.cleared():
                console.print(line.text, highlight=False, markup=False)
    except Exception as error:
        notes.append(f"{name} ended early: {type(error).__name__}: {str(error).strip()[:400]}")
        return lines, False
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # nothing without a GPU
        with PROGRESS.cleared():
            console.print(f"{name}: {time.perf_counter() - start:.0f} s", highlight=False)
    return lines, True


def run_cases(
    cases: Mapping[str, Callable[[Settings], Iterable[Comparison]]],
    settings: Settings,
    report: Report,
    console: Console,
    arguments: argparse.Namespace,
    *,
    first: Sequence[str] = (),
) -> int:
    """Runs `first` and the cases that the arguments of `benchmark_parser` name, and prints the table and the notes.

    Returns:
        The exit status: 1 if a case ended early.
    """
    is_complete = True
    for name in (*first, *arguments.only):
        torch.set_num_threads(arguments.threads)  # a case may have set another number
        start = time.perf_counter()
        lines, came_to_end = run_case(name, cases[name](settings), report.notes, console)
        is_complete &= came_to_end
        report.comparisons.extend(lines)
        report.seconds[name] = time.perf_counter() - start
        if arguments.json:
            report.write_json(arguments.json)  # after each case: a run that is cut short leaves what it has
    report.print_table(console)
    for note in dict.fromkeys(report.notes):
        console.print(f"note: {note}", highlight=False, markup=False)
    return 0 if is_complete else 1


def benchmark_parser(description: str, cases: Iterable[str], repeats: str) -> argparse.ArgumentParser:
    """The options that every benchmark script has; `repeats` says what is repeated."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    cases = list(cases)
    parser.add_argument("--only", nargs="+", choices=cases, default=cases, help="cases to run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11, help=repeats)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check this script")
    parser.add_argument(
        "--json", type=Path, help="also write the figures to this file; to a folder: as <machine>-<script>.json"
    )
    return parser
