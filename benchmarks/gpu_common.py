"""What benchmarks/gpu_attention.py measures with: timing on the device, problems in the layouts of all, the peers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from common import OURS, add_theirs, quartiles
from flash_dmattn import KeyIntervals, attention, dynamic_mask_attention, select_keys
from progress import PROGRESS
from report import Comparison
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

DEVICE = "cuda"
DTYPE = torch.bfloat16
FA2, CUDNN, FA4, EFFICIENT = "FA2 in torch", "cuDNN", "FA4", "SDPA efficient"
FLEX, TOPK, ORIGINAL = "FlexAttention", "torch.topk mask", "the original, recorded"

Work = Callable[[], object]  # enqueues work on the current stream

# ---- Timing

# A call below this is replayed from a CUDA graph, so that what is timed is the device and not Python.
SHORT_SECONDS = 2e-3
GRAPH_SECONDS = 5e-3  # about what one graph of several calls takes
MOST_CALLS = 20
# A GPU that has computed at full power for some 50 ms lowers its clocks, by an eighth on an H200, until it has rested:
# every sample begins after twice as long a rest, whatever was timed before. SUSTAINED_SECONDS: until clocks have
# settled.
REST_SECONDS = 0.1
SUSTAINED_SECONDS = 0.2
# Keeps the device busy for about 1.5 ms while the host gets ahead of it.
HEAD_START_CYCLES = 3_000_000


def seconds_between_events(work: Work, head_start_cycles: int = HEAD_START_CYCLES, before: Work | None = None) -> float:
    """Of `work`, once the device has waited and done what comes `before`."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(head_start_cycles)
    if before is not None:
        before()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def rest() -> None:
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)


def device_sampler(work: Work) -> Callable[[], float]:
    """What measures seconds of one call of a rested GPU, after a warm-up. Short calls are replayed from a graph of
    several."""
    for _ in range(2):
        work()
    rest()
    seconds = seconds_between_events(work)

    def sample(work: Work, calls: int) -> float:
        rest()
        return seconds_between_events(work) / calls

    if seconds >= SHORT_SECONDS:
        return partial(sample, work, 1)
    calls = max(1, min(MOST_CALLS, round(GRAPH_SECONDS / seconds)))
    graph = torch.cuda.CUDAGraph()
    # On the stream that recorded the forward: its backward runs there.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            work()
    graph.replay()
    return partial(sample, graph.replay, calls)


def sustained_sampler(work: Work) -> Callable[[], float]:
    """What measures seconds of one call among many that follow one another, at the clocks that these settle at."""
    for _ in range(2):
        work()
    calls = max(1, math.ceil(SUSTAINED_SECONDS / seconds_between_events(work)))

    def run() -> None:
        for _ in range(calls):
            work()

    return lambda: seconds_between_events(run, before=run) / calls


def kernel_seconds(work: Work, kernel: str) -> list[float]:
    """What each of five calls spends in the kernels that have `kernel` in their names."""
    seconds = []
    for _ in range(6):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            work()
            torch.cuda.synchronize()
        taken = [event.time_range.elapsed_us() for event in profiled.events() if kernel in event.name]
        seconds.append(sum(taken) / 1e6)
    return seconds[1:]


@dataclass
class Bench:
    repeats: int
    quick: bool
    copy_bandwidth: float = math.nan  # bytes a second, read and written
    notes: list[str] = field(default_factory=list)

    def length(self, length: int) -> int:
        return length // 16 if self.quick else length

    def note(self, case: str, what: str, seconds: list[float], *, limit: float | None = None) -> Iterator[Comparison]:
        """One line of ours alone, in ms, measured elsewhere."""
        kind = str(DTYPE).removeprefix("torch.")
        low, middle, high = quartiles([each * 1e3 for each in seconds])
        line = Comparison(case, what, kind, "ms", middle, limit=limit, ours_low=low, ours_high=high)
        line.samples = len(seconds)
        yield line

    def compare(
        self,
        case: str,
        what: str,
        ours: Work,
        others: dict[str, Work] | None = None,
        *,
        recorded: dict[str, float] | None = None,
        dtype: torch.dtype = DTYPE,
        unit: str = "ms",
        amount: float | None = None,
        other_amounts: dict[str, float] | None = None,
        goals: dict[str, float] | None = None,
        limit: float | None = None,
        least: float | None = None,
        sizes: dict[str, float | str] | None = None,
        sampler_of: Callable[[Work], Callable[[], float]] = device_sampler,
    ) -> Iterator[Comparison]:
        """One line for every other, or one of ours alone.

        Args:
            recorded: times of others, in seconds, that this run cannot measure.
            amount: what a call does, in what `unit` says is done in a second. None: figures are times in ms.
            other_amounts: where an other does another amount.
            goals: for the ratio to an other; limit, least: for our figure.
            sizes: what a sweep varies, by name.
            sampler_of: a work's; of a rested GPU, or sustained_sampler.
        """
        samples: dict[str, list[float]] = {}
        samplers = {}
        failed: dict[str, str] = {}
        for name, work in {OURS: ours, **(others or {})}.items():
            # Peers fail in ways of their own (shapes, memory, compilers): a figure is missing then, not the table.
            try:
                samplers[name] = sampler_of(work)
                samples[name] = []
            except Exception as error:
                if name == OURS:
                    raise
                failed[name] = type(error).__name__
                self.notes.append(f"{case}, {what}: {name}: {failed[name]}: {str(error).strip()[:160]}")
        for repeat in range(self.repeats):
            PROGRESS.show(f"{case}, {what}", repeat, self.repeats)
            for name, sampler in samplers.items():
                samples[name].append(sampler())
        samples |= {name: [seconds] * self.repeats for name, seconds in (recorded or {}).items()}
        amounts = {name: (other_amounts or {}).get(name, amount) for name in samples}

        def figures(name: str) -> tuple[float, float, float]:
            taken = samples[name]
            return quartiles([each * 1e3 if amount is None else amounts[name] / each for each in taken])

        kind = str(dtype).removeprefix("torch.")
        low, middle, high = figures(OURS)
        line = Comparison(case, what, kind, unit, middle, limit=limit, least=least, ours_low=low, ours_high=high)
        line.samples, line.sizes = self.repeats, sizes or {}
        ours_alone = replace(line, limit=None, least=None)
        if len(samples) == 1 and not failed:
            yield line
        for name in (name for name in samples if name != OURS):
            line.other, line.goal = name, (goals or {}).get(name)
            add_theirs(line, samples[OURS], samples[name], 1 if amount is None else amount / amounts[name])
            line.theirs_low, line.theirs, line.theirs_high = figures(name)
            yield line
            line = replace(ours_alone)  # an aim for our figure stands once
        for name, error in failed.items():
            line.other, line.missing = name, f"failed: {error}"
            yield line
            line = replace(ours_alone)


# ---- Problems


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


@dataclass
class Problem:
    """One attention in the layouts of both: (B, S, H, D) here and in FA4, (B, H, S, D) in torch."""

    heads: int
    key_heads: int
    head_dim: int
    length: int
    batch: int = 1
    value_dim: int = 0  # 0: head_dim
    query: Tensor = field(init=False)
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.value_dim = self.value_dim or self.head_dim

        def leaf(heads: int, head_dim: int) -> Tensor:
            return normal(self.batch, self.length, heads, head_dim).requires_grad_()

        self.query, self.key = leaf(self.heads, self.head_dim), leaf(self.key_heads, self.head_dim)
        self.value = leaf(self.key_heads, self.value_dim)
        self.dout = normal(self.batch, self.length, self.heads, self.value_dim)
        self.leaves = [self.query, self.key, self.value]
        self.their_leaves = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in self.leaves]
        self.their_dout = self.dout.transpose(1, 2).contiguous()

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    @property
    def name(self) -> str:
        key_heads = "" if self.group == 1 else f" Hkv{self.key_heads}"
        batch = "" if self.batch == 1 else f"B{self.batch} "
        value_dim = "" if self.value_dim == self.head_dim else f"/{self.value_dim}"
        return f"{batch}H{self.heads}{key_heads} D{self.head_dim}{value_dim} S{self.length}"

    def teraflop(self, kept: float = 1.0) -> float:
        """Of the forward of values of the same head dim; the backward does 2.5 times as much."""
        return 4 * self.batch * self.heads * self.length**2 * self.head_dim * kept / 1e12

    def sdpa(self, backend: SDPBackend, **arguments: object) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*self.their_leaves, **arguments)

        return forward

    def by_key_head(self) -> tuple[list[Tensor], Tensor]:
        """Query, key and value, leaves, and dout as (Hkv, G, S, D): torch's efficient kernel knows no groups, and a
        mask per key head broadcasts over G like this."""
        parts = [t.detach().view(self.key_heads, -1, self.length, self.head_dim) for t in self.their_leaves]
        leaves = [t.expand(-1, self.group, -1, -1).contiguous().requires_grad_() for t in parts]
        return leaves, self.their_dout.view(self.key_heads, self.group, self.length, self.head_dim)


class DynamicProblem(Problem):
    """Attention of every row to the `window` keys of highest bias among its past."""

    def __init__(self, bench: Bench, heads: int, key_heads: int, head_dim: int, length: int, window: int) -> None:
        super().__init__(heads, key_heads, head_dim, bench.length(length))
        self.window = bench.length(window)
        self.key_bias = normal(1, key_heads, self.length).requires_grad_()
        self.our_leaves = [*self.leaves, self.key_bias]

    @property
    def name(self) -> str:
        return f"{super().name} w{self.window}"

    def select(self) -> KeyIntervals:
        return select_keys(self.key_bias, self.window)

    def ours_selected(self) -> Tensor:
        return dynamic_mask_attention(self.query, self.key, self.value, self.key_bias, self.window)

    def ours(self, mask: Tensor | KeyIntervals) -> Tensor:
        return attention(self.query, self.key, self.value, mask=mask, bias=self.key_bias, is_causal=True)


def backward_of(forward: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> Work:
    """The backward alone; its graph is recorded by the first call."""
    outs: list[Tensor] = []

    def backward() -> object:
        if not outs:
            outs.append(forward())
        return torch.autograd.grad(outs[0], leaves, dout, retain_graph=True)

    return backward


def step_of(forward: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> Work:
    """Forward and backward."""
    return lambda: torch.autograd.grad(forward(), leaves, dout)


def peak_beyond_results(work: Callable[[], tuple[Tensor, ...]]) -> float:
    """Bytes that a call allocates at most at a time, beside what it returns."""
    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    returned = work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(each.untyped_storage().nbytes() for each in returned)


def check_equal(ours: Tensor, theirs: Tensor) -> None:
    """Raises AssertionError if the two do not compute the same: no such time is worth anything."""
    difference, norm = (ours.float() - theirs.float()).norm(), theirs.float().norm()
    # Two roundings to bfloat16 are some 0.003 apart.
    assert difference <= 0.02 * norm, f"outputs differ by {difference / norm:.2g}"


def check_kept(intervals: KeyIntervals, window: int) -> None:
    """Raises AssertionError if the rows do not keep `window` keys each, or all of fewer. Which ones, tests check."""
    heads, keys = intervals.shape[1:]
    window = min(window, keys)
    expected = heads * (window * (window + 1) // 2 + (keys - window) * window)
    assert intervals.kept_scores() == expected, f"{intervals.kept_scores()} scores are kept, not {expected}"


# ---- Peers


def if_installed(name: str, work: Work | None) -> dict[str, Work]:
    """What to compare with, by name: nothing, if the peer is not installed."""
    return {} if work is None else {name: work}


def fa4_call(function: str, *tensors: Tensor, **arguments: object) -> Callable[[], Tensor] | None:
    """A call of FA4's `function` without what it returns beside the output; None if it is not installed."""
    try:
        from flash_attn import cute
    except ImportError:
        return None

    def forward() -> Tensor:
        out = getattr(cute, function)(*tensors, **arguments)
        return out[0] if isinstance(out, tuple) else out

    return forward


def fa4_forward(problem: Problem, **arguments: object) -> Callable[[], Tensor] | None:
    return fa4_call("flash_attn_func", problem.query, problem.key, problem.value, **arguments)


def fa4_tiles(problem: Problem, kept: Tensor) -> Callable[[], Tensor] | None:
    """FA4's block sparsity, given which 128 x 128 tiles are kept: bool (blocks, blocks). The forward only."""
    try:
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    except ImportError:
        return None
    counts = kept.sum(-1, dtype=torch.int32).expand(1, problem.heads, -1).contiguous()
    # Kept tiles first, in order.
    indices = kept.int().argsort(dim=-1, descending=True, stable=True).int().expand(1, problem.heads, -1, -1)
    indices = indices.contiguous()
    sparse = BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros_like(counts),
        mask_block_idx=torch.zeros_like(indices),
        full_block_cnt=counts,
        full_block_idx=indices,
        block_size=(128, 128),
    )
    forward = fa4_forward(problem, block_sparse_tensors=sparse)

    def without_graph() -> Tensor:
        with torch.no_grad():
            return forward()

    return without_graph


def compiled_flex() -> Callable[..., Tensor]:
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # or the backward cannot run twice
    torch.compiler.reset()  # or shapes of other cases count against the limit of recompilations
    return torch.compile(flex_attention, dynamic=False)


@dataclass
class FlexDynamic:
    """FlexAttention given the intervals."""

    problem: DynamicProblem
    intervals: KeyIntervals

    def __post_init__(self) -> None:
        self.key_bias = self.problem.key_bias.detach().float().requires_grad_()
        begin, end, bias, group = self.intervals.begin[0], self.intervals.end[0], self.key_bias[0], self.problem.group

        def is_visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (begin[head // group, key] <= row) & (row < end[head // group, key])

        def with_bias(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return score + bias[head // group, key]

        self.is_visible, self.with_bias = is_visible, with_bias
        self.flex = compiled_flex()
        self.leaves = [*self.problem.their_leaves, self.key_bias]
        self.block_mask = self.make_block_mask()

    def make_block_mask(self) -> BlockMask:
        length = self.problem.length
        return create_block_mask(
            self.is_visible, 1, self.problem.heads, length, length, device=DEVICE, _compile=DEVICE == "cuda"
        )

    def forward(self) -> Tensor:
        return self.flex(
            *self.problem.their_leaves, score_mod=self.with_bias, block_mask=self.block_mask, enable_gqa=True
        )


def topk_mask(scores: Tensor, window: int) -> Tensor:
    """scores (1, heads, S) -> bool (1, heads, S, S): what users of dense masks do. Which of equal scores stay is
    torch.topk's choice."""
    length = scores.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril_()
    visible = scores.detach()[:, :, None].masked_fill(~causal, -math.inf)
    values, indices = visible.topk(min(window, length), sorted=False)
    return torch.zeros_like(visible, dtype=torch.bool).scatter_(-1, indices, values != -math.inf)
