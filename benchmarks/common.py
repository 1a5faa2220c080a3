"""Fair timing of two things against each other, and the report."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from flash_dmattn.commands.info import collect
from rich.console import Console
from rich.table import Table


@dataclass
class Comparison:
    """One line of the report. `ratio` is PyTorch's figure over ours: above 1, ours is better."""

    case: str
    what: str  # forward, backward, ...
    dtype: str
    unit: str
    ours: float
    theirs: float
    ratio: float
    ratio_low: float  # quartiles of the ratios of single pairs: how far to trust the median
    ratio_high: float
    goal: float | None = None  # for the ratio
    limit: float | None = None  # for ours, in `unit`

    @property
    def reached(self) -> bool | None:
        if self.goal is None and self.limit is None:
            return None
        return (self.goal is None or self.ratio >= self.goal) and (self.limit is None or self.ours <= self.limit)

    @property
    def aim(self) -> str:
        aims = [] if self.goal is None else [f"ratio ≥ {self.goal:g}"]
        return ", ".join(aims if self.limit is None else [*aims, f"≤ {self.limit:g} {self.unit}"])


@dataclass
class Report:
    machine: dict[str, object]
    comparisons: list[Comparison] = field(default_factory=list)

    def write_json(self, path: Path) -> None:
        content = {
            "machine": self.machine,
            "comparisons": [{**asdict(line), "reached": line.reached} for line in self.comparisons],
        }
        path.write_text(json.dumps(content, indent=2) + "\n")

    def print_table(self, console: Console) -> None:
        table = Table(title="flash_dmattn against PyTorch; ratio = PyTorch / flash_dmattn (its quartiles)")
        for name in ("case", "what", "dtype"):
            table.add_column(name)
        for name in ("flash_dmattn", "PyTorch", "ratio", "aim"):
            table.add_column(name, justify="right", no_wrap=True)
        for line in self.comparisons:
            color = {None: "default", True: "green", False: "red"}[line.reached]
            table.add_row(
                line.case,
                line.what,
                line.dtype,
                f"{line.ours:.4g} {line.unit}",
                f"{line.theirs:.4g} {line.unit}",
                f"[{color}]{line.ratio:.2f} ({line.ratio_low:.2f} – {line.ratio_high:.2f})[/]",
                line.aim,
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
) -> Comparison:
    """Times of one call each; a sample averages over `calls` of them."""
    per_second = {"ms": 1e3, "us": 1e6}[unit]

    def sampler(function: Callable[[], object]) -> Callable[[], float]:
        return lambda: sample_seconds(function, calls) * per_second

    samples = sampler(ours), sampler(theirs)
    return compare_samples(case, what, dtype, unit, *samples, repeats=repeats, goal=goal, limit=limit)


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
    )


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
