"""Transformers' Doge with sequences split across ranks, on the CPU by gloo: shares against one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from doge_models import BATCH, distinct_tokens, pair, tiny_doge
from flash_dmattn.distributed import shard
from flash_dmattn.integrations import doge
from ranks import Ranks, start_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import DogeConfig, DogeForCausalLM

RANKS, SHARE = 3, 16


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with start_ranks(RANKS, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def compare(window: int, padded: int) -> None:
    """Logits and gradients, with `padded` tokens on the left of the first sequence."""
    mesh = mesh_of_all()
    model, _ = pair(window, torch.float64)
    torch.manual_seed(1)
    text = distinct_tokens(BATCH, RANKS * SHARE)
    inputs = {"input_ids": text}
    if padded > 0:
        inputs["attention_mask"] = (torch.arange(RANKS * SHARE) >= torch.tensor([[padded], [0]])).long()
    weights = torch.randn(BATCH, RANKS * SHARE, model.config.vocab_size, dtype=torch.float64)
    weights[0, :padded] = 0  # what padding makes of itself is nobody's business
    whole = model(**inputs).logits
    (whole * weights).sum().backward()
    parameters = dict(model.named_parameters())
    wanted = {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None}
    model.zero_grad()

    doge.enable(model, cp_mesh=mesh)
    own = model(**{name: shard(tensor, group=mesh) for name, tensor in inputs.items()}).logits
    own_weights = shard(weights, group=mesh)
    (own * own_weights).sum().backward()
    real = own_weights.abs().sum(-1) != 0
    torch.testing.assert_close(own[real], shard(whole, group=mesh)[real], atol=1e-11, rtol=0)
    for name, gradient in wanted.items():
        dist.all_reduce(parameters[name].grad)
        torch.testing.assert_close(parameters[name].grad, gradient, atol=1e-10, rtol=1e-9)
    assert {"model.layers.1.self_attn.A", "model.layers.1.self_attn.dt_proj.weight"} <= wanted.keys()

    doge.disable(model)
    doge.enable(model)
    assert torch.equal(model(**inputs).logits, whole)


# With padding first: the first call of a group compares what all ranks give, and the last rank's share has none.
@pytest.mark.parametrize("padded", [SHARE + 5, 0])
@pytest.mark.parametrize("window", [5, SHARE, 1000])
def test_shares_are_those_of_one_process(ranks: Ranks, window: int, padded: int) -> None:
    ranks.run(compare, window, padded)


def refuse() -> None:
    mesh = mesh_of_all()
    model, _ = pair(5)
    doge.enable(model, cp_mesh=mesh)
    text = distinct_tokens(BATCH, SHARE)
    with pytest.raises(ValueError, match="past_key_values must be None"):
        model(text, use_cache=True)
    with pytest.raises(ValueError, match="attention_mask must be None or"):
        model(text, attention_mask=torch.ones(BATCH, 1, SHARE, SHARE, dtype=torch.bool))
    packed = torch.arange(SHARE).expand(BATCH, -1) % 7
    with pytest.raises(ValueError, match="position_ids must belong to one sequence"):
        model(text, position_ids=packed)
    with pytest.raises(ValueError, match="without a sliding window"):
        doge.enable(tiny_doge(5, sliding_window=9), cp_mesh=mesh)
    for other in (None, DogeForCausalLM):
        with pytest.raises(ValueError, match="cp_mesh needs a model"):
            doge.enable(other, cp_mesh=mesh)
    with pytest.raises(TypeError, match="ProcessGroup or a DeviceMesh"):
        doge.enable(DogeForCausalLM(DogeConfig(num_hidden_layers=1)), cp_mesh=3)


def test_what_cannot_be_split_is_refused(ranks: Ranks) -> None:
    ranks.run(refuse)
