"""`info`: what this build is and what it chose on this machine."""

import argparse
import json
import platform

import torch

from .. import __version__, get_available_backends
from .._library import cpu_info, cuda_info, cuda_kernels


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the parser of `python -m flash_dmattn`."""
    parser = commands.add_parser("info", help="version, backends, instruction sets, threads, GPUs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def collect() -> dict[str, object]:
    """The facts, as JSON holds them."""
    cpu, cuda = cpu_info(), cuda_info()
    return {
        "version": __version__,
        "backends": get_available_backends(),
        "cpu": {
            "isa_float": cpu.isa_float,
            "isa_bfloat16": cpu.isa_bfloat16,
            "compiled": cpu.compiled,
            "supported": cpu.supported,
            "threads": torch.get_num_threads(),
        },
        "cuda": None
        if cuda.toolkit == 0
        else {
            "toolkit": f"{cuda.toolkit // 1000}.{cuda.toolkit % 1000 // 10}",
            "architectures": cuda.architectures,
            "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        },
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _gpu(index: int) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "kernels": cuda_kernels(index),
    }


def _cuda_rows(cuda: dict | None) -> list[tuple[str, str]]:
    if cuda is None:
        return [("CUDA", "not in this build")]
    rows = [
        ("CUDA", cuda["toolkit"]),
        ("CUDA kernels in this build", ", ".join(map(_architecture, cuda["architectures"]))),
    ]
    for index, gpu in enumerate(cuda["gpus"]):
        rows.append(
            (f"GPU {index}", f"{gpu['name']}, {gpu['capability']}, {gpu['memory_gib']} GiB: {gpu['kernels']} kernels")
        )
    return rows if cuda["gpus"] else [*rows, ("GPUs", "none that torch sees")]


def _architecture(name: str) -> str:
    """ "90-real" -> "sm_90", "80-virtual" -> "PTX of 80", "90" -> "sm_90 and its PTX"."""
    number, _, kind = name.partition("-")
    return {"real": f"sm_{number}", "virtual": f"PTX of {number}"}.get(kind, f"sm_{number} and its PTX")


def run(options: argparse.Namespace) -> int:
    """Prints the facts."""
    facts = collect()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    cpu = facts["cpu"]
    table = Table(title=f"flash_dmattn {facts['version']}", show_header=False)
    for name, value in (
        ("backends", ", ".join(facts["backends"])),
        ("CPU kernels for float32, float16", cpu["isa_float"]),
        ("CPU kernels for bfloat16", cpu["isa_bfloat16"]),
        ("CPU kernels in this build", ", ".join(cpu["compiled"])),
        ("CPU kernels this machine can run", ", ".join(cpu["supported"])),
        ("threads", str(cpu["threads"])),
        *_cuda_rows(facts["cuda"]),
        ("torch", facts["torch"]),
        ("Python", facts["python"]),
    ):
        table.add_row(name, value)
    Console().print(table)
    return 0
