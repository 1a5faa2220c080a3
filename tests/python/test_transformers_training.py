"""Training of Doge on flash_dmattn with what people train with: PEFT, DDP, FSDP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from doge_models import VOCABULARY, distinct_tokens, pair, tiny_doge
from flash_dmattn.integrations import doge
from peft import LoraConfig, get_peft_model
from ranks import Ranks, mesh_of, start_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "dt_proj"], task_type="CAUSAL_LM")


def losses(model: nn.Module, text: Tensor, steps: int) -> list[float]:
    """Of steps on the same text."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, found = torch.optim.AdamW(trainable, lr=1e-2), []
    for _ in range(steps):
        loss = model(input_ids=text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_lora_trains_as_with_eager_attention() -> None:
    text, found = distinct_tokens(2, 40), []
    for model in pair(9):
        torch.manual_seed(3)
        found.append(losses(get_peft_model(model, LORA), text, 5))
    assert found[0][-1] < found[0][0] - 0.05
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-3, atol=1e-3)


def test_peft_models_can_be_enabled() -> None:
    model = get_peft_model(tiny_doge(9), LORA)
    doge.enable(model)
    assert model.base_model.model.config._attn_implementation == "dmattn"
    written = model.generate(input_ids=distinct_tokens(1, 20), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert written.shape == (1, 24)
    doge.disable(model)
    assert model.base_model.model.config._attn_implementation == "eager"


def test_norms_in_float32() -> None:
    """As PEFT prepares quantised models: query and key leave their norms in float32, all else is bfloat16."""
    model = tiny_doge(9, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    doge.enable(model)
    kinds = []
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda module, inputs, out: kinds.append(out.dtype))
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda module, inputs, out: kinds.append(out.dtype))
    for module in model.modules():  # the linear layers take their weights' dtype, as quantised ones do
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(module.weight.dtype),))
    model(distinct_tokens(2, 40)).logits.float().square().mean().backward()
    assert kinds == [torch.float32, torch.bfloat16]
    gradient = model.model.layers[0].self_attn.dt_proj.weight.grad
    assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all() and gradient.any()


# ---- Two processes


def train_on_rank(how: str, texts: list[Tensor]) -> dict[str, Tensor]:
    """The parameters after a step for each of `texts`, of which every rank has its part."""
    model = tiny_doge(9)
    doge.enable(model)
    if how == "ddp":
        trained = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh_of())
        trained = fully_shard(model, mesh=mesh_of())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for text in texts:
        part = text.chunk(dist.get_world_size())[dist.get_rank()]
        loss = trained(input_ids=part, labels=part).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {
        name: parameter.full_tensor().detach() if how == "fsdp" else parameter.detach()
        for name, parameter in model.named_parameters()
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with start_ranks(2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_train_as_one(how: str, two_ranks: Ranks) -> None:
    texts = [distinct_tokens(4, 40) for _ in range(3)]
    trained, other = two_ranks.run(train_on_rank, how, texts)
    for name in trained:
        assert torch.equal(trained[name], other[name]), name
    model, _ = pair(9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for text in texts:
        optimizer.zero_grad()
        for part in text.chunk(2):
            (model(input_ids=part, labels=part).loss / 2).backward()
        optimizer.step()
    before = tiny_doge(9).state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    assert not torch.equal(trained["model.layers.0.self_attn.A"], before["model.layers.0.self_attn.A"])
    assert VOCABULARY > 40
