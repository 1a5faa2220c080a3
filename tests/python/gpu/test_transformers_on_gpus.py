"""Transformers' models on a GPU: low precision against their eager attention, caches, captured graphs, memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import transformers
from doge_models import VOCABULARY, distinct_tokens, pair
from flash_dmattn.integrations import doge
from flash_dmattn.integrations.attention_interface import dmattn_attention_forward
from flash_dmattn.integrations.flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward
from torch import Tensor, nn
from transformers import Cache, DogeConfig, DogeForCausalLM, DogeModel, DynamicCache, StaticCache

BATCH, LENGTH = 2, 50
MIB = 2**20
pytestmark = pytest.mark.devices("cuda")


def padding(left: int = 0, right: int = 0) -> Tensor:
    """(B, length), the second sequence is padded."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, :left] = 0
    mask[1, LENGTH - right :] = 0
    return mask


def assert_near(got: Tensor, expected: Tensor, name: str = "logits") -> None:
    """As near as roundings of a layer or two leave it, gradients less so."""
    tolerance = (0.03 if got.dtype == torch.bfloat16 else 0.01) * (1 if name == "logits" else 2)
    assert got.dtype == expected.dtype
    difference = (got.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm()
    assert difference < tolerance, f"{name} differs by {difference:.2g}"


# ---- Doge


@pytest.mark.parametrize("mask", ["none", "left", "right"])
@pytest.mark.parametrize("window", [9, 200])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1)], ids=str)
def test_doge_equals_eager(dtype: torch.dtype, heads: tuple[int, int], window: int, mask: str) -> None:
    """One layer, judged by the same in float32 with the same selection: errors of at most twice those of the eager
    attention."""
    sizes = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    ours, eager = pair(window, dtype, num_hidden_layers=1, hidden_size=8 * heads[0], **sizes)
    text = distinct_tokens(BATCH, LENGTH)
    given = {"none": None, "left": padding(left=13), "right": padding(right=9)}[mask]
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool) if given is None else given.bool()
    weights, results = torch.randn(int(real.sum()), VOCABULARY), []
    for model in (ours, eager, in_float32(eager, text, given)):
        logits = model(text, attention_mask=given).logits[real]
        (logits.float() * weights).sum().backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
        results[-1]["logits"] = logits.detach()
    for name, expected in results[2].items():
        got, theirs = (result[name].double() for result in results[:2])
        expected, size = expected.double(), expected.double().norm()
        if name.endswith(".A"):  # a sum over tokens that nearly cancels
            expected, size = expected.sum((0, 1)), expected.abs().sum((0, 1)).norm()
        allowed = 2 * (theirs - expected).norm() + 2 * torch.finfo(dtype).eps * size
        assert (got - expected).norm() <= allowed, name


def in_float32(eager: DogeForCausalLM, text: Tensor, mask: Tensor | None) -> DogeForCausalLM:
    """The model of one layer, with the keys that the one of lower precision keeps, and A for every token."""
    attention, masks = eager.model.layers[0].self_attn, []
    make = attention.prepare_dynamic_mask
    attention.prepare_dynamic_mask = lambda **arguments: masks.append(make(**arguments)) or masks[-1]
    eager(text, attention_mask=mask)
    attention.prepare_dynamic_mask = make
    hidden = masks[0] == torch.finfo(masks[0].dtype).min

    def same_mask(hidden_states: Tensor, dt_states: Tensor, **_: object) -> Tensor:
        return dt_states[:, :, None].expand_as(hidden).masked_fill(hidden, torch.finfo(torch.float32).min)

    model = copy.deepcopy(eager).float()
    attention = model.model.layers[0].self_attn
    attention.prepare_dynamic_mask = same_mask
    attention.A = nn.Parameter(attention.A.detach().expand(*text.shape, -1).clone())
    return model


def test_doge_under_autocast() -> None:
    ours, eager = pair(9, num_hidden_layers=1)
    text, found = distinct_tokens(BATCH, LENGTH), []
    for model in (ours, eager):
        with torch.autocast("cuda", torch.bfloat16):
            found.append(model(text).logits)
        found[-1].float().square().mean().backward()
    assert_near(*found)
    for name, parameter in ours.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name


def test_doge_in_float32_is_refused() -> None:
    ours, _ = pair(9)
    with pytest.raises(ValueError, match="query must be float16 or bfloat16 on CUDA; got query float32"):
        ours(distinct_tokens(BATCH, LENGTH))


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=130),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [16, 60, 200])
def test_token_by_token_equals_one_pass(dtype: torch.dtype, window: int, cache: str) -> None:
    """A prompt in two parts, then 64 tokens one by one, with the window below, inside and above the lengths."""
    ours, eager = pair(window, dtype, num_hidden_layers=1)
    text, held = distinct_tokens(BATCH, LENGTH + 64), CACHES[cache](ours.config)
    with torch.no_grad():
        parts = [ours(part, past_key_values=held).logits for part in text.split([30, 20] + [1] * 64, dim=1)]
        assert_near(torch.cat(parts, 1), eager(text).logits)


def test_padded_generation() -> None:
    """Both kinds of cache, with padding on the left: the same tokens, until two are about equally likely."""
    ours, _ = pair(16, torch.bfloat16)
    text = distinct_tokens(BATCH, LENGTH)
    settings = {"attention_mask": padding(left=13), "max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    settings |= {"disable_compile": True, "output_logits": True, "return_dict_in_generate": True}
    written = [ours.generate(text, cache_implementation=cache, **settings) for cache in ("dynamic", "static")]
    assert_near(*(result.logits[0] for result in written))
    assert all(result.sequences.shape == (BATCH, LENGTH + 20) for result in written)


def step_of(model: nn.Module, cache: Cache) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A captured step, its token (B, 1) and its logits."""
    token = torch.full((BATCH, 1), 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, past_key_values=cache).logits
    return graph, token, logits


def test_captured_decode() -> None:
    """Replays write to a static cache without telling anybody; steps before, between and after them are not misled."""
    ours, eager = pair(9, torch.bfloat16, num_hidden_layers=1)
    text, held = distinct_tokens(BATCH, LENGTH), CACHES["static"](ours.config)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # as capturing wants it: what is made once is made here
            parts = [ours(part, past_key_values=held).logits for part in text[:, :22].split([20, 1, 1], dim=1)]
        torch.cuda.current_stream().wait_stream(stream)
        graph, token, logits = step_of(ours, held)
        for at in range(22, LENGTH):
            if at in (30, 31, 32, 40):
                parts.append(ours(text[:, at : at + 1], past_key_values=held).logits)
                continue
            token.copy_(text[:, at : at + 1])
            graph.replay()
            parts.append(logits.clone())
        assert_near(torch.cat(parts, 1), eager(text).logits)


# ---- torch.compile


def test_compiled_layer() -> None:
    """Training of a layer: no graph breaks, one graph for all lengths; and inductor's code computes the same."""
    model = pair(64, torch.bfloat16, num_hidden_layers=1, max_position_embeddings=1024)[0].train()
    layer, graphs = model.model.layers[0], []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    def train(run: Callable, length: int) -> Tensor:
        torch.manual_seed(length)
        hidden = torch.randn(BATCH, length, 32, dtype=torch.bfloat16)
        model.zero_grad()
        out = run(hidden, position_embeddings=model.model.rotary_emb(hidden, torch.arange(length)[None]))
        out.float().square().mean().backward()
        gradients = [parameter.grad for parameter in layer.self_attn.parameters()]
        assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
        return out

    torch.compiler.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for length in (300, 411, 170, 640):
        assert_near(train(compiled, length), train(layer, length))
    assert len(graphs) == 1
    torch.compiler.reset()
    assert_near(train(torch.compile(layer, fullgraph=True, dynamic=True), 300), train(layer, 300))


def test_compiled_decode() -> None:
    """The whole model with a static cache, as generate() compiles it but for the code of inductor."""
    ours, eager = pair(9, torch.bfloat16, num_hidden_layers=1)
    text, held = distinct_tokens(BATCH, LENGTH), CACHES["static"](ours.config)
    torch.compiler.reset()
    compiled = torch.compile(ours.__call__, backend="cudagraphs", fullgraph=True)
    with torch.no_grad():
        parts = [ours(text[:, :30], past_key_values=held).logits]
        for at in range(30, LENGTH):
            call = ours if at in (36, 37) else compiled
            torch.compiler.cudagraph_mark_step_begin()
            parts.append(call(input_ids=text[:, at : at + 1], past_key_values=held).logits.clone())
        assert_near(torch.cat(parts, 1), eager(text).logits)


# ---- Memory


def peak_of(work: Callable[[], object]) -> int:
    """Bytes beyond what is held before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_memory_of_the_original_function_is_linear(dtype: torch.dtype, mask: str) -> None:
    """A bias per key at 16384 keys, forward and backward: a bool for every score would be 256 MiB."""
    length = 16384
    query, key, value = (torch.randn(1, heads, length, 32, dtype=dtype, requires_grad=True) for heads in (2, 1, 1))
    bias = torch.randn(1, 1, length, dtype=dtype, requires_grad=True)
    given = {
        "none": lambda: None,
        "causal": lambda: torch.ones(1, 1, length, length, dtype=torch.bool).tril_(),
        "padding": lambda: torch.arange(length)[None] > 100,
    }[mask]()
    module = nn.Module()
    module.config, module.keep_window_size, module.is_causal = SimpleNamespace(), 64, True

    def work() -> None:
        out, _ = flash_dynamic_mask_attention_forward(module, query, key, value, given, bias)
        gradients = torch.autograd.grad(out, (query, key, value, bias), torch.ones_like(out))
        assert all(gradient.isfinite().all() for gradient in gradients)

    assert peak_of(work) < 64 * MIB


@pytest.mark.parametrize("head_dim, value_dim", [(192, 128), (64, 128)])
def test_values_of_another_head_dim_are_not_padded(dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    """A forward takes the memory of its output and little else."""
    query, key, value = (torch.randn(1, 16, 8192, dim, dtype=dtype) for dim in (head_dim, head_dim, value_dim))
    module = nn.Module()
    module.is_causal = True
    assert peak_of(lambda: dmattn_attention_forward(module, query, key, value, None)) < 1.2 * value.nbytes


def test_memory_of_doge_is_linear() -> None:
    """Two layers at 16384 tokens with padding: a bool for every score would be 256 MiB, a bfloat16 512 MiB."""
    length = 16384
    config = DogeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=length,
        keep_window_size=64,
    )
    model = DogeModel(config).bfloat16()
    doge.enable(model)
    text, mask = torch.randint(0, 64, (1, length)), torch.ones(1, length, dtype=torch.long)
    mask[:, :100] = 0

    def work() -> None:
        model(text, attention_mask=mask, use_cache=False).last_hidden_state.float().square().mean().backward()

    assert peak_of(work) < 180 * MIB


# ---- Other models


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_other_models_equal_eager(dtype: torch.dtype, name: str) -> None:
    """Causal, padded; Gemma 2 with softcap and a sliding window, too."""
    sizes = {
        "vocab_size": 120,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attn_implementation": "eager",
    }
    kind, config = {
        "llama": lambda: (transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes)),
        "gemma2": lambda: (
            transformers.Gemma2ForCausalLM,
            transformers.Gemma2Config(**sizes, sliding_window=7, attn_logit_softcapping=5.0, query_pre_attn_scalar=16),
        ),
    }[name]()
    model = kind(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # far enough from 0 that attention matters
            nn.init.normal_(parameter, std=0.15)
    model = model.to(dtype)
    text, real, found = torch.randint(3, 120, (BATCH, LENGTH)), padding(left=13), []
    for implementation in ("dmattn", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(text, attention_mask=real, use_cache=False).logits[real.bool()]
        logits.float().square().mean().backward()
        found.append((logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()))
    for what, got, expected in zip(("logits", "q_proj"), *found, strict=True):
        assert_near(got, expected, what)
