"""Wrong arguments: one error that names the argument, the rule and the values, and never a crash."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from flash_dmattn import (
    KeyIntervals,
    attention,
    dynamic_mask_attention,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flex_dmattn_func,
    plan_report,
    prepare_mask,
    select_keys,
)
from flash_dmattn.flash_dmattn_triton import triton_dmattn_func
from flash_dmattn.utils.mask import block_smooth, create_mask, topk_indices, topk_mask
from operators import BACKWARD, FORWARD, backward_arguments, changed, forward_arguments
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

NO_BIAS = (True, True, True, False)  # gradients that are needed
INF, NAN = float("inf"), float("nan")


def inputs(**changes: object) -> dict[str, object]:
    """Sound arguments for B 2, Sq 3, Sk 5, H 4, Hkv 2, D 8, with changes."""
    sound = {"query": torch.zeros(2, 3, 4, 8), "key": torch.zeros(2, 5, 2, 8), "value": torch.zeros(2, 5, 2, 8)}
    return sound | changes


def bits(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


BROADCAST = "must broadcast to (B, H or Hkv, Sq, Sk) = (2, 4 or 2, 3, 5)"
VALUE_ERRORS = {
    "query rank": ({"query": torch.zeros(3, 4, 8)}, "query must have 4 dimensions; got query (3, 4, 8)"),
    "query rank 5": ({"query": torch.zeros(1, 2, 3, 4, 8)}, "query must have 1 to 4 dimensions; got query with 5"),
    "key scalar": ({"key": torch.zeros(())}, "key must have 1 to 4 dimensions; got key with 0 dimensions"),
    "value rank": ({"value": torch.zeros(2, 5)}, "value must have 4 dimensions; got value (2, 5)"),
    "query integer": (
        {"query": torch.zeros(2, 3, 4, 8, dtype=torch.int64)},
        "query must be float16, bfloat16, float32 or float64; got query int64",
    ),
    "query bool": ({"query": bits(2, 3, 4, 8)}, "query must be float16, bfloat16, float32 or float64; got query bool"),
    "query complex": ({"query": torch.zeros(2, 3, 4, 8, dtype=torch.complex64)}, "got query complex64"),
    "key dtype": (
        {"key": torch.zeros(2, 5, 2, 8).half()},
        "key must have query's dtype; got key float16, query float32",
    ),
    "value dtype": (
        {"value": torch.zeros(2, 5, 2, 8).double()},
        "value must have query's dtype; got value float64, query float32",
    ),
    "head dim 0": (
        {name: torch.zeros(2, 5, 2, 0) for name in ("query", "key", "value")},
        "query must have a head dim of 1 to 256; got query (2, 5, 2, 0)",
    ),
    "head dim 257": (
        {name: torch.zeros(2, 5, 2, 257) for name in ("query", "key", "value")},
        "query must have a head dim of 1 to 256; got query (2, 5, 2, 257)",
    ),
    "key batch": (
        {"key": torch.zeros(3, 5, 2, 8)},
        "key must have query's batch size; got key (3, 5, 2, 8), query (2, 3, 4, 8)",
    ),
    "key head dim": (
        {"key": torch.zeros(2, 5, 2, 4)},
        "key must have query's head dim; got key (2, 5, 2, 4), query (2, 3, 4, 8)",
    ),
    "value shape": (
        {"value": torch.zeros(2, 6, 2, 8)},
        "value must have key's shape but for the head dim; got value (2, 6, 2, 8), key (2, 5, 2, 8)",
    ),
    "heads": (
        {"key": torch.zeros(2, 5, 3, 8), "value": torch.zeros(2, 5, 3, 8)},
        "query must have a multiple of key's heads; got query (2, 3, 4, 8), key (2, 5, 3, 8)",
    ),
    "no key heads": (
        {"key": torch.zeros(2, 5, 0, 8), "value": torch.zeros(2, 5, 0, 8)},
        "query must have a multiple of key's heads; got query (2, 3, 4, 8), key (2, 5, 0, 8)",
    ),
    "mask dtype": ({"mask": torch.zeros(3, 5)}, "mask must be bool; got mask float32"),
    "mask integer": ({"mask": torch.zeros(3, 5, dtype=torch.uint8)}, "mask must be bool; got mask uint8"),
    "mask scalar": ({"mask": bits()}, "mask must have 1 to 4 dimensions; got mask with 0 dimensions"),
    "mask rank 1": ({"mask": bits(5)}, "mask must have 2, 3 or 4 dimensions; got mask (5)"),
    "mask batch": ({"mask": bits(3, 1, 3, 5)}, f"mask {BROADCAST}; got mask (3, 1, 3, 5)"),
    "mask heads": ({"mask": bits(2, 3, 3, 5)}, f"mask {BROADCAST}; got mask (2, 3, 3, 5)"),
    "mask rows": ({"mask": bits(2, 1, 2, 5)}, f"mask {BROADCAST}; got mask (2, 1, 2, 5)"),
    "mask keys": ({"mask": bits(2, 1, 3, 4)}, f"mask {BROADCAST}; got mask (2, 1, 3, 4)"),
    "mask per key": ({"mask": bits(2, 3, 5)}, f"mask {BROADCAST}; got mask (2, 3, 5)"),
    "mask of rows and keys": ({"mask": bits(5, 3)}, f"mask {BROADCAST}; got mask (5, 3)"),
    "mask of batch and keys": (
        {"mask": bits(2, 5)},
        f"mask {BROADCAST}; got mask (2, 5): if that is (B, Sk), make it (B, 1, Sk), in Python mask[:, None, :]",
    ),
    "bias of batch and keys": (
        {"bias": torch.zeros(2, 5)},
        f"bias {BROADCAST}; got bias (2, 5): if that is (B, Sk), make it (B, 1, Sk), in Python bias[:, None, :]",
    ),
    "bias dtype": (
        {"bias": torch.zeros(3, 5).half()},
        "bias must have query's dtype or float32; got bias float16, query float32",
    ),
    "bias integer": (
        {"bias": torch.zeros(3, 5, dtype=torch.int64)},
        "bias must have query's dtype or float32; got bias int64",
    ),
    "bias rank": ({"bias": torch.zeros(5)}, "bias must have 2, 3 or 4 dimensions; got bias (5)"),
    "bias shape": ({"bias": torch.zeros(2, 4, 3, 6)}, f"bias {BROADCAST}; got bias (2, 4, 3, 6)"),
    "seqlens dtype": ({"seqlens_k": torch.zeros(2, dtype=torch.int64)}, "seqlens_k must be int32; got seqlens_k int64"),
    "seqlens shape": (
        {"seqlens_k": torch.zeros(3, dtype=torch.int32)},
        "seqlens_k must have the shape (B) = (2); got seqlens_k (3)",
    ),
    "seqlens rank": (
        {"seqlens_k": torch.zeros(2, 1, dtype=torch.int32)},
        "seqlens_k must have 1 dimension; got seqlens_k (2, 1)",
    ),
    "scale nan": ({"scale": NAN}, "scale must be finite; got scale nan"),
    "scale infinite": ({"scale": -INF}, "scale must be finite; got scale -inf"),
    "scale of an endless integer": ({"scale": 10**400}, "scale must be finite; got scale inf"),
    "softcap negative": ({"softcap": -1}, "softcap must be finite and not negative; got softcap -1"),
    "softcap nan": ({"softcap": NAN}, "softcap must be finite and not negative; got softcap nan"),
    "key device": ({"key": torch.zeros(2, 5, 2, 8, device="meta")}, "got key on meta, query on cpu"),
    "mask device": ({"mask": bits(3, 5).to("meta")}, "mask must be on the device of query; got mask on meta, query on"),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("changes", "message"), VALUE_ERRORS.values(), ids=VALUE_ERRORS.keys())
def test_value_errors(changes: dict, message: str, requires_grad: bool) -> None:
    arguments = inputs(**changes)
    if requires_grad:
        for name in ("query", "key", "value"):
            if arguments[name].is_floating_point():
                arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(**arguments)


def test_sizes_are_refused_before_anything_is_copied() -> None:
    """Expanded from one number, so that D has a stride of 0: 512 GiB if it was copied first."""
    query, key = torch.zeros(()).expand(1, 8, 2**31, 8), torch.zeros(1, 8, 1, 8)
    message = "query must have at most 65536 heads for each of key's; got query (1, 8, 2147483648, 8), key (1, 8, 1, 8)"
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(query, key, key)
    with pytest.raises(ValueError, match=re.escape(message)):
        BACKWARD(*backward_arguments(query, None, (query,) * 3, forward_arguments(query, key, key), NO_BIAS))


@pytest.mark.parametrize("copied", [False, True])
def test_memory_that_runs_out_is_counted(copied: bool) -> None:
    """For the result, or for a copy of query: 2^48 bytes, more than a process can address. Fewer are granted where the
    system overcommits whatever is asked for."""
    query = torch.zeros(1 if copied else 8).expand(1, 2**30, 2**13, 8)
    key = torch.zeros(1, 8, 1, 8)
    with pytest.raises(RuntimeError, match=f"^allocation failed: {2**48} bytes asked for on cpu$"):
        attention(query, key, key)


TYPE_ERRORS = {
    "query list": ({"query": [[1.0]]}, "query must be a torch.Tensor; got query of type list"),
    "key none": ({"key": None}, "key must be a torch.Tensor; got key of type NoneType"),
    "value array": ({"value": np.zeros(3)}, "value must be a torch.Tensor; got value of type ndarray"),
    "mask list": (
        {"mask": [True]},
        "mask must be a torch.Tensor, KeyIntervals, KeyIndices, PreparedMask or None; got mask of type list",
    ),
    "bias number": ({"bias": 1.0}, "bias must be a torch.Tensor or None; got bias of type float"),
    "seqlens list": ({"seqlens_k": [3, 5]}, "seqlens_k must be a torch.Tensor or None; got seqlens_k of type list"),
    "scale text": ({"scale": "0.5"}, "scale must be a number; got scale of type str"),
    "scale bool": ({"scale": True}, "scale must be a number; got scale of type bool"),
    "scale tensor": ({"scale": torch.ones(())}, "scale must be a number; got scale of type Tensor"),
    "scale complex": ({"scale": 1j}, "scale must be a number; got scale of type complex"),
    "softcap none": ({"softcap": None}, "softcap must be a number; got softcap of type NoneType"),
    "causal number": ({"is_causal": 1}, "is_causal must be a bool; got is_causal of type int"),
    "deterministic text": ({"deterministic": "no"}, "deterministic must be a bool; got deterministic of type str"),
    "return_lse number": ({"return_lse": 1}, "return_lse must be a bool; got return_lse of type int"),
}


@pytest.mark.parametrize(("changes", "message"), TYPE_ERRORS.values(), ids=TYPE_ERRORS.keys())
def test_type_errors(changes: dict, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        attention(**inputs(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attn_mask": [True]},
            "attn_mask must be a torch.Tensor, KeyIntervals, KeyIndices, PreparedMask or None; got attn_mask of",
        ),
        ({"attn_bias": 0}, "attn_bias must be a torch.Tensor or None; got attn_bias of type int"),
        ({"softmax_scale": "1"}, "softmax_scale must be a number; got softmax_scale of type str"),
        ({"return_attn_probs": 1}, "return_attn_probs must be a bool; got return_attn_probs of type int"),
        ({"is_causal": 0}, "is_causal must be a bool; got is_causal of type int"),
    ],
)
def test_type_errors_under_the_original_names(changes: dict, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        flash_dmattn_func(**inputs(**changes))


INTERVALS = KeyIntervals.causal(3, 5)
BOUND = torch.zeros(2, 2, 5, dtype=torch.int32)
LENGTHS = torch.ones(2, dtype=torch.int32)
# Every public function, with a sound value of each of its tensor arguments.
TENSOR_ARGUMENTS: dict[str, tuple[Callable, dict[str, object], dict[str, object]]] = {
    "attention": (attention, inputs(mask=bits(3, 5), bias=torch.zeros(3, 5), seqlens_k=LENGTHS), {}),
    "dynamic_mask_attention": (
        dynamic_mask_attention,
        inputs(key_bias=torch.zeros(2, 2, 5), scores=torch.zeros(2, 2, 5), key_mask=bits(2, 2, 5), seqlens_k=LENGTHS),
        {"window_size": 3},
    ),
    "flash_dmattn_func": (flash_dmattn_func, inputs(attn_mask=bits(3, 5), attn_bias=torch.zeros(3, 5)), {}),
    "flex_dmattn_func": (flex_dmattn_func, inputs(attn_mask=bits(3, 5), attn_bias=torch.zeros(3, 5)), {}),
    "triton_dmattn_func": (triton_dmattn_func, inputs(attn_mask=bits(3, 5), attn_bias=torch.zeros(3, 5)), {}),
    "select_keys": (
        select_keys,
        {"scores": torch.zeros(2, 2, 5), "key_mask": bits(2, 2, 5), "seqlens_k": LENGTHS},
        {"window_size": 3},
    ),
    "prepare_mask": (prepare_mask, {"mask": bits(3, 5)}, {}),
    "plan_report": (
        plan_report,
        {"query": torch.zeros(2, 3, 4, 8), "key": torch.zeros(2, 5, 2, 8), "mask": bits(3, 5), "seqlens_k": LENGTHS},
        {},
    ),
    "KeyIntervals": (KeyIntervals, {"begin": BOUND, "end": BOUND}, {}),
    "intersection": (INTERVALS.intersection, {"other": bits(3, 5)}, {}),
    "causal": (KeyIntervals.causal, {"seqlens_k": LENGTHS}, {"seqlen_q": 3, "seqlen_k": 5}),
    "prefix": (KeyIntervals.prefix, {"prefix_length": LENGTHS, "seqlens_k": LENGTHS}, {"seqlen_q": 3, "seqlen_k": 5}),
    "documents": (KeyIntervals.documents, {"cu_seqlens": torch.tensor([0, 2, 5])}, {}),
    "topk_indices": (topk_indices, {"attention_bias": torch.zeros(2, 2, 5)}, {"window_size": 3}),
    "topk_mask": (
        topk_mask,
        {"attention_bias": torch.zeros(2, 2, 5), "attention_mask": bits(2, 2, 5)},
        {"window_size": 3, "min_dtype": -1e9},
    ),
    "create_mask": (
        create_mask,
        {"attention_bias": torch.zeros(2, 2, 5), "attention_mask": bits(2, 5)},
        {"batch_size": 2, "query_len": 3, "key_len": 5, "window_size": 3, "min_dtype": -1e9},
    ),
    "block_smooth": (block_smooth, {"attention_mask": bits(3, 5)}, {"key_len": 5, "block_size": 2}),
}


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize(("function", "tensors", "others"), TENSOR_ARGUMENTS.values(), ids=TENSOR_ARGUMENTS.keys())
def test_tensors_that_are_not_dense_are_named(function: Callable, tensors: dict, others: dict) -> None:
    function(**tensors, **others)
    for name, tensor in tensors.items():
        message = f"{name} must be a dense tensor; got {name} with layout sparse_coo"
        with pytest.raises(ValueError, match=re.escape(message)):
            function(**(tensors | {name: tensor.to_sparse()}), **others)


def test_other_layouts_are_named() -> None:
    rows = [torch.zeros(3, 4, 8), torch.zeros(2, 4, 8)]
    layouts = {
        "sparse_csr": torch.zeros(2, 3, 4, 8).to_sparse_csr(2),
        "_mkldnn": torch.zeros(2, 3, 4, 8).to_mkldnn(),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
    }
    for layout, query in layouts.items():
        with pytest.raises(ValueError, match=f"query must be a dense tensor; got query with layout {layout}"):
            attention(**inputs(query=query))


# ---- A mask that can be read as (Sq, Sk) or as (B, Sk)

SQUARE = {"query": torch.zeros(4, 4, 2, 8), "key": torch.zeros(4, 6, 2, 8), "value": torch.zeros(4, 6, 2, 8)}
TWO_READINGS: dict[str, tuple[str, Callable]] = {
    "mask": ("mask", lambda mask: attention(**SQUARE, mask=mask)),
    "bias": ("bias", lambda mask: attention(**SQUARE, bias=mask.float())),
    "flash_dmattn_func": ("mask", lambda mask: flash_dmattn_func(**SQUARE, attn_mask=mask)),
    "probabilities": ("mask", lambda mask: flash_dmattn_func(**SQUARE, attn_mask=mask, return_attn_probs=True)),
    "bound": ("mask", lambda mask: flash_dmattn_func_auto("cpu", attn_mask=mask)(**SQUARE)),
    "flex": ("mask", lambda mask: flex_dmattn_func(**SQUARE, attn_mask=mask)),
    "flex bias": ("bias", lambda mask: flex_dmattn_func(**SQUARE, attn_bias=mask.float())),
    "plan_report": ("mask", lambda mask: plan_report(SQUARE["query"], SQUARE["key"], mask=mask)),
    "intersection": ("other", lambda mask: select_keys(torch.zeros(4, 1, 6), 3, seqlen_q=4).intersection(mask)),
    "topk_mask": ("attention_mask", lambda mask: topk_mask(torch.zeros(4, 1, 1, 6), mask, 3, -1e9)),
}


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize(("name", "call"), TWO_READINGS.values(), ids=TWO_READINGS.keys())
def test_a_mask_with_two_readings_warns_once_for_every_place(name: str, call: Callable) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("default", ".* is read as")
        for _ in range(3):
            call(bits(4, 6))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = (
        f"{name} (4, 6) is read as (Sq, Sk), but with B = Sq = 4 it may be meant as (B, Sk): give {name}[:, None, :]"
    )
    assert message in str(caught[0].message)


def test_masks_with_one_reading_do_not_warn() -> None:
    mask = bits(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in (mask[None, None], mask[:, None, :], mask[:1], mask[:, :1], prepare_mask(mask)):
            attention(**SQUARE, mask=form)
        for batch in (1, 3):
            attention(**{name: tensor[:batch] for name, tensor in SQUARE.items()}, mask=mask, bias=mask.float())
        flash_dmattn_func(**{name: tensor[:1] for name, tensor in SQUARE.items()}, attn_mask=mask)
        KeyIntervals.causal(4, 6).intersection(mask)


def test_the_warning_breaks_no_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda mask: attention(**SQUARE, mask=mask), fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* is read as")
        compiled(bits(4, 6))
    torch._dynamo.reset()


def test_other_devices_are_named() -> None:
    with FakeTensorMode():
        tensor = torch.empty(2, 3, 4, 8, device="mps")
        cpu = torch.empty(2, 3, 4, 8)
        message = "query must be on a device that this build has a backend for; got query on mps:0, .*backends: cpu"
        with pytest.raises(ValueError, match=message):
            attention(tensor, tensor, tensor)
        with pytest.raises(ValueError, match="value must be on the device of query; got value on mps:0, query on cpu"):
            attention(cpu, cpu, tensor)


def test_backends_by_wrong_names() -> None:
    with pytest.raises(ValueError, match="backend must be one of cuda, cpu, triton, flex or None; got backend 'tpu'"):
        flash_dmattn_func_auto("tpu")
    with pytest.raises(RuntimeError, match=r"backend 'triton' is not available in this build; available are .*cpu"):
        flash_dmattn_func_auto("triton")


@pytest.mark.parametrize("scale", [1, Fraction(1, 2), np.float32(0.5), np.int64(2)])
def test_every_kind_of_real_number_is_a_scale(scale: object) -> None:
    query = torch.randn(2, 3, 4, 8)
    expected = attention(**inputs(query=query, scale=float(scale)))
    assert torch.equal(attention(**inputs(query=query, scale=scale)), expected)


BACKWARD_ERRORS = {
    "dout shape": ("dout", torch.zeros(2, 3, 4, 7), "dout must have the shape (B, Sq, H, Dv) = (2, 3, 4, 8)"),
    "dout dtype": ("dout", torch.zeros(2, 3, 4, 8).half(), "dout must be float32; got dout float16"),
    "dout scalar": ("dout", torch.zeros(()), "dout must have 1 to 4 dimensions"),
    "dlse shape": ("dlse", torch.zeros(2, 4, 4), "dlse must have the shape (B, H, Sq) = (2, 4, 3); got dlse (2, 4, 4)"),
    "dlse dtype": ("dlse", torch.zeros(2, 4, 3).double(), "dlse must be float32; got dlse float64"),
    "plan dtype": ("plan", torch.zeros(64), "plan must be contiguous uint8 with 1 dimension; got plan float32 with 1"),
    "plan rank": ("plan", torch.zeros(8, 8).byte(), "with 1 dimension; got plan uint8 with 2 dimensions"),
    "plan stride": ("plan", torch.zeros(128).byte()[::2], "plan must be contiguous uint8 with 1 dimension"),
    "plan alignment": ("plan", torch.zeros(65).byte()[1:], "plan must be aligned to 64 bytes; got plan unaligned"),
    "out shape": ("out", torch.zeros(2, 3, 8), "out must have 4 dimensions; got out (2, 3, 8)"),
    "lse shape": ("lse", torch.zeros(2, 3, 4), "lse must have the shape (B, H, Sq) = (2, 4, 3); got lse (2, 3, 4)"),
    "row_stats shape": ("row_stats", torch.zeros(2, 4, 3), "row_stats must have 4 dimensions; got row_stats (2, 4, 3)"),
    "row_stats dtype": (
        "row_stats",
        torch.zeros(2, 4, 3, 2).half(),
        "row_stats must be float32; got row_stats float16",
    ),
    "key shape": ("key", torch.zeros(2, 5, 2, 4), "key must have query's head dim"),
}


@pytest.mark.parametrize(("name", "tensor", "message"), BACKWARD_ERRORS.values(), ids=BACKWARD_ERRORS.keys())
def test_backward_operator_checks_its_arguments(name: str, tensor: Tensor, message: str) -> None:
    forward = forward_arguments(**inputs())
    results = FORWARD(*forward)
    arguments = backward_arguments(torch.zeros_like(results[0]), None, results, forward, NO_BIAS)
    with pytest.raises(ValueError, match=re.escape(message)):
        BACKWARD(*changed(BACKWARD, arguments, **{name: tensor}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_none_for_a_tensor_in_a_direct_call(name: str, device: str) -> None:
    tensors = [None if other == name else tensor.to(device) for other, tensor in inputs().items()]
    with pytest.raises((TypeError, ValueError), match=f"{name} must be a"):
        FORWARD(*forward_arguments(*tensors))
