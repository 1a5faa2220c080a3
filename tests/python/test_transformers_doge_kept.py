"""Doge's caches on flash_dmattn: the best keys are kept from step to step and follow what happens to the cache."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from doge_models import BATCH, LENGTH, assert_equal_logits, distinct_tokens, padding, pair, with_other_scores
from flash_dmattn import KeptKeys, KeyIndices, KeyIntervals, select_keys
from flash_dmattn.integrations import _doge_cache
from torch import Tensor, nn
from transformers import Cache, CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

CACHES = ("dynamic", "static")


def best_mask(best: KeyIntervals | KeyIndices, keys: int) -> Tensor:
    """(B, Hkv, rows, Sk) of what best_keys returns, for one row unless it is lists."""
    return best.dense_mask(keys) if isinstance(best, KeyIndices) else best.dense_mask(1)


def scores_as_values(monkeypatch: pytest.MonkeyPatch, window: int) -> tuple[nn.Module, list[int]]:
    """A layer whose values are the scores themselves, and of how many keys eager code computed these at once."""
    seen = []

    def key_scores(module: nn.Module, value: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            seen.append(value.shape[1])
        return value.transpose(1, 2).clone()

    monkeypatch.setattr(_doge_cache, "key_scores", key_scores)
    module = nn.Module()
    module.layer_idx, module.head_dim, module.keep_window_size = 0, 1, window
    return module, seen


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("seed", range(4))
def test_kept_keys_follow_the_cache(cache: str, masked: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any size, tokens that are taken back, beams that are reordered and masks that change, in any order: the
    best keys are those that a selection from all keys finds, and no score of a cached key is computed again."""
    torch.manual_seed(seed)
    window, slots = 9, 900
    module, seen = scores_as_values(monkeypatch, window)
    held = DynamicCache() if cache == "dynamic" else Cache(layers=[StaticLayer(slots)])
    history = torch.zeros(3, 2, 0)
    hidden = torch.rand(3, 1, slots) < 0.3
    appended = 0
    with torch.no_grad():
        for rows in [20, *torch.randint(1, 20, (40,)).tolist()]:
            new = torch.randint(-4, 5, (3, 2, rows)) / 4
            history = torch.cat([history, new], 2)
            step, keys = _doge_cache.CacheStep(module, held), history.shape[2]
            step.update(new.mT[..., None], new.mT)
            key_mask = ~hidden[:, :, :keys] if masked else None
            if masked and cache == "static":  # what is said of slots without keys changes nothing
                key_mask = torch.cat([key_mask, torch.rand(3, 1, slots - keys) < 0.5], 2)
            best = step.best_keys(window, True, key_mask)
            if len(seen) > 1:
                assert seen[-1] == rows
            assert (best is None) == (rows > 16)
            if best is not None:
                appended += 1
                shown = key_mask if key_mask is None else key_mask[:, :, :keys]
                expected = select_keys(history, window, seqlen_q=rows, key_mask=shown).dense_mask(rows)
                assert torch.equal(best_mask(best, keys), expected)
            change = int(torch.randint(0, 6, ()))
            if change == 0:
                taken = int(torch.randint(1, 6, ()))
                history = history[:, :, :-taken]
                if cache == "dynamic":
                    held.crop(-taken)
                else:
                    held.layers[0].cumulative_length.sub_(taken)
            elif change == 1:
                beams = torch.randint(0, 3, (3,))
                held.reorder_cache(beams)
                history, hidden = history[beams], hidden[beams] if seed % 2 == 0 else hidden
            elif change == 2:
                hidden = torch.where(torch.rand(3, 1, slots) < 0.01, ~hidden, hidden)
    assert appended > 20


def take_back(layer: StaticLayer, history: Tensor) -> Tensor:
    taken = min(int(torch.randint(1, 24, ())), history.shape[2])
    layer.cumulative_length.sub_(taken)
    return history[:, :, : history.shape[2] - taken]


def reorder(layer: StaticLayer, history: Tensor) -> Tensor:
    beams = torch.randint(0, 3, (3,))
    layer.reorder_cache(beams)
    return history[beams]


def reset(layer: StaticLayer, history: Tensor) -> Tensor:
    layer.reset()
    return history[:, :, :0]


def put_in(layer: StaticLayer, history: Tensor) -> Tensor:
    """Keys of a prefix that was computed elsewhere."""
    new = torch.randint(-4, 5, (3, 2, 5)) / 4
    layer.update(new[..., None], new[..., None])
    return torch.cat([history, new], 2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("change", [take_back, reorder, reset, put_in])
def test_compiled_steps_follow_the_cache(
    change: Callable[[StaticLayer, Tensor], Tensor], masked: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in compiled and in eager code, by turns at random, with and without masks, with changes between them."""
    torch.manual_seed(seed)
    torch.compiler.reset()
    window, slots = 9, 2000
    module, seen = scores_as_values(monkeypatch, window)
    held = Cache(layers=[StaticLayer(slots)])

    def run(new: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        step = _doge_cache.CacheStep(module, held)
        scores = step.update(new.mT[..., None], new.mT)[2]
        best = step.best_keys(window, True, key_mask)
        return scores, None if best is None else best_mask(best, slots)

    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=False)
    history, hidden, appended = torch.zeros(3, 2, 0), torch.rand(3, 1, slots) < 0.3, 0
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=200):
        for count in range(60):
            rows = 20 if count == 0 else int(torch.tensor([1, 1, 1, 1, 3, 20])[torch.randint(0, 6, ())])
            new = torch.randint(-4, 5, (3, 2, rows)) / 4
            history = torch.cat([history, new], 2)
            keys, key_mask = history.shape[2], None
            if masked and torch.rand(()) < 0.8:
                hidden = torch.where(torch.rand(3, 1, slots) < 0.001, ~hidden, hidden)
                key_mask = torch.cat([~hidden[:, :, :keys], torch.rand(3, 1, slots - keys) < 0.5], 2)
            call = run if count == 0 or torch.rand(()) < 0.2 else compiled
            scores, best = call(new, key_mask)
            assert torch.equal(scores[:, :, :keys], history)
            if best is not None:
                appended += 1
                shown = None if key_mask is None else key_mask[:, :, :keys]
                expected = select_keys(history, window, seqlen_q=rows, key_mask=shown).dense_mask(rows)
                assert torch.equal(best[..., :keys], expected)
                assert not best[..., keys:].any()
            if torch.rand(()) < 0.2:
                history = change(held.layers[0], history)
    assert appended > 20
    torch.compiler.reset()


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager"])
def test_other_keys_in_the_place_of_those_taken_back(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as before, by a step of too many rows for what is kept: the number of keys does not tell."""
    torch.compiler.reset()
    module, _ = scores_as_values(monkeypatch, 9)
    held, history = Cache(layers=[StaticLayer(200)]), torch.randn(2, 2, 60)

    def run(new: Tensor) -> Tensor | None:
        step = _doge_cache.CacheStep(module, held)
        step.update(new.mT[..., None], new.mT)
        best = step.best_keys(9, True)
        return None if best is None else best_mask(best, 60)

    later = torch.compile(run, backend="eager", fullgraph=True, dynamic=False) if is_compiled else run
    with torch.no_grad():
        run(history[:, :, :40])
        later(history[:, :, 40:41])
        held.layers[0].cumulative_length.sub_(20)
        history[:, :, 21:41] = torch.randn(2, 2, 20)
        later(history[:, :, 21:41])
        expected = select_keys(history[:, :, :42], 9, seqlen_q=1).dense_mask(1)
        assert torch.equal(later(history[:, :, 41:42])[..., :42], expected)
    torch.compiler.reset()


def test_compiled_steps_look_at_new_tokens_only() -> None:
    """One graph after a prompt in eager code, which scores the new token and chooses from what was kept."""
    torch.compiler.reset()
    ours, eager = pair(9)
    text, held, graphs = distinct_tokens(BATCH, LENGTH), StaticCache(config=ours.config, max_cache_len=130), []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(ours.__call__, backend=backend, fullgraph=True)
    with torch.no_grad():
        parts = [ours(text[:, :20], past_key_values=held).logits]
        parts += [compiled(text[:, at : at + 1], past_key_values=held).logits for at in range(20, LENGTH)]
        assert_equal_logits(torch.cat(parts, 1), eager(text).logits)
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("append_kept_keys" in target for target in targets) == 2
    assert not any("select_keys" in target for target in targets)
    scored = [node.meta["example_value"].shape[1] for node in graphs[0].graph.nodes if "softplus" in str(node.target)]
    assert scored == [1, 1]
    torch.compiler.reset()


@pytest.mark.parametrize("mask", [padding(), padding(left=13)], ids=["", "padded"])
def test_compiled_generation(mask: Tensor) -> None:
    """As generate() compiles on GPUs, but for the code of inductor: all steps behind the prompt by one graph."""
    torch.compiler.reset()
    (ours, eager), graphs = pair(9), []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    how = CompileConfig(fullgraph=True, backend=backend, mode=None, dynamic=None)
    how._compile_all_devices = True
    settings = {"attention_mask": mask, "max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
    settings |= {"cache_implementation": "static"}
    text = distinct_tokens(BATCH, LENGTH)
    assert torch.equal(ours.generate(text, compile_config=how, **settings), eager.generate(text, **settings))
    (targets,) = graphs
    assert sum("append_kept_keys" in target for target in targets) == 2
    assert not any("select_keys" in target for target in targets)
    torch.compiler.reset()


def test_compiled_steps_of_other_kinds_forget() -> None:
    """Of another model, and with gradients, whose scores depend on weights."""
    torch.compiler.reset()
    text, results = distinct_tokens(BATCH, LENGTH + 12), []
    for first in pair(9):
        second = with_other_scores(first)
        held, parts = StaticCache(config=first.config, max_cache_len=130), []
        with torch.no_grad():
            first(text[:, :LENGTH], past_key_values=held)
        for at, kind in enumerate("ffsfgfsgffef"):
            model = second if kind == "s" else first
            is_compiled = model.config._attn_implementation != "eager" and kind != "e"
            call = torch.compile(model.__call__, backend="eager", fullgraph=True) if is_compiled else model
            token = text[:, LENGTH + at : LENGTH + at + 1]
            with torch.set_grad_enabled(kind == "g"):
                parts.append(call(token, past_key_values=held).logits.detach())
            for layer in held.layers:  # keys and values of a step with gradients belong to its graph
                layer.keys.detach_(), layer.values.detach_()
        results.append(torch.cat(parts, 1))
    assert_equal_logits(*results)
    torch.compiler.reset()


def test_copies_of_a_static_cache_know_nothing() -> None:
    ours, _ = pair(9)
    held = StaticCache(config=ours.config, max_cache_len=130)
    with torch.no_grad():
        ours(distinct_tokens(BATCH, 20), past_key_values=held)
    assert all(_doge_cache.slot_scores_of(layer) is not None for layer in held.layers)
    for other in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert all(_doge_cache.slot_scores_of(layer) is None for layer in other.layers)


def test_what_is_known_of_other_batches_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams that become more or fewer."""
    window, held = 4, DynamicCache()
    module, seen = scores_as_values(monkeypatch, window)
    history = torch.randn(2, 2, 20)
    with torch.no_grad():
        _doge_cache.CacheStep(module, held).update(history.mT[..., None], history.mT)
        for beams in ([0, 1, 1], [2, 0], [1, 0]):
            held.reorder_cache(torch.tensor(beams))
            new = torch.randn(len(beams), 2, 2)
            history = torch.cat([history[beams], new], 2)
            step = _doge_cache.CacheStep(module, held)
            step.update(new.mT[..., None], new.mT)
            expected = select_keys(history, window, seqlen_q=2).dense_mask(2)
            assert torch.equal(best_mask(step.best_keys(window, True), history.shape[2]), expected)
    assert seen == [20, 2, 2, 2]


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
    module, _ = scores_as_values(monkeypatch, window)
    held = DynamicCache() if cache == "dynamic" else Cache(layers=[StaticLayer(slots)])
    begin = 3 if cache == "static" else window + 1
    with torch.no_grad():
        for before, end in ((0, begin), *((end - 1, end) for end in range(begin + 1, keys + 1))):
            step, new = _doge_cache.CacheStep(module, held), scores[:, :, before:end].transpose(1, 2)
            step.update(new[..., None], new)
            best = step.best_keys(window, True)
            if best is None:  # for the rows of a prompt
                assert before == 0
                continue
            best = best_mask(best, slots)[:, :, -1, :end]
            known = select_keys(scores[:, :, :end], window, seqlen_q=1, causal=False).dense_mask(1)[:, :, 0]
            assert torch.equal(best, known)


def count_choices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each step in eager code that finds kept keys of another cache, and chooses from all."""
    chosen, append = [], KeptKeys.append_

    def count(kept: KeptKeys, new_scores: Tensor, positions: Tensor, cache_scores: Tensor | None = None) -> KeyIndices:
        if not torch.compiler.is_compiling() and not torch.equal(
            kept.lengths, positions[:, None].expand_as(kept.lengths)
        ):
            assert cache_scores is not None
            chosen.append(1)
        return append(kept, new_scores, positions, cache_scores)

    monkeypatch.setattr(KeptKeys, "append_", count)
    return chosen


@pytest.mark.parametrize("cache", CACHES)
def test_a_long_generation_equals_one_pass(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 tokens, one by one, by appending; then all of them at once by the eager model."""
    count, chosen = 2000, count_choices(monkeypatch)
    ours, eager = pair(32, max_position_embeddings=count + 8)
    text = distinct_tokens(1, 8)
    settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "output_logits": True}
    settings |= {"return_dict_in_generate": True}
    written = ours.generate(text, cache_implementation=cache, **settings)
    assert len(chosen) == 2  # one for each layer
    with torch.no_grad():
        expected = eager(written.sequences[:, :-1]).logits[:, 7:]
    assert_equal_logits(torch.stack(written.logits, 1), expected)


SETTINGS = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "static_beams": {"cache_implementation": "static", "num_beams": 3},
    "padded": {"attention_mask": padding(left=13)},
    "padded_static_beams": {"cache_implementation": "static", "num_beams": 3, "attention_mask": padding(left=13)},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("how", SETTINGS)
def test_generation_looks_at_new_tokens_only(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With beams that are reordered and tokens that are taken back, too; and generates what the eager model does."""
    (ours, eager), seen, chosen = pair(9), [], count_choices(monkeypatch)
    for layer in ours.model.layers:
        layer.self_attn.dt_proj.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].shape[1]))
    text = distinct_tokens(BATCH, LENGTH)
    if how == "prompt_lookup":  # for one sequence
        text = text[1:].repeat(1, 2)
    settings = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False} | SETTINGS[how]
    assert torch.equal(ours.generate(text, **settings), eager.generate(text, **settings))
    # All but the prompt's, of two layers, and one selection from all keys for each.
    if how == "prompt_lookup":  # whose tokens are taken back after most steps
        assert max(seen[2:]) <= 4
    else:
        assert seen[2:] == [1] * 58 and len(chosen) == 2
