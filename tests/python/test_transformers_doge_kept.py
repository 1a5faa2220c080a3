"""Doge's caches on flash_dmattn: the best keys are kept from step to step and follow what happens to the cache."""

from __future__ import annotations

import pytest
import torch
from doge_models import BATCH, LENGTH, assert_equal_logits, distinct_tokens, padding, pair
from flash_dmattn import KeptKeys, KeyIndices, KeyIntervals, select_keys
from flash_dmattn.integrations import _doge_cache
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import StaticLayer

CACHES = ("dynamic", "static")


def best_mask(best: Tensor | KeyIntervals | KeyIndices, keys: int) -> Tensor:
    """(B, Hkv, rows, Sk) of what best_keys returns, for one row unless it is lists."""
    if isinstance(best, KeyIndices):
        return best.dense_mask(keys)
    return best[:, :, None] if isinstance(best, Tensor) else best.dense_mask(1)


def scores_as_values(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, list[int]]:
    """A layer whose values are the scores themselves, and of how many keys these were computed at once."""
    seen = []

    def key_scores(module: nn.Module, value: Tensor) -> Tensor:
        seen.append(value.shape[1])
        return value.transpose(1, 2).clone()

    monkeypatch.setattr(_doge_cache, "key_scores", key_scores)
    module = nn.Module()
    module.layer_idx, module.head_dim = 0, 1
    return module, seen


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("seed", range(4))
def test_kept_keys_follow_the_cache(cache: str, masked: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any size, tokens that are taken back, beams that are reordered and masks that change, in any order: the
    best keys are those that a selection from all keys finds, and no score of a cached key is computed again."""
    torch.manual_seed(seed)
    (module, seen), window, slots = scores_as_values(monkeypatch), 9, 900
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


def test_what_is_known_of_other_batches_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams that become more or fewer."""
    (module, seen), window, held = scores_as_values(monkeypatch), 4, DynamicCache()
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
@pytest.mark.parametrize("lists", [True, False], ids=["lists", "bools"])
def test_a_new_key_puts_out_one(
    lists: bool, window: int, kind: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps from the best keys before keep what a selection from all keys keeps, in both forms."""
    monkeypatch.setattr(_doge_cache, "_keeps_lists", lambda tensor: lists)
    keys, slots = 60, 64
    scores = torch.randn(2, 3, keys)
    if kind == "ties":
        scores = torch.tensor([0.0, -0.0, 1.0])[torch.randint(0, 3, scores.shape)]
    elif kind == "special":
        scores[torch.rand(scores.shape) < 0.05] = torch.nan
        scores[torch.rand(scores.shape) < 0.05] = torch.inf
        scores[:, :, :window] = scores[:, :, :window].nan_to_num(0.0, 0.0)
        scores[:, 0] = scores[:, 0].nan_to_num(0.5, 0.5)
    module, _ = scores_as_values(monkeypatch)
    held = DynamicCache() if cache == "dynamic" else Cache(layers=[StaticLayer(slots)])
    begin = 3 if cache == "static" else window + 1
    with torch.no_grad():
        for before, end in ((0, begin), *((end - 1, end) for end in range(begin + 1, keys + 1))):
            step, new = _doge_cache.CacheStep(module, held), scores[:, :, before:end].transpose(1, 2)
            step.update(new[..., None], new)
            best = step.best_keys(window, True)
            if best is None:  # for the rows of a prompt
                assert end - before > (16 if lists else 1)
                continue
            best, given = best_mask(best, slots)[:, :, -1, :end], scores[:, :, :end]
            known = select_keys(given, window, seqlen_q=1, causal=False).dense_mask(1)[:, :, 0]
            if kind != "special":
                assert torch.equal(best, known)
            else:  # among infinities and NaNs, whose output is NaN in any case, which stay is not the same
                finite = (given.isfinite() | ~known).all(2)
                assert torch.equal(best[finite], known[finite])
                broken = ~given.isfinite()
                assert torch.equal((best & broken).any(2), (known & broken).any(2))


def count_starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each selection from all keys that a state begins with."""
    starts, from_scores = [], KeptKeys.from_scores

    def begin(*arguments: object, **settings: object) -> KeptKeys:
        starts.append(1)
        return from_scores(*arguments, **settings)

    monkeypatch.setattr(KeptKeys, "from_scores", begin)
    return starts


@pytest.mark.parametrize("cache", CACHES)
def test_a_long_generation_equals_one_pass(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 tokens, one by one, by appending; then all of them at once by the eager model."""
    count, starts = 2000, count_starts(monkeypatch)
    ours, eager = pair(32, max_position_embeddings=count + 8)
    text = distinct_tokens(1, 8)
    settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "output_logits": True}
    settings |= {"return_dict_in_generate": True}
    written = ours.generate(text, cache_implementation=cache, **settings)
    assert len(starts) == 2  # one for each layer
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
    (ours, eager), seen, starts = pair(9), [], count_starts(monkeypatch)
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
        assert seen[2:] == [1] * 58 and len(starts) == 2
