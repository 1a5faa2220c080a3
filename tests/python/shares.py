"""Sequences that are split across ranks, against one process that has them whole: what tests of
flash_dmattn.distributed run on every rank, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import flash_dmattn
import torch
import torch.distributed as dist
from flash_dmattn import KeyIntervals, select_keys
from flash_dmattn.distributed import (
    DynamicMaskAttention,
    DynamicMaskParallel,
    attention,
    dynamic_mask_attention,
    gather_kept_keys,
    shard,
    unshard,
)
from ranks import mesh_of, rank_device
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

BATCH, HEADS, KEY_HEADS = 2, 4, 2
SHARE, HEAD_DIM = 24, 16  # tokens of a rank; both are Setting's defaults
TOKEN_DIM = {"query": 1, "key": 1, "value": 1, "key_bias": 2, "bias": 2, "scores": 2, "key_mask": 2, "dout": 1}
LEAVES = ("query", "key", "value", "key_bias")
# Of the largest value, or of 1. Outputs differ by roundings where kernels add up tile by tile.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}


@dataclass(frozen=True)
class Setting:
    """How the arguments of a case are made: sizes and heads of bias and scores, and changes to what is random."""

    window: int = 10
    bias: tuple[int, int] = (BATCH, KEY_HEADS)
    scores: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float64
    share: int = SHARE
    head_dim: int = HEAD_DIM
    change: Callable[[dict[str, Tensor], int], None] | None = None  # of the arguments, in place, and the share
    options: dict[str, object] = field(default_factory=dict)


def make_arguments(setting: Setting) -> dict[str, Tensor]:
    """Of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    length = setting.share * dist.get_world_size()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(setting.dtype)

    arguments = {name: normal(BATCH, length, heads, setting.head_dim) for name, heads in
                 (("query", HEADS), ("key", KEY_HEADS), ("value", KEY_HEADS), ("dout", HEADS))}  # fmt: skip
    arguments["key_bias"] = normal(*setting.bias, length)
    if setting.scores is not None:
        arguments["scores"] = normal(*setting.scores, length)
    if setting.change is not None:
        setting.change(arguments, setting.share)
    return {name: tensor.to(rank_device()) for name, tensor in arguments.items()}


def hide_padding(arguments: dict[str, Tensor], share: int) -> None:
    """Of the first rank all keys but two, in the second batch element; what they hold is not to be seen."""
    length = arguments["key"].shape[1]
    arguments["key_mask"] = torch.arange(length) >= torch.tensor([[[0]], [[share - 2]]])
    for name in ("key", "value"):
        arguments[name][1, : share - 2] = torch.nan


def round_scores(arguments: dict[str, Tensor], share: int) -> None:
    arguments["key_bias"].round_()


def break_a_score(arguments: dict[str, Tensor], share: int) -> None:
    arguments["scores"][0, :, 5] = torch.nan


def hide_by_scores(arguments: dict[str, Tensor], share: int) -> None:
    """Of the first rank all keys but four, the last one among them: what stands for the others must not be it again."""
    arguments["key_bias"][..., 3 : share - 1] = -torch.inf


def hide_a_rank(arguments: dict[str, Tensor], share: int) -> None:
    arguments["key_bias"][..., :share] = -torch.inf


def share_of(name: str, tensor: Tensor, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return tensor.chunk(dist.get_world_size(), TOKEN_DIM.get(name, 1))[rank]


def own_shares(setting: Setting) -> dict[str, Tensor]:
    return {name: share_of(name, tensor) for name, tensor in make_arguments(setting).items()}


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


def gathered_first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    window_size: int,
    *,
    group: object = None,
    scores: Tensor | None = None,
    key_mask: Tensor | None = None,
    **options: object,
) -> Tensor:
    """dynamic_mask_attention by way of gather_kept_keys."""
    given = {"scores": scores, "key_mask": key_mask}
    gathered = gather_kept_keys(key, value, key_bias, window_size, group=group, **given)
    query = query * 1  # beside the exchange
    return dynamic_mask_attention(query, key, value, key_bias, window_size, gathered=gathered, **given, **options)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        size = max(wanted[name].nan_to_num().abs().max().item(), 1)
        torch.testing.assert_close(
            tensor,
            wanted[name],
            atol=TOLERANCE[tensor.dtype] * size,
            rtol=0,
            equal_nan=True,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        assert torch.equal(tensor.nan_to_num(7), wanted[name].nan_to_num(7)), f"other bits in {name}"


def compare_with_one_process(setting: Setting) -> None:
    """On every rank."""
    whole = make_arguments(setting)
    wanted = results_of(flash_dmattn.dynamic_mask_attention, whole, setting.window, **setting.options)
    wanted = {name: share_of(name, tensor) for name, tensor in wanted.items()}
    own = {name: share_of(name, tensor) for name, tensor in whole.items()}
    found = results_of(dynamic_mask_attention, own, setting.window, group=dist.group.WORLD, **setting.options)
    if setting.dtype == torch.float64:
        assert_same_bits({"out": found["out"]}, wanted)
    assert_close(found, wanted)
    assert all(tensor.is_contiguous() for tensor in found.values())


def compare_two_backwards(setting: Setting) -> None:
    """Of one graph: the second gets what the first one got."""
    own = own_shares(setting)
    dout = own.pop("dout")
    leaves = [own[name].requires_grad_() for name in LEAVES]
    out = dynamic_mask_attention(**own, window_size=setting.window, group=dist.group.WORLD, deterministic=True)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    copies = [tensor.clone() for tensor in first]
    second = torch.autograd.grad(out, leaves, dout)
    for name, *tensors in zip(LEAVES, first, copies, second, strict=True):
        for tensor in tensors[1:]:
            assert_same_bits({name: tensors[0]}, {name: tensor})


# ---- The same calls in one process


def compare_with_parts(setting: Setting) -> None:
    """Bits of all results are those of every rank's call, made here, with gradients added up in float32 and rounded
    once."""
    options = {"deterministic": True} | setting.options
    own = own_shares(setting)
    found = results_of(dynamic_mask_attention, own, setting.window, group=dist.group.WORLD, **options)
    assert_same_bits(found, results_of_parts(setting, options))


def results_of_parts(setting: Setting, options: dict[str, object]) -> dict[str, Tensor]:
    """This rank's."""
    whole, rank = make_arguments(setting), dist.get_rank()
    shares = [
        {name: share_of(name, tensor, of) for name, tensor in whole.items()} for of in range(dist.get_world_size())
    ]
    kept = [_last_kept(share.get("scores", share["key_bias"]), setting.window) for share in shares]
    count = min(setting.window, setting.share)
    keys = LEAVES[1:]
    sums: dict[str, Tensor] = {}
    for of in range(rank, len(shares)):
        call = dict(shares[of])
        for name in set(call) - {"query", "dout"}:
            earlier = [_take(name, shares[before][name], kept[before], count) for before in range(of)]
            call[name] = torch.cat([*earlier, call[name]], TOKEN_DIM[name])
        results = results_of(flash_dmattn.dynamic_mask_attention, call, setting.window, **options)
        if of == rank:
            wanted = results
            continue
        for name in keys:
            part = results[name].narrow(TOKEN_DIM[name], rank * count, count).float()
            sums[name] = part if name not in sums else sums[name] + part
    for name in keys:
        own = wanted[name].narrow(TOKEN_DIM[name], rank * count, setting.share).clone()
        if name in sums:
            _add_rounded(name, own, kept[rank], sums[name])
        wanted[name] = own
    return wanted


def _last_kept(scores: Tensor, window: int) -> list[list[Tensor]]:
    """For each batch element and head, which keys the last row keeps."""
    mask = select_keys(scores, window).dense_mask(scores.shape[2])[:, :, -1]
    return [[head.nonzero()[:, 0] for head in heads] for heads in mask]


def _by_head(name: str, tensor: Tensor) -> Tensor:
    return tensor.movedim(TOKEN_DIM[name], 2)


def _take(name: str, tensor: Tensor, kept: list[list[Tensor]], count: int) -> Tensor:
    """What is kept, then zeros that are hidden."""
    source = _by_head(name, tensor)
    taken = source.new_full((*source.shape[:2], count, *source.shape[3:]), -torch.inf if source.dim() == 3 else 0)
    for element, heads in enumerate(kept):
        for head, index in enumerate(heads):
            taken[element, head, : len(index)] = source[element, head, index]
    return _by_head(name, taken)


def _add_rounded(name: str, gradient: Tensor, kept: list[list[Tensor]], sums: Tensor) -> None:
    gradient, sums = _by_head(name, gradient), _by_head(name, sums)
    for element, heads in enumerate(kept):
        for head, index in enumerate(heads):
            own = gradient[element, head, index].float()
            gradient[element, head, index] = (own + sums[element, head, : len(index)]).to(gradient.dtype)


# ---- Ranks that want different gradients


def compare_frozen(setting: Setting) -> None:
    """Only queries want a gradient on the first rank, only keys on the others."""
    wanted = results_of(flash_dmattn.dynamic_mask_attention, make_arguments(setting), setting.window)
    for function in (dynamic_mask_attention, gathered_first):
        own = own_shares(setting)
        name = "query" if dist.get_rank() == 0 else "key"
        own[name].requires_grad_()
        dout = own.pop("dout")
        out = function(window_size=setting.window, group=dist.group.WORLD, **own)
        out.backward(dout)
        assert_close({name: own[name].grad}, {name: share_of(name, wanted[name])})


# ---- Started early, and compiled


def compare_gathered_first(setting: Setting) -> None:
    own, options = own_shares(setting), {"deterministic": True} | setting.options
    wanted = results_of(dynamic_mask_attention, own, setting.window, group=dist.group.WORLD, **options)
    found = results_of(gathered_first, own, setting.window, group=dist.group.WORLD, **options)
    assert_same_bits(found, wanted)


def compare_compiled(setting: Setting, backend: str) -> None:
    """In one graph."""
    mesh, own, options = mesh_of(names=("cp",)), own_shares(setting), {"deterministic": True}
    wanted = results_of(dynamic_mask_attention, own, setting.window, group=dist.group.WORLD, **options)
    for function in (dynamic_mask_attention, gathered_first):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        assert_same_bits(results_of(compiled, own, setting.window, group=mesh, **options), wanted)


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


def compare_intervals(name: str, order: str, with_bias: bool, setting: Setting) -> None:
    make_mask, is_causal = MASKS[name]
    whole = make_arguments(setting)
    mask = make_mask(whole["key"].shape[1])
    mask = None if mask is None else mask.to(rank_device())
    bias = whole.pop("key_bias")
    leaves = ["query", "key", "value"]
    if with_bias:
        whole["bias"] = bias
        leaves.append("bias")

    def run(function: Callable[..., Tensor], arguments: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
        given = {leaf: arguments[leaf].clone().requires_grad_() for leaf in leaves}
        out = function(mask=mask, is_causal=is_causal, **given, **options)
        gradients = torch.autograd.grad(out, list(given.values()), arguments["dout"])
        return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))

    def dim_of(part: str) -> int:
        return TOKEN_DIM.get(part, 1)

    ways = {"group": dist.group.WORLD, "order": order}
    own = {part: shard(tensor, dim=dim_of(part), **ways) for part, tensor in whole.items()}
    found = run(attention, own, **ways)
    together = {part: unshard(tensor, dim=dim_of(part), **ways) for part, tensor in found.items()}
    assert_close(together, run(flash_dmattn.attention, whole))


# ---- Beside other ways to share work


class Layer(nn.Module):
    """Projections, dynamic-mask attention, and a projection back; of as many heads as the projections return."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head_dim = setting.head_dim
        width, key_width = HEADS * setting.head_dim, KEY_HEADS * setting.head_dim
        for name, inputs, outputs in (
            ("query", width, width),
            ("key", width, key_width),
            ("value", width, key_width),
            ("score", width, KEY_HEADS),
            ("output", width, width),
        ):
            linear = nn.Linear(inputs, outputs, bias=name == "query", dtype=setting.dtype)
            self.add_module(name, linear.to(rank_device()))
        self.attend = DynamicMaskAttention(setting.window)

    def forward(self, x: Tensor) -> Tensor:
        key, value = (project(x).unflatten(2, (-1, self.head_dim)) for project in (self.key, self.value))
        bias = self.score(x).mT
        gathered = self.attend.gather(key, value, bias)
        query = self.query(x).unflatten(2, (-1, self.head_dim))
        return self.output(self.attend(query, key, value, bias, gathered=gathered).flatten(2))


def layer_input(setting: Setting) -> Tensor:
    """(B, S, width), of the whole sequence."""
    return make_arguments(setting)["query"].flatten(2)


def gradients_of_one_process(setting: Setting) -> dict[str, Tensor]:
    """Of the layer's weights, under a loss that is a mean over all tokens."""
    one = Layer(setting)
    one(layer_input(setting)).square().mean().backward()
    return {name: parameter.grad for name, parameter in one.named_parameters()}


def compare_layer(way: str, setting: Setting) -> None:
    """Gradients of the weights, averaged over the ranks, in all of which sequences are split."""
    wanted, mesh = gradients_of_one_process(setting), mesh_of()
    layer: nn.Module = parallelize_module(Layer(setting), mesh, {"attend": DynamicMaskParallel()})
    own = shard(layer_input(setting), group=mesh)
    if way == "ddp":
        layer = nn.parallel.DistributedDataParallel(layer, process_group=dist.new_group())
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
        assert_near(name, gradient, wanted[name.removeprefix("module.")])


def assert_near(name: str, found: Tensor, wanted: Tensor) -> None:
    """By norms, of gradients that are much smaller than 1."""
    difference, norm = (found.double() - wanted.double()).norm().item(), wanted.double().norm().item()
    assert difference <= TOLERANCE[wanted.dtype] * norm, f"{name} is {difference / norm:.2g} of its norm off"
