"""Cases of gpu_attention.py that vary one size, by protocols of the original project, flash-dmattn 1.x: "Vary sequence
length" and "Vary keep_window_size" of its forward_performance.py and backward_performance.py. Every row sees the keys
of highest score in its past, with a bias per key; ours chooses them in the call, PyTorch's kernel gets a mask made
before, and FlashAttention 4 attends to all of the past, which is what one has without a choice.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpu_cases import beside_dense, efficient_dynamic, takes_mask
from gpu_common import EFFICIENT, Bench, DynamicProblem, Work, backward_of, check_equal
from report import Comparison

PROTOCOL = (2, 1, 128)  # H, Hkv, D
MODEL = (32, 8, 128)
WINDOWS = [32, 128, 512, 2048, 8192]


def lengths(bench: Bench) -> Iterator[Comparison]:
    """Time against length, every row keeping 1024 keys."""
    yield from _lengths(bench, PROTOCOL, 1024, range(8, 18))


def model_lengths(bench: Bench) -> Iterator[Comparison]:
    """The same with the heads of a model, every row keeping 2048 keys."""
    yield from _lengths(bench, MODEL, 2048, range(12, 18))


def _lengths(bench: Bench, heads: tuple[int, int, int], window: int, powers: range) -> Iterator[Comparison]:
    for length in [1 << power for power in powers]:
        problem = DynamicProblem(bench, *heads, length, window)
        yield from _keeping(bench, problem, {"length": problem.length})


def kept(bench: Bench) -> Iterator[Comparison]:
    """Time against the number of keys that a row keeps."""
    for window in WINDOWS:
        problem = DynamicProblem(bench, *PROTOCOL, 16384, window)
        yield from _keeping(bench, problem, {"window": problem.window})


def _keeping(bench: Bench, problem: DynamicProblem, sizes: dict[str, float | str]) -> Iterator[Comparison]:
    forwards: dict[str, Work] = {}
    backwards: dict[str, Work] = {}
    if takes_mask(problem):
        efficient, leaves, dout = efficient_dynamic(problem, problem.select())
        check_equal(problem.ours_selected(), efficient().reshape_as(problem.their_dout).transpose(1, 2))
        forwards[EFFICIENT], backwards[EFFICIENT] = efficient, backward_of(efficient, leaves, dout)
    yield from beside_dense(bench, f"keeping {problem.name}", problem, forwards, backwards, sizes=sizes)


CASES = {"lengths": lengths, "model_lengths": model_lengths, "kept": kept}
