"""Models of Transformers on packed documents, as DataCollatorWithFlattening makes them: training without padding."""

from __future__ import annotations

import copy

import pytest
import torch
from doge_models import VOCABULARY, pair, tiny_doge
from flash_dmattn import select_keys
from flash_dmattn.integrations import _masks, doge
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, PreTrainedModel

LENGTHS = [13, 1, 30, 6]


def texts() -> list[dict[str, list[int]]]:
    """No token twice in all of them, so that no scores are equal."""
    tokens = torch.randperm(VOCABULARY - 3)[: sum(LENGTHS)] + 3
    return [{"input_ids": part.tolist()} for part in tokens.split(LENGTHS)]


def tiny_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="dmattn"))


def dynamic_doge(window: int = 4, **settings: object) -> PreTrainedModel:
    model = tiny_doge(window, **settings)
    doge.enable(model)
    return model


MODELS = {
    "llama": tiny_llama,
    "doge": dynamic_doge,
    "doge_that_keeps_all": lambda: dynamic_doge(100),
    "doge_with_windows": lambda: dynamic_doge(sliding_window=6),
}


COLLATORS = {
    "positions": {},
    "bounds_and_positions": {"return_flash_attn_kwargs": True},
    "sequence_numbers": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("collator", COLLATORS.values(), ids=COLLATORS.keys())
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_packed_documents_are_a_loop_over_documents(make: object, collator: dict) -> None:
    """Loss and gradients of all parameters."""
    packed, alone, data = make().train(), make().train(), texts()
    batch = DataCollatorWithFlattening(return_tensors="pt", **collator)(data)
    loss = packed(**batch, use_cache=False).loss
    loss.backward()
    total, count = 0.0, sum(len(text["input_ids"]) - 1 for text in data)
    for text in data:
        tokens = torch.tensor([text["input_ids"]])
        logits = alone(input_ids=tokens, use_cache=False).logits
        total = total + nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum") / count
    total.backward()
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-5)
    expected = gradients(alone)
    assert set(expected) == set(gradients(packed))
    for name, gradient in gradients(packed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("make", [tiny_llama, dynamic_doge], ids=["llama", "doge"])
def test_trains(make: object) -> None:
    model = make().train()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    batch = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)(texts())
    for _ in range(6):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < found[0] - 0.3


@pytest.mark.parametrize("padded", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not_causal"])
@pytest.mark.parametrize("window", [4, 100])
def test_doge_by_bounds_alone(window: int, causal: bool, padded: bool) -> None:
    """cu_seq_lens without positions that begin anew: against the eager attention given the same as a dense mask."""
    ours, eager = pair(window)
    for model in () if causal else (ours, eager):
        model.config.is_causal = False
    length, bounds = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    text = torch.tensor([[token for item in texts() for token in item["input_ids"]]])
    shown = torch.ones(1, length, dtype=torch.long)
    shown[:, 20:23] = 0 if padded else 1
    number = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    mask = (number[:, None] == number) & shown.bool()
    mask = (mask & torch.ones_like(mask).tril() if causal else mask)[None, None]
    given = {"attention_mask": shown} if padded else {}
    got = ours(text, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds.clone(), use_cache=False, **given).logits
    expected = eager(text, attention_mask=mask, use_cache=False).logits
    sees = mask.any(-1)[0, 0]
    torch.testing.assert_close(got[:, sees], expected[:, sees], rtol=1e-4, atol=1e-4)


def test_doge_within_a_mask_of_users() -> None:
    ours, eager = pair(4)
    length, bounds = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    text = torch.tensor([[token for item in texts() for token in item["input_ids"]]])
    number = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    holes = (torch.rand(length, length) < 0.7).tril() | torch.eye(length).bool()
    got = ours(text, attention_mask=holes[None, None], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, use_cache=False)
    mask = (holes & (number[:, None] == number))[None, None]
    expected = eager(text, attention_mask=mask, use_cache=False)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_bounds_that_do_not_fit_are_refused() -> None:
    model, bounds = dynamic_doge(), torch.tensor([0, 20, 50], dtype=torch.int32)
    text = torch.arange(3, 53)[None]
    for batch, given in (
        (2, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}),
        (1, {"cu_seq_lens_q": bounds}),
        (1, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds[:2]}),
    ):
        with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k must both be bounds of the documents of"):
            model(text.expand(batch, -1), **given, use_cache=False)


def test_compiles_once_for_other_documents_of_the_same_total() -> None:
    model, counter = dynamic_doge(), CompileCounter()
    compiled, text = torch.compile(copy.deepcopy(model), backend=counter), torch.arange(3, 53)[None]
    frames = []
    for lengths in ([13, 1, 30, 6], [20, 20, 5, 5], [47, 1, 1, 1]):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        got = compiled(text, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(got, model(text, position_ids=positions, use_cache=False).logits)
        frames.append(counter.frame_count)
    assert frames[0] > 0 and frames == frames[:1] * 3


def test_heads_may_have_documents_of_their_own() -> None:
    bounds = [[0, 5, 12], [0, 9, 12]]
    end = torch.tensor([[5] * 5 + [12] * 7, [9] * 9 + [12] * 3])[None]
    scores, seen = torch.randint(0, 4, (2, 1, 12)).float(), torch.rand(1, 2, 12) < 0.8
    growing = _masks.GrowingMask(True, seen, None, torch.where(seen, end, 0))
    got = _masks.select_within(scores, 3, growing, 12)
    for head in range(2):
        own = torch.tensor(bounds[head], dtype=torch.int32)
        expected = select_keys(scores, 3, key_mask=seen[:, head : head + 1], cu_seqlens_q=own)
        assert torch.equal(got.begin[:, head], expected.begin[:, 0]) and torch.equal(
            got.end[:, head], expected.end[:, 0]
        )
