"""`info`: what this build is and what it chose on this machine."""

import argparse
import json
import platform

import torch

from .. import __version__, get_available_backends
from .._library import cpu_info


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the parser of `python -m flash_dmattn`."""
    parser = commands.add_parser("info", help="version, backends, instruction sets, threads")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def collect() -> dict[str, object]:
    """The facts, as JSON holds them."""
    cpu = cpu_info()
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
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


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
        ("torch", facts["torch"]),
        ("Python", facts["python"]),
    ):
        table.add_row(name, value)
    Console().print(table)
    return 0
