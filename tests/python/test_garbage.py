"""Arguments of any kind raise what is documented, and never crash the process."""

from __future__ import annotations

import torch
from flash_dmattn import (
    attention,
)
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

BACKWARD = torch.ops.flash_dmattn.attention_backward.default
DTYPES = st.sampled_from(
    [torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int32, torch.int64, torch.uint8]
    + [torch.complex64, torch.float8_e4m3fn, torch.quint8, torch.uint16]
)
SIZES = st.lists(st.sampled_from([0, 1, 1, 2, 2, 3, 4, 8]), max_size=5)


@st.composite
def tensors(draw: st.DrawFn, sizes: st.SearchStrategy = SIZES, dtypes: st.SearchStrategy = DTYPES) -> Tensor:
    """Any shape, dtype, strides and layout."""
    shape, dtype = draw(sizes), draw(dtypes)
    if dtype == torch.quint8:
        return torch.quantize_per_tensor(torch.zeros(shape), 1.0, 0, dtype)
    tensor = torch.zeros(shape, dtype=dtype)
    form = draw(st.sampled_from(["plain"] * 4 + ["expanded", "permuted", "sparse", "meta", "offset"]))
    if form == "expanded":
        return torch.zeros([1] * len(shape), dtype=dtype).expand(shape)
    if form == "permuted":
        return tensor.permute(draw(st.permutations(range(len(shape)))))
    if form == "offset":
        return torch.zeros([*shape, 3], dtype=dtype)[..., 1]
    if form == "meta":
        return tensor.to("meta")
    return tensor.to_sparse() if form == "sparse" and dtype == torch.float32 and shape else tensor


def right(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> st.SearchStrategy:
    return st.just(torch.zeros(shape, dtype=dtype))


NUMBERS = st.one_of(st.none(), st.floats(), st.integers(), st.booleans(), st.text(max_size=3), st.just(10**400))
FLAGS = st.one_of(st.none(), st.integers(), st.text(max_size=3))
OBJECTS = st.one_of(st.none(), st.integers(), st.lists(st.booleans(), max_size=2))
SOUND = {
    "query": right((2, 3, 4, 8)),
    "key": right((2, 5, 2, 8)),
    "value": right((2, 5, 2, 8)),
    "mask": st.one_of(st.none(), right((2, 2, 5), torch.bool), right((1, 4, 3, 1), torch.bool)),
    "bias": st.one_of(st.none(), right((2, 1, 3, 5)), right((3, 5))),
    "sink": st.one_of(st.none(), right((4,))),
    "seqlens_k": st.one_of(st.none(), right((2,), torch.int32)),
    "scale": st.one_of(st.none(), st.floats(-2, 2)),
    "softcap": st.floats(0, 2),
    "is_causal": st.booleans(),
    "deterministic": st.booleans(),
}
GARBAGE = {name: st.one_of(tensors(), tensors(), OBJECTS) for name in list(SOUND)[:7]} | {
    "scale": NUMBERS,
    "softcap": NUMBERS,
    "is_causal": FLAGS,
    "deterministic": FLAGS,
}


@st.composite
def mostly_sound(draw: st.DrawFn, sound: dict, garbage: dict) -> dict[str, object]:
    """Sound arguments of which a few are replaced by garbage, so that every rule has its turn."""
    wrong = draw(st.sets(st.sampled_from(list(garbage)), max_size=2))
    return {name: draw(garbage[name] if name in wrong else strategy) for name, strategy in sound.items()}


@given(mostly_sound(SOUND, GARBAGE), st.booleans())
def test_garbage_raises_documented_errors_only(arguments: dict, requires_grad: bool) -> None:
    if requires_grad:
        for name in ("query", "key", "value", "bias", "sink"):
            if isinstance(arguments[name], Tensor) and arguments[name].dtype.is_floating_point:
                arguments[name] = arguments[name].detach().requires_grad_()
    try:
        out, lse = attention(**arguments, return_lse=True)
        if out.requires_grad and not out.is_meta:
            (out.sum() + lse.sum()).backward()
    except (ValueError, TypeError, RuntimeError):
        event("refused")
        return
    event("accepted")
    query = arguments["query"]
    assert out.shape == (*query.shape[:3], arguments["value"].shape[3]) and out.dtype == query.dtype
    assert lse.shape == (query.shape[0], query.shape[2], query.shape[1])


NEEDS = {f"needs_{name}": st.booleans() for name in ("dquery", "dkey", "dvalue", "dbias", "dsink")}
SOUND_BACKWARD = (
    SOUND
    | NEEDS
    | {
        "interval_begin": st.none(),
        "interval_end": st.none(),
        "interval_window": st.integers(-1, 8),
        "indices": st.one_of(st.none(), right((2, 1, 3, 5), torch.int32)),
        "index_lengths": st.none(),
        "index_block_size": st.integers(0, 8),
        "plan": st.one_of(st.none(), right((64,), torch.uint8)),  # the CPU has no use for one
        "dout": right((2, 3, 4, 8)),
        "dlse": st.one_of(st.none(), right((2, 4, 3))),
        "out": right((2, 3, 4, 8)),
        "lse": right((2, 4, 3)),
        "row_stats": right((2, 4, 3, 2)),
    }
)
GARBAGE_BACKWARD = GARBAGE | {
    name: tensors()
    for name in (
        "interval_begin",
        "interval_end",
        "indices",
        "index_lengths",
        "plan",
        "dout",
        "dlse",
        "out",
        "lse",
        "row_stats",
    )
}


@given(mostly_sound(SOUND_BACKWARD, GARBAGE_BACKWARD))
def test_garbage_to_the_backward_operator(arguments: dict) -> None:
    try:
        gradients = BACKWARD(**arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        assert "missing value for argument" not in str(error)
        event("refused")
        return
    event("accepted")
    for name, gradient in zip(("query", "key", "value", "bias", "sink"), gradients, strict=True):
        assert gradient.shape == (arguments[name].shape if arguments[f"needs_d{name}"] else (0,))
