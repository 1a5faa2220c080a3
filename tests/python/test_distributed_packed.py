"""Packed documents of a sequence that is split across ranks, on the CPU by gloo: every rank's share against one process
that has the whole sequence."""

from __future__ import annotations

from collections.abc import Callable

import flash_dmattn
import pytest
import torch
import torch.distributed as dist
from flash_dmattn.distributed import DynamicMaskAttention, dynamic_mask_attention, gather_kept_keys
from ranks import Ranks, mesh_of
from shares import (
    KEY_HEADS,
    LEAVES,
    SHARE,
    TOKEN_DIM,
    Setting,
    assert_close,
    assert_same_bits,
    hide_padding,
    make_arguments,
    own_shares,
    results_of,
    round_scores,
    share_of,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import Shard, distribute_tensor

# Bounds for shares of 24 tokens of 2 and 3 ranks, which cut what is beyond the sequence.
BOUNDS = {
    "inside_shares": [0, 10, 40, 60, 72],
    "ends_with_a_share": [0, 24, 30, 48, 72],
    "one": [0, 72],
    "one_within_two": [0, 5, 67, 72],
    "empty_ones": [0, 0, 24, 24, 24, 30, 30, 72],
    "tiny": list(range(0, 73, 3)),
    "tokens_of_none": [0, 20, 35],
    "tokens_of_none_in_front": [7, 30, 60],
    "ends_in_the_first_share": [0, 20],
    "none": [0],
    "wrong": [5, 90, 3, -7, 60],
}


def compare_packed(setting: Setting, bounds: list[int], first_gather: bool = False) -> None:
    """On every rank."""
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    whole = make_arguments(setting)

    def alone(window_size: int, **given: Tensor) -> Tensor:
        return flash_dmattn.dynamic_mask_attention(window_size=window_size, cu_seqlens_q=cu_seqlens, **given)

    def split(window_size: int, **given: Tensor) -> Tensor:
        gathered = None
        if first_gather:
            keys = {name: tensor for name, tensor in given.items() if name != "query"}
            gathered = gather_kept_keys(window_size=window_size, cu_seqlens=cu_seqlens, group=dist.group.WORLD, **keys)
        return dynamic_mask_attention(
            window_size=window_size, cu_seqlens=cu_seqlens, group=dist.group.WORLD, gathered=gathered, **given
        )

    wanted = {name: share_of(name, tensor) for name, tensor in results_of(alone, whole, setting.window).items()}
    own = {name: share_of(name, tensor) for name, tensor in whole.items()}
    found = results_of(split, own, setting.window)
    assert_same_bits({"out": found["out"]}, wanted)
    assert_close(found, wanted)


@pytest.mark.parametrize("window", [1, 4, SHARE + 7, 100])
@pytest.mark.parametrize("name", BOUNDS)
def test_shares_are_those_of_one_process(ranks: Ranks, name: str, window: int) -> None:
    ranks.run(compare_packed, Setting(window=window), BOUNDS[name])


SETTINGS = {
    "padding": Setting(change=hide_padding),
    "ties": Setting(change=round_scores, window=4),
    "scores_apart": Setting(bias=(1, 1), scores=(2, KEY_HEADS), window=4),
    "one_bias_for_the_batch": Setting(bias=(1, KEY_HEADS), change=hide_padding, window=4),
    "no_key": Setting(window=0),
}


@pytest.mark.parametrize("first_gather", [False, True], ids=["", "gathered_first"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(ranks: Ranks, name: str, first_gather: bool) -> None:
    ranks.run(compare_packed, SETTINGS[name], BOUNDS["inside_shares"], first_gather)


def use_modules() -> None:
    setting, bounds = Setting(window=4), torch.tensor(BOUNDS["inside_shares"], dtype=torch.int32)
    whole = make_arguments(setting)
    module = DynamicMaskAttention(4)
    wanted = share_of("query", module(*(whole[name] for name in ("query", *LEAVES[1:])), cu_seqlens=bounds))
    own = own_shares(setting)
    module.group = dist.group.WORLD
    keys = [own[name] for name in LEAVES[1:]]
    assert torch.equal(module(own["query"], *keys, cu_seqlens=bounds), wanted)
    gathered = module.gather(*keys, cu_seqlens=bounds)
    assert torch.equal(module(own["query"], *keys, cu_seqlens=bounds, gathered=gathered), wanted)


def test_modules(ranks: Ranks) -> None:
    ranks.run(use_modules)


def use_dtensors() -> None:
    setting, bounds, mesh = Setting(window=4), torch.tensor(BOUNDS["inside_shares"], dtype=torch.int32), mesh_of()
    whole = make_arguments(setting)
    wanted = flash_dmattn.dynamic_mask_attention(
        *(whole[name] for name in ("query", *LEAVES[1:])), window_size=4, cu_seqlens_q=bounds
    )
    split = {
        name: distribute_tensor(tensor, mesh, [Shard(TOKEN_DIM[name])])
        for name, tensor in whole.items()
        if name != "dout"
    }
    out = dynamic_mask_attention(**split, window_size=4, cu_seqlens=bounds)
    assert torch.equal(out.to_local(), share_of("query", wanted))


def test_dtensors(ranks: Ranks) -> None:
    ranks.run(use_dtensors)


def compile_for_other_bounds() -> None:
    """One graph for other documents."""
    own, counter, mesh = own_shares(Setting(window=4)), CompileCounterWithBackend("aot_eager"), mesh_of()

    def attend(cu_seqlens: Tensor, **given: Tensor) -> Tensor:
        return dynamic_mask_attention(**given, window_size=4, cu_seqlens=cu_seqlens, group=mesh)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    own.pop("dout")
    for name in ("inside_shares", "wrong"):
        bounds = torch.tensor(BOUNDS[name], dtype=torch.int32)
        assert torch.equal(compiled(bounds, **own), attend(bounds, **own))
    assert counter.frame_count == 1


def test_compiles_once_for_other_documents(ranks: Ranks) -> None:
    ranks.run(compile_for_other_bounds)


def refuse(make: Callable[[], object], kind: type, message: str) -> None:
    own, group = own_shares(Setting()), dist.group.WORLD
    own.pop("dout")
    with pytest.raises(kind, match=message):
        dynamic_mask_attention(**own, window_size=4, group=group, cu_seqlens=make())


def as_list() -> object:
    return [0, 5]


def of_ranks() -> object:
    return torch.zeros(dist.get_rank() + 2, dtype=torch.int32)


def of_int64() -> object:
    return torch.zeros(3, dtype=torch.int64)


def of_two_dimensions() -> object:
    return torch.zeros(1, 3, dtype=torch.int32)


ERRORS = {
    "type": (as_list, TypeError, "cu_seqlens must be a torch.Tensor or None; got cu_seqlens of type list"),
    "dtype": (
        of_int64,
        ValueError,
        r"cu_seqlens must be int32 \(documents \+ 1\), of the whole sequence; got cu_seqlens",
    ),
    "rank": (of_two_dimensions, ValueError, r"got cu_seqlens int32 \(1, 3\)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(ranks: Ranks, name: str) -> None:
    ranks.run(refuse, *ERRORS[name])


def refuse_others() -> None:
    """Bounds of other shapes on other ranks, where they compare; and another tensor than what was gathered."""
    own, group = own_shares(Setting()), dist.group.WORLD
    own.pop("dout")
    with pytest.raises(ValueError, match=r"all ranks .* got cu_seqlens int32 \(2,\) on rank 0, int32 \(3,\) on rank 1"):
        dynamic_mask_attention(**own, window_size=4, group=group, cu_seqlens=of_ranks(), check=True)
    keys = {name: tensor for name, tensor in own.items() if name != "query"}
    bounds = torch.tensor([0, 30], dtype=torch.int32)
    gathered = gather_kept_keys(**keys, window_size=4, group=group, cu_seqlens=bounds)
    for other in (None, bounds.clone()):
        with pytest.raises(ValueError, match="cu_seqlens must be what gather_kept_keys was given, the same object"):
            dynamic_mask_attention(**own, window_size=4, gathered=gathered, cu_seqlens=other)
    dynamic_mask_attention(**own, window_size=4, gathered=gathered, cu_seqlens=bounds)


def test_what_ranks_disagree_about(ranks: Ranks) -> None:
    ranks.run(refuse_others)
