"""Intervals of flash_dmattn.distributed on the CPU, by gloo: shares against one process that has the whole sequence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from flash_dmattn import KeyIntervals
from flash_dmattn.distributed import attention, shard
from ranks import Ranks
from shares import BATCH, HEAD_DIM, HEADS, MASKS, SHARE, Setting, compare_intervals, own_shares
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.parametrize("order", ["contiguous", "head-tail"])
@pytest.mark.parametrize("name", MASKS)
def test_intervals(ranks: Ranks, name: str, order: str) -> None:
    ranks.run(compare_intervals, name, order, name.startswith("intervals"), Setting())


def test_intervals_in_bfloat16(ranks: Ranks) -> None:
    ranks.run(compare_intervals, "intervals_of_heads", "head-tail", True, Setting(dtype=torch.bfloat16))


def see_unused_keys() -> None:
    """What no row of another rank sees does not come, so that it may be anything."""
    size = dist.get_world_size()
    own = own_shares(Setting())
    mask = KeyIntervals.sliding_window(6, 0, SHARE * size)
    counts = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if "all_to_all" in str(operator):
                counts.append(args[0].shape[0])
            return operator(*args, **(kwargs or {}))

    with Count():
        attention(**{name: own[name] for name in ("query", "key", "value")}, mask=mask, group=dist.group.WORLD)
    # Its own keys stay where they are; of them the last six go to the next rank, too.
    assert counts == [SHARE + (6 if dist.get_rank() < size - 1 else 0)]


def test_only_keys_that_are_seen_travel(ranks: Ranks) -> None:
    ranks.run(see_unused_keys)


REFUSED = {
    "mask_of_a_share": ({"mask": KeyIntervals.causal(SHARE)}, ValueError, "mask must be of the whole sequence"),
    "bool_mask": ({"mask": torch.ones(SHARE, SHARE, dtype=torch.bool)}, TypeError, "mask must be KeyIntervals"),
    "bias_by_row": ({"bias": torch.zeros(1, 1, SHARE, SHARE)}, ValueError, "bias must be a share of a bias per key"),
    "order": ({"order": "zigzag"}, ValueError, "order must be one of 'contiguous', 'head-tail'; got order 'zigzag'"),
    "one_length": ({"query": torch.zeros(BATCH, 1, HEADS, HEAD_DIM)}, ValueError, "of one length"),
}


def refuse(name: str) -> None:
    changes, error, message = REFUSED[name]
    own = own_shares(Setting())
    given = {leaf: own[leaf] for leaf in ("query", "key", "value")}
    with pytest.raises(error, match=message):
        attention(**given | {"group": dist.group.WORLD} | changes)


@pytest.mark.parametrize("name", REFUSED)
def test_what_intervals_cannot_say_is_refused(ranks: Ranks, name: str) -> None:
    ranks.run(refuse, name)


def refuse_lengths() -> None:
    size = dist.get_world_size()
    for order, parts in (("contiguous", size), ("head-tail", 2 * size)):
        with pytest.raises(ValueError, match=f"multiple of {parts} tokens"):
            shard(torch.zeros(1, 2 * size + 1), group=dist.group.WORLD, order=order)


def test_sequences_that_do_not_divide_are_refused(ranks: Ranks) -> None:
    ranks.run(refuse_lengths)
