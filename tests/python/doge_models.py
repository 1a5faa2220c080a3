"""Small Doge models with random weights, their eager attention with the library's choice among equal scores, and
comparisons of the two."""

from __future__ import annotations

import copy

import torch
from flash_dmattn.integrations import doge
from torch import Tensor, nn
from transformers import DogeConfig, DogeForCausalLM
from transformers.models.doge.modeling_doge import DogeAttention

VOCABULARY = 400
BATCH, LENGTH = 2, 50


def tiny_doge(window: int = 16, dtype: torch.dtype = torch.float32, **settings: object) -> DogeForCausalLM:
    """Eager attention; A and dt_proj away from where all scores are equal."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "keep_window_size": window,
        "attn_implementation": "eager",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model = DogeForCausalLM(DogeConfig(**(sizes | settings)))
    for parameter in model.parameters():
        if parameter.dim() > 1:  # larger than by default, so that attention matters
            nn.init.normal_(parameter, std=0.15)
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.A)
    return model.to(dtype).eval()


def pair(*arguments: object, **settings: object) -> tuple[DogeForCausalLM, DogeForCausalLM]:
    """The same model run by flash_dmattn and by its eager attention."""
    eager = tiny_doge(*arguments, **settings)
    ours = copy.deepcopy(eager)
    doge.enable(ours)
    return ours, keep_the_newest(eager)


def with_other_scores(model: DogeForCausalLM) -> DogeForCausalLM:
    """A copy, run by the same attention, whose keys have other scores."""
    other = copy.deepcopy(model)
    if model.config._attn_implementation == "eager":
        keep_the_newest(other)
    for layer in other.model.layers:
        layer.self_attn.A.data *= -1
    return other


def keep_the_newest(model: DogeForCausalLM) -> DogeForCausalLM:
    """Lets the model's own attention keep the newest of equal scores, where torch.topk may keep any. Tokens that come
    twice have equal scores in the first layer."""
    for module in model.modules():
        if isinstance(module, DogeAttention):
            module.prepare_dynamic_mask = newest_best_mask
    return model


def newest_best_mask(
    hidden_states: Tensor, dt_states: Tensor, keep_window_size: int, attention_mask: Tensor | None = None
) -> Tensor:
    """In the place of DogeAttention.prepare_dynamic_mask: (B, Hkv, Sq, Sk), to be added to the scores."""
    lowest, keys = torch.finfo(hidden_states.dtype).min, dt_states.shape[-1]
    scores = dt_states[:, :, None].expand(-1, -1, hidden_states.shape[1], -1)
    if attention_mask is not None:
        hidden = attention_mask[..., :keys]
        scores = scores.masked_fill(~hidden if hidden.dtype == torch.bool else hidden != 0, lowest)
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, keys - 1 - order[..., :keep_window_size], True)
    return scores.masked_fill(~kept, lowest)


def distinct_tokens(batch: int, length: int) -> Tensor:
    """(batch, length), no token twice in a sequence."""
    return torch.stack([torch.randperm(VOCABULARY - 3)[:length] + 3 for _ in range(batch)])


def padding(left: int = 0, right: int = 0, length: int = LENGTH) -> Tensor:
    """(B, length), the second sequence is padded."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, :left] = 0
    mask[1, length - right :] = 0
    return mask


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
