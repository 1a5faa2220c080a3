"""Dynamic masks of flash_dmattn.distributed on the CPU, by gloo: every rank's share against one process that has the
whole sequence."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from flash_dmattn.distributed import dynamic_mask_attention, gather_kept_keys, previous_tokens
from ranks import Ranks, mesh_of, start_ranks
from shares import (
    BATCH,
    HEAD_DIM,
    HEADS,
    KEY_HEADS,
    LEAVES,
    SHARE,
    TOKEN_DIM,
    Setting,
    break_a_score,
    compare_compiled,
    compare_frozen,
    compare_gathered_first,
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SETTINGS = {
    "plain": Setting(),
    "float32": Setting(dtype=torch.float32),
    "bfloat16": Setting(dtype=torch.bfloat16),
    "one_bias": Setting(bias=(1, 1)),
    "one_bias_for_the_batch": Setting(bias=(1, KEY_HEADS), change=hide_padding),
    "scores_apart": Setting(bias=(1, 1), scores=(BATCH, KEY_HEADS)),
    "one_score_many_biases": Setting(scores=(1, 1)),
    "key_mask": Setting(change=hide_padding),
    "ties": Setting(change=round_scores),
    "nan_score": Setting(scores=(BATCH, KEY_HEADS), change=break_a_score),
    "fewer_than_the_window": Setting(change=hide_by_scores),
    "a_rank_without_keys": Setting(change=hide_a_rank),
    "window_of_a_share": Setting(window=SHARE),
    "window_above_a_share": Setting(window=SHARE + 7),
    "all_keys": Setting(window=4 * SHARE),
    "one_key": Setting(window=1),
    "no_key": Setting(window=0),
    "softcap": Setting(options={"softcap": 2.0, "scale": 0.3}),
    "deterministic": Setting(options={"deterministic": True}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_shares_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    ranks.run(compare_with_one_process, SETTINGS[name])


@pytest.mark.parametrize(
    "change", [None, round_scores, hide_by_scores, hide_a_rank], ids=lambda change: str(change and change.__name__)
)
def test_gradients_are_rounded_once_after_their_sum(ranks: Ranks, change: object) -> None:
    ranks.run(compare_with_parts, Setting(dtype=torch.bfloat16, change=change))


def test_a_rank_without_gradients_of_its_own_sends_those_of_others(ranks: Ranks) -> None:
    ranks.run(compare_frozen, Setting())


def test_two_backwards_of_one_graph(ranks: Ranks) -> None:
    ranks.run(compare_two_backwards, Setting())


def test_meshes_and_compiled_code(ranks: Ranks) -> None:
    ranks.run(compare_compiled, Setting(), "aot_eager")


def see_nothing_to_send() -> None:
    for batch, share in ((0, SHARE), (BATCH, 0)):
        query, key, bias = (torch.zeros(batch, share, heads, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        bias = bias[..., 0].mT
        leaves = [tensor.requires_grad_() for tensor in (query, key, bias)]
        out = dynamic_mask_attention(query, key, key, bias, 10, group=dist.group.WORLD)
        assert out.shape == query.shape
        for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
            assert gradient.shape == leaf.shape


def test_nothing_to_send(ranks: Ranks) -> None:
    ranks.run(see_nothing_to_send)


# ---- The exchange, started early


@pytest.mark.parametrize("name", ["plain", "bfloat16", "scores_apart", "key_mask", "window_above_a_share", "no_key"])
def test_an_exchange_that_starts_early_changes_nothing(ranks: Ranks, name: str) -> None:
    ranks.run(compare_gathered_first, SETTINGS[name])


def record_order() -> list[str]:
    names = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            names.append(operator.name())
            return operator(*args, **(kwargs or {}))

    own = own_shares(Setting())
    own.pop("dout")
    with Record():
        gathered = gather_kept_keys(*(own[name] for name in LEAVES[1:]), 10, group=dist.group.WORLD)
        torch.eye(2).mm(torch.eye(2))
        dynamic_mask_attention(**own, window_size=10, gathered=gathered)
    return names


def test_what_stands_between_runs_beside_the_exchange(ranks: Ranks) -> None:
    for names in ranks.run(record_order):
        sends = [index for index, name in enumerate(names) if "all_gather" in name]
        assert len(sends) == 1 and sends[0] < names.index("aten::mm")
        assert not any("wait_tensor" in name for name in names[: names.index("aten::mm")])


def refuse_gathered() -> None:
    own = own_shares(Setting(scores=(BATCH, KEY_HEADS)))
    own.pop("dout")
    keys = {name: own[name] for name in ("key", "value", "key_bias", "scores")}
    gathered = gather_kept_keys(**keys, window_size=10, group=dist.group.WORLD)
    for name in keys:
        with pytest.raises(ValueError, match=f"^{name} must be what gather_kept_keys was given"):
            dynamic_mask_attention(**own | {name: own[name].clone()}, window_size=10, gathered=gathered)
    with pytest.raises(ValueError, match="window_size must be 10, what gather_kept_keys was given; got 9"):
        dynamic_mask_attention(**own, window_size=9, gathered=gathered)
    with pytest.raises(ValueError, match="group must be the one in which gather_kept_keys was called"):
        dynamic_mask_attention(**own, window_size=10, gathered=gathered, group=dist.new_group())
    with pytest.raises(TypeError, match="gathered must be what gather_kept_keys returns"):
        dynamic_mask_attention(**own, window_size=10, gathered=keys)
    dynamic_mask_attention(**own, window_size=10, gathered=gathered, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="key and value must be shares of one sequence"):
        gather_kept_keys(**keys | {"value": own["value"][:, 1:]}, window_size=10, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="key_mask must be"):
        mask = torch.ones(BATCH, 1, SHARE + 1, dtype=torch.bool)
        gather_kept_keys(**keys, key_mask=mask, window_size=10, group=dist.group.WORLD)


def test_gathered_of_other_arguments_is_refused(ranks: Ranks) -> None:
    ranks.run(refuse_gathered)


# ---- What is sent


def count_bytes() -> list[tuple[str, int]]:
    """What a rank gives to the collectives of a forward, and of a backward."""
    given = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name = str(operator)
            if "all_gather" in name or "reduce_scatter" in name:
                given.append((name.split(".")[1], args[0].nbytes))
            return operator(*args, **(kwargs or {}))

    own = own_shares(Setting(dtype=torch.float32))
    with Count():
        results_of(dynamic_mask_attention, own, 10, group=dist.group.WORLD)
    return given


def test_what_is_sent(ranks: Ranks) -> None:
    """The formula of docs/distributed.md. A rank gives its part to an all-gather, parts for all to a reduce-scatter."""
    elements = BATCH * KEY_HEADS * 10 * (2 * HEAD_DIM + 1)
    for given in ranks.run(count_bytes):
        (gather, gathered), (scatter, scattered) = given
        assert (gather, scatter) == ("all_gather_into_tensor", "reduce_scatter_tensor")
        assert elements * 4 <= gathered < elements * 4 + 3 * 16
        assert scattered == elements * 4 * ranks.size


# ---- Ranks that disagree, and arguments that are refused


def find_disagreement(change: str) -> str:
    own = own_shares(Setting())
    own.pop("dout")
    window = 10
    if dist.get_rank() == 1:
        if change == "window_size":
            window = 11
        elif change == "scores":
            own["scores"] = own["key_bias"]
        elif change == "query":  # which is wrong on every rank that has it
            own["query"] = own["query"][:, 1:]
        elif change == "gradients":
            own["value"].requires_grad_()
        else:
            own |= {name: own[name].narrow(TOKEN_DIM[name], 0, SHARE - 1) for name in LEAVES}
    with pytest.raises(ValueError) as error:
        dynamic_mask_attention(window_size=window, group=dist.group.WORLD, check=True, **own)
    return str(error.value)


@pytest.mark.parametrize("name", ["window_size", "scores", "key", "query", "gradients"])
def test_ranks_that_disagree_say_so_alike(ranks: Ranks, name: str) -> None:
    messages = ranks.run(find_disagreement, name)
    assert len(set(messages)) == 1
    assert f"{name} " in messages[0] and "on rank 1" in messages[0]


def find_disagreement_of_a_new_group() -> None:
    group = dist.new_group()
    own = own_shares(Setting())
    own.pop("dout")
    window = 10 + dist.get_rank()
    with pytest.raises(ValueError, match="window_size"):
        dynamic_mask_attention(window_size=window, group=group, **own)
    query = own.pop("query")
    with pytest.raises(ValueError, match="window_size"):
        gather_kept_keys(window_size=window, group=group, **own)
    gathered = gather_kept_keys(window_size=10, group=group, **own)
    with pytest.raises(ValueError, match="scale"):  # which the exchange does not know
        dynamic_mask_attention(query, window_size=10, gathered=gathered, scale=1.0 + dist.get_rank(), **own)
    dynamic_mask_attention(query, window_size=10, gathered=gathered, **own)


def test_a_groups_first_call_is_checked(ranks: Ranks) -> None:
    ranks.run(find_disagreement_of_a_new_group)


REFUSED = {
    "per_key": ({"selection": "per_key"}, ValueError, "selection must be 'causal'"),
    "seqlens_k": ({"seqlens_k": torch.tensor([3, 4], dtype=torch.int32)}, ValueError, "seqlens_k is not supported"),
    "head_of_a_query": ({"key_bias": torch.zeros(BATCH, HEADS, SHARE)}, ValueError, "key_bias must be .* Hkv or 1"),
    "scores_of_a_query": ({"scores": torch.zeros(BATCH, HEADS, SHARE)}, ValueError, "scores must be .* Hkv or 1"),
    "one_length": ({"query": torch.zeros(BATCH, 1, HEADS, HEAD_DIM)}, ValueError, "of one length"),
    "heads_of_the_value": ({"value": torch.zeros(BATCH, SHARE, 1, HEAD_DIM)}, ValueError, "value must have key's"),
    "length_of_the_bias": ({"key_bias": torch.zeros(BATCH, 1, SHARE + 1)}, ValueError, "key_bias must be .* S / P"),
    "negative_window": ({"window_size": -1}, ValueError, "window_size must not be negative"),
    "device": ({"key_bias": torch.zeros(BATCH, 1, SHARE, device="meta")}, ValueError, "on the device of"),
    "group": ({"group": None}, TypeError, "group must be a ProcessGroup or a DeviceMesh"),
    "check": ({"check": 1}, TypeError, "check must be a bool"),
}


def refuse(name: str) -> None:
    changes, error, message = REFUSED[name]
    own = own_shares(Setting())
    own.pop("dout")
    with pytest.raises(error, match=message):
        dynamic_mask_attention(**{"window_size": 10, "group": dist.group.WORLD} | own | changes)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused(ranks: Ranks, name: str) -> None:
    ranks.run(refuse, name)


def refuse_mesh() -> None:
    mesh = mesh_of(1, dist.get_world_size(), names=("dp", "cp"))
    own = own_shares(Setting())
    own.pop("dout")
    with pytest.raises(ValueError, match="mesh of one dimension"):
        dynamic_mask_attention(window_size=10, group=mesh, **own)
    dynamic_mask_attention(window_size=10, group=mesh["cp"], **own)


def test_a_mesh_of_two_dimensions_is_refused(ranks: Ranks) -> None:
    ranks.run(refuse_mesh)


def leave_or_wait() -> str:
    """On a group of its own, which the last rank leaves before the collective."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    own = own_shares(Setting())
    own.pop("dout")
    dynamic_mask_attention(window_size=10, group=group, **own)
    if dist.get_rank() == dist.get_world_size() - 1:
        return "left"
    with pytest.raises(RuntimeError) as error:
        dynamic_mask_attention(window_size=10, group=group, **own)
    return str(error.value)


def test_a_rank_that_never_calls_ends_in_torchs_timeout(tmp_path: Path) -> None:
    with start_ranks(2, tmp_path) as started:
        waited, left = started.run(leave_or_wait)
    assert left == "left" and "imed out" in waited


# ---- Tokens of the rank before


def compare_halo() -> None:
    """A convolution over four tokens."""
    whole = make_arguments(Setting())
    kernel = torch.arange(1.0, 5, dtype=torch.float64)

    def mix(value: Tensor, before: Tensor) -> Tensor:
        return torch.cat([before, value], 1).unfold(1, 4, 1) @ kernel

    results = []
    for value, dout, before_of in (
        (whole["value"], whole["dout"][:, :, :KEY_HEADS], lambda value: value.new_zeros(value[:, :3].shape)),
        (
            share_of("value", whole["value"]),
            share_of("dout", whole["dout"][:, :, :KEY_HEADS]),
            lambda value: previous_tokens(value, 3, group=dist.group.WORLD),
        ),
    ):
        leaf = value.clone().requires_grad_()
        out = mix(leaf, before_of(leaf))
        out.backward(dout)
        results.append((out.detach(), leaf.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, share_of("out", expected), atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match=f"between 0 and the share's {SHARE} tokens"):
        previous_tokens(whole["value"][:, :SHARE], SHARE + 1, group=dist.group.WORLD)


def test_tokens_of_the_rank_before(ranks: Ranks) -> None:
    ranks.run(compare_halo)
