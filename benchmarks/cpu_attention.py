"""Compares flash_dmattn on the CPU with torch.nn.functional.scaled_dot_product_attention.

    python benchmarks/cpu_attention.py                            every case, some minutes on two cores
    python benchmarks/cpu_attention.py --only dense tiny          some of them
    python benchmarks/cpu_attention.py --quick --json out.json    small sizes, to check this script only

Both get the same values, masks and biases in one process, in turn; the mask or bias is a tensor that exists already.
docs/benchmarks.md says how to read the table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from common import (
    benchmark_parser,
    compare_samples,
    compare_times,
    peak_memory_mib,
    run_cases,
    sample_seconds,
)
from flash_dmattn import attention, varlen_attention
from report import Comparison, Report, describe_machine, print_machine
from rich.console import Console
from torch import Tensor


@dataclass
class Problem:
    """One attention call in the layouts that the two libraries want: (B, S, H, D) here, (B, H, S, D) in torch."""

    heads: int
    key_heads: int
    head_dim: int
    length: int
    dtype: torch.dtype = torch.float32
    is_causal: bool = False
    mask: Tensor | None = None  # bool, broadcastable to (B, H, S, S)
    bias: Tensor | None = None
    requires_grad: bool = True
    query: Tensor = field(init=False)
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int) -> Tensor:
            return torch.randn(1, self.length, heads, self.head_dim, generator=generator).to(self.dtype)

        self.query, self.key, self.value = normal(self.heads), normal(self.key_heads), normal(self.key_heads)
        self.dout = normal(self.heads)
        # Each library gets leaves of its own, contiguous in its own layout.
        self.their_inputs = [t.transpose(1, 2).contiguous() for t in (self.query, self.key, self.value)]
        self.their_dout = self.dout.transpose(1, 2).contiguous()
        self.their_bias = None if self.bias is None else self.bias.clone()
        for leaf in (*self.our_leaves(), *self.their_leaves()):
            leaf.requires_grad_(self.requires_grad)

    def our_leaves(self) -> list[Tensor]:
        return [t for t in (self.query, self.key, self.value, self.bias) if t is not None]

    def their_leaves(self) -> list[Tensor]:
        return [t for t in (*self.their_inputs, self.their_bias) if t is not None]

    def ours(self) -> Tensor:
        return attention(self.query, self.key, self.value, mask=self.mask, bias=self.bias, is_causal=self.is_causal)

    def theirs(self) -> Tensor:
        query, key, value = self.their_inputs
        # torch knows one argument for both: no case here has a mask and a bias.
        mask = self.mask if self.bias is None else self.their_bias
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.is_causal, enable_gqa=self.heads != self.key_heads
        )

    def our_backward(self) -> Callable[[], object]:
        out = self.ours()
        return lambda: torch.autograd.grad(out, self.our_leaves(), self.dout, retain_graph=True)

    def their_backward(self) -> Callable[[], object]:
        out = self.theirs()
        return lambda: torch.autograd.grad(out, self.their_leaves(), self.their_dout, retain_graph=True)

    @torch.no_grad()
    def check(self) -> None:
        """Raises AssertionError if the two do not compute the same."""
        tolerance = 1e-4 if self.dtype == torch.float32 else 4e-2
        torch.testing.assert_close(
            self.ours(), self.theirs().transpose(1, 2), atol=tolerance, rtol=tolerance, check_stride=False
        )


@dataclass
class PackedProblem(Problem):
    """Causal documents of one length in one sequence: one call here, in torch one call for every document."""

    documents: int = 1

    def ours(self) -> Tensor:
        bounds = torch.arange(self.documents + 1, dtype=torch.int32) * (self.length // self.documents)
        tokens = (tensor[0] for tensor in (self.query, self.key, self.value))
        return varlen_attention(*tokens, bounds, is_causal=True)[None]

    def theirs(self) -> Tensor:
        parts = zip(*(tensor.chunk(self.documents, 2) for tensor in self.their_inputs), strict=True)
        grouped = self.heads != self.key_heads
        return torch.cat(
            [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=grouped) for part in parts], 2
        )


@dataclass(frozen=True)
class Settings:
    repeats: int
    threads: int
    quick: bool
    has_amx: bool

    def length(self, length: int) -> int:
        return length // 16 if self.quick else length


def compare_problem(
    settings: Settings, case: str, problem: Problem, forward_goal: float, backward_goal: float, with_graph: bool = False
) -> Iterator[Comparison]:
    """Forward, by default without recording a graph for the backward, then backward alone."""
    problem.check()

    def line(what: str, ours: Callable[[], object], theirs: Callable[[], object], goal: float) -> Comparison:
        return compare_times(case, what, problem.dtype, ours, theirs, repeats=settings.repeats, goal=goal)

    with torch.set_grad_enabled(with_graph):
        yield line("forward", problem.ours, problem.theirs, forward_goal)
    yield line("backward", problem.our_backward(), problem.their_backward(), backward_goal)


def dense(settings: Settings) -> Iterator[Comparison]:
    """Causal attention that sees everything: what generality costs."""
    for heads, key_heads, head_dim in ((2, 1, 64), (8, 2, 128)):
        length = settings.length(4096)
        case = f"dense causal H{heads} Hkv{key_heads} D{head_dim} S{length}"
        for dtype in (torch.float32, torch.bfloat16):
            problem = Problem(heads, key_heads, head_dim, length, dtype, is_causal=True)
            low_precision_goals = (0.7 if settings.has_amx else 0.9, 1.2)
            goals = (0.9, 0.9) if dtype == torch.float32 else low_precision_goals
            yield from compare_problem(settings, case, problem, *goals)


def window(settings: Settings) -> Iterator[Comparison]:
    """A local causal window, told only by a dense bool mask."""
    length, width = settings.length(8192), settings.length(1024)
    row, key = torch.arange(length)[:, None], torch.arange(length)
    mask = (key <= row) & (key > row - width)
    case = f"window {width} as a bool mask H2 Hkv1 D64 S{length}"
    yield from compare_problem(settings, case, Problem(2, 1, 64, length, mask=mask), 6.0, 5.0)


def packed(settings: Settings) -> Iterator[Comparison]:
    """Packed documents against a loop of calls, one for each document."""
    for documents, length in ((16, settings.length(512)), (128, settings.length(64))):
        for heads, key_heads, head_dim in ((2, 1, 64), (8, 2, 128)):
            case = f"{documents} documents of {length} causal H{heads} Hkv{key_heads} D{head_dim}"
            problem = PackedProblem(heads, key_heads, head_dim, documents * length, documents=documents)
            yield from compare_problem(settings, case, problem, 1.5, 1.5)


def per_key(settings: Settings) -> Iterator[Comparison]:
    """A mask that hides the same random keys from every row."""
    length, kept = settings.length(8192), settings.length(1024)
    mask = torch.zeros(1, 1, 1, length, dtype=torch.bool)
    mask[..., torch.randperm(length, generator=torch.Generator().manual_seed(1))[:kept]] = True
    case = f"{kept} random keys of {length} H2 Hkv1 D64"
    yield from compare_problem(settings, case, Problem(2, 1, 64, length, mask=mask), 6.0, 6.0)


def full_bias(settings: Settings) -> Iterator[Comparison]:
    """A bias per score that wants its gradient: time, then memory in a process each."""
    case, problem = full_bias_problem(settings)
    # In training torch leaves its fused kernel when the mask wants a gradient, so the forward is timed as in training.
    yield from compare_problem(settings, case, problem, 1.0, 1.0, with_graph=True)
    ours, theirs = (memory_in_own_process(settings, which) for which in ("ours", "theirs"))
    yield Comparison(
        case, "peak memory, both", "float32", "MiB", ours, theirs, *[theirs / ours] * 3, goal=1.0, other="PyTorch"
    )


def full_bias_problem(settings: Settings) -> tuple[str, Problem]:
    length = settings.length(2048)
    bias = torch.randn(1, 4, length, length, generator=torch.Generator().manual_seed(1))
    return f"bias (1, 4, {length}, {length}) with gradient, Hkv2 D64", Problem(4, 2, 64, length, bias=bias)


def memory_in_own_process(settings: Settings, which: str) -> float:
    command = [sys.executable, __file__, "--measure-memory", which, "--threads", str(settings.threads)]
    if settings.quick:
        command.append("--quick")
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure_memory(settings: Settings, which: str) -> float:
    """MiB that forward and backward of the full bias case add to what the inputs take."""
    _, problem = full_bias_problem(settings)
    small = Problem(4, 2, 64, 16, bias=torch.randn(1, 4, 16, 16))

    def run(case: Problem) -> object:
        backward = case.our_backward() if which == "ours" else case.their_backward()
        return backward()

    run(small)  # what a first call sets up once is not what is asked about
    return peak_memory_mib(lambda: run(problem))


def tiny(settings: Settings) -> Iterator[Comparison]:
    """What a call costs besides its arithmetic."""
    problem = Problem(2, 2, 64, 16, requires_grad=False)
    problem.check()
    for what, grad_mode in (("grad mode off", torch.no_grad()), ("no input needs grad", torch.enable_grad())):
        with grad_mode:
            yield compare_times(
                "tiny call B1 H2 S16 D64",
                what,
                problem.dtype,
                problem.ours,
                problem.theirs,
                repeats=settings.repeats,
                calls=20 if settings.quick else 1000,
                unit="us",
                limit=40.0,
            )


def mixed(settings: Settings) -> Iterator[Comparison]:
    """Slowdown when attention and matrix products take turns, against running each on its own.

    1 means that they do not disturb each other. A second pool of spinning threads beside torch's would show here.
    """
    length = settings.length(1024)
    problem = Problem(2, 1, 64, length, is_causal=True, requires_grad=False)
    left, right = torch.randn(2, length, length)
    calls = 2 if settings.quick else 10

    def slowdown(attend: Callable[[], Tensor]) -> Callable[[], float]:
        def in_turn() -> None:
            attend()
            torch.mm(left, right)

        def sample() -> float:
            apart = sample_seconds(attend, calls) + sample_seconds(lambda: torch.mm(left, right), calls)
            return sample_seconds(in_turn, calls) / apart

        return sample

    for threads in sorted({1, settings.threads}):
        torch.set_num_threads(threads)
        yield compare_samples(
            f"slowdown in turn with matmul, {threads} thread(s)",
            "forward",
            problem.dtype,
            "x",
            slowdown(problem.ours),
            slowdown(problem.theirs),
            repeats=settings.repeats,
            limit=1.1,
        )


CASES = {
    "dense": dense,
    "window": window,
    "packed": packed,
    "per-key": per_key,
    "bias": full_bias,
    "tiny": tiny,
    "mixed": mixed,
}


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__.split("\n")[0], CASES, "pairs of samples per line")
    parser.add_argument("--measure-memory", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    machine = describe_machine()
    settings = Settings(
        repeats=arguments.repeats,
        threads=arguments.threads,
        quick=arguments.quick,
        has_amx=machine["cpu"]["isa_bfloat16"] == "amx",
    )
    if arguments.measure_memory:
        print(measure_memory(settings, arguments.measure_memory))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    report = Report(machine)
    print_machine(report, console)
    return run_cases(CASES, settings, report, console, arguments)


if __name__ == "__main__":
    sys.exit(main())
