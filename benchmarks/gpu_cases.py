"""The cases of gpu_attention.py: what is measured, and against what."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from flash_dmattn import KeyIntervals, PreparedMask, attention, prepare_mask, select_keys
from flash_dmattn._library import attention_plan
from flash_dmattn._visibility import Visibility
from gpu_common import (
    CUDNN,
    DEVICE,
    EFFICIENT,
    FA2,
    FA4,
    FLEX,
    ORIGINAL,
    TOPK,
    Bench,
    DynamicProblem,
    FlexDynamic,
    Problem,
    Work,
    backward_of,
    check_equal,
    check_kept,
    compiled_flex,
    fa4_forward,
    fa4_tiles,
    if_installed,
    normal,
    step_of,
    sustained_sampler,
    topk_mask,
)
from report import Comparison
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

# H, Hkv, D, S, w of the dynamic masks.
SMALL = (2, 1, 64, 16384, 1024)
MIDDLE = (32, 8, 128, 8192, 1024)
LARGE = (32, 8, 128, 16384, 2048)
LONG = (32, 8, 128, 65536, 2048)
DENSE_FA4 = f"{FA4}, dense causal"


def ceilings(bench: Bench) -> Iterator[Comparison]:
    """Copy and matrix product of this GPU, beside which everything below is to be read."""
    source = normal(bench.length(1 << 31))
    target = torch.empty_like(source)
    lines = bench.compare("copy on the device", "read + written", lambda: target.copy_(source), unit="TB/s",
                          amount=2 * source.nbytes / 1e12)  # fmt: skip
    for line in lines:
        bench.copy_bandwidth = line.ours * 1e12
        yield line
    size = bench.length(8192)
    left, right = normal(size, size), normal(size, size)
    name = f"matrix product {size}^3"
    yield from bench.compare(name, "forward", lambda: left @ right, unit="TFLOPS", amount=2 * size**3 / 1e12)


def sustained(bench: Bench) -> Iterator[Comparison]:
    """Dense attention and dynamic masks, again and again, at the clocks that a GPU settles at when it does nothing
    else."""
    for is_causal in (False, True):
        problem = Problem(16, 16, 128, bench.length(16384))
        teraflop = problem.teraflop(0.5 if is_causal else 1.0)
        cudnn = problem.sdpa(SDPBackend.CUDNN_ATTENTION, is_causal=is_causal)
        forwards: dict[str, Work] = {CUDNN: cudnn}
        backwards = {CUDNN: backward_of(cudnn, problem.their_leaves, problem.their_dout)}
        if (fa4 := fa4_forward(problem, causal=is_causal)) is not None:
            forwards[FA4], backwards[FA4] = fa4, backward_of(fa4, problem.leaves, problem.dout)
        ours = partial(attention, problem.query, problem.key, problem.value, is_causal=is_causal)
        backward = backward_of(ours, problem.leaves, problem.dout)
        case = f"sustained dense {problem.name}{' causal' if is_causal else ''}"
        for what, work, others, amount in (
            ("forward", ours, forwards, teraflop),
            ("backward", backward, backwards, 2.5 * teraflop),
        ):
            yield from bench.compare(
                case, what, work, others, unit="TFLOPS", amount=amount, sampler_of=sustained_sampler
            )
    for shape in (LARGE, LONG):
        dynamic = DynamicProblem(bench, *shape)
        yield from beside_dense(bench, f"sustained dynamic {dynamic.name}", dynamic, sampler_of=sustained_sampler)


def dense(bench: Bench) -> Iterator[Comparison]:
    """Attention in which nothing is sparse."""
    shapes = (
        (1, 32, 64, 16384),
        (1, 16, 128, 16384),
        (1, 8, 256, 16384),
        (2, 16, 96, 8192),
        (4, 24, 128, 3000),
        (8, 16, 128, 2048),
    )
    for batch, heads, head_dim, length in shapes:
        for is_causal in (False, True):
            problem = Problem(heads, heads, head_dim, bench.length(length), batch)
            case = f"dense {problem.name}{' causal' if is_causal else ''}"
            yield from _dense(bench, case, problem, is_causal)


def _dense(bench: Bench, case: str, problem: Problem, is_causal: bool) -> Iterator[Comparison]:
    def ours() -> Tensor:
        return attention(problem.query, problem.key, problem.value, is_causal=is_causal)

    fa2 = problem.sdpa(SDPBackend.FLASH_ATTENTION, is_causal=is_causal)
    cudnn = problem.sdpa(SDPBackend.CUDNN_ATTENTION, is_causal=is_causal)
    fa4 = fa4_forward(problem, causal=is_causal)
    check_equal(ours(), fa2().transpose(1, 2))
    teraflop = problem.teraflop(0.5 if is_causal else 1.0)
    forwards: dict[str, Work] = {FA2: fa2, CUDNN: cudnn}
    backwards = {
        name: backward_of(forward, problem.their_leaves, problem.their_dout) for name, forward in forwards.items()
    }
    if fa4 is not None:
        forwards[FA4], backwards[FA4] = fa4, backward_of(fa4, problem.leaves, problem.dout)
    else:
        bench.notes.append("dense: without FA4, the package flash-attn-4, which is not installed")
    goals = {FA2: 0.95}
    yield from bench.compare(case, "forward", ours, forwards, unit="TFLOPS", amount=teraflop, goals=goals | {FA4: 0.97})
    backward = backward_of(ours, problem.leaves, problem.dout)
    goals[FA4] = 1.2 if problem.head_dim == 256 else 0.97
    yield from bench.compare(case, "backward", backward, backwards, unit="TFLOPS", amount=2.5 * teraflop, goals=goals)


def tiles(bench: Bench) -> Iterator[Comparison]:
    """A bool mask of whole 128 x 128 tiles: the rate per kept tile. Prepared before, as FlexAttention's is; and as it
    is."""
    problem = Problem(16, 16, 128, bench.length(16384))
    blocks = problem.length // 128
    full = problem.teraflop()

    def dense_ours() -> Tensor:
        return attention(problem.query, problem.key, problem.value)

    # One mask, written anew for each density, so that FlexAttention is compiled once.
    mask = torch.ones(problem.length, problem.length, dtype=torch.bool, device=DEVICE)
    flex = compiled_flex()

    def is_visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return mask[row, key]

    def ours_unprepared() -> Tensor:
        return attention(problem.query, problem.key, problem.value, mask=mask)

    dense_backward = backward_of(dense_ours, problem.leaves, problem.dout)
    # By density: of own dense attention.
    forward_goals, backward_goals = {0.25: 0.93, 0.1: 0.9}, {0.25: 0.92, 0.1: 0.87}
    for density in (1.0, 0.25, 0.1):
        kept = torch.zeros(blocks**2, dtype=torch.bool, device=DEVICE)
        kept[torch.randperm(blocks**2, device=DEVICE)[: math.ceil(density * blocks**2)]] = True
        mask.view(blocks, 128, blocks, 128).copy_(kept.view(blocks, 1, blocks, 1).expand(-1, 128, -1, 128))
        share = kept.double().mean().item()
        prepared = prepare_mask(mask)

        def ours(prepared: PreparedMask = prepared) -> Tensor:
            return attention(problem.query, problem.key, problem.value, mask=prepared)

        block_mask = create_block_mask(is_visible, None, None, problem.length, problem.length, device=DEVICE)

        def theirs(block_mask: BlockMask = block_mask) -> Tensor:
            return flex(*problem.their_leaves, block_mask=block_mask)

        check_equal(ours(), theirs().transpose(1, 2))
        forwards: dict[str, Work] = {"own dense": dense_ours, FLEX: theirs}
        forwards |= if_installed(FA4, fa4_tiles(problem, kept.view(blocks, blocks)))
        case = f"tiles {problem.name} density {share:.3g}"
        backwards = {
            "own dense": dense_backward,
            FLEX: backward_of(theirs, problem.their_leaves, problem.their_dout),
        }
        backward = backward_of(ours, problem.leaves, problem.dout)
        for what, work, others, factor, dense_goals, goals in (
            ("forward", ours, forwards, 1.0, forward_goals, {FA4: 1.0}),
            ("backward", backward, backwards, 2.5, backward_goals, {FLEX: 1.4}),
        ):
            yield from bench.compare(
                case,
                what,
                work,
                others,
                unit="TFLOPS",
                amount=factor * full * share,
                other_amounts={"own dense": factor * full},
                goals=goals | {"own dense": dense_goals[density]} if density in dense_goals else None,
            )
        yield from bench.compare(
            f"{case}, mask not prepared",
            "forward",
            ours_unprepared,
            {"own dense": dense_ours},
            unit="TFLOPS",
            amount=full * share,
            other_amounts={"own dense": full},
        )


def dynamic(bench: Bench) -> Iterator[Comparison]:
    """Selection and attention over what it keeps, with the bias's gradient."""
    for shape, forward_limit, backward_limit in ((SMALL, 0.1, 0.14), (MIDDLE, 0.38, 1.0), (LARGE, 1.15, 3.1)):
        problem = DynamicProblem(bench, *shape)
        yield from _dynamic(bench, problem, forward_limit, backward_limit)
    for shape, limit, backward_limit in (
        ((24, 6, 128, 12000, 700), 0.32, 0.85),
        ((16, 16, 64, 16384, 1024), 0.3, 0.7),
        (LONG, None, None),
    ):
        problem = DynamicProblem(bench, *shape)
        goals = {DENSE_FA4: 11.0} if shape == LONG else None
        limits, case = (limit, backward_limit), f"dynamic {problem.name}"
        yield from beside_dense(bench, case, problem, limits=limits, goals=goals)


def beside_dense(
    bench: Bench,
    case: str,
    problem: DynamicProblem,
    forwards: dict[str, Work] | None = None,
    backwards: dict[str, Work] | None = None,
    limits: tuple[float | None, float | None] = (None, None),
    **arguments: object,
) -> Iterator[Comparison]:
    """Selection and forward, and backward, beside these and FA4's dense causal attention; `limits`: of either."""
    dense = if_installed(DENSE_FA4, fa4_forward(problem, causal=True))
    dense_backward = {name: backward_of(work, problem.leaves, problem.dout) for name, work in dense.items()}
    selected, backward = problem.ours_selected, backward_of(problem.ours_selected, problem.our_leaves, problem.dout)
    for what, ours, others, limit in (
        ("selection + forward", selected, {**(forwards or {}), **dense}, limits[0]),
        ("backward", backward, {**(backwards or {}), **dense_backward}, limits[1]),
    ):
        yield from bench.compare(case, what, ours, others, limit=limit, **arguments)


def _dynamic(
    bench: Bench, problem: DynamicProblem, forward_limit: float | None, backward_limit: float | None
) -> Iterator[Comparison]:
    case = f"dynamic {problem.name}"
    intervals = problem.select()
    check_kept(intervals, problem.window)
    flex = FlexDynamic(problem, intervals)
    check_equal(problem.ours_selected(), flex.forward().transpose(1, 2))
    forwards: dict[str, Work] = {FLEX: flex.forward}
    backwards = {FLEX: backward_of(flex.forward, flex.leaves, problem.their_dout)}
    if takes_mask(problem):
        efficient, leaves, dout = efficient_dynamic(problem, intervals)
        forwards[EFFICIENT], backwards[EFFICIENT] = efficient, backward_of(efficient, leaves, dout)
    else:
        bench.notes.append(f"{case}: {EFFICIENT}: left out, its mask has 2^31 elements")
    selected = problem.ours_selected
    yield from bench.compare(case, "selection + forward", selected, forwards, limit=forward_limit)
    backward = backward_of(selected, problem.our_leaves, problem.dout)
    yield from bench.compare(case, "backward", backward, backwards, limit=backward_limit)
    makers = {TOPK: lambda: topk_mask(problem.key_bias, problem.window), "Flex block mask": flex.make_block_mask}
    yield from bench.compare(case, "selection", problem.select, makers)


def takes_mask(problem: DynamicProblem) -> bool:
    """Offsets within a mask of more elements are not safe in every kernel of torch's."""
    return problem.key_heads * problem.length**2 < 1 << 31


def efficient_dynamic(
    problem: DynamicProblem, intervals: KeyIntervals
) -> tuple[Callable[[], Tensor], list[Tensor], Tensor]:
    """With one additive mask of bias and visibility, made before; without a gradient for the bias."""
    visible = intervals.dense_mask(problem.length)[0]
    mask = torch.where(visible, problem.key_bias.detach()[0, :, None], -math.inf)[:, None]
    leaves, dout = problem.by_key_head()

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(*leaves, attn_mask=mask)

    return forward, leaves, dout


def original(bench: Bench) -> Iterator[Comparison]:
    """The original's own protocol: the dense bool mask of the highest scores is given, and a bias per key."""
    # Milliseconds of the original (flash_dmattn 1.x) on an H200, forward and backward. The source of the second row
    # names no shape; D 128 is what its backward, a sixteenth of the last row's, points to. Last come the aims.
    recorded = (
        (SMALL, 0.872, 1.52, 4.0, 4.0),
        ((2, 1, 128, 16384, 1024), 1.29, 2.16, 4.0, 4.0),
        (MIDDLE, 3.47, 9.01, 4.0, 4.0),
        (LARGE, 13.3, 33.4, 7.5, 9.0),
    )
    for shape, forward, backward, forward_goal, backward_goal in recorded:
        problem = DynamicProblem(bench, *shape)
        intervals = problem.select()
        mask = intervals.dense_mask(problem.length)

        def ours(problem: DynamicProblem = problem, mask: Tensor = mask) -> Tensor:
            return problem.ours(mask)

        check_equal(ours(), problem.ours(intervals))
        case = f"bool mask {problem.name}"
        for what, work, milliseconds, goal in (
            ("forward", ours, forward, forward_goal),
            ("backward", backward_of(ours, problem.our_leaves, problem.dout), backward, backward_goal),
        ):
            yield from bench.compare(case, what, work, recorded={ORIGINAL: milliseconds / 1e3}, goals={ORIGINAL: goal})


def sliding(bench: Bench) -> Iterator[Comparison]:
    """The last 1024 keys, as intervals."""
    problem = Problem(16, 16, 128, bench.length(16384))
    window = bench.length(1024)
    intervals = KeyIntervals.sliding_window(window - 1, 0, problem.length, device=DEVICE)

    def ours() -> Tensor:
        return attention(problem.query, problem.key, problem.value, mask=intervals, is_causal=True)

    fa4 = fa4_forward(problem, causal=True, window_size=(window - 1, 0))
    forwards = if_installed(FA4, fa4)
    backwards = {name: backward_of(forward, problem.leaves, problem.dout) for name, forward in forwards.items()}
    if fa4 is not None:
        check_equal(ours(), fa4())
    case = f"sliding window {window} {problem.name}"
    yield from bench.compare(case, "forward", ours, forwards, goals={FA4: 1.0})
    yield from bench.compare(case, "backward", backward_of(ours, problem.leaves, problem.dout), backwards)


def biases(bench: Bench) -> Iterator[Comparison]:
    """A bias for every score; one for every key."""
    problem = Problem(16, 16, 128, bench.length(8192))
    for name, rows, goal in (("per score", problem.length, 1.2), ("per key", 1, None)):
        bias = normal(1, problem.heads, rows, problem.length)

        def ours(bias: Tensor = bias) -> Tensor:
            return attention(problem.query, problem.key, problem.value, bias=bias)

        others = {
            other: problem.sdpa(backend, attn_mask=bias.expand(-1, -1, problem.length, -1))
            for other, backend in ((CUDNN, SDPBackend.CUDNN_ATTENTION), (EFFICIENT, SDPBackend.EFFICIENT_ATTENTION))
        }
        check_equal(ours(), others[CUDNN]().transpose(1, 2))
        case = f"bias {name} {problem.name}"
        yield from bench.compare(case, "forward", ours, others, goals={CUDNN: goal} if goal else None)
        if rows > 1:
            yield from _bias_gradients(bench, case, problem, bias)


def _bias_gradients(bench: Bench, case: str, problem: Problem, bias: Tensor) -> Iterator[Comparison]:
    """With the gradient of the bias, which cuDNN has no kernel for."""
    leaves, their_leaves = ([*each, bias.clone().requires_grad_()] for each in (problem.leaves, problem.their_leaves))
    query, key, value, own = leaves
    others = {
        CUDNN: step_of(
            problem.sdpa(SDPBackend.CUDNN_ATTENTION, attn_mask=bias), problem.their_leaves, problem.their_dout
        ),
        EFFICIENT: step_of(
            problem.sdpa(SDPBackend.EFFICIENT_ATTENTION, attn_mask=their_leaves[3]), their_leaves, problem.their_dout
        ),
    }
    step = step_of(lambda: attention(query, key, value, bias=own), leaves, problem.dout)
    yield from bench.compare(case, "forward and backward", step, others, goals={CUDNN: 1.3})


def densities(bench: Bench) -> Iterator[Comparison]:
    """From which share of kept scores on each kind of plan beats own dense attention. Bool masks are prepared before,
    the plan of "top w" is part of the time."""
    for heads, head_dim in ((32, 64), (16, 128)):
        problem = Problem(heads, heads, head_dim, bench.length(16384))
        ratios: dict[str, list[tuple[float, float]]] = {}
        for share in (1.0, 0.9, 0.8, 0.65, 0.5, 0.25, 0.1):
            for kind, mask in _masks(problem, share).items():
                for line in _against_dense(bench, f"{kind} {problem.name}, share {share:g}", problem, mask):
                    ratios.setdefault(kind, []).append((share, line.ratio))
                    yield line
        for kind, found in ratios.items():
            bench.notes.append(f"{kind} {problem.name}: {_break_even(found)}")


def _masks(problem: Problem, share: float) -> dict[str, PreparedMask | KeyIntervals]:
    """Masks that keep that share of the scores, of the causal ones if they are KeyIntervals."""
    length, blocks = problem.length, problem.length // 128
    tile_mask = torch.rand(blocks, blocks, device=DEVICE) < share
    return {
        "tiles": prepare_mask(tile_mask.repeat_interleave(128, 0).repeat_interleave(128, 1)),
        "keys": prepare_mask(torch.rand(1, 1, 1, length, device=DEVICE) < share, length),
        "scores": prepare_mask(torch.rand(length, length, device=DEVICE) < share),
        "top w": select_keys(normal(1, problem.heads, length), math.ceil(length * (1 - math.sqrt(1 - share)))),
    }


def _against_dense(
    bench: Bench, case: str, problem: Problem, mask: PreparedMask | KeyIntervals
) -> Iterator[Comparison]:
    is_causal = isinstance(mask, KeyIntervals)

    def work(mask: PreparedMask | KeyIntervals | None) -> Work:
        return lambda: attention(problem.query, problem.key, problem.value, mask=mask, is_causal=is_causal)

    yield from bench.compare(case, "forward", work(mask), {"own dense": work(None)})


def _break_even(ratios: list[tuple[float, float]]) -> str:
    """Where the time, linear between two shares, is that of dense attention."""
    times = [(share, 1 / ratio) for share, ratio in ratios]
    for (share, time), (lower_share, lower_time) in itertools.pairwise(times):
        if lower_time < 1 <= time:
            even = lower_share + (share - lower_share) * (1 - lower_time) / (time - lower_time)
            return f"pays below {even:.0%} of the scores"
    return "always pays" if times[0][1] < 1 else "never pays"


def windows(bench: Bench) -> Iterator[Comparison]:
    """A bool mask of the last W keys, of which nothing is known before it is read: what plot.py draws."""
    problem = Problem(2, 1, 32, bench.length(16384))
    row = torch.arange(problem.length, device=DEVICE)[:, None]
    key = torch.arange(problem.length, device=DEVICE)
    leaves, dout = problem.by_key_head()
    for window in [1 << power for power in range(5, 15) if 1 << power <= problem.length]:
        mask = (key <= row) & (key > row - window)

        def ours(mask: Tensor = mask) -> Tensor:
            return attention(problem.query, problem.key, problem.value, mask=mask, is_causal=True)

        def theirs(mask: Tensor = mask) -> Tensor:
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return F.scaled_dot_product_attention(*leaves, attn_mask=mask)

        check_equal(ours(), theirs().view_as(problem.their_dout).transpose(1, 2))
        case = f"window {window} {problem.name}"
        is_narrow = window <= 1024
        goals, sizes = {EFFICIENT: 8.0} if is_narrow else None, {"window": window}
        yield from bench.compare(case, "forward", ours, {EFFICIENT: theirs}, goals=goals, sizes=sizes)
        backward, their_backward = (backward_of(ours, problem.leaves, problem.dout), backward_of(theirs, leaves, dout))
        goals = {EFFICIENT: 10.0} if is_narrow else None
        yield from bench.compare(case, "backward", backward, {EFFICIENT: their_backward}, goals=goals, sizes=sizes)


def prepass(bench: Bench) -> Iterator[Comparison]:
    """What a call does first with a bool mask, bits and plan: the bytes of the mask and of its bits against the copy of
    this run."""
    problem = DynamicProblem(bench, *MIDDLE)
    mask = problem.select().dense_mask(problem.length)
    layouts = {
        "": mask,
        ", rows not aligned": F.pad(mask, (1, 2))[..., 1:-2],
        ", transposed": mask.mT.contiguous().mT,
        ", transposed, not aligned": F.pad(mask.mT, (1, 2))[..., 1:-2].mT,
    }
    for layout, given in layouts.items():
        yield from bench.compare(
            f"bool mask {problem.name}{layout}",
            "share of the copy",
            lambda given=given: attention_plan(problem.query, problem.key, Visibility(mask=given)),
            unit="%",
            amount=100 * mask.nbytes * 9 / 8 / bench.copy_bandwidth,
            least=75.0,
        )


def selection(bench: Bench) -> Iterator[Comparison]:
    """The selection alone, of float32 scores."""
    window = bench.length(2048)
    for keys, heads, limit in ((16384, 8, 0.08), (32768, 8, 0.12), (1 << 20, 1, 1.2)):
        scores = torch.randn(1, heads, bench.length(keys), device=DEVICE)
        check_kept(select_keys(scores, window), window)
        # Head by head, for memory.
        others = {TOPK: lambda scores=scores: [topk_mask(head, window) for head in scores.split(1, 1)]}
        yield from bench.compare(
            f"select {scores.shape[2]} keys x {heads} heads w{window}",
            "selection",
            lambda scores=scores: select_keys(scores, window),
            others if keys <= 32768 else None,
            dtype=scores.dtype,
            limit=limit,
        )


def deterministic(bench: Bench) -> Iterator[Comparison]:
    """What identical bits cost the backward."""
    problem = DynamicProblem(bench, *LARGE)
    intervals = problem.select()

    def backward(is_deterministic: bool) -> Work:
        def forward() -> Tensor:
            leaves = problem.query, problem.key, problem.value
            return attention(
                *leaves, mask=intervals, bias=problem.key_bias, is_causal=True, deterministic=is_deterministic
            )

        return backward_of(forward, problem.our_leaves, problem.dout)

    ours = backward(True)
    if not all(torch.equal(first, second) for first, second in zip(ours(), ours(), strict=True)):
        bench.notes.append(f"deterministic {problem.name}: two runs differ in their bits")
    yield from bench.compare(
        f"deterministic {problem.name}", "backward", ours, {"own default": backward(False)},
        goals={"own default": 1 / 1.5},
    )  # fmt: skip


CASES = {
    "dense": dense,
    "sustained": sustained,
    "tiles": tiles,
    "dynamic": dynamic,
    "original": original,
    "sliding": sliding,
    "biases": biases,
    "densities": densities,
    "windows": windows,
    "prepass": prepass,
    "selection": selection,
    "deterministic": deterministic,
}
