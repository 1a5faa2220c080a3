"""Trains and runs Transformers' Doge on one NVIDIA GPU: flash_dmattn against Transformers' eager and sdpa attention.

    python benchmarks/gpu_doge.py                      every case
    python benchmarks/gpu_doge.py --only train decode  some of them
    python benchmarks/gpu_doge.py --json out.json      also as JSON
    python benchmarks/gpu_doge.py --quick              small sizes, to check this script only; on a CPU, too

One model, built from its configuration with random weights in bfloat16: 4 layers, hidden 1024, 16 query and 8 key heads
of 64, MLP 2048, vocabulary 32k, window 2048, batch 1. A and dt_proj are random, too: keys have different scores. In
training sdpa gets an explicit 4-D causal mask, since without one some versions of Transformers are not causal there.
Each attention trains a copy of the model of its own, one after the other; the aims are for an H200. Times are the
host's clock around work that the GPU has finished, Python included, as users see it.

Where sdpa wants more memory than there is, its peak is only known to be larger than that. So the case "memory" measures
one layer of the model at 32k tokens without the vocabulary (forward and backward of a loss on its hidden states), and
the training step at lengths that fit; through these goes a parabola in the length, which says what sdpa would take at
32k. That line says that it is extrapolated.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import transformers
from common import OURS, add_theirs, benchmark_parser, quartiles, run_cases
from flash_dmattn.integrations import doge
from progress import PROGRESS
from report import Comparison, Report, describe_machine
from rich.console import Console
from torch import Tensor
from transformers import Cache, CompileConfig, DogeConfig, DogeForCausalLM, DynamicCache, StaticCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
EAGER, SDPA = "eager", "sdpa"
PEERS = (SDPA, EAGER)
UNCOMPILED = "the same, uncompiled"
COMPILED = "static cache, compiled"
TOKENS = 32768  # of the longest training step


@dataclass
class Bench:
    repeats: int
    quick: bool
    notes: list[str] = field(default_factory=list)

    def length(self, length: int) -> int:
        return length // 64 if self.quick else length


# ---- Models


def make_model(bench: Bench, layers: int = 4) -> DogeForCausalLM:
    """On the host, with eager attention."""
    config = DogeConfig(
        vocab_size=bench.length(32768),
        hidden_size=128 if bench.quick else 1024,
        intermediate_size=256 if bench.quick else 2048,
        num_hidden_layers=layers,
        num_attention_heads=4 if bench.quick else 16,
        num_key_value_heads=2 if bench.quick else 8,
        max_position_embeddings=1 << 17,
        keep_window_size=bench.length(2048),
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = DogeForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A)
        torch.nn.init.normal_(layer.self_attn.dt_proj.weight, std=0.2)
    return model.to(DTYPE)


def with_attention(model: DogeForCausalLM, name: str) -> DogeForCausalLM:
    """A copy on the device that runs on one of the three."""
    model = copy.deepcopy(model).to(DEVICE)
    if name == OURS:
        doge.enable(model)
    else:
        model.set_attn_implementation(name)
    return model


def random_tokens(model: DogeForCausalLM, length: int) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (1, length), device=DEVICE)


# ---- Measuring


def finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def seconds_of(work: Callable[[], object]) -> float:
    finish()
    start = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - start


@dataclass
class Measured:
    seconds: list[float] = field(default_factory=list)
    peak_gib: float | None = None  # of all memory that the process holds on the device; None on a CPU
    failed: bool = False  # at that peak


def measure(
    bench: Bench, case: str, name: str, make: Callable[[], Callable[[], object]], repeats: int | None = None
) -> Measured:
    """Seconds of what make() returns, after two calls for warm-up, and the peak of memory from make() on."""
    found, work = Measured(), None
    PROGRESS.show(f"{case}, {name}")
    free()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # Peers may want more memory than there is, or tensors larger than their kernels take.
    try:
        work = make()
        for _ in range(2):
            work()
        found.seconds = [seconds_of(work) for _ in range(repeats or bench.repeats)]
    except RuntimeError as error:
        if name == OURS:
            raise
        found.failed = True
        bench.notes.append(f"{case}: {name}: {type(error).__name__}: {str(error).strip()[:160]}")
    if DEVICE == "cuda":
        found.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    work = None
    free()
    return found


def compare(
    bench: Bench,
    case: str,
    what: str,
    measured: dict[str, Measured],
    *,
    amount: float | None = None,
    unit: str = "ms",
    goals: dict[str, float] | None = None,
) -> Iterator[Comparison]:
    """One line for every other that ran; `amount`: what a call does, in what `unit` says is done in a second."""

    def figures(name: str) -> tuple[float, float, float]:
        return quartiles([each * 1e3 if amount is None else amount / each for each in measured[name].seconds])

    low, middle, high = figures(OURS)
    kind = str(DTYPE).removeprefix("torch.")
    others = [name for name in measured if name != OURS]
    ours = Comparison(case, what, kind, unit, middle, ours_low=low, ours_high=high)
    ours.samples = len(measured[OURS].seconds)
    for name in others:
        if measured[name].failed:
            continue
        line = replace(ours, goal=(goals or {}).get(name), other=name)
        add_theirs(line, measured[OURS].seconds, measured[name].seconds)
        line.theirs_low, line.theirs, line.theirs_high = figures(name)
        yield line
    if all(measured[name].failed for name in others):
        yield ours


def compare_memory(
    case: str, measured: dict[str, Measured], goals: dict[str, float], what: str = "peak memory"
) -> Iterator[Comparison]:
    ours = measured[OURS].peak_gib
    for name in PEERS:
        if ours is None or name not in measured:
            continue
        # One that failed would have needed more.
        other = f"{name}, where it failed" if measured[name].failed else name
        line = Comparison(case, what, str(DTYPE).removeprefix("torch."), "GiB", ours, other=other)
        line.theirs, line.goal = measured[name].peak_gib, goals.get(name)
        line.ratio = line.ratio_low = line.ratio_high = line.theirs / ours
        yield line


# ---- Cases


def train(bench: Bench) -> Iterator[Comparison]:
    """Forward, backward and AdamW of one sequence."""
    model = make_model(bench)
    for tokens, memory_goals in ((8192, {}), (TOKENS, {SDPA: 8.0})):
        length, measured = bench.length(tokens), {}
        case = f"training step, {length} tokens"
        for name in (OURS, *PEERS):
            measured[name] = measure(bench, case, name, training_step(model, name, length))
        yield from compare(bench, case, "time", measured, goals={SDPA: 3.0})
        yield from compare_memory(case, measured, memory_goals)


def training_step(model: DogeForCausalLM, name: str, length: int) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        trained = with_attention(model, name).train()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)
        text, mask = random_tokens(trained, length), causal_mask(name, length)

        def step() -> None:
            loss = trained(text, attention_mask=mask, labels=text, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return make


def causal_mask(name: str, length: int) -> Tensor | None:
    if name != SDPA:
        return None
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=DEVICE).tril_()


def memory(bench: Bench) -> Iterator[Comparison]:
    """Peaks where sdpa fits: of one layer at full length, and of the training step at lengths below."""
    full, model, measured = bench.length(TOKENS), make_model(bench, layers=1), {}
    case = f"one layer without vocabulary, {full} tokens"
    for name in (OURS, SDPA):
        measured[name] = measure(bench, case, name, layer_step(model, name, full), repeats=2)
    yield from compare(bench, case, "forward + backward", measured)
    yield from compare_memory(case, measured, {SDPA: 8.0})

    model, peaks = make_model(bench), {OURS: [], SDPA: []}
    lengths = [bench.length(tokens) for tokens in (8192, 12288, 16384)]
    for length in lengths:
        case, measured = f"training step, {length} tokens", {}
        for name in peaks:
            measured[name] = measure(bench, case, name, training_step(model, name, length), repeats=2)
            if measured[name].peak_gib is not None and not measured[name].failed:
                peaks[name].append(measured[name].peak_gib)
        yield from compare_memory(case, measured, {})
    if any(len(found) < len(lengths) for found in peaks.values()):
        return
    case, at = f"training step, {full} tokens", ", ".join(map(str, lengths))
    measured = {OURS: measure(bench, case, OURS, training_step(model, OURS, full), repeats=2)}
    measured[SDPA] = Measured(peak_gib=parabola_at(full, lengths, peaks[SDPA]))
    yield from compare_memory(case, measured, {SDPA: 8.0}, f"peak memory, sdpa's extrapolated from {at}")


def layer_step(model: DogeForCausalLM, name: str, length: int) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        layer = with_attention(model, name).model.train()
        text, mask = random_tokens(layer, length), causal_mask(name, length)

        def step() -> None:
            layer(text, attention_mask=mask, use_cache=False).last_hidden_state.float().square().mean().backward()
            layer.zero_grad(set_to_none=True)

        return step

    return make


def parabola_at(length: int, lengths: list[int], peaks: list[float]) -> float:
    """The value at `length` of the parabola through three measured points (Lagrange's formula)."""
    total = 0.0
    for index, peak in enumerate(peaks):
        others = lengths[:index] + lengths[index + 1 :]
        total += peak * math.prod((length - other) / (lengths[index] - other) for other in others)
    return total


def decode(bench: Bench) -> Iterator[Comparison]:
    """Tokens one by one behind 64k cached ones, with caches that grow and that are filled; and behind 512k."""
    model, context, steps = make_model(bench).eval(), bench.length(65536), 4 if bench.quick else 32
    found: dict[str, Measured] = {}
    for kind in ("dynamic cache", "static cache", COMPILED):
        case, measured = f"decode behind {context} tokens, {kind}", {}
        for name in (OURS, *(PEERS[:1] if kind == COMPILED else PEERS)):
            measured[name] = measure(bench, case, name, decoding(bench, model, name, kind, context, steps))
        found[kind] = measured[OURS]
        yield from compare(bench, case, "speed", measured, amount=steps, unit="tokens/s", goals={SDPA: 1.5})

    longer = bench.length(524288)
    case, name = f"decode behind {longer} tokens, {COMPILED}", f"ours behind {context}"
    measured = {OURS: measure(bench, case, OURS, decoding(bench, model, OURS, COMPILED, longer, steps))}
    measured[name] = found[COMPILED]
    yield from compare(bench, case, "speed", measured, amount=steps, unit="tokens/s", goals={name: 1 / 1.15})


def decoding(
    bench: Bench, model: DogeForCausalLM, name: str, kind: str, context: int, steps: int
) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        running = with_attention(model, name)
        if kind == "dynamic cache":
            cache = DynamicCache(config=model.config)
        else:
            cache = StaticCache(config=model.config, max_cache_len=context + 1 + (bench.repeats + 2) * steps)
        fill(cache, running, context)
        token = random_tokens(running, 1)
        with torch.no_grad():  # not compiled, as generate() runs the prompt
            running(input_ids=token, past_key_values=cache, use_cache=True)
        call = compiled_call(bench, running) if kind == COMPILED else running

        @torch.no_grad()
        def write() -> None:
            for _ in range(steps):
                call(input_ids=token, past_key_values=cache, use_cache=True)

        return write

    return make


def compiled_call(bench: Bench, model: DogeForCausalLM) -> Callable:
    """Compiled as generate() compiles for static caches; inductor takes too long to check this script."""
    torch.compiler.reset()
    return model.get_compiled_call(CompileConfig(backend="aot_eager", mode=None) if bench.quick else CompileConfig())


def fill(cache: Cache, model: DogeForCausalLM, tokens: int) -> None:
    """Random keys and values: a prompt of this length is more than the others' memory."""
    config = model.config
    shape = (1, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for layer in range(config.num_hidden_layers):
        key, value = torch.randn(2, *shape, device=DEVICE, dtype=DTYPE, generator=generator)
        cache.update(key, value, layer)


def generate(bench: Bench) -> Iterator[Comparison]:
    """generate(): the prompt, then tokens."""
    model, prompt, new = make_model(bench).eval(), bench.length(8192), 8 if bench.quick else 128
    measured, case = {}, f"generate {new} tokens from {prompt}"
    for name in (OURS, *PEERS):

        def make(name: str = name) -> Callable[[], object]:
            running = with_attention(model, name)
            text = random_tokens(running, prompt)
            settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            return lambda: running.generate(text, attention_mask=torch.ones_like(text), pad_token_id=0, **settings)

        measured[name] = measure(bench, case, name, make)
    yield from compare(bench, case, "speed", measured, amount=new, unit="tokens/s")


def compile_layer(bench: Bench) -> Iterator[Comparison]:
    """Training of one compiled layer at several lengths above the window, up to which nothing is selected: breaks of
    its graph and how many graphs there are, without and with inductor, which makes some of its own for ranges of
    lengths where it merges kernels differently (TORCH_LOGS=recompiles shows its guards).
    """
    model = with_attention(make_model(bench, layers=1), OURS).train()
    layer, lengths = model.model.layers[0], [bench.length(tokens) for tokens in (3000, 6144, 8192, 12288)]

    def train_at(call: Callable, length: int) -> Callable[[], None]:
        hidden = torch.randn(1, length, model.config.hidden_size, device=DEVICE, dtype=DTYPE, requires_grad=True)
        embeddings = model.model.rotary_emb(hidden, torch.arange(length, device=DEVICE)[None])

        def train_layer() -> None:
            call(hidden, position_embeddings=embeddings).sum().backward()
            model.zero_grad(set_to_none=True)

        train_layer()
        return train_layer

    kind, counters = str(DTYPE).removeprefix("torch."), torch._dynamo.utils.counters
    # Inductor takes too long to check this script.
    for backend in ("aot_eager",) if bench.quick else ("aot_eager", "inductor"):
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(layer, dynamic=True, backend=backend)
        trained = {length: train_at(compiled, length) for length in lengths}
        case, limit = (
            f"layer by {backend}, {', '.join(map(str, lengths))} tokens",
            1 if backend == "aot_eager" else None,
        )
        yield Comparison(case, "graph breaks", kind, "breaks", sum(counters["graph_break"].values()), limit=0)
        yield Comparison(case, "compiled", kind, "graphs", counters["stats"]["unique_graphs"], limit=limit)
    for length, ours in trained.items():
        found = {}
        for name, work in ((OURS, ours), (UNCOMPILED, train_at(layer, length))):
            found[name] = Measured([seconds_of(work) for _ in range(bench.repeats)])
        yield from compare(bench, f"layer by {backend}, {length} tokens", "forward + backward", found)


CASES = {"train": train, "memory": memory, "decode": decode, "generate": generate, "compile": compile_layer}


# ---- The same result


def newest_best_mask(
    hidden_states: Tensor, dt_states: Tensor, keep_window_size: int, attention_mask: Tensor | None = None
) -> Tensor:
    """In the place of DogeAttention.prepare_dynamic_mask: keeps the newest of equal scores, of which bfloat16 has many
    and torch.topk keeps any."""
    lowest, keys = torch.finfo(hidden_states.dtype).min, dt_states.shape[-1]
    scores = dt_states[:, :, None].expand(-1, -1, hidden_states.shape[1], -1)
    scores = scores.masked_fill(attention_mask[..., :keys] != 0, lowest)
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, keys - 1 - order[..., :keep_window_size], True)
    return scores.masked_fill(~kept, lowest)


@torch.no_grad()
def check_equal(bench: Bench) -> None:
    """Raises AssertionError if a layer does not compute what the eager one computes: no such time is worth anything.

    Of one layer, since a rounding in front of a selection may change what it keeps.
    """
    model = make_model(bench, layers=1).eval()
    model.model.layers[0].self_attn.keep_window_size = 64
    ours, eager = with_attention(model, OURS), with_attention(model, EAGER)
    eager.model.layers[0].self_attn.prepare_dynamic_mask = newest_best_mask
    text = random_tokens(model, 1024)
    got, expected = (running(text).logits.float() for running in (ours, eager))
    difference = (got - expected).norm() / expected.norm()
    assert difference < 0.02, f"logits differ by {difference:.2g}"


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__.split("\n")[0], CASES, "samples of each attention per line")
    arguments = parser.parse_args()
    if DEVICE == "cpu" and not arguments.quick:
        parser.error("there is no GPU: only --quick runs on a CPU")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    machine = describe_machine()
    if DEVICE == "cuda":
        machine["name"] = torch.cuda.get_device_name()
    report = Report(machine, title="Doge; ratio = other's time or memory over ours (its quartiles)")
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(
        f"{machine['name']}; transformers {transformers.__version__}, torch {torch.__version__}, flash_dmattn "
        f"{report.versions['flash_dmattn']}",
        highlight=False,
    )
    bench = Bench(max(2, arguments.repeats), arguments.quick, report.notes)
    check_equal(bench)
    free()
    gc.freeze()  # else `free` goes through all that was imported, each time
    return run_cases(CASES, bench, report, console, arguments)


if __name__ == "__main__":
    sys.exit(main())
