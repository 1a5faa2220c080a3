"""Runs the C++ benchmark of dynamic selection on the device, cuda_selection.cu, and reports what it measured.

    cmake --build build/release --target cuda_selection_benchmark
    python benchmarks/gpu_selection.py build/release/cuda_selection_benchmark --json out.json

Each shape three times: as a CUDA graph that is replayed, as plain launches, and as graphs one behind another, where the
events' own time and the first launch's latency are shared out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from report import Comparison, Report, describe_machine
from rich.console import Console


def lines_of(shape: dict[str, object]) -> Iterator[Comparison]:
    """Of one line that the program printed."""
    name = str(shape["shape"])
    dtype = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}[name.split(" x ")[1].split()[1]]
    sizes = {size: shape[size] for size in ("keys", "heads", "window")}
    for what, measured in shape.items():
        if isinstance(measured, dict):
            low, middle, high = measured["us"]
            line = Comparison(f"select {name}, w{shape['window']}", what, dtype, "us", middle, ours_low=low)
            line.ours_high, line.samples, line.sizes, line.group = high, measured["samples"], sizes, "selection"
            yield line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", type=Path, help="cuda_selection_benchmark, as built")
    parser.add_argument("--json", type=Path, help="also write the figures to this file; into a folder: as "
                        "<machine>-<script>.json")  # fmt: skip
    arguments = parser.parse_args()
    start = time.perf_counter()
    printed = subprocess.run([arguments.program], check=True, stdout=subprocess.PIPE, text=True).stdout
    report = Report({**describe_machine(), "name": torch.cuda.get_device_name()}, title="Selection on the device")
    report.seconds["selection"] = time.perf_counter() - start
    report.comparisons = [line for shape in printed.splitlines() for line in lines_of(json.loads(shape))]
    report.print_table(Console(width=None if sys.stdout.isatty() else 120))
    if arguments.json:
        report.write_json(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
