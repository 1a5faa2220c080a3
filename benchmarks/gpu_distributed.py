"""Measures flash_dmattn.distributed: dynamic-mask attention over sequences that are split across GPUs.

    torchrun --nproc-per-node 2 benchmarks/gpu_distributed.py                    every case, about a minute on H200
    torchrun --nproc-per-node 4 benchmarks/gpu_distributed.py                    any number of GPUs of one host
    torchrun --nproc-per-node 2 benchmarks/gpu_distributed.py --only exchange memory
    torchrun --nproc-per-node 2 benchmarks/gpu_distributed.py --json out.json    also as JSON
    torchrun --nproc-per-node 2 benchmarks/gpu_distributed.py --quick            small sizes, to check this script only

NCCL on GPUs, a rank on each; gloo where there is none, which is good for --quick. All in bfloat16, on the same random
values on every rank; `exchange` compares split results with whole ones before it times them. Aims are for H200, by
ranks. An error on one rank ends all: the ranks of a collective cannot go on without one of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from common import benchmark_parser
from distributed_common import DTYPE, NAMES, PROJECTION, Bench, Problem, Work, compared, line, scaling, slowest
from flash_dmattn import distributed as split
from flash_dmattn.distributed.kept_keys import GatheredKeys, kept_keys, prepend_kept
from progress import PROGRESS
from report import Comparison, Report, describe_machine
from rich.console import Console
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.utils._python_dispatch import TorchDispatchMode

# H, Hkv, D, w.
LARGE = (32, 8, 128, 2048)
SMALL = (8, 2, 64, 2048)
SPEED_UPS = {4: 3.5, 8: 6.5}  # of a million tokens of LARGE, by ranks


def exchange(bench: Bench) -> Iterator[Comparison]:
    """What splitting a sequence costs beside the slowest rank's own attention, and where it goes."""
    # Tokens; aims by ranks: milliseconds beside the ordinary call, and how many times faster than one GPU.
    for tokens, beyond_limit, speed_up in (
        (1 << 20, {}, SPEED_UPS),
        (262144, {2: 1.0}, {2: 1.93}),
        (65536, {2: 0.6}, {2: 1.85}),
    ):
        problem = Problem(bench, LARGE, bench.size(tokens))
        whole = problem.whole()
        shares, group = problem.shares(whole, bench.rank, bench.ranks), dist.group.WORLD
        problem.check(whole, shares, group)
        bench.free()
        # The call that a rank makes in the end, with all of its keys there already.
        gathered = split.gather_kept_keys(*(shares[name] for name in NAMES[1:]), problem.window, group=group)
        keys = prepend_kept(shares["query"], {**shares, "scores": None, "key_mask": None}, gathered)[:3]
        ordinary = dict(shares) | {
            name: tensor.detach().requires_grad_() for name, tensor in zip(NAMES[1:], keys, strict=True)
        }
        samples = bench.measure(
            {
                "split": partial(problem.step, shares, group),
                "ordinary call": partial(problem.step, ordinary),
                "one rank": partial(problem.step, whole),
            }
        )
        what, taken = "forward + backward", {name: slowest(of_ranks) for name, of_ranks in samples.items()}
        for rank in range(bench.ranks):
            for name in ("split", "ordinary call"):
                yield line(problem.name, f"{what}, {name}, rank {rank}", statistics.median(samples[name][rank]))
        beyond = [ours - call for ours, call in zip(taken["split"], taken["ordinary call"], strict=True)]
        limit = bench.aim(beyond_limit)
        yield line(problem.name, "slowest rank beyond its ordinary call", statistics.median(beyond), limit=limit)
        goal = bench.aim(speed_up)
        yield compared(problem.name, f"{what}, {bench.ranks} ranks", taken["split"], taken["one rank"], "1 rank", goal)
        yield from _parts(bench, problem, shares, gathered)
        del whole, shares, gathered, keys, ordinary
        bench.free()


def _parts(bench: Bench, problem: Problem, shares: dict[str, Tensor], gathered: GatheredKeys) -> Iterator[Comparison]:
    """Bytes that a rank sends, and the pieces of the exchange one by one, none beside another."""
    heads, ranks, group = problem.shape[1], bench.ranks, dist.group.WORLD
    sent = _count_sent(partial(problem.step, shares, group), ranks)
    for name, of_head in (
        ("all-gather", 2 * 2 * problem.shape[2] + 2),
        ("reduce-scatter", 4 * (2 * problem.shape[2] + 1)),
    ):
        formula = (ranks - 1) * heads * min(problem.window, problem.length // ranks) * of_head
        # Each of three tensors is padded to 16 bytes.
        assert formula <= sent[name] <= formula + 48 * (ranks - 1), f"{name}: {sent[name]} bytes, not {formula}"
        yield line(problem.name, f"sent by {name}, as the formula says", sent[name] / 1e6, "MB")
    forward = torch.empty(sent["all-gather"] // max(ranks - 1, 1), dtype=torch.uint8, device=bench.device)
    backward = torch.empty(ranks * (sent["reduce-scatter"] // max(ranks - 1, 1) // 4), device=bench.device)
    detached = {name: tensor.detach() for name, tensor in shares.items()} | {"scores": None, "key_mask": None}
    works = {
        "kept keys, chosen": partial(kept_keys, shares["key_bias"], problem.window, None),
        "keys put in front of own": partial(
            prepend_kept, detached["query"], detached, dataclasses.replace(gathered, own=None)
        ),
        "all-gather alone": lambda: collectives.wait_tensor(collectives.all_gather_tensor(forward, 0, group)),
        "reduce-scatter alone": lambda: collectives.wait_tensor(
            collectives.reduce_scatter_tensor(backward, "sum", 0, group)
        ),
    }
    for name, samples in bench.measure(works).items():
        yield line(problem.name, f"{name}, slowest rank", statistics.median(slowest(samples)))


def _count_sent(work: Work, ranks: int) -> dict[str, int]:
    """Bytes that a rank gives to others in each collective."""
    sent = {"all-gather": 0, "reduce-scatter": 0}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if "all_gather_into_tensor" in operator.name():
                sent["all-gather"] += args[0].nbytes * (ranks - 1)
            elif "reduce_scatter_tensor" in operator.name():
                sent["reduce-scatter"] += args[0].nbytes // ranks * (ranks - 1)
            return operator(*args, **(kwargs or {}))

    with Count():
        work()
    return sent


def memory(bench: Bench) -> Iterator[Comparison]:
    """Peak memory of one layer's forward and backward, its inputs and gradients included."""
    for shape, tokens in ((SMALL, 1 << 20), (LARGE, 262144), (LARGE, 1 << 20)):
        yield from _memory(bench, Problem(bench, shape, bench.size(tokens)))
        bench.free()


def _memory(bench: Bench, problem: Problem) -> Iterator[Comparison]:
    group = dist.group.WORLD

    def step_of_whole() -> None:
        problem.step(problem.whole())

    alone = bench.peak_mib(step_of_whole)
    bench.free()
    whole = problem.whole()
    shares = {name: tensor.cpu() for name, tensor in problem.shares(whole, bench.rank, bench.ranks).items()}
    del whole
    bench.free()

    def step_of_share() -> None:
        own = {name: tensor.detach().to(bench.device, copy=True) for name, tensor in shares.items()}
        for name in NAMES:
            own[name].requires_grad_()
        problem.step(own, group)

    step_of_share()  # ranks compare arguments, collectives set up
    bench.free()
    peaks: list[float] = [0.0] * bench.ranks
    dist.all_gather_object(peaks, bench.peak_mib(step_of_share))
    yield line(problem.name, "peak memory, 1 rank", alone, "MiB")
    for rank, peak in enumerate(peaks):
        yield line(problem.name, f"peak memory, rank {rank} of {bench.ranks}", peak, "MiB")
    if bench.device.type == "cuda":  # a CPU's resident memory does not say what so small tensors take
        yield line(problem.name, "highest of these over 1 rank's", max(peaks) / alone, "x", limit=bench.aim({2: 0.6}))


def strong(bench: Bench) -> Iterator[Comparison]:
    """The same sequences on 1, 2, 4, ... ranks."""
    for shape, tokens in ((LARGE, 262144), (SMALL, 1 << 20), (LARGE, 1 << 20)):
        problem = Problem(bench, shape, bench.size(tokens))
        whole = problem.whole()
        works: dict[str, Work] = {"1": partial(problem.step, whole)} if bench.rank == 0 else {}
        for ranks, group in _groups(bench):
            if bench.rank < ranks:
                shares = problem.shares(whole, bench.rank, ranks)
                works[str(ranks)] = partial(problem.step, shares, group)
        samples = {int(ranks): slowest(taken) for ranks, taken in bench.measure(works).items()}
        aims = SPEED_UPS if (shape, tokens) == (LARGE, 1 << 20) else {}
        goals = {ranks: goal for ranks in samples if (goal := bench.aim(aims, ranks)) is not None}
        lines = scaling(problem.name, problem.length, samples, lambda ranks: 1 / ranks, goals)
        yield from (line for line in lines if shape == LARGE or line.other != PROJECTION)
        works.clear()
        del whole, shares
        bench.free()


def weak(bench: Bench) -> Iterator[Comparison]:
    """131072 tokens on each of 1, 2, 4, ... ranks: the ratio would be 1, if a share of a longer sequence cost nothing
    more. Rows of later shares have more keys to attend to, up to the window, and their keys more rows."""
    share = bench.size(131072)
    works: dict[str, Work] = {}
    for ranks, group in [(1, None), *_groups(bench)]:
        problem = Problem(bench, LARGE, share * ranks)
        if bench.rank < ranks:
            shares = problem.shares(problem.whole(), bench.rank, ranks)
            works[str(ranks)] = partial(problem.step, shares, group)
        bench.free()
    samples = {int(ranks): slowest(taken) for ranks, taken in bench.measure(works).items()}
    case = f"{problem.name.rpartition(' S')[0]}, {share} tokens a rank"
    yield from scaling(case, share, samples, lambda _: 1.0, {})


_made: dict[int, ProcessGroup] = {}


def _groups(bench: Bench) -> list[tuple[int, ProcessGroup]]:
    """The first 2, 4, ... ranks, and all: every rank has to make every group."""
    sizes = sorted(
        {2**power for power in range(1, bench.ranks.bit_length()) if 2**power <= bench.ranks} | {bench.ranks}
    )
    for size in sizes:
        if size not in _made:
            _made[size] = dist.new_group(list(range(size)))
    return [(size, _made[size]) for size in sizes]


class Layer(nn.Module):
    """Projections around dynamic-mask attention; `early` starts the exchange before queries are projected."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        heads, key_heads, self.head_dim, _ = problem.shape
        width, torch_options = heads * self.head_dim, {"device": problem.bench.device, "dtype": DTYPE, "bias": False}
        self.query = nn.Linear(width, width, **torch_options)
        self.key_value = nn.Linear(width, 2 * key_heads * self.head_dim, **torch_options)
        self.score = nn.Linear(width, key_heads, **torch_options)
        self.output = nn.Linear(width, width, **torch_options)
        self.window = problem.window

    def forward(self, x: Tensor, early: bool) -> Tensor:
        key, value = self.key_value(x).unflatten(2, (-1, self.head_dim)).chunk(2, 2)
        given, gathered = (key, value, self.score(x).mT, self.window), None
        if early:
            gathered = split.gather_kept_keys(*given, group=dist.group.WORLD)
        query = self.query(x).unflatten(2, (-1, self.head_dim))
        out = split.dynamic_mask_attention(query, *given, group=dist.group.WORLD, gathered=gathered)
        return self.output(out.flatten(2))


def early(bench: Bench) -> Iterator[Comparison]:
    """A layer that starts the exchange before it projects its queries, and one that does not."""
    problem = Problem(bench, LARGE, bench.size(65536))
    torch.manual_seed(0)
    layer = Layer(problem)
    heads, _, head_dim, _ = problem.shape
    x = torch.randn(1, problem.length // bench.ranks, heads * head_dim, device=bench.device, dtype=DTYPE)

    def step(early: bool) -> object:
        return torch.autograd.grad(layer(x, early).float().square().mean(), list(layer.parameters()))

    samples = bench.measure({"early": partial(step, True), "late": partial(step, False)})
    taken = {name: slowest(of_ranks) for name, of_ranks in samples.items()}
    what = "layer, forward + backward, exchange started early"
    yield compared(problem.name, what, taken["early"], taken["late"], "not early")


CASES = {"exchange": exchange, "memory": memory, "strong": strong, "weak": weak, "early": early}


def describe(bench: Bench) -> dict[str, object]:
    names: list[str] = [""] * bench.ranks
    is_cuda = bench.device.type == "cuda"
    dist.all_gather_object(names, torch.cuda.get_device_name() if is_cuda else "CPU")
    versions = {"nccl": list(torch.cuda.nccl.version()), "cuda": torch.version.cuda} if is_cuda else {}
    machine = describe_machine()
    name = f"{bench.ranks} x {names[0] if is_cuda else machine['name']}"
    return {**machine, "name": name, "ranks": names, "backend": dist.get_backend(), **versions}


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    bench = Bench(max(2, arguments.repeats), arguments.quick, device)
    if not bench.quick and bench.device.type == "cpu":
        raise RuntimeError("there is no GPU: only --quick is for CPUs")
    if bench.ranks < 2:
        raise RuntimeError("start at least two processes: torchrun --nproc-per-node 2 benchmarks/gpu_distributed.py")
    machine = describe(bench)
    console = Console(width=180, quiet=bench.rank != 0)
    console.print(f"{machine['backend']}, {', '.join(machine['ranks'])}; torch {torch.__version__}", highlight=False)
    report = Report(machine, title=f"{bench.ranks} ranks; ratio = the other's time over ours (its quartiles)")
    gc.freeze()  # else `free` goes through all that was imported, each time
    for name in arguments.only:
        start = time.perf_counter()
        for each in CASES[name](bench):
            each.group = name
            report.comparisons.append(each)
            with PROGRESS.cleared():
                console.print(each.text, highlight=False, markup=False)
            report.seconds[name] = time.perf_counter() - start
            if arguments.json and bench.rank == 0:
                report.write_json(arguments.json)  # a run that is cut short leaves what it has
        bench.free()
        with PROGRESS.cleared():
            console.print(f"{name}: {report.seconds[name]:.0f} s", highlight=False)
    report.print_table(console)


def main() -> None:
    parser = benchmark_parser(__doc__.split("\n")[0], CASES, "samples per line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    run(arguments, device)
    # Not after an error: others may be in a collective, and this rank would wait for them instead of ending all.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
