"""Sweeps over lengths, windows and densities on the CPU, against every peer that is installed.

    python benchmarks/cpu_sweeps.py                                every case, some minutes on two cores
    python benchmarks/cpu_sweeps.py --only lengths --json out.json
    python benchmarks/plot.py out.json --out .                     draws them
    python benchmarks/cpu_sweeps.py --quick                        small sizes, to check this script only

`lengths` and `windows` are protocols of the original project, flash-dmattn 1.x ("Vary sequence length" and "Vary
keep_window_size" of its forward_performance.py and backward_performance.py), which ran on a GPU: one sequence, two
query heads, one key head, head dim 128; every row sees the keys of highest score in its past, with a bias per key.
FlexAttention is compiled and has no backward on CPUs. Its block masks, and the masks of scaled_dot_product_attention,
are made before the clock starts, except where a line says that it selects. A peer without a figure is there with the
reason.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from common import benchmark_parser, compare_all, milliseconds, run_cases
from cpu_problems import DTYPE, DynamicProblem, Problem
from flash_dmattn import KeyIntervals, PreparedMask, prepare_mask, select_keys
from report import Comparison, Report, describe_machine, print_machine
from rich.console import Console
from torch import Tensor

SDPA, FLEX, TOPK, DENSE = "SDPA", "FlexAttention", "topk mask + SDPA", "own dense"
NO_BACKWARD = "no backward on CPUs"

LENGTHS = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
LONGEST_OF_PEERS = 16384  # at the next length a mask in float32 takes 4 GiB, and torch.topk three times that
WINDOWS = [32, 128, 512, 2048, 8192]
SLIDING_WINDOWS = [64, 256, 1024, 4096]
SHARES = [1.0, 0.5, 0.25, 0.1]
TILE = 128


@dataclass(frozen=True)
class Settings:
    repeats: int
    quick: bool

    def length(self, length: int) -> int:
        return length // 16 if self.quick else length

    def compare(
        self,
        case: str,
        what: str,
        ours: Callable[[], object],
        others: Mapping[str, Callable[[], object] | str],
        sizes: Mapping[str, float | str],
        most: int,
    ) -> list[Comparison]:
        """Milliseconds of one call each, from at most `most` samples."""
        calls = 10 if sizes["length"] <= 1024 else 1
        samplers = {name: work if isinstance(work, str) else milliseconds(work, calls) for name, work in others.items()}
        repeats = min(self.repeats, most)
        return compare_all(case, what, DTYPE, "ms", milliseconds(ours, calls), samplers, repeats=repeats, sizes=sizes)


def absent_peers() -> dict[str, str]:
    """Why these have no figure on a CPU."""
    reasons = {"flash-dmattn 1.x": "GPUs only"}
    for name, module in (("xFormers", "xformers"), ("flash-attn", "flash_attn")):
        reasons[name] = "not installed" if importlib.util.find_spec(module) is None else "GPUs only"
    return reasons


def lengths(settings: Settings) -> Iterator[Comparison]:
    """Time against length, every row keeping 1024 keys."""
    for length in LENGTHS:
        problem = DynamicProblem(settings.length(length), settings.length(1024), head_dim=128)
        others = absent_peers() if length == LENGTHS[0] else {}
        yield from _dynamic(settings, problem, others, length <= LONGEST_OF_PEERS)


def windows(settings: Settings) -> Iterator[Comparison]:
    """Time against the number of kept keys, at one length."""
    for window in WINDOWS:
        problem = DynamicProblem(settings.length(8192), settings.length(window), head_dim=128)
        yield from _dynamic(settings, problem, absent_peers() if window == WINDOWS[0] else {}, True)


def _dynamic(
    settings: Settings, problem: DynamicProblem, absent: dict[str, str], with_peers: bool
) -> Iterator[Comparison]:
    case = f"S{problem.length} w{problem.window} {problem.shape}"
    sizes = {"length": problem.length, "window": problem.window}
    intervals = problem.select()
    selecting, forwards, backwards = (dict.fromkeys(names, "too long") for names in ((TOPK,), (SDPA, FLEX), (SDPA,)))
    if with_peers:
        mask = problem.their_mask()
        flex = problem.flex_forward(intervals)
        problem.check(intervals, mask)
        with torch.no_grad():
            _check_equal(flex(), problem.theirs(mask))
        selecting = {TOPK: lambda: problem.theirs(problem.their_mask())}
        forwards = {SDPA: lambda: problem.theirs(mask), FLEX: flex}
        backwards = {SDPA: problem.backward_of(problem.theirs(mask), problem.their_inputs, problem.their_dout)}
    backward = problem.backward_of(problem.ours(intervals), problem.our_leaves(), problem.dout)
    most = 7 if problem.length <= 4096 else 3
    with torch.no_grad():
        yield from settings.compare(case, "selection + forward", problem.ours_selected, selecting, sizes, most)
        yield from settings.compare(case, "forward", lambda: problem.ours(intervals), forwards | absent, sizes, most)
    yield from settings.compare(case, "backward", backward, backwards | {FLEX: NO_BACKWARD}, sizes, most)


def _check_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, check_stride=False)


def sliding(settings: Settings) -> Iterator[Comparison]:
    """The last W keys: as intervals here, as a bool mask and as a block mask there."""
    for window in SLIDING_WINDOWS:
        problem, width = Problem(settings.length(8192)), settings.length(window)
        intervals = KeyIntervals.sliding_window(width - 1, 0, problem.length)
        case = f"last {width} keys, S{problem.length} {problem.shape}"
        sizes = {"length": problem.length, "window": width}
        mask, absent = intervals.dense_mask(problem.length), absent_peers() if window == SLIDING_WINDOWS[0] else {}
        yield from _masked(settings, case, sizes, problem, intervals, mask, _last(width), absent, is_causal=True)


def _last(width: int) -> Callable[..., Tensor]:
    """A mask_mod of FlexAttention, as is what _given returns."""

    def is_visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (key > row - width)

    return is_visible


def _given(mask: Tensor) -> Callable[..., Tensor]:
    def is_visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return mask[row, key]

    return is_visible


def densities(settings: Settings) -> Iterator[Comparison]:
    """Four kinds of mask at several shares of kept scores, beside this library's own dense attention."""
    for kind in ("tiles", "keys", "scores", "top w"):
        for share in SHARES:
            problem = Problem(settings.length(4096))
            mask = _mask(kind, problem, share)
            is_causal = isinstance(mask, KeyIntervals)
            dense = mask.dense_mask(problem.length)[0, 0] if is_causal else mask.expand(problem.length, -1)
            ours = mask if is_causal else prepare_mask(mask[None, None], problem.length)
            case = f"{kind}, share {share:g}, S{problem.length} {problem.shape}"
            sizes = {"length": problem.length, "share": share, "kind": kind}
            absent = absent_peers() if (kind, share) == ("tiles", 1.0) else {}
            yield from _masked(
                settings, case, sizes, problem, ours, dense[None, None], _given(dense), absent, is_causal=is_causal
            )


def _mask(kind: str, problem: Problem, share: float) -> Tensor | KeyIntervals:
    """A bool mask (S or 1, S) that keeps that share of the scores; of "top w" intervals, and of the causal scores."""
    length, generator = problem.length, torch.Generator().manual_seed(1)

    def kept(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    if kind == "tiles":
        return kept(length // TILE, length // TILE).repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    if kind == "keys":
        return kept(1, length)
    if kind == "scores":
        return kept(length, length)
    scores = torch.randn(1, problem.key_heads, length, generator=generator)
    return select_keys(scores, math.ceil(length * (1 - math.sqrt(1 - share))))


def _masked(
    settings: Settings,
    case: str,
    sizes: Mapping[str, float | str],
    problem: Problem,
    given: KeyIntervals | PreparedMask,
    mask: Tensor,
    is_visible: Callable[..., Tensor],
    absent: dict[str, str],
    *,
    is_causal: bool,
) -> Iterator[Comparison]:
    """The same mask in the form that each wants."""

    def ours() -> Tensor:
        return problem.attend(given, is_causal=is_causal)

    def dense() -> Tensor:
        return problem.attend(None, is_causal=is_causal)

    flex = problem.flex(is_visible)
    with torch.no_grad():
        expected = problem.theirs(mask)
        visible = mask.any(-1, keepdim=True)  # of a row that sees nothing, libraries return what they like
        _check_equal(ours().transpose(1, 2) * visible, expected.nan_to_num() * visible)
        _check_equal(flex() * visible, expected.nan_to_num() * visible)
        forwards = {DENSE: dense, SDPA: lambda: problem.theirs(mask), FLEX: flex}
        yield from settings.compare(case, "forward", ours, forwards | absent, sizes, 5)
    backward, dense_backward = (
        problem.backward_of(work(), problem.our_leaves(), problem.dout) for work in (ours, dense)
    )
    their_backward = problem.backward_of(problem.theirs(mask), problem.their_inputs, problem.their_dout)
    backwards = {DENSE: dense_backward, SDPA: their_backward, FLEX: NO_BACKWARD}
    yield from settings.compare(case, "backward", backward, backwards, sizes, 5)


CASES = {"lengths": lengths, "windows": windows, "sliding": sliding, "densities": densities}


def main() -> int:
    description = "samples of each per line; at most 7, 3 where one takes long"
    arguments = benchmark_parser(__doc__.split("\n")[0], CASES, description).parse_args()
    torch.set_num_threads(arguments.threads)
    settings = Settings(arguments.repeats, arguments.quick)
    console = Console(width=None if sys.stdout.isatty() else 180)
    report = Report(describe_machine(), title="Sweeps; ratio = other / flash_dmattn (its quartiles)")
    print_machine(report, console)
    return run_cases(CASES, settings, report, console, arguments)


if __name__ == "__main__":
    sys.exit(main())
