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
from doge_models import VOCABULARY, distinct_tokens, keep_the_newest, pair, tiny_doge
from flash_dmattn import select_keys
from flash_dmattn.integrations import _doge_cache, _masks, attention_interface, doge
from oracle import Case
from selecting import visible_keys
from torch import Tensor, nn
from transformers import Cache, DogeConfig, DogeForCausalLM, DogeModel, DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.models.doge import modeling_doge
from transformers.models.doge.modeling_doge import DogeAttention

BATCH, LENGTH = 2, 50
WINDOWS = [1, 5, 16, LENGTH - 1, LENGTH, 200]


def padding(left: int = 0, right: int = 0, length: int = LENGTH) -> Tensor:
    """(B, length), the second sequence is padded."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, :left] = 0
    mask[1, length - right :] = 0
    return mask


PADDINGS = {"none": None, "all_ones": padding(), "left": padding(left=13), "right": padding(right=9)}


def assert_equal_logits(got: Tensor, expected: Tensor, real: Tensor | None = None) -> None:
    if real is not None:
        got, expected = got[real.bool()], expected[real.bool()]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        size = 1e-4 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            got[name], gradient, rtol=1e-3, atol=size, msg=lambda text, name=name: f"{name}: {text}"
        )


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


# ---- Caches

CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=130),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mask", [None, padding(left=13)], ids=["", "left"])
@pytest.mark.parametrize("window", [1, 16, 60, 200])
def test_token_by_token_equals_one_pass(window: int, mask: Tensor | None, cache: str) -> None:
    """A prompt, then 64 tokens one by one, with the window below, inside and above the lengths."""
    ours, eager = pair(window)
    text, held = distinct_tokens(BATCH, LENGTH + 64), CACHES[cache](ours.config)
    with torch.no_grad():
        whole = None if mask is None else torch.cat([mask, torch.ones(BATCH, 64, dtype=torch.long)], 1)
        parts = []
        for begin, end in ((0, LENGTH), *((row, row + 1) for row in range(LENGTH, LENGTH + 64))):
            seen = None if whole is None else whole[:, :end]
            parts.append(ours(text[:, begin:end], attention_mask=seen, past_key_values=held).logits)
        assert_equal_logits(torch.cat(parts, 1), eager(text, attention_mask=whole).logits, whole)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [9, 200])
def test_prefill_with_history(window: int, cache: str) -> None:
    ours, eager = pair(window)
    text, held = distinct_tokens(BATCH, LENGTH), CACHES[cache](ours.config)
    with torch.no_grad():
        sizes = [20, 11, 1, 1, 10, 1, 2, 1, 1, 2]
        parts = [ours(part, past_key_values=held).logits for part in text.split(sizes, dim=1)]
        assert_equal_logits(torch.cat(parts, 1), eager(text).logits)


SETTINGS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sampled_beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "static": {"cache_implementation": "static"},
    "static_beams": {"cache_implementation": "static", "num_beams": 2},
    "no_cache": {"use_cache": False},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mask", [padding(), padding(left=13)], ids=["", "left"])
@pytest.mark.parametrize("how", SETTINGS)
def test_generates_what_eager_generates(how: str, mask: Tensor) -> None:
    models, text = pair(9), distinct_tokens(BATCH, LENGTH)
    if how == "prompt_lookup":  # for one sequence
        text, mask = text[1:].repeat(1, 2), mask[1:].repeat(1, 2)
        mask[:, LENGTH:] = 1
    settings = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False} | SETTINGS[how]
    written = []
    for model in models:
        torch.manual_seed(1)
        written.append(model.generate(text, attention_mask=mask, **settings))
    assert torch.equal(*written)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("sliding_window", [5, 12, 100])
def test_caches_with_sliding_windows(sliding_window: int, cache: str) -> None:
    ours, eager = pair(9, sliding_window=sliding_window)
    text, held, mask = distinct_tokens(BATCH, LENGTH), CACHES[cache](ours.config), padding(left=13)
    with torch.no_grad():
        parts, end = [], 0
        for size in (3, 2, *[1] * 25, 20):
            part, end = text[:, end : end + size], end + size
            parts.append(ours(part, attention_mask=mask[:, :end], past_key_values=held).logits)
        assert_equal_logits(torch.cat(parts, 1), eager(text, attention_mask=mask).logits, mask)


def test_generates_in_inference_mode() -> None:
    models, text = pair(9), distinct_tokens(BATCH, LENGTH)
    with torch.inference_mode():
        written = [model.generate(text, max_new_tokens=20, do_sample=False) for model in models]
    assert torch.equal(*written)


def reorder(cache: Cache) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def repeat(cache: Cache) -> None:
    cache.batch_repeat_interleave(2)


def select(cache: Cache) -> None:
    cache.batch_select_indices(torch.tensor([1]))


def crop(cache: Cache) -> None:
    cache.crop(-7)


def step_back(cache: Cache) -> None:
    """The next tokens take the slots of the last ones."""
    for layer in cache.layers:
        layer.cumulative_length.sub_(4)


def write(cache: Cache) -> None:
    for layer in cache.layers:
        layer.values[:, :, 3:9] = layer.values[:, :, 11:17] * 1.5


@pytest.mark.parametrize(
    ("change", "cache"),
    [
        *((change, "dynamic") for change in (reorder, repeat, select, crop, write)),
        *((change, "static") for change in (reorder, write, step_back)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_changed_caches(change: Callable[[Cache], None], cache: str) -> None:
    """What was known of a cache is forgotten when it changes."""
    models, text = pair(9), distinct_tokens(BATCH, LENGTH + 10)
    results = []
    for model in models:
        held, parts = CACHES[cache](model.config), []
        with torch.no_grad():
            model(text[:, :LENGTH], past_key_values=held)
            for step in range(LENGTH, LENGTH + 10):
                if step == LENGTH + 5:
                    change(held)
                batch = held.layers[0].keys.shape[0]
                part = text[:1, step : step + 1].expand(batch, -1)
                parts.append(model(part, past_key_values=held).logits[:, 0])
        results.append(torch.cat(parts))
    assert_equal_logits(*results)


def test_reset_caches() -> None:
    ours, eager = pair(9)
    held = CACHES["static"](ours.config)
    with torch.no_grad():
        for _ in range(2):
            text = distinct_tokens(BATCH, LENGTH)
            parts = [ours(part, past_key_values=held).logits for part in text.split([40] + [1] * 10, dim=1)]
            assert_equal_logits(torch.cat(parts, 1), eager(text).logits)
            held.reset()


def test_copies_of_caches_go_their_own_ways() -> None:
    models, text = pair(9), distinct_tokens(BATCH, LENGTH + 8)
    results = []
    for model in models:
        held = DynamicCache(config=model.config)
        with torch.no_grad():
            model(text[:, :LENGTH], past_key_values=held)
            model(text[:, LENGTH : LENGTH + 1], past_key_values=held)
            other = copy.deepcopy(held)
            steps = [(held, LENGTH + 1), (other, LENGTH + 4), (held, LENGTH + 2), (other, LENGTH + 5)]
            parts = [model(text[:, at : at + 1], past_key_values=cache).logits for cache, at in steps]
        results.append(torch.cat(parts))
    assert_equal_logits(*results)


def test_masks_that_come_and_go() -> None:
    """Keys hidden in one step and shown in the next."""
    models, text = pair(9), distinct_tokens(BATCH, LENGTH + 8)
    results = []
    for model in models:
        held, parts = DynamicCache(config=model.config), []
        with torch.no_grad():
            model(text[:, :LENGTH], past_key_values=held)
            for step in range(8):
                end = LENGTH + step + 1
                mask = None if step in (0, 1, 4, 5) else padding(left=20 + step, length=end)
                parts.append(model(text[:, end - 1 : end], attention_mask=mask, past_key_values=held).logits)
        results.append(torch.cat(parts))
    assert_equal_logits(*results)


@pytest.mark.parametrize("cache", CACHES)
def test_scores_of_cached_keys_are_not_computed_again(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(9)
    seen, selections = [], []
    for layer in ours.model.layers:
        layer.self_attn.dt_proj.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].shape[1]))
    for module in (doge, _doge_cache):
        monkeypatch.setattr(module, "select_keys", lambda *args, **kw: selections.append(1) or select_keys(*args, **kw))
    placed, make_slots = [], _doge_cache.make_slots
    monkeypatch.setattr(_doge_cache, "make_slots", lambda *args: placed.append(1) or make_slots(*args))
    text, held = distinct_tokens(BATCH, LENGTH + 5), CACHES[cache](ours.config)
    with torch.no_grad():
        for part in text.split([LENGTH, 1, 1, 1, 1, 1], dim=1):
            ours(part, past_key_values=held)
    first = LENGTH if cache == "dynamic" else 130  # slots
    assert seen == [first] * 2 + [1] * 10
    assert len(selections) == 4  # the prompt, and the step after it
    assert len(placed) == (6 if cache == "static" else 0)  # once per forward


def test_nothing_is_known_of_captured_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph's replays write to a static cache without telling anybody."""
    ours, eager = pair(9)
    held, text, seen = CACHES["static"](ours.config), distinct_tokens(BATCH, LENGTH), []
    for layer in ours.model.layers:
        layer.self_attn.dt_proj.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].shape[1]))
    with torch.no_grad():
        parts = [ours(text[:, :40], past_key_values=held).logits]
        with monkeypatch.context() as capture:
            capture.setattr(_doge_cache, "_is_capturing", lambda tensor: True)
            parts.append(ours(text[:, 40:41], past_key_values=held).logits)
        parts += [ours(text[:, at : at + 1], past_key_values=held).logits for at in range(41, LENGTH)]
    assert set(seen) == {130}
    assert_equal_logits(torch.cat(parts, 1), eager(text).logits)


def test_room_for_more_keys_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doge_cache, "LEAST_ROOM", 2)
    ours, eager = pair(9)
    text, held = distinct_tokens(BATCH, LENGTH), DynamicCache(config=ours.config)
    with torch.no_grad():
        parts = [ours(part, past_key_values=held).logits for part in text.split([5] + [1] * (LENGTH - 5), dim=1)]
        assert_equal_logits(torch.cat(parts, 1), eager(text).logits)


def test_window_size_that_changes() -> None:
    models, text, results = pair(9), distinct_tokens(BATCH, LENGTH), []
    for model in models:
        held, parts = DynamicCache(config=model.config), []
        with torch.no_grad():
            for part in text.split([40] + [1] * 10, dim=1):
                parts.append(model(part, past_key_values=held).logits)
                model.model.layers[1].self_attn.keep_window_size = 9 - len(parts) // 4
        results.append(torch.cat(parts, 1))
    assert_equal_logits(*results)


def test_dtype_that_changes() -> None:
    """Nothing in higher precision is taken from scores of a lower one."""
    layer, held = tiny_doge(9).model.layers[0].self_attn, DynamicCache()
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            step = _doge_cache.CacheStep(layer.to(dtype), held)
            _, values, scores = step.update(torch.randn(1, 20, 2, 8).to(dtype), torch.randn(1, 20, 16).to(dtype))
            assert scores.dtype == dtype
            assert torch.equal(scores, _doge_cache.key_scores(layer, values.flatten(2)))


def test_layers_of_a_static_cache_that_run_alone() -> None:
    """Each counts its own keys."""
    results = []
    for model in pair(9):
        torch.manual_seed(4)
        held, parts = StaticCache(config=model.config, max_cache_len=60), []
        with torch.no_grad():
            model(distinct_tokens(BATCH, 20), past_key_values=held)
            for index, rows in ((0, 1), (1, 2), (1, 1), (1, 1), (0, 3), (1, 3)):
                before, hidden = int(held.layers[index].cumulative_length), torch.randn(BATCH, rows, 32)
                positions = torch.arange(before, before + rows)[:, None]
                embeddings = model.model.rotary_emb(hidden, positions.mT)
                mask = (torch.arange(60) <= positions)[None, None]
                mask = mask if model.config._attn_implementation == "eager" else None
                layer = model.model.layers[index]
                parts.append(layer(hidden, embeddings, attention_mask=mask, past_key_values=held))
        results.append(torch.cat(parts, 1))
    assert_equal_logits(*results)


@pytest.mark.parametrize("cache", CACHES)
def test_graphs_hold_nothing_that_later_steps_write_to(cache: str) -> None:
    """A step whose scores need no gradient but whose queries do, between steps without gradients."""
    text, found = distinct_tokens(BATCH, LENGTH), []
    for model in pair(9):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name and ".1." in name)
        held = CACHES[cache](model.config)
        with torch.no_grad():
            for part in text[:, :40].split([38, 1, 1], dim=1):
                model(part, past_key_values=held)
        loss = model(text[:, 40:41], past_key_values=held).logits.square().mean()
        if cache == "dynamic":  # a static one writes to values that the graph holds
            with torch.no_grad():
                for part in text[:, 41:44].split(1, dim=1):
                    model(part, past_key_values=held)
        found.append(gradients(model, loss))
    assert_equal_gradients(*found)


@pytest.mark.parametrize("with_prompt", [True, False])
def test_gradients_through_a_cache(with_prompt: bool) -> None:
    """With gradients nothing is remembered: scores of cached values depend on weights, too."""
    ours, eager = pair(9)
    text = distinct_tokens(BATCH, LENGTH)
    found = []
    for model in (ours, eager):
        held = DynamicCache(config=model.config)
        with torch.set_grad_enabled(with_prompt):
            model(text[:, :30], past_key_values=held)
        logits = torch.cat([model(part, past_key_values=held).logits for part in text[:, 30:].split([18, 1, 1], 1)], 1)
        found.append(gradients(model, logits.square().mean()))
        assert not with_prompt or not any(layer in _doge_cache.known_scores for layer in held.layers)
    assert_equal_gradients(*found)


def test_two_models_on_one_cache() -> None:
    """Scores are those of the model that asks."""
    text, results = distinct_tokens(BATCH, LENGTH + 3), []
    for first in pair(9):
        second = copy.deepcopy(first)
        if first.config._attn_implementation == "eager":
            keep_the_newest(second)
        for layer in second.model.layers:
            layer.self_attn.A.data *= -1
        held = DynamicCache(config=first.config)
        with torch.no_grad():
            first(text[:, :LENGTH], past_key_values=held)
            steps = zip((first, second, first), text[:, LENGTH:].split(1, dim=1), strict=True)
            results.append(torch.cat([model(part, past_key_values=held).logits for model, part in steps]))
    assert_equal_logits(*results)


@pytest.mark.devices("cpu", "cuda")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize("window", [1, 4, 9])
def test_a_new_key_puts_out_one(window: int, kind: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps from the best keys before keep what a selection from all keys keeps."""
    keys, slots = 60, 64
    scores = torch.randn(2, 3, keys)
    if kind == "ties":
        scores = torch.tensor([0.0, -0.0, 1.0])[torch.randint(0, 3, scores.shape)]
    elif kind == "special":
        scores[torch.rand(scores.shape) < 0.05] = torch.nan
        scores[torch.rand(scores.shape) < 0.05] = torch.inf
        scores[:, :, :window] = scores[:, :, :window].nan_to_num(0.0, 0.0)
        scores[:, 0] = scores[:, 0].nan_to_num(0.5, 0.5)
    # Values are the scores themselves.
    monkeypatch.setattr(_doge_cache, "key_scores", lambda module, value: value.transpose(1, 2).clone())
    module = nn.Module()
    module.layer_idx, module.head_dim = 0, 1
    held = DynamicCache() if cache == "dynamic" else Cache(layers=[StaticLayer(slots)])
    begin = 3 if cache == "static" else window + 1
    with torch.no_grad():
        for before, end in ((0, begin), *((end - 1, end) for end in range(begin + 1, keys + 1))):
            step, new = _doge_cache.CacheStep(module, held), scores[:, :, before:end].transpose(1, 2)
            step.update(new[..., None], new)
            best = step.best_keys(window)
            best = best if isinstance(best, Tensor) else best.dense_mask(1)[:, :, 0]
            best, given = best[:, :, :end], scores[:, :, :end]
            known = select_keys(given, window, seqlen_q=1, causal=False).dense_mask(1)[:, :, 0]
            if kind != "special":
                assert torch.equal(best, known)
            else:  # among infinities and NaNs, whose output is NaN in any case, which stay is not the same
                finite = (given.isfinite() | ~known).all(2)
                assert torch.equal(best[finite], known[finite])
                broken = ~given.isfinite()
                assert torch.equal((best & broken).any(2), (known & broken).any(2))


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


def test_compiled_decode() -> None:
    """With a static cache the whole model is one graph, which is captured once."""
    ours, eager = pair(9)
    held, text, graphs = CACHES["static"](ours.config), distinct_tokens(BATCH, LENGTH), []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(ours.__call__, backend=backend, fullgraph=True)
    with torch.no_grad():
        parts = [ours(text[:, :40], past_key_values=held).logits]
        parts += [compiled(text[:, at : at + 1], past_key_values=held).logits for at in range(40, 46)]
        parts += [ours(text[:, at : at + 1], past_key_values=held).logits for at in range(46, LENGTH)]
        assert_equal_logits(torch.cat(parts, 1), eager(text).logits)
    assert len(graphs) == 1


def test_registered_functions_are_ours() -> None:
    assert DogeAttention.forward is doge._forward
    assert attention_interface.NAME == "dmattn" and VOCABULARY > LENGTH + 64
