"""Doge's caches on flash_dmattn: what is kept of earlier keys, and what may happen to a cache between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from doge_models import (
    BATCH,
    LENGTH,
    assert_equal_gradients,
    assert_equal_logits,
    distinct_tokens,
    gradients,
    padding,
    pair,
    tiny_doge,
    with_other_scores,
)
from flash_dmattn import kept_keys, select_keys
from flash_dmattn.integrations import _doge_cache, doge
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

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
    for module in (doge, _doge_cache, kept_keys):
        monkeypatch.setattr(module, "select_keys", lambda *args, **kw: selections.append(1) or select_keys(*args, **kw))
    placed, make_slots = [], _doge_cache.make_slots
    monkeypatch.setattr(_doge_cache, "make_slots", lambda *args: placed.append(1) or make_slots(*args))
    text, held = distinct_tokens(BATCH, LENGTH + 5), CACHES[cache](ours.config)
    with torch.no_grad():
        for part in text.split([LENGTH, 1, 1, 1, 1, 1], dim=1):
            ours(part, past_key_values=held)
    first = LENGTH if cache == "dynamic" else 130  # slots
    assert seen == [first] * 2 + [1] * 10
    assert len(selections) == 2  # the prompt's
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
        second = with_other_scores(first)
        held = DynamicCache(config=first.config)
        with torch.no_grad():
            first(text[:, :LENGTH], past_key_values=held)
            steps = zip((first, second, first), text[:, LENGTH:].split(1, dim=1), strict=True)
            results.append(torch.cat([model(part, past_key_values=held).logits for model, part in steps]))
    assert_equal_logits(*results)


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
