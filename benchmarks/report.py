"""What a benchmark found: lines of figures, printed as a table and written as JSON, which README.md describes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import flash_dmattn
import torch
from flash_dmattn.commands.info import collect
from results import SCHEMA
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# Distributions whose version a figure may depend on, where they are installed.
PEERS = ("numpy", "transformers", "triton", "flash-attn", "flash-attn-4", "xformers")


@dataclass
class Comparison:
    """One line of the report. `ratio` is how many times better ours is: the other's time over ours."""

    case: str
    what: str  # forward, backward, ...
    dtype: str
    unit: str
    ours: float  # the median of the samples
    theirs: float | None = None  # None: compared with nothing, or `missing` says why there is no figure
    ratio: float | None = None  # the median of the ratios of neighbouring samples
    ratio_low: float | None = None  # quartiles of the ratios of single pairs: how far to trust the median
    ratio_high: float | None = None
    goal: float | None = None  # for the ratio
    limit: float | None = None  # for ours, in `unit`: at most
    least: float | None = None  # for ours, in `unit`: at least
    other: str = ""  # whose figure `theirs` is
    missing: str | None = None  # why the other has no figure
    ours_low: float | None = None  # quartiles of the samples
    ours_high: float | None = None
    theirs_low: float | None = None
    theirs_high: float | None = None
    samples: int = 1  # of each
    sizes: dict[str, float | str] = field(default_factory=dict)  # what a sweep varies, by name
    group: str = ""  # the case of the script, as --only names it

    @property
    def reached(self) -> bool | None:
        if self.goal is None and self.limit is None and self.least is None:
            return None
        return (
            (self.goal is None or (self.ratio is not None and self.ratio >= self.goal))
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

    def as_json(self) -> dict[str, object]:
        """Without the fields that say nothing of this line, except `theirs`."""
        fields = {**asdict(self), "reached": self.reached}
        return {name: value for name, value in fields.items() if name == "theirs" or value not in (None, {})}

    @property
    def text(self) -> str:
        """The line as it is printed when it has been measured."""
        theirs = "" if self.theirs is None else f"; {self.other} {self.theirs:.4g}, ratio {self.ratio:.3g}"
        if self.missing is not None:
            theirs = f"; {self.other}: {self.missing}"
        return f"{self.case}, {self.what}: {self.ours:.4g} {self.unit}{theirs}"


@dataclass
class Report:
    machine: dict[str, object]
    title: str = "flash_dmattn against PyTorch; ratio = PyTorch / flash_dmattn (its quartiles)"
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # that each case took
    script: str = field(default_factory=lambda: Path(sys.argv[0]).stem)
    command: list[str] = field(default_factory=lambda: command_line())
    versions: dict[str, str | None] = field(default_factory=lambda: describe_versions())
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%d"))

    def write_json(self, path: Path) -> None:
        """Into a folder: as `<machine>-<script>.json`."""
        if path.is_dir():
            path /= f"{slug(str(self.machine['name']))}-{self.script}.json"
        content = {
            "schema": SCHEMA,
            "script": self.script,
            "command": self.command,
            "date": self.date,
            "machine": self.machine,
            "versions": self.versions,
            "seconds": {name: round(taken, 1) for name, taken in self.seconds.items()},
            "notes": list(dict.fromkeys(self.notes)),
        }
        # Six digits: more are noise. A line of text for each comparison, so that kept files can be compared.
        lines = [json.dumps(_rounded(line.as_json()), ensure_ascii=False) for line in self.comparisons]
        start = json.dumps(_rounded(content), indent=2, ensure_ascii=False).removesuffix("\n}")
        path.write_text(f'{start},\n  "comparisons": [\n    ' + ",\n    ".join(lines) + "\n  ]\n}\n")

    def print_table(self, console: Console) -> None:
        others = {line.other for line in self.comparisons if line.theirs is not None or line.missing is not None}
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
                theirs = f"{line.theirs:.4g} {line.unit}"
                ratio = f"{line.ratio:.2f} ({line.ratio_low:.2f} – {line.ratio_high:.2f})"
            elif line.missing is not None:
                theirs = line.missing
            if theirs and not only_other:
                theirs = f"{line.other}: {theirs}"
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


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value


def slug(name: str) -> str:
    """A name as part of a file's: "Intel(R) Xeon(R) Processor" -> "intel-xeon-processor"."""
    name = re.sub(r"\((r|tm)\)", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def command_line() -> list[str]:
    script = Path(sys.argv[0]).resolve()
    is_here = script.is_relative_to(ROOT)
    return [script.relative_to(ROOT).as_posix() if is_here else script.name, *sys.argv[1:]]


# ---- What figures depend on


def describe_machine() -> dict[str, object]:
    """CPU, instruction sets, threads. Scripts that measure a GPU put its name in the place of the CPU's."""
    facts = collect()
    for name in ("version", "torch", "python"):
        del facts[name]  # describe_versions() has them
    threads = facts["cpu"].pop("threads")
    return {
        "name": _processor(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()}, {platform.machine()}",
        **facts,
    }


def describe_versions() -> dict[str, str | None]:
    """Of the package, its commit, torch, Python and the peers that are installed."""
    versions = {
        "flash_dmattn": flash_dmattn.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in PEERS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str | None:
    """Of the checkout that the package is imported from, with "-dirty" where files differ; None outside of one."""
    if not Path(flash_dmattn.__file__).resolve().is_relative_to(ROOT / "python"):
        return None
    # The files that this run writes are no difference.
    changed = ["git", "diff", "--quiet", "HEAD", "--", ".", ":(exclude)benchmarks/results"]
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        is_dirty = subprocess.run(changed, cwd=ROOT, capture_output=True).returncode != 0
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, or no repository: an unpacked archive
    return head.stdout.strip() + ("-dirty" if is_dirty else "")


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_machine(report: Report, console: Console) -> None:
    machine, versions = report.machine, report.versions
    cpu = machine["cpu"]
    console.print(
        f"{machine['processor']}; {machine['threads']} threads of {machine['cores']} cores; kernels: "
        f"{cpu['isa_float']} for float32, {cpu['isa_bfloat16']} for bfloat16; flash_dmattn {versions['flash_dmattn']}, "
        f"torch {versions['torch']}",
        highlight=False,
    )
