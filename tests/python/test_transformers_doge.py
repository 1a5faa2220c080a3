"""Transformers' Doge on flash_dmattn against its own eager attention."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from compare import assert_case_close
from doge_models import (
    BATCH,
    LENGTH,
    VOCABULARY,
    assert_equal_gradients,
    assert_equal_logits,
    distinct_tokens,
    gradients,
    keep_the_newest,
    padding,
    pair,
    tiny_doge,
)
from flash_dmattn.integrations import _masks, attention_interface, doge
from oracle import Case
from selecting import visible_keys
from torch import Tensor, nn
from transformers import DogeConfig, DogeForCausalLM, DogeModel, LlamaConfig
from transformers.models.doge import modeling_doge
from transformers.models.doge.modeling_doge import DogeAttention

WINDOWS = [1, 5, 16, LENGTH - 1, LENGTH, 200]


PADDINGS = {"none": None, "all_ones": padding(), "left": padding(left=13), "right": padding(right=9)}


def assert_equal_training(ours: nn.Module, eager: nn.Module, text: Tensor, **inputs: object) -> None:
    """Logits and gradients where the tokens are real."""
    real = inputs.get("attention_mask")
    real = torch.ones_like(text).bool() if real is None or real.dim() != 2 else real.bool()
    got, expected = (model(text, **inputs).logits for model in (ours, eager))
    assert_equal_logits(got, expected, real)
    weights = torch.randn_like(got[real])
    losses = [(logits[real] * weights).sum() for logits in (got, expected)]
    found, wanted = (gradients(model, loss) for model, loss in zip((ours, eager), losses, strict=True))
    assert_equal_gradients(found, wanted)
    assert {"model.layers.1.self_attn.A", "model.layers.1.self_attn.dt_proj.weight"} <= found.keys()


# ---- Whole sequences


def test_what_others_put_in_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms with hooks or another forward, and another function for rotary embeddings."""
    ours, _ = pair(9)
    text, calls = distinct_tokens(BATCH, LENGTH), []
    expected = ours(text).logits
    first, second = (layer.self_attn for layer in ours.model.layers)
    first.q_norm.register_forward_hook(lambda module, inputs, out: calls.append("hook"))
    theirs, rotate = second.k_norm.forward, modeling_doge.apply_rotary_pos_emb
    second.k_norm.forward = lambda states: calls.append("forward") or theirs(states)
    monkeypatch.setattr(
        modeling_doge, "apply_rotary_pos_emb", lambda *states: calls.append("rotary") or rotate(*states)
    )
    assert_equal_logits(ours(text).logits, expected)
    assert calls == ["hook", "rotary", "forward", "rotary"]


@pytest.mark.parametrize("mask", PADDINGS.values(), ids=PADDINGS.keys())
@pytest.mark.parametrize("window", WINDOWS)
def test_equals_eager(window: int, mask: Tensor | None) -> None:
    ours, eager = pair(window)
    assert_equal_training(ours, eager, distinct_tokens(BATCH, LENGTH), attention_mask=mask)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 1), (6, 3)])
def test_groups_of_heads(heads: int, key_heads: int) -> None:
    ours, eager = pair(9, num_attention_heads=heads, num_key_value_heads=key_heads, hidden_size=8 * heads)
    assert_equal_training(ours, eager, distinct_tokens(BATCH, LENGTH), attention_mask=padding(left=13))


def test_equals_transformers_own_choice_where_no_scores_are_equal() -> None:
    """The eager attention as it is, torch.topk included."""
    ours, eager = pair(9)[0], tiny_doge(9)
    assert_equal_training(ours, eager, distinct_tokens(BATCH, LENGTH))


@pytest.mark.parametrize("lengths", [[20, 25, 5], [1, 1, 48], [50]])
@pytest.mark.parametrize("window", [1, 9, 30])
def test_packed_sequences(window: int, lengths: list[int]) -> None:
    ours, eager = pair(window)
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.stack([positions, torch.arange(LENGTH)])  # the second sequence is one document
    text = distinct_tokens(BATCH, LENGTH)
    for position_ids in (positions[None], rows):
        assert_equal_training(ours, eager, text, position_ids=position_ids, use_cache=False)


@pytest.mark.parametrize("sliding_window", [5, 9, 10, 12, 30, 100])
@pytest.mark.parametrize("mask", [None, padding(left=13)], ids=["", "left"])
def test_sliding_windows(sliding_window: int, mask: Tensor | None) -> None:
    ours, eager = pair(9, sliding_window=sliding_window)
    assert_equal_training(ours, eager, distinct_tokens(BATCH, LENGTH), attention_mask=mask)


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_not_causal(sliding_window: int | None) -> None:
    ours, eager = pair(9, sliding_window=sliding_window)
    for model in (ours, eager):
        model.config.is_causal = False
    for mask in (None, padding(right=9)):
        assert_equal_training(ours, eager, distinct_tokens(BATCH, LENGTH), attention_mask=mask)


@pytest.mark.parametrize("window", [9, 200])
@pytest.mark.parametrize("name", ["causal", "causal_and_padding", "documents", "holes", "row"])
def test_masks_of_users(name: str, window: int) -> None:
    """Bool masks with four dimensions, and the same added to the scores."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    document = torch.arange(LENGTH) // 17
    mask = {
        "causal": causal[None, None],
        "causal_and_padding": (causal & padding(left=13).bool()[:, None]).unsqueeze(1) | torch.eye(LENGTH).bool(),
        "documents": (causal & (document == document[:, None]))[None, None],
        "holes": (causal & (torch.rand(LENGTH, LENGTH) < 0.7) | torch.eye(LENGTH).bool())[None, None],
        "row": padding(left=13).bool()[:, None, None],
    }[name].expand(BATCH, -1, -1, -1)
    ours, eager = pair(window)
    text = distinct_tokens(BATCH, LENGTH)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for form in (mask, additive):
        assert_equal_training(ours, eager, text, attention_mask=form)


def test_causal_masks_of_users_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a dense selection was made")

    looks, prepare = [], _masks.prepare_mask
    monkeypatch.setattr(doge, "dense_selection", refuse)
    monkeypatch.setattr(_masks, "prepare_mask", lambda *args: looks.append(1) or prepare(*args))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for window in (9, 200):
        ours, _ = pair(window)
        for form in (mask.clone(), additive, torch.cat([mask, ~mask], 3)[..., :LENGTH]):
            looks.clear()
            ours(distinct_tokens(BATCH, LENGTH), attention_mask=form)
            assert len(looks) == 1  # for both layers


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_is_within_the_numerical_bar(low: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer: the call that it makes, judged by the oracle, and its result beside that of the eager attention."""
    ours, eager = pair(9, low, num_hidden_layers=1)
    calls = []

    def record(*tensors: Tensor, **options: object) -> Tensor:
        calls.append((tensors, options, attention(*tensors, **options)))
        return calls[-1][2]

    attention = doge.attention
    monkeypatch.setattr(doge, "attention", record)
    text = distinct_tokens(BATCH, LENGTH)
    got, expected = ours(text).logits, eager(text).logits
    ((query, key, value), options, out), *others = calls
    assert not others and query.dtype == low and options["bias"].dtype == low
    kept = visible_keys(options["bias"], 9, LENGTH)
    inputs = [tensor.detach() for tensor in (query, key, value, torch.zeros_like(query))]
    case = Case(*inputs, mask=kept, bias=options["bias"].detach(), options={"scale": options["scale"]})
    case = replace(case, options=case.options | {"is_causal": True})
    assert_case_close(case, {"out": out.detach()})
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[low]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * float(expected.detach().abs().max()))


def test_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, eager = pair(200)
    text = distinct_tokens(BATCH, LENGTH)
    biases, attention = [], doge.attention
    monkeypatch.setattr(doge, "attention", lambda *args, **kw: biases.append(kw["bias"]) or attention(*args, **kw))
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(text).logits
    assert got.dtype == torch.bfloat16 and all(bias.dtype == torch.float32 for bias in biases)
    expected = eager(text).logits
    assert (got - expected).norm() < 0.05 * expected.norm()
    got.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters() if parameter.grad is not None)


def test_gradient_checkpointing() -> None:
    for reentrant in (False, True):
        ours, eager = pair(9)
        ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ours.train()
        eager.train()
        assert_equal_training(ours, eager, distinct_tokens(BATCH, LENGTH), attention_mask=padding(left=13))


# ---- enable and disable


def implementations(model: nn.Module) -> set[str]:
    return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every layer that runs here."""
    made = []
    attention = doge.attention
    monkeypatch.setattr(doge, "attention", lambda *args, **kw: made.append(1) or attention(*args, **kw))
    yield made
    doge.disable()


def test_enable_and_disable_a_model(calls: list[int]) -> None:
    model, other, text = tiny_doge(9), tiny_doge(9), distinct_tokens(BATCH, LENGTH)
    for before in ("eager", "sdpa"):
        model.set_attn_implementation(before)
        doge.enable(model)
        doge.enable(model)  # changes nothing
        assert implementations(model) == {"dmattn"}
        model(text)
        assert len(calls) == 2
        other(text)
        assert len(calls) == 2
        doge.disable(model)
        assert implementations(model) == {before}
        model(text, attention_mask=padding(left=13))
        assert len(calls) == 2
        calls.clear()


@pytest.mark.parametrize("model_class", [None, DogeForCausalLM, DogeModel])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_enable_and_disable_all_models(calls: list[int], implementation: str, model_class: type | None) -> None:
    before, text = tiny_doge(9, attn_implementation=implementation), distinct_tokens(BATCH, LENGTH)
    expected = keep_the_newest(tiny_doge(9))
    doge.enable(model_class)
    after = tiny_doge(9, attn_implementation=implementation)
    for model in (before, after):
        assert_equal_training(model, expected, text, attention_mask=padding(left=13))
        settings = {"attention_mask": padding(left=13), "max_new_tokens": 5, "do_sample": False}
        for cache in ("dynamic", "static"):
            written = [m.generate(text, cache_implementation=cache, **settings) for m in (model, expected)]
            assert torch.equal(*written)
    assert len(calls) > 0
    calls.clear()
    doge.disable(model_class)
    before(text, attention_mask=padding(left=13))
    after(text, attention_mask=padding(left=13))
    assert implementations(before) == implementations(after) == {implementation} and not calls
    assert not doge._enabled_configs


def test_disabled_models_are_what_they_were() -> None:
    eager = tiny_doge(9)
    text = distinct_tokens(BATCH, LENGTH)
    expected = eager(text).logits
    doge.enable(eager)
    doge.disable(eager)
    assert torch.equal(eager(text).logits, expected)


def test_attn_implementation_is_enough(calls: list[int]) -> None:
    model = DogeForCausalLM._from_config(tiny_doge(9).config, attn_implementation="dmattn")
    model(distinct_tokens(BATCH, LENGTH))
    assert len(calls) == 2
    doge.disable(model)
    assert implementations(model) == {"eager"}


def test_copies_and_wrappers(calls: list[int]) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

    model, text = tiny_doge(9), distinct_tokens(BATCH, LENGTH)
    doge.enable(Wrapper(model.model))
    copy.deepcopy(model)(text)
    assert len(calls) == 2
    assert "dmattn" not in str(model.config.to_dict())  # nothing is saved


def test_enable_refuses_what_is_no_doge() -> None:
    with pytest.raises(TypeError, match="must be a module, a class or None; got model_or_class of type DogeConfig"):
        doge.enable(DogeConfig())
    with pytest.raises(ValueError, match="must hold a Doge model of Transformers; got Linear"):
        doge.enable(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must be a Doge model or class of Transformers; got LlamaConfig"):
        doge.disable(LlamaConfig)


def test_dropout_of_attention_is_refused_in_training() -> None:
    ours, _ = pair(9, attention_dropout=0.1)
    text = distinct_tokens(BATCH, LENGTH)
    ours(text)
    with pytest.raises(ValueError, match="dropout of attention probabilities is not supported"):
        ours.train()(text)


def test_hidden_dropout_is_no_matter_of_ours() -> None:
    ours, eager = pair(9, hidden_dropout=0.3)
    text, results = distinct_tokens(BATCH, LENGTH), []
    for model in (ours, eager):
        torch.manual_seed(5)
        results.append(model.train()(text).logits)
    assert_equal_logits(*results)


# A peak never goes down again, so this runs in a process of its own.
MEMORY = """
import torch
from transformers import DogeConfig, DogeModel
from flash_dmattn.integrations import doge

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

def run(length):
    config = DogeConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=length,
                        keep_window_size=64)
    model = DogeModel(config)
    doge.enable(model)
    before = peak()
    mask = torch.ones(1, length, dtype=torch.long)
    mask[:, :100] = 0
    model(torch.randint(0, 64, (1, length)), attention_mask=mask).last_hidden_state.sum().backward()
    return peak() - before

run(256)
print(run(16384))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_linear() -> None:
    """Two layers at 16384 tokens with padding: a bool for every score would be 256 MiB, a float 1 GiB."""
    result = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 180 * 2**20


# ---- torch.compile


def test_compiled_layer() -> None:
    """One graph, without breaks, for all lengths."""
    ours, eager = pair(9)
    rotary = ours.model.rotary_emb
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    layer = torch.compile(ours.model.layers[0], backend=backend, fullgraph=True, dynamic=True)
    for length in (30, 41, 17, 64):
        hidden = torch.randn(BATCH, length, 32)
        embeddings = rotary(hidden, torch.arange(length)[None])
        mask = padding(left=5, length=length).int()[:, None, None]
        causal = torch.ones(length, length, dtype=torch.bool).tril() & mask.bool()
        causal = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
        got = layer(hidden, embeddings, attention_mask=mask)
        expected = eager.model.layers[0](hidden, embeddings, attention_mask=causal)
        assert_equal_logits(got, expected, padding(left=5, length=length))
    assert len(graphs) == 1
    assert "select_keys" in graphs[0].code and "attention_forward" in graphs[0].code


def test_registered_functions_are_ours() -> None:
    assert DogeAttention.forward is doge._forward
    assert attention_interface.NAME == "dmattn" and VOCABULARY > LENGTH + 64
