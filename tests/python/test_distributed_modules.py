"""flash_dmattn.distributed beside torch's own ways to share work, on the CPU by gloo: DTensors, DDP, FSDP2, activation
checkpointing, and tensor parallelism over heads."""

from __future__ import annotations

from collections.abc import Iterator

import flash_dmattn
import pytest
import torch
import torch.distributed as dist
from flash_dmattn.distributed import DynamicMaskParallel, attention, dynamic_mask_attention, gather_kept_keys, shard
from ranks import Ranks, mesh_of, start_ranks
from shares import (
    LEAVES,
    TOKEN_DIM,
    Layer,
    Setting,
    assert_close,
    assert_near,
    compare_layer,
    gathered_first,
    gradients_of_one_process,
    layer_input,
    make_arguments,
    own_shares,
    results_of,
    share_of,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# ---- DTensors


def compare_dtensors() -> None:
    mesh, whole = mesh_of(), make_arguments(Setting())
    split = {name: distribute_tensor(tensor, mesh, [Shard(TOKEN_DIM[name])]) for name, tensor in whole.items()}
    wanted = results_of(flash_dmattn.dynamic_mask_attention, whole, 10)
    for function in (dynamic_mask_attention, gathered_first):
        found = results_of(function, split, 10)
        assert all(isinstance(tensor, DTensor) for tensor in found.values())
        assert_close({name: tensor.full_tensor() for name, tensor in found.items()}, wanted)
    parts = {name: split[name] for name in ("query", "key", "value")}
    out = attention(**parts, bias=split["key_bias"], is_causal=True)
    expected = flash_dmattn.attention(**{name: whole[name] for name in parts}, bias=whole["key_bias"], is_causal=True)
    torch.testing.assert_close(out.full_tensor(), expected, atol=1e-12, rtol=0)
    with pytest.raises(TypeError, match="value must be a DTensor where others are"):
        attention(**parts | {"value": share_of("value", whole["value"])})
    with pytest.raises(ValueError, match="key must be split along the sequence"):
        attention(**parts | {"key": distribute_tensor(whole["key"], mesh, [Shard(3)])})
    with pytest.raises(ValueError, match="group must be the mesh of the DTensors"):
        attention(**parts, group=dist.group.WORLD)


def test_dtensors(ranks: Ranks) -> None:
    ranks.run(compare_dtensors)


# ---- Modules


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "activation_checkpointing"])
def test_beside_other_ways_to_share_work(ranks: Ranks, way: str) -> None:
    """Each averages gradients of weights over the ranks, whose losses' mean is that of the whole sequence."""
    ranks.run(compare_layer, way, Setting())


def refuse_module() -> None:
    layer = Layer(Setting())
    with pytest.raises(ValueError, match="is for DynamicMaskAttention; got Linear"):
        parallelize_module(layer, mesh_of(), {"query": DynamicMaskParallel()})
    own = own_shares(Setting())
    own.pop("dout")
    gathered = gather_kept_keys(*(own[name] for name in LEAVES[1:]), 10, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="gathered must be None where sequences are whole"):
        layer.attend(**own, gathered=gathered)
    dynamic_mask_attention(**own, window_size=10, gathered=gathered)


def test_only_the_module_is_split(ranks: Ranks) -> None:
    ranks.run(refuse_module)


# ---- Heads split across some ranks, sequences across others


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with start_ranks(4, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def compare_heads_and_sequences(sharded_weights: bool) -> None:
    """Ranks 0 and 1 hold the first tokens, ranks 0 and 2 the first heads."""
    setting, mesh = Setting(share=12), mesh_of(2, 2, names=("cp", "tp"))
    wanted = gradients_of_one_process(setting)
    expected = Layer(setting)(layer_input(setting))
    by_heads = {name: ColwiseParallel() for name in ("query", "key", "value", "score")}
    layer = parallelize_module(Layer(setting), mesh["tp"], by_heads | {"output": RowwiseParallel()})
    layer = parallelize_module(layer, mesh["cp"], {"attend": DynamicMaskParallel()})
    if sharded_weights:
        fully_shard(layer, mesh=mesh["cp"])
    out = layer(shard(layer_input(setting), group=mesh["cp"]))
    torch.testing.assert_close(out, shard(expected, group=mesh["cp"]), atol=1e-12, rtol=0)
    out.square().mean().backward()
    for name, parameter in layer.named_parameters():
        gradient = parameter.grad
        assert gradient.to_local().numel() < parameter.numel()
        if not sharded_weights:  # which would be averaged over the ranks that hold other tokens
            dist.all_reduce(gradient.to_local(), group=mesh["cp"].get_group())
            gradient = gradient / mesh["cp"].size()
        assert_near(name, gradient.full_tensor(), wanted[name])


@pytest.mark.parametrize("sharded_weights", [False, True], ids=["tensor_parallel", "and_fsdp2"])
def test_heads_and_sequences(four_ranks: Ranks, sharded_weights: bool) -> None:
    four_ranks.run(compare_heads_and_sequences, sharded_weights)
