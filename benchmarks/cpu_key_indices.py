"""Measures attention under lists of keys per query (KeyIndices) on the CPU, against PyTorch given the same mask.

    python benchmarks/cpu_key_indices.py                       every case, a minute on two cores
    python benchmarks/cpu_key_indices.py --only coherent --json out.json
    python benchmarks/cpu_key_indices.py --quick               small sizes, to check this script only

Every row keeps 512 of its past keys, chosen anew for every row. What such a call costs depends on how alike
neighbouring rows choose: choices.py says how the three cases draw. Making the lists is not what is measured; what the
library makes of them (packing, planning) is part of every call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from choices import POOLS, choose_keys
from common import (
    benchmark_parser,
    compare_times,
    measure_samples,
    run_cases,
)
from flash_dmattn import KeyIndices, attention, plan_report
from report import Comparison, Report, describe_machine, print_machine
from rich.console import Console
from torch import Tensor

HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 128
DTYPE = torch.float32
GOAL = 3.0  # of the forward against PyTorch, where rows choose alike


@dataclass(frozen=True)
class Settings:
    repeats: int
    length: int
    kept: int


def compare(settings: Settings, choice: str) -> Iterator[Comparison]:
    """Forward and backward for one way to choose, and the forward against this library's own dense causal one."""
    generator = torch.Generator().manual_seed(1)

    def normal(heads: int) -> Tensor:
        return torch.randn(1, settings.length, heads, HEAD_DIM, generator=generator, dtype=DTYPE).requires_grad_()

    ours = normal(HEADS), normal(KEY_HEADS), normal(KEY_HEADS)
    theirs = [tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in ours]
    dout = torch.randn(ours[0].shape, generator=generator, dtype=DTYPE)
    their_dout = dout.transpose(1, 2).contiguous()
    chosen = choose_keys(settings.length, settings.kept, POOLS[choice])
    lists = KeyIndices(chosen[None, None])
    mask = lists.dense_mask(settings.length)

    def our_forward() -> Tensor:
        return attention(*ours, mask=lists, is_causal=True)

    def their_forward() -> Tensor:
        return F.scaled_dot_product_attention(*theirs, attn_mask=mask, enable_gqa=True)

    torch.testing.assert_close(our_forward(), their_forward().transpose(1, 2), atol=1e-4, rtol=1e-4, check_stride=False)
    case = f"{choice}, S{settings.length} keeping {settings.kept}, H{HEADS} Hkv{KEY_HEADS} D{HEAD_DIM}"
    timed = partial(compare_times, case, dtype=DTYPE, repeats=settings.repeats)
    goal = GOAL if choice == "coherent" else None
    with torch.no_grad():
        yield timed(what="forward", ours=our_forward, theirs=their_forward, goal=goal)
        dense = partial(attention, *ours, is_causal=True)
        yield timed(what="forward", ours=our_forward, theirs=dense, other="own dense causal")
    outs = our_forward(), their_forward()
    yield timed(
        what="backward",
        ours=lambda: torch.autograd.grad(outs[0], ours, dout, retain_graph=True),
        theirs=lambda: torch.autograd.grad(outs[1], theirs, their_dout, retain_graph=True),
    )
    report = plan_report(ours[0], ours[1], mask=lists, is_causal=True)
    yield measure_samples(case, "computed / kept", DTYPE, "x", lambda: report.ratio, repeats=1)


def main() -> int:
    parser = benchmark_parser(__doc__.split("\n")[0], POOLS, "pairs of samples per line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = (512, 64) if arguments.quick else (4096, 512)
    settings = Settings(arguments.repeats, *sizes)
    machine = describe_machine()
    console = Console(width=None if sys.stdout.isatty() else 180)
    report = Report(machine, title="Lists of keys per query; ratio = other / flash_dmattn (its quartiles)")
    print_machine(report, console)
    cases = {choice: partial(compare, choice=choice) for choice in POOLS}
    return run_cases(cases, settings, report, console, arguments)


if __name__ == "__main__":
    sys.exit(main())
