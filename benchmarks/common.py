"""Fair timing of two things against each other, or of one, and the report."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from flash_dmattn.commands.info import collect
from rich.console import Console
from rich.table import Table

Settings = TypeVar("Settings")  # what each script gives its cases


@dataclass
class Comparison:
    """One line of the report. `ratio` is how many times better ours is: the other's time over ours."""

    case: str
    what: str  # forward, backward, ...
    dtype: str
    unit: str
    ours: float
    theirs: float | None = None  # None: compared with nothing
    ratio: float | None = None
    ratio_low: float | None = None  # quartiles of the ratios of single pairs: how far to trust the median
    ratio_high: float | None = None
    goal: float | None = None  # for the ratio
    limit: float | None = None  # for ours, in `unit`: at most
    least: float | None = None  # for ours, in `unit`: at least
    other: str = "PyTorch"  # whose figure `theirs` is

    @property
    def reached(self) -> bool | None:
        if self.goal is None and self.limit is None and self.least is None:
            return None
        return (
            (self.goal is None or self.ratio >= self.goal)
            and (self.limit is None or self.ours <= self.limit)
            and (self.least is None or self.ours >= self.least)
        )

    @property
    def aim(self) -> str:
        aims = [
            None if self.goal is None else f"ratio ≥ {self.goal:g}",
            None if self.limit is None else f"≤ {self.limit:g} {self.unit}",
            None if self.least is None else f"≥ {self.least:g} {self.unit}",
        ]
        return ", ".join(aim for aim in aims if aim is not None)


@dataclass
class Report:
    machine: dict[str, object]
    title: str = "flash_dmattn against PyTorch; ratio = PyTorch / flash_dmattn (its quartiles)"
    comparisons: list[Comparison] = field(default_factory=list)

    def write_json(self, path: Path) -> None:
        content = {
            "machine": self.machine,
            "comparisons": [{**asdict(line), "reached": line.reached} for line in self.comparisons],
        }
        path.write_text(json.dumps(content, indent=2) + "\n")

    def print_table(self, console: Console) -> None:
        others = {line.other for line in self.comparisons if line.theirs is not None}
        only_other = others.pop() if len(others) == 1 else None
        table = Table(title=self.title)
        for name in ("case", "what", "dtype"):
            table.add_column(name)
        for name in ("flash_dmattn", only_other or "other", "ratio", "aim"):
            table.add_column(name, justify="right", no_wrap=True)
        for line in self.comparisons:
            color = {None: "default", True: "green", False: "red"}[line.reached]
            theirs = ratio = ""
            if line.theirs is not None:
                theirs = (
                    f"{line.theirs:.4g} {line.unit}" if only_other else f"{line.other}: {line.theirs:.4g} {line.unit}"
                )
                ratio = f"{line.ratio:.2f} ({line.ratio_low:.2f} – {line.ratio_high:.2f})"
            # The figure that the aim is about is the one that is coloured.
            ours_color, ratio_color = (color, "default") if line.goal is None else ("default", color)
            table.add_row(
                line.case,
                line.what,
                line.dtype,
                f"[{ours_color}]{line.ours:.4g} {line.unit}[/]",
                theirs,
                f"[{ratio_color}]{ratio}[/]",
                line.aim + {None: "", True: ": met", False: ": not met"}[line.reached],
            )
        console.print(table)


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
    """Medians over `repeats` samples each, after a warm-up.

    The samples alternate (ours, theirs, ours, ...): whatever else the machine does then hits both alike, and the ratio
    is the median of the ratios of neighbours.
    """
    ours()
    theirs()
    pairs = [(ours(), theirs()) for _ in range(repeats)]
    ratios = [second / first for first, second in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if repeats > 1 else ratios * 3
    return Comparison(
        case=case,
        what=what,
        dtype=str(dtype).removeprefix("torch."),
        unit=unit,
        ours=statistics.median(first for first, _ in pairs),
        theirs=statistics.median(second for _, second in pairs),
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        goal=goal,
        limit=limit,
        other=other,
    )


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
    sample()
    ours = statistics.median(sample() for _ in range(repeats))
    return Comparison(case, what, str(dtype).removeprefix("torch."), unit, ours, limit=limit, least=least)


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


def describe_machine() -> dict[str, object]:
    """What figures depend on: CPU, instruction sets, versions, threads."""
    return {"processor": _processor(), "system": platform.platform(), **collect()}


def print_machine(machine: dict[str, object], console: Console) -> None:
    cpu = machine["cpu"]
    console.print(
        f"{machine['processor']}; {cpu['threads']} threads; kernels: {cpu['isa_float']} for float32, "
        f"{cpu['isa_bfloat16']} for bfloat16; flash_dmattn {machine['version']}, torch {machine['torch']}",
        highlight=False,
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
    try:
        for line in case:
            lines.append(line)
            theirs = "" if line.theirs is None else f"; {line.other} {line.theirs:.4g}, ratio {line.ratio:.2f}"
            console.print(f"{line.case}, {line.what}: {line.ours:.4g} {line.unit}{theirs}", highlight=False)
    except Exception as error:
        notes.append(f"{name} ended early: {type(error).__name__}: {str(error).strip()[:400]}")
        return lines, False
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # nothing without a GPU
        console.print(f"{name}: {time.perf_counter() - start:.0f} s", highlight=False)
    return lines, True


def run_cases(
    cases: Mapping[str, Callable[[Settings], Iterable[Comparison]]],
    settings: Settings,
    report: Report,
    console: Console,
    arguments: argparse.Namespace,
    notes: list[str],
    *,
    first: Sequence[str] = (),
) -> tuple[dict[str, list[Comparison]], int]:
    """Runs `first` and the cases that the arguments of `benchmark_parser` name, and prints the table and the notes.

    Returns:
        The lines of each case, and the exit status: 1 if one of them ended early.
    """
    lines: dict[str, list[Comparison]] = {}
    is_complete = True
    for name in (*first, *arguments.only):
        torch.set_num_threads(arguments.threads)  # a case may have set another number
        lines[name], came_to_end = run_case(name, cases[name](settings), notes, console)
        is_complete &= came_to_end
        report.comparisons.extend(lines[name])
        if arguments.json:
            report.write_json(arguments.json)  # after each case: a run that is cut short leaves what it has
    report.print_table(console)
    for note in dict.fromkeys(notes):
        console.print(f"note: {note}", highlight=False, markup=False)
    return lines, 0 if is_complete else 1


def benchmark_parser(description: str, cases: Iterable[str], repeats: str) -> argparse.ArgumentParser:
    """The options that every benchmark script has; `repeats` says what is repeated."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    cases = list(cases)
    parser.add_argument("--only", nargs="+", choices=cases, default=cases, help="cases to run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11, help=repeats)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check this script")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser
