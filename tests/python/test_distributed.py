"""flash_dmattn.distributed on the CPU, by gloo: every rank's share against one process that has the whole sequence."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import flash_dmattn
import pytest
import torch
import torch.distributed as dist
from flash_dmattn import KeyIntervals
from flash_dmattn.distributed import (
    DynamicMaskAttention,
    DynamicMaskParallel,
    attention,
    dynamic_mask_attention,
    previous_tokens,
    shard,
    unshard,
)
from ranks import Ranks, start_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

BATCH, HEADS, KEY_HEADS, HEAD_DIM, SHARE = 2, 4, 2, 16, 24  # SHARE: tokens of a rank
TOKEN_DIM = {"query": 1, "key": 1, "value": 1, "key_bias": 2, "scores": 2, "key_mask": 2, "dout": 1}
LEAVES = ("query", "key", "value", "key_bias")


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size}_ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with start_ranks(request.param, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@dataclass(frozen=True)
class Setting:
    """How the arguments of a case are made: sizes and heads of bias and scores, and changes to what is random."""

    window: int = 10
    bias: tuple[int, int] = (BATCH, KEY_HEADS)
    scores: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float64
    change: Callable[[dict[str, Tensor]], None] | None = None
    options: dict[str, object] = field(default_factory=dict)


def make_arguments(setting: Setting, size: int) -> dict[str, Tensor]:
    """Of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    length = SHARE * size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(setting.dtype)

    arguments = {name: normal(BATCH, length, heads, HEAD_DIM) for name, heads in
                 (("query", HEADS), ("key", KEY_HEADS), ("value", KEY_HEADS), ("dout", HEADS))}  # fmt: skip
    arguments["key_bias"] = normal(*setting.bias, length)
    if setting.scores is not None:
        arguments["scores"] = normal(*setting.scores, length)
    if setting.change is not None:
        setting.change(arguments)
    return arguments


def results_of(
    function: Callable[..., Tensor], arguments: dict[str, Tensor], window: int, **options: object
) -> dict[str, Tensor]:
    """out, and gradients by the name of their leaf."""
    given = {name: tensor for name, tensor in arguments.items() if name != "dout"}
    for name in LEAVES:
        given[name] = given[name].detach().clone().requires_grad_()
    out = function(window_size=window, **given, **options)
    gradients = torch.autograd.grad(out, [given[name] for name in LEAVES], arguments["dout"])
    return {"out": out.detach()} | dict(zip(LEAVES, gradients, strict=True))


def share_of(name: str, tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size(), TOKEN_DIM.get(name, 1))[dist.get_rank()]


def compare_with_one_process(setting: Setting) -> None:
    """On every rank."""
    whole = make_arguments(setting, dist.get_world_size())
    wanted = results_of(flash_dmattn.dynamic_mask_attention, whole, setting.window, **setting.options)
    own = {name: share_of(name, tensor) for name, tensor in whole.items()}
    found = results_of(dynamic_mask_attention, own, setting.window, group=dist.group.WORLD, **setting.options)
    if setting.dtype == torch.float64:
        assert torch.equal(found["out"].nan_to_num(7), share_of("out", wanted["out"]).nan_to_num(7)), "other bits"
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}[setting.dtype]
    for name, tensor in found.items():
        expected = share_of(name, wanted[name])
        size = expected.nan_to_num().abs().max().item()
        torch.testing.assert_close(
            tensor, expected, atol=tolerance * max(size, 1), rtol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def hide_padding(arguments: dict[str, Tensor]) -> None:
    """Of the first rank all keys but two, in the second batch element; what they hold is not to be seen."""
    length = arguments["key"].shape[1]
    mask = torch.arange(length) >= torch.tensor([[[0]], [[SHARE - 2]]])
    arguments["key_mask"] = mask
    for name in ("key", "value"):
        arguments[name][1, : SHARE - 2] = torch.nan


def round_scores(arguments: dict[str, Tensor]) -> None:
    arguments["key_bias"].round_()


def break_a_score(arguments: dict[str, Tensor]) -> None:
    arguments["scores"][0, :, 5] = torch.nan


def hide_by_scores(arguments: dict[str, Tensor]) -> None:
    """Of the first rank all keys but four, the last one among them: what stands for the others must not be it again."""
    arguments["key_bias"][..., 3 : SHARE - 1] = -torch.inf


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


def plain_shares() -> dict[str, Tensor]:
    whole = make_arguments(Setting(), dist.get_world_size())
    return {name: share_of(name, tensor) for name, tensor in whole.items()}


def compare_frozen() -> None:
    """Only queries want a gradient on the first rank, only keys on the others."""
    whole = make_arguments(Setting(), dist.get_world_size())
    wanted = results_of(flash_dmattn.dynamic_mask_attention, whole, 10)
    own = plain_shares()
    name = "query" if dist.get_rank() == 0 else "key"
    own[name].requires_grad_()
    dout = own.pop("dout")
    out = dynamic_mask_attention(window_size=10, group=dist.group.WORLD, **own)
    out.backward(dout)
    torch.testing.assert_close(own[name].grad, share_of(name, wanted[name]), atol=1e-12, rtol=0)


def test_a_rank_without_gradients_of_its_own_sends_those_of_others(ranks: Ranks) -> None:
    ranks.run(compare_frozen)


def compare_mesh_and_compiled() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    compiled = torch.compile(dynamic_mask_attention, backend="aot_eager", fullgraph=True)
    own = plain_shares()
    wanted = results_of(dynamic_mask_attention, own, 10, group=dist.group.WORLD)
    for function in (dynamic_mask_attention, compiled):
        found = results_of(function, own, 10, group=mesh)
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name


def test_meshes_and_compiled_code(ranks: Ranks) -> None:
    ranks.run(compare_mesh_and_compiled)


def count_bytes() -> list[tuple[str, int]]:
    """What a rank gives to the collectives of a forward, and of a backward."""
    given = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name = str(operator)
            if "all_gather" in name or "reduce_scatter" in name:
                given.append((name.split(".")[1], args[0].nbytes))
            return operator(*args, **(kwargs or {}))

    own = {name: tensor.float() for name, tensor in plain_shares().items()}
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


def find_disagreement(change: str) -> str:
    own = plain_shares()
    own.pop("dout")
    window = 10
    if dist.get_rank() == 1:
        if change == "window_size":
            window = 11
        elif change == "scores":
            own["scores"] = own["key_bias"]
        elif change == "query":  # which is wrong on every rank that has it
            own["query"] = own["query"][:, 1:]
        else:
            own |= {name: own[name].narrow(TOKEN_DIM[name], 0, SHARE - 1) for name in LEAVES}
    with pytest.raises(ValueError) as error:
        dynamic_mask_attention(window_size=window, group=dist.group.WORLD, check=True, **own)
    return str(error.value)


@pytest.mark.parametrize("name", ["window_size", "scores", "key", "query"])
def test_ranks_that_disagree_say_so_alike(ranks: Ranks, name: str) -> None:
    messages = ranks.run(find_disagreement, name)
    assert len(set(messages)) == 1
    assert f"{name} " in messages[0] and "on rank 1" in messages[0]


def find_disagreement_of_a_new_group() -> None:
    group = dist.new_group()
    own = plain_shares()
    own.pop("dout")
    with pytest.raises(ValueError, match="window_size"):
        dynamic_mask_attention(window_size=10 + dist.get_rank(), group=group, **own)


def test_a_groups_first_call_is_checked(ranks: Ranks) -> None:
    ranks.run(find_disagreement_of_a_new_group)


REFUSED = {
    "per_key": ({"selection": "per_key"}, ValueError, "selection must be 'causal'"),
    "seqlens_k": ({"seqlens_k": torch.tensor([3, 4], dtype=torch.int32)}, ValueError, "seqlens_k is not supported"),
    "head_of_a_query": ({"key_bias": torch.zeros(BATCH, HEADS, SHARE)}, ValueError, "key_bias must be .* Hkv or 1"),
    "scores_of_a_query": ({"scores": torch.zeros(BATCH, HEADS, SHARE)}, ValueError, "scores must be .* Hkv or 1"),
    "one_length": ({"query": torch.zeros(BATCH, 1, HEADS, HEAD_DIM)}, ValueError, "of one length"),
    "group": ({"group": None}, TypeError, "group must be a ProcessGroup or a DeviceMesh"),
    "check": ({"check": 1}, TypeError, "check must be a bool"),
}


def refuse(name: str) -> None:
    changes, error, message = REFUSED[name]
    own = plain_shares()
    own.pop("dout")
    with pytest.raises(error, match=message):
        dynamic_mask_attention(**{"window_size": 10, "group": dist.group.WORLD} | own | changes)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused(ranks: Ranks, name: str) -> None:
    ranks.run(refuse, name)


def refuse_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    own = plain_shares()
    own.pop("dout")
    with pytest.raises(ValueError, match="mesh of one dimension"):
        dynamic_mask_attention(window_size=10, group=mesh, **own)
    dynamic_mask_attention(window_size=10, group=mesh["cp"], **own)


def test_a_mesh_of_two_dimensions_is_refused(ranks: Ranks) -> None:
    ranks.run(refuse_mesh)


def leave_or_wait() -> str:
    """On a group of its own, which the last rank leaves before the collective."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    own = plain_shares()
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


# ---- Intervals


def intervals_for_heads(length: int) -> KeyIntervals:
    """Random ones, many of them empty, of which bounds leave the sequence; other ones for each key head."""
    generator = torch.Generator().manual_seed(2)
    begin, end = torch.randint(-5, length + 5, (2, BATCH, KEY_HEADS, length), generator=generator, dtype=torch.int32)
    return KeyIntervals(begin, end)


def documents(length: int) -> KeyIntervals:
    bounds = torch.tensor([0, 5, 40, length], dtype=torch.int32)
    return KeyIntervals.documents(bounds, length)


def nothing(length: int) -> KeyIntervals:
    return KeyIntervals(*torch.zeros(2, 1, 1, length, dtype=torch.int32))


MASKS: dict[str, tuple[Callable[[int], KeyIntervals | None], bool]] = {  # and whether the call is causal
    "none": (lambda length: None, False),
    "causal": (lambda length: None, True),
    "window": (lambda length: KeyIntervals.sliding_window(6, 0, length), False),
    "window_to_both_sides": (lambda length: KeyIntervals.sliding_window(3, 9, length), False),
    "documents": (documents, True),
    "intervals_of_heads": (intervals_for_heads, False),
    "intervals_of_heads_causal": (intervals_for_heads, True),
    "nothing": (nothing, False),
}  # fmt: skip


def compare_intervals(name: str, order: str, with_bias: bool, dtype: torch.dtype) -> None:
    make_mask, is_causal = MASKS[name]
    size = dist.get_world_size()
    whole = make_arguments(Setting(dtype=dtype), size)
    mask = make_mask(SHARE * size)
    bias = whole.pop("key_bias")
    leaves = ["query", "key", "value"]
    if with_bias:
        whole["bias"] = bias
        leaves.append("bias")
    dims = TOKEN_DIM | {"bias": 2, "out": 1}

    def run(function: Callable[..., Tensor], arguments: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
        given = {leaf: arguments[leaf].clone().requires_grad_() for leaf in leaves}
        out = function(mask=mask, is_causal=is_causal, **given, **options)
        gradients = torch.autograd.grad(out, list(given.values()), arguments["dout"])
        return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))

    wanted = run(flash_dmattn.attention, whole)
    own = {part: shard(tensor, group=dist.group.WORLD, dim=dims[part], order=order) for part, tensor in whole.items()}
    found = run(attention, own, group=dist.group.WORLD, order=order)
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 0.05}[dtype]
    for part, tensor in found.items():
        together = unshard(tensor, group=dist.group.WORLD, dim=dims[part], order=order)
        size = max(wanted[part].abs().max().item(), 1)
        torch.testing.assert_close(
            together, wanted[part], atol=tolerance * size, rtol=0, msg=lambda m, part=part: f"{part}: {m}"
        )


@pytest.mark.parametrize("order", ["contiguous", "head-tail"])
@pytest.mark.parametrize("name", MASKS)
def test_intervals(ranks: Ranks, name: str, order: str) -> None:
    ranks.run(compare_intervals, name, order, name.startswith("intervals"), torch.float64)


def test_intervals_in_bfloat16(ranks: Ranks) -> None:
    ranks.run(compare_intervals, "intervals_of_heads", "head-tail", True, torch.bfloat16)


def see_unused_keys() -> None:
    """What no row of another rank sees does not come, so that it may be anything."""
    size = dist.get_world_size()
    whole = make_arguments(Setting(), size)
    mask = KeyIntervals.sliding_window(6, 0, SHARE * size)
    own = {name: share_of(name, whole[name]) for name in ("query", "key", "value")}
    counts = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if "all_to_all" in str(operator):
                counts.append(args[0].shape[0])
            return operator(*args, **(kwargs or {}))

    with Count():
        attention(**own, mask=mask, group=dist.group.WORLD)
    # Its own keys stay where they are; of them the last six go to the next rank, too.
    assert counts == [SHARE + (6 if dist.get_rank() < size - 1 else 0)]


def test_only_keys_that_are_seen_travel(ranks: Ranks) -> None:
    ranks.run(see_unused_keys)


REFUSED_INTERVALS = {
    "mask_of_a_share": ({"mask": KeyIntervals.causal(SHARE)}, ValueError, "mask must be of the whole sequence"),
    "bool_mask": ({"mask": torch.ones(SHARE, SHARE, dtype=torch.bool)}, TypeError, "mask must be KeyIntervals"),
    "bias_by_row": ({"bias": torch.zeros(1, 1, SHARE, SHARE)}, ValueError, "bias must be a share of a bias per key"),
    "order": ({"order": "zigzag"}, ValueError, "order must be one of 'contiguous', 'head-tail'; got order 'zigzag'"),
    "one_length": ({"query": torch.zeros(BATCH, 1, HEADS, HEAD_DIM)}, ValueError, "of one length"),
}


def refuse_intervals(name: str) -> None:
    changes, error, message = REFUSED_INTERVALS[name]
    own = plain_shares()
    given = {leaf: own[leaf] for leaf in ("query", "key", "value")}
    with pytest.raises(error, match=message):
        attention(**given | {"group": dist.group.WORLD} | changes)


@pytest.mark.parametrize("name", REFUSED_INTERVALS)
def test_what_intervals_cannot_say_is_refused(ranks: Ranks, name: str) -> None:
    ranks.run(refuse_intervals, name)


def refuse_lengths() -> None:
    size = dist.get_world_size()
    for order, parts in (("contiguous", size), ("head-tail", 2 * size)):
        with pytest.raises(ValueError, match=f"multiple of {parts} tokens"):
            shard(torch.zeros(1, 2 * size + 1), group=dist.group.WORLD, order=order)


def test_sequences_that_do_not_divide_are_refused(ranks: Ranks) -> None:
    ranks.run(refuse_lengths)


# ---- Tokens of the rank before


def compare_halo() -> None:
    """A convolution over four tokens."""
    whole = make_arguments(Setting(), dist.get_world_size())
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


# ---- DTensors


def compare_dtensors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = make_arguments(Setting(), dist.get_world_size())
    split = {name: distribute_tensor(tensor, mesh, [Shard(TOKEN_DIM[name])]) for name, tensor in whole.items()}
    wanted = results_of(flash_dmattn.dynamic_mask_attention, whole, 10)
    found = results_of(dynamic_mask_attention, split, 10)
    for name, tensor in found.items():
        assert isinstance(tensor, DTensor)
        torch.testing.assert_close(tensor.full_tensor(), wanted[name], atol=1e-12, rtol=0)
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


# ---- Beside other ways to share work


class Layer(torch.nn.Module):
    """Projections and dynamic-mask attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * HEAD_DIM
        self.query = torch.nn.Linear(width, width, dtype=torch.float64)
        self.key_value = torch.nn.Linear(width, 2 * KEY_HEADS * HEAD_DIM, dtype=torch.float64)
        self.score = torch.nn.Linear(width, KEY_HEADS, dtype=torch.float64)
        self.attend = DynamicMaskAttention(10)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(2, (HEADS, HEAD_DIM))
        key, value = self.key_value(x).unflatten(2, (2 * KEY_HEADS, HEAD_DIM)).chunk(2, 2)
        bias = self.score(x).mT
        return self.attend(query, key, value, bias).flatten(2)


def compare_layer(way: str) -> None:
    whole = make_arguments(Setting(), dist.get_world_size())["query"].flatten(2)
    one = Layer()
    one(whole).square().mean().backward()
    wanted = {name: parameter.grad for name, parameter in one.named_parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer: torch.nn.Module = parallelize_module(Layer(), mesh, {"attend": DynamicMaskParallel()})
    own = shard(whole, group=dist.group.WORLD)
    if way == "ddp":
        layer = torch.nn.parallel.DistributedDataParallel(layer, process_group=dist.new_group())
    elif way == "fsdp2":
        fully_shard(layer, mesh=mesh)
    out = checkpoint(layer, own, use_reentrant=False) if way == "activation_checkpointing" else layer(own)
    out.square().mean().backward()
    for name, parameter in layer.named_parameters():
        gradient = parameter.grad
        if way == "activation_checkpointing":  # nobody averages gradients of the weights
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        elif way == "fsdp2":
            gradient = gradient.full_tensor()
        torch.testing.assert_close(gradient, wanted[name.removeprefix("module.")], atol=1e-12, rtol=1e-9)


def refuse_module() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(ValueError, match="is for DynamicMaskAttention; got Linear"):
        parallelize_module(Layer(), mesh, {"query": DynamicMaskParallel()})


def test_only_the_module_is_split(ranks: Ranks) -> None:
    ranks.run(refuse_module)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "activation_checkpointing"])
def test_beside_other_ways_to_share_work(ranks: Ranks, way: str) -> None:
    """Each averages gradients of weights over the ranks, whose losses' mean is that of the whole sequence."""
    ranks.run(compare_layer, way)
