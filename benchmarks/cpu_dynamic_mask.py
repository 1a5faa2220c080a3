"""Measures attention over dynamically selected keys on the CPU, against PyTorch and against this library's dense rate.

    python benchmarks/cpu_dynamic_mask.py                             every case, some minutes on two cores
    python benchmarks/cpu_dynamic_mask.py --only speed --json out.json
    python benchmarks/cpu_dynamic_mask.py --only lengths --plot lengths.png
    python benchmarks/cpu_dynamic_mask.py --quick                     small sizes, to check this script only

What PyTorch does is what the original package's users do: torch.topk over the causal scores of every row, scattered
into a mask, then scaled_dot_product_attention with the bias where the mask is true. Its mask wants no gradient, since
it would leave its fused kernel; the backward here computes the bias's gradient too. Every figure is a time, except how
many scores are computed for each one kept, which plan_report tells. docs/benchmarks.md says how to read the table,
docs/selection.md what is computed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from common import (
    Comparison,
    Report,
    benchmark_parser,
    compare_samples,
    compare_times,
    describe_machine,
    measure_samples,
    print_machine,
    run_cases,
    sample_seconds,
)
from flash_dmattn import (
    KeyIntervals,
    PreparedMask,
    attention,
    dynamic_mask_attention,
    plan_report,
    prepare_mask,
    select_keys,
)
from rich.console import Console
from torch import Tensor

# The shape of every case but the selection's.
HEADS, KEY_HEADS, HEAD_DIM = 2, 1, 64
SHAPE = f"H{HEADS} Hkv{KEY_HEADS} D{HEAD_DIM}"
DTYPE = torch.float32

LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536]
WINDOW = 1024
# PyTorch holds a (S, S) mask in float32, and what it is made from.
LONGEST_OF_THEIRS = 8192


def key_scores(length: int, drift: float = 0.0) -> Tensor:
    """(1, KEY_HEADS, length): normal scores, of which no two are equal, since torch.topk does not say which stay.

    With `drift` they rise along the sequence, by so many standard deviations: then newer keys push out older ones.
    """
    generator = torch.Generator().manual_seed(1)
    ranks = torch.stack([torch.randperm(length, generator=generator) for _ in range(KEY_HEADS)])
    scores = torch.special.ndtri((ranks.double() + 0.5) / length)
    return (scores + drift * torch.arange(length) / length).float()[None]


@dataclass
class Problem:
    """One causal attention with a score per key, by both libraries: (B, S, H, D) here, (B, H, S, D) in torch."""

    length: int
    window: int
    drift: float = 0.0
    query: Tensor = field(init=False)
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int) -> Tensor:
            return torch.randn(1, self.length, heads, HEAD_DIM, generator=generator, dtype=DTYPE)

        self.query, self.key, self.value = normal(HEADS), normal(KEY_HEADS), normal(KEY_HEADS)
        self.dout = normal(HEADS)
        self.key_bias = key_scores(self.length, self.drift)
        # Each library gets leaves of its own, contiguous in its own layout.
        self.their_inputs = [t.transpose(1, 2).contiguous() for t in (self.query, self.key, self.value)]
        self.their_dout = self.dout.transpose(1, 2).contiguous()
        for leaf in (*self.our_leaves(), *self.their_inputs):
            leaf.requires_grad_()

    def our_leaves(self) -> list[Tensor]:
        return [self.query, self.key, self.value, self.key_bias]

    def select(self) -> KeyIntervals:
        return select_keys(self.key_bias, self.window)

    def ours(self, mask: Tensor | KeyIntervals | PreparedMask) -> Tensor:
        return attention(self.query, self.key, self.value, mask=mask, bias=self.key_bias, is_causal=True)

    def ours_selected(self) -> Tensor:
        return dynamic_mask_attention(self.query, self.key, self.value, self.key_bias, self.window)

    def our_dense(self) -> Tensor:
        return attention(self.query, self.key, self.value, is_causal=True)

    def our_step(self) -> object:
        """What training needs of one layer: selection, forward, backward."""
        return torch.autograd.grad(self.ours_selected(), self.our_leaves(), self.dout)

    @torch.no_grad()
    def their_mask(self) -> Tensor:
        """(1, KEY_HEADS, S, S): the bias of each row's highest keys, -inf elsewhere."""
        causal = torch.ones(self.length, self.length, dtype=torch.bool).tril_()
        scores = self.key_bias[:, :, None].masked_fill(~causal, -math.inf)
        values, indices = scores.topk(min(self.window, self.length), sorted=False)
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, values != -math.inf)
        return scores.masked_fill_(~kept, -math.inf)

    def theirs(self, mask: Tensor) -> Tensor:
        query, key, value = self.their_inputs
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=HEADS != KEY_HEADS)

    def backward_of(self, out: Tensor, leaves: list[Tensor], dout: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    @torch.no_grad()
    def check(self, intervals: KeyIntervals, mask: Tensor) -> None:
        """Raises AssertionError if the two do not select and compute the same."""
        assert torch.equal(intervals.dense_mask(self.length), mask != -math.inf), "other keys were selected"
        expected = self.theirs(mask).transpose(1, 2)
        torch.testing.assert_close(self.ours(intervals), expected, atol=1e-4, rtol=1e-4, check_stride=False)
        torch.testing.assert_close(self.ours_selected(), expected, atol=1e-4, rtol=1e-4, check_stride=False)


@dataclass(frozen=True)
class Settings:
    repeats: int
    threads: int
    quick: bool

    def length(self, length: int) -> int:
        return length // 16 if self.quick else length

    def problem(self, length: int, window: int, drift: float = 0.0) -> Problem:
        return Problem(self.length(length), self.length(window), drift)


def milliseconds(function: Callable[[], object]) -> float:
    return 1e3 * sample_seconds(function, 1)


def speed(settings: Settings) -> Iterator[Comparison]:
    """Against PyTorch at S 8192, w 1024."""
    problem = settings.problem(8192, WINDOW)
    case = f"S{problem.length} w{problem.window} {SHAPE}"
    intervals, mask = problem.select(), problem.their_mask()
    problem.check(intervals, mask)
    compare = partial(compare_times, case, dtype=DTYPE, repeats=settings.repeats)
    with torch.no_grad():
        yield compare(
            what="selection + forward",
            ours=problem.ours_selected,
            theirs=lambda: problem.theirs(problem.their_mask()),
            goal=30.0,
            other="topk mask + SDPA",
        )
        yield compare(
            what="forward",
            ours=lambda: problem.ours(intervals),
            theirs=lambda: problem.theirs(mask),
            goal=5.0,
            other="SDPA given the mask",
        )
    yield compare(
        what="backward",
        ours=problem.backward_of(problem.ours(intervals), problem.our_leaves(), problem.dout),
        theirs=problem.backward_of(problem.theirs(mask), problem.their_inputs, problem.their_dout),
        goal=5.0,
        other="SDPA given the mask",
    )


def rate(settings: Settings) -> Iterator[Comparison]:
    """Time per kept score against that of a dense causal call, which has no bias."""
    for drift, scores in ((0.0, "random"), (4.0, "rising")):
        problem = settings.problem(32768, 2048, drift)
        case = f"S{problem.length} w{problem.window} {SHAPE}, {scores} scores"
        yield from compare_rates(case, problem, min(settings.repeats, 5))


def compare_rates(case: str, problem: Problem, repeats: int) -> Iterator[Comparison]:
    intervals = problem.select()
    kept = intervals.kept_scores() * HEADS // KEY_HEADS
    dense = problem.length * (problem.length + 1) // 2 * HEADS

    def per_score(function: Callable[[], object], scores: int) -> Callable[[], float]:
        return lambda: 1e9 * sample_seconds(function, 1) / scores

    compare = partial(compare_samples, case, dtype=DTYPE, unit="ns/score", repeats=repeats, goal=0.85)
    compare = partial(compare, other="own dense causal")
    with torch.no_grad():
        ours = per_score(lambda: problem.ours(intervals), kept)
        yield compare(what="forward", ours=ours, theirs=per_score(problem.our_dense, dense))
    backward = problem.backward_of(problem.ours(intervals), problem.our_leaves(), problem.dout)
    dense_backward = problem.backward_of(problem.our_dense(), problem.our_leaves()[:3], problem.dout)
    yield compare(what="backward", ours=per_score(backward, kept), theirs=per_score(dense_backward, dense))


def plan(settings: Settings) -> Iterator[Comparison]:
    """Scores that the forward computes for each one that it keeps: the price of tiles."""
    for length, window, limit in ((8192, 1024, 1.25), (32768, 2048, 1.12)):
        for drift, scores in ((0.0, "random"), (4.0, "rising")):
            problem = settings.problem(length, window, drift)
            report = plan_report(problem.query, problem.key, mask=problem.select(), is_causal=True)
            yield measure_samples(
                f"S{problem.length} w{problem.window} {SHAPE}, {scores} scores",
                "computed / kept",
                DTYPE,
                "x",
                lambda report=report: report.ratio,
                repeats=1,
                limit=limit,
            )


def prepared(settings: Settings) -> Iterator[Comparison]:
    """A dense bool mask of the highest scores, prepared once, against the same mask as it is."""
    problem = settings.problem(8192, WINDOW)
    mask = problem.select().dense_mask(problem.length)
    ready = prepare_mask(mask)
    torch.testing.assert_close(problem.ours(ready), problem.ours(mask), atol=1e-5, rtol=1e-5)
    case = f"S{problem.length} w{problem.window} {SHAPE}, bool mask"
    compare = partial(compare_times, case, dtype=DTYPE, repeats=settings.repeats, other="not prepared")
    with torch.no_grad():
        yield compare(what="forward", ours=lambda: problem.ours(ready), theirs=lambda: problem.ours(mask))
    ours, theirs = (
        problem.backward_of(problem.ours(form), problem.our_leaves(), problem.dout) for form in (ready, mask)
    )
    yield compare(what="backward", ours=ours, theirs=theirs)
    once = partial(milliseconds, lambda: prepare_mask(mask))
    yield measure_samples(case, "prepare_mask, once", DTYPE, "ms", once, repeats=settings.repeats)


def growth(settings: Settings) -> Iterator[Comparison]:
    """How much longer a step takes on four times the length: 4 is linear."""
    short, long = settings.problem(16384, WINDOW), settings.problem(65536, WINDOW)
    yield measure_samples(
        f"S{short.length} to S{long.length}, w{short.window} {SHAPE}",
        "growth of selection + forward + backward",
        DTYPE,
        "x",
        lambda: milliseconds(long.our_step) / milliseconds(short.our_step),
        repeats=settings.repeats,
        limit=4.4,
    )


def selection(settings: Settings) -> Iterator[Comparison]:
    """The selection alone, on one core."""
    torch.set_num_threads(1)
    window = settings.length(WINDOW)
    for length in (settings.length(65536), settings.length(1 << 20)):
        seconds = partial(sample_seconds, partial(select_keys, key_scores(length), window), 1)
        yield measure_samples(
            f"{length} keys w{window}, one head and thread",
            "selection",
            DTYPE,
            "M keys/s",
            lambda length=length, seconds=seconds: length / 1e6 / seconds(),
            repeats=settings.repeats,
            least=10.0,
        )


def lengths(settings: Settings) -> Iterator[Comparison]:
    """Time against length at a fixed window, PyTorch as far as its masks fit: what --plot draws."""
    for length in LENGTHS:
        problem = settings.problem(length, WINDOW)
        yield from measure_parts(problem, length <= LONGEST_OF_THEIRS, min(settings.repeats, 5))


def measure_parts(problem: Problem, with_theirs: bool, repeats: int) -> Iterator[Comparison]:
    intervals = problem.select()
    ours = {
        "selection": problem.select,
        "forward": lambda: problem.ours(intervals),
        "backward": problem.backward_of(problem.ours(intervals), problem.our_leaves(), problem.dout),
    }
    theirs = {}
    if with_theirs:
        mask = problem.their_mask()
        theirs = {
            "selection": problem.their_mask,
            "forward": lambda: problem.theirs(mask),
            "backward": problem.backward_of(problem.theirs(mask), problem.their_inputs, problem.their_dout),
        }
    case = f"S{problem.length} w{problem.window} {SHAPE}"
    for what, function in ours.items():
        with torch.set_grad_enabled(what == "backward"):
            if with_theirs:
                yield compare_times(case, what, DTYPE, function, theirs[what], repeats=repeats)
            else:
                yield measure_samples(case, what, DTYPE, "ms", partial(milliseconds, function), repeats=repeats)


CASES = {
    "plan": plan,
    "speed": speed,
    "prepared": prepared,
    "rate": rate,
    "growth": growth,
    "selection": selection,
    "lengths": lengths,
}


def plot(comparisons: list[Comparison], path: Path) -> None:
    """Draws the lines of `lengths`: both axes logarithmic, so that slope 1 is linear in the length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5.6), layout="constrained")
    for what, color in (("selection", "tab:green"), ("forward", "tab:blue"), ("backward", "tab:red")):
        lines = [line for line in comparisons if line.what == what]
        lengths = [int(line.case.split()[0].removeprefix("S")) for line in lines]
        axes.plot(lengths, [line.ours for line in lines], "o-", color=color, label=f"{what}, flash_dmattn")
        both = [(length, line.theirs) for length, line in zip(lengths, lines, strict=True) if line.theirs is not None]
        axes.plot(*zip(*both, strict=True), "x--", color=color, label=f"{what}, PyTorch")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths])
    axes.set(xlabel="sequence length", ylabel="milliseconds", title=" ".join(lines[0].case.split()[1:]))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__.split("\n")[0], CASES, "samples per line; at most 5 where one takes long")
    parser.add_argument("--plot", type=Path, help="also draw time against length into this PNG")
    arguments = parser.parse_args()
    if arguments.plot and "lengths" not in arguments.only:
        parser.error("--plot draws the case lengths, which --only leaves out")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    machine = describe_machine()
    settings = Settings(repeats=arguments.repeats, threads=arguments.threads, quick=arguments.quick)
    console = Console(width=None if sys.stdout.isatty() else 180)
    print_machine(machine, console)
    report = Report(machine, title="Dynamic masks; ratio = other / flash_dmattn (its quartiles)")
    lines, status = run_cases(CASES, settings, report, console, arguments, [])
    if arguments.plot:
        plot(lines["lengths"], arguments.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
