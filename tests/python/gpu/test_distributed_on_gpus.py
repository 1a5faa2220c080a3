"""flash_dmattn.distributed on two GPUs, by NCCL: every rank's share against one GPU that has the whole sequence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from flash_dmattn.distributed import dynamic_mask_attention, previous_tokens
from launching import STEPS, train
from ranks import Ranks, mesh_of, rank_device, start_ranks
from shares import (
    BATCH,
    KEY_HEADS,
    MASKS,
    TOKEN_DIM,
    Setting,
    assert_same_bits,
    break_a_score,
    compare_compiled,
    compare_frozen,
    compare_gathered_first,
    compare_intervals,
    compare_layer,
    compare_two_backwards,
    compare_with_one_process,
    compare_with_parts,
    hide_a_rank,
    hide_by_scores,
    hide_padding,
    make_arguments,
    own_shares,
    results_of,
    round_scores,
    share_of,
)
from torch.distributed.tensor import DTensor, Shard

pytestmark = [
    pytest.mark.devices("cuda"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHARE = 320  # five tiles of rows


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with start_ranks(2, tmp_path_factory.mktemp("ranks"), "nccl") as started:
        yield started


def setting(**arguments: object) -> Setting:
    return Setting(**{"window": 96, "dtype": torch.bfloat16, "share": SHARE, "head_dim": 64} | arguments)


SETTINGS = {
    "plain": setting(),
    "head_dim_128": setting(head_dim=128),
    "scores_apart": setting(bias=(1, 1), scores=(BATCH, KEY_HEADS)),
    "key_mask": setting(change=hide_padding),
    "ties": setting(change=round_scores),
    "nan_score": setting(scores=(BATCH, KEY_HEADS), change=break_a_score),
    "fewer_than_the_window": setting(change=hide_by_scores),
    "a_rank_without_keys": setting(change=hide_a_rank),
    "window_above_a_share": setting(window=SHARE + 7),
    "no_key": setting(window=0),
    "softcap": setting(options={"softcap": 2.0, "scale": 0.3}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_shares_are_those_of_one_gpu(ranks: Ranks, name: str) -> None:
    ranks.run(compare_with_one_process, SETTINGS[name])


@pytest.mark.parametrize("name", ["plain", "head_dim_128", "ties", "fewer_than_the_window", "a_rank_without_keys"])
def test_bits_are_those_of_the_same_calls_on_one_gpu(ranks: Ranks, name: str) -> None:
    """Which the tests above cannot say: there one call has other tiles, and adds up in another order."""
    ranks.run(compare_with_parts, SETTINGS[name])


def compare_with_parts_under_torchs_switch() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        compare_with_parts(setting(options={"deterministic": None}))
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms(ranks: Ranks) -> None:
    ranks.run(compare_with_parts_under_torchs_switch)


def test_two_backwards_of_one_graph(ranks: Ranks) -> None:
    ranks.run(compare_two_backwards, SETTINGS["plain"])


@pytest.mark.parametrize("name", ["plain", "scores_apart", "key_mask", "window_above_a_share"])
def test_an_exchange_that_starts_early_changes_nothing(ranks: Ranks, name: str) -> None:
    ranks.run(compare_gathered_first, SETTINGS[name])


def test_a_rank_without_gradients_of_its_own_sends_those_of_others(ranks: Ranks) -> None:
    """The first rank wants none of its keys, and uses no other's."""
    ranks.run(compare_frozen, SETTINGS["plain"])


def compare_on_another_stream() -> None:
    """All on a side stream, behind work that takes longer than the host takes to enqueue everything."""
    own = own_shares(SETTINGS["plain"])
    options = {"group": dist.group.WORLD, "deterministic": True}
    wanted = results_of(dynamic_mask_attention, own, 96, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = {name: torch.empty_like(tensor) for name, tensor in own.items()}
        torch.cuda._sleep(100_000_000)
        for name, tensor in own.items():
            late[name].copy_(tensor)
        found = results_of(dynamic_mask_attention, late, 96, **options)
    stream.synchronize()
    assert_same_bits(found, wanted)


def test_other_streams(ranks: Ranks) -> None:
    ranks.run(compare_on_another_stream)


def see_the_host_go_on() -> None:
    """Behind 0.5 seconds of work the host comes back from forward and backward before any of it has begun."""
    own, options = own_shares(SETTINGS["plain"]), {"group": dist.group.WORLD}
    for _ in range(2):  # ranks have compared their arguments then, and the allocator has the memory
        results_of(dynamic_mask_attention, own, 96, **options)
    torch.cuda.synchronize()
    waits = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    waits.record()
    results_of(dynamic_mask_attention, own, 96, **options)
    assert not waits.query()
    torch.cuda.synchronize()


def test_the_host_does_not_wait(ranks: Ranks) -> None:
    ranks.run(see_the_host_go_on)


@pytest.mark.parametrize("order", ["contiguous", "head-tail"])
@pytest.mark.parametrize("name", MASKS)
def test_intervals(ranks: Ranks, name: str, order: str) -> None:
    ranks.run(compare_intervals, name, order, name.startswith("intervals"), setting())


@pytest.mark.timeout(600)  # compiles four times
def test_compiled_code(ranks: Ranks) -> None:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("needs a C compiler, which inductor calls")
    pytest.importorskip("triton", reason="needs triton, to which inductor compiles")
    ranks.run(compare_compiled, SETTINGS["plain"], "inductor")


def test_compiled_code_without_a_compiler(ranks: Ranks) -> None:
    ranks.run(compare_compiled, SETTINGS["plain"], "aot_eager")


def compare_dtensors() -> None:
    mesh, own = mesh_of(), own_shares(SETTINGS["plain"])
    options = {"deterministic": True}
    wanted = results_of(dynamic_mask_attention, own, 96, group=dist.group.WORLD, **options)
    split = {name: DTensor.from_local(tensor, mesh, [Shard(TOKEN_DIM[name])]) for name, tensor in own.items()}
    found = results_of(dynamic_mask_attention, split, 96, **options)
    assert_same_bits({name: tensor.to_local() for name, tensor in found.items()}, wanted)


def test_dtensors(ranks: Ranks) -> None:
    ranks.run(compare_dtensors)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "activation_checkpointing"])
def test_beside_other_ways_to_share_work(ranks: Ranks, way: str) -> None:
    ranks.run(compare_layer, way, setting())


def compare_halo() -> None:
    whole = make_arguments(SETTINGS["plain"])["value"].requires_grad_()
    before = previous_tokens(share_of("value", whole), 3, group=dist.group.WORLD)
    expected = torch.cat([torch.zeros_like(whole[:, :3]), whole], 1).narrow(1, dist.get_rank() * SHARE, 3)
    assert before.device == rank_device() and torch.equal(before, expected)
    (gradient,) = torch.autograd.grad(before.sum(), whole)
    is_sent = torch.zeros_like(gradient)
    if dist.get_rank() == 0:
        is_sent[:, SHARE - 3 : SHARE] = 1
    assert torch.equal(gradient, is_sent)


def test_tokens_of_the_rank_before(ranks: Ranks) -> None:
    ranks.run(compare_halo)


@pytest.fixture(scope="module")
def of_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    pytest.importorskip("tqdm", reason="needs tqdm, as the example does")
    return train(tmp_path_factory.mktemp("one"), 1, on_gpus=True)


def test_two_gpus_learn_what_one_learns(of_one_gpu: list[float], tmp_path: Path) -> None:
    """Roundings to bfloat16 differ, and add up over the steps, to some 0.002."""
    losses = train(tmp_path, 2, on_gpus=True)
    assert len(losses) == STEPS and losses[-1] < losses[0] - 2
    assert losses == pytest.approx(of_one_gpu, abs=0.01)


def test_two_gpus_resume(of_one_gpu: list[float], tmp_path: Path) -> None:
    assert len(train(tmp_path, 2, "--pause-at", "11", on_gpus=True)) == 11
    assert train(tmp_path, 2, "--resume", on_gpus=True) == pytest.approx(of_one_gpu, abs=0.01)
