"""Compares flash_dmattn on one NVIDIA GPU with PyTorch's attention, FlexAttention and FlashAttention 4, if installed.

    python benchmarks/gpu_attention.py                                 every case, a quarter of an hour on an H200
    python benchmarks/gpu_attention.py --only dense decode             some of them
    python benchmarks/gpu_attention.py --json out.json                 also as JSON, which plot.py draws
    python benchmarks/gpu_attention.py --quick                         small sizes, to check this script only

All in bfloat16, in one process, on the same random values, each library in its own memory layout, samples in turn. The
aims are for an H200. docs/benchmarks.md says how it measures and how to read the table.
"""

from __future__ import annotations

import os
import sys

import torch
from common import benchmark_parser, run_cases
from gpu_cases import CASES as COMMON_CASES
from gpu_cases import ceilings
from gpu_common import DEVICE, Bench
from gpu_decode_cases import CASES as DECODE_CASES
from gpu_document_cases import CASES as DOCUMENT_CASES
from gpu_list_cases import CASES as LIST_CASES
from gpu_sweep_cases import CASES as SWEEP_CASES
from report import Report, describe_machine
from rich.console import Console

CASES = {**COMMON_CASES, **DECODE_CASES, **DOCUMENT_CASES, **LIST_CASES, **SWEEP_CASES}


def describe_gpu() -> dict[str, object]:
    """`name` says, too, which kernels FLASH_DMATTN_ARCH asks for."""
    properties = torch.cuda.get_device_properties(DEVICE)
    kernels = os.environ.get("FLASH_DMATTN_ARCH")
    return {
        "name": f"{properties.name}, {kernels} kernels" if kernels else properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": properties.total_memory / 2**30,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def main() -> int:
    arguments = benchmark_parser(__doc__.split("\n")[0], CASES, "samples of each library per line").parse_args()
    torch.manual_seed(0)
    gpu = describe_gpu()
    report = Report(
        {**describe_machine(), "name": gpu["name"], "gpu": gpu},
        title="On the GPU; ratio = other's time over ours (its quartiles)",
    )
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(
        f"{gpu['name']}; CUDA {gpu['cuda']}, cuDNN {gpu['cudnn']}, torch {report.versions['torch']}, "
        f"flash_dmattn {report.versions['flash_dmattn']}",
        highlight=False,
    )
    bench = Bench(max(2, arguments.repeats), arguments.quick, notes=report.notes)
    torch.cuda.set_stream(torch.cuda.Stream())  # graphs cannot be captured on the default stream
    cases = {"ceilings": ceilings, **CASES}
    return run_cases(cases, bench, report, console, arguments, first=["ceilings"])


if __name__ == "__main__":
    sys.exit(main())
