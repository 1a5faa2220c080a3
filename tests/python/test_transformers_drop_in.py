"""flash_dynamic_mask_attention_forward against the original's rule of selection, written out densely."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cases import assert_same_bits, to_device
from cases import make_case as make_random_case
from compare import assert_case_close
from drop_in import attention_module
from flash_dmattn import KeyIntervals
from flash_dmattn.integrations import _inputs, _masks
from flash_dmattn.integrations import modeling_flash_dynamic_mask_attention_utils as modeling
from flash_dmattn.integrations.flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward
from flash_dmattn.integrations.import_utils import is_flash_dmattn_available
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
)
from oracle import Case
from torch import Tensor, nn

LEAVES = ("query", "key", "value", "bias")
ROWS, KEYS = 33, 47

pytestmark = pytest.mark.devices("cpu", "cuda")


def make_case(*sizes: int, **settings: object) -> Case:
    """As in cases.py, but no two keys of a row have the same bias in any dtype: torch.topk would keep either."""
    case = make_random_case(*sizes, **settings)
    if case.bias is not None:
        generator = torch.Generator().manual_seed(3)
        order = torch.rand(case.bias.shape, generator=generator, device="cpu").argsort(-1)
        case.bias = to_device(order / 8 - 3).to(case.bias.dtype)
    return case


def run_drop_in(
    case: Case, window: int | None, module: nn.Module | None = None, **options: object
) -> dict[str, Tensor]:
    """out and all gradients, named as in `oracle.reference`."""
    leaves = {name: getattr(case, name) for name in LEAVES}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items() if tensor is not None}
    heads_first = [leaves[name].transpose(1, 2) for name in ("query", "key", "value")]
    module = module or attention_module(keep_window_size=window, is_causal=case.options.get("is_causal", False))
    arguments = {"scaling": case.options.get("scale"), "softcap": case.options.get("softcap")} | options
    out, weights = flash_dynamic_mask_attention_forward(
        module, *heads_first, case.mask, leaves.get("bias"), **arguments
    )
    assert weights is None
    gradients = torch.autograd.grad(out, list(leaves.values()), case.dout.to(out.dtype))
    return {"out": out.detach()} | {f"d{name}": grad for name, grad in zip(leaves, gradients, strict=True)}


def kept_by_the_original(
    mask: Tensor | None, bias: Tensor, window: int | None, *, rows: int, within_causal: bool = False
) -> Tensor | None:
    """What the original's rule leaves visible, the causal rule aside: mask and the highest scores of what it shows.

    within_causal: of what the causal rule shows, too.
    """
    keys = bias.shape[-1]
    if mask is not None:
        mask = mask.bool()[:, None, None] if mask.dim() == 2 else mask[:, :, None] if mask.dim() == 3 else mask
    if within_causal:
        rule = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        mask = rule[None, None] if mask is None else mask & rule
    if window is None or keys <= window:
        return mask
    scores = bias.detach()[:, :, None] if bias.dim() == 3 else bias.detach()
    if mask is not None:
        scores, mask = torch.broadcast_tensors(scores, mask)
        scores = scores.masked_fill(~mask, -math.inf)
    values, indices = scores.topk(window, dim=-1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, values != -math.inf)


def assert_keeps_what_the_original_keeps(
    case: Case, window: int | None, got: dict[str, Tensor], within_causal: bool = False
) -> None:
    rows = case.query.shape[1]
    kept = kept_by_the_original(case.mask, case.bias, window, rows=rows, within_causal=within_causal)
    assert_case_close(replace(case, mask=kept), got)


CAUSAL = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(KEYS - ROWS)
PADDING = torch.arange(KEYS) >= torch.tensor([[0], [9]])  # (B, Sk), on the left of the second
HOLES = torch.rand(2, 1, ROWS, KEYS, generator=torch.Generator().manual_seed(1)) < 0.6
MASKS = {
    "none": None,
    "padding": PADDING,
    "padding_of_integers": PADDING.long(),
    "padding_right": PADDING.flip(-1),
    "keys": PADDING[:, None],
    "keys_of_heads": torch.stack([PADDING, PADDING.roll(3, -1)], 1),
    "row_of_keys": PADDING[:, None, None],
    "causal": CAUSAL[None, None],
    "causal_and_padding": CAUSAL & PADDING[:, None, None],
    "causal_static_cache": torch.ones(ROWS, KEYS, dtype=torch.bool).tril(6)[None, None],
    "causal_ahead": torch.ones(ROWS, KEYS, dtype=torch.bool).tril(KEYS - ROWS + 5)[None, None],
    "prefix": (CAUSAL | (torch.arange(KEYS) < 25))[None, None],
    "future": CAUSAL[None, None].logical_not(),
    "holes": HOLES,
    "holes_of_heads": torch.cat([HOLES, HOLES.flip(2)], 1),
}
PER_KEY, FULL = (2, 2, KEYS), (2, 2, ROWS, KEYS)


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "is_causal"])
@pytest.mark.parametrize("bias", [PER_KEY, FULL], ids=["3d", "4d"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_keeps_what_the_original_keeps(mask: Tensor | None, bias: tuple[int, ...], is_causal: bool) -> None:
    case = make_case(bias=bias, is_causal=is_causal)
    case.mask = to_device(mask)
    for window in (1, 6, KEYS - 1, KEYS, None):
        got = run_drop_in(case, window)
        assert got["dbias"].shape == case.bias.shape
        assert_keeps_what_the_original_keeps(case, window, got)


@pytest.mark.parametrize("bias", [PER_KEY, FULL], ids=["3d", "4d"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_selection_of_each_row(mask: Tensor | None, bias: tuple[int, ...]) -> None:
    """selection="causal": the best of what mask and causal rule show."""
    case = make_case(bias=bias, is_causal=True)
    case.mask = to_device(mask)
    for window in (1, 6):
        got = run_drop_in(case, window, selection="causal")
        assert_keeps_what_the_original_keeps(case, window, got, within_causal=True)


BIASES = {
    "query_heads": (2, 4, KEYS),
    "one_head": (2, 1, KEYS),
    "one_for_the_batch": (1, 2, KEYS),
    "one_row": (2, 2, 1, KEYS),
    "rows_for_the_batch": (1, 1, ROWS, KEYS),
}


@pytest.mark.parametrize("mask", ["none", "padding", "causal_and_padding", "holes"])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_forms_of_the_bias(bias: tuple[int, ...], mask: str) -> None:
    case = make_case(bias=bias, is_causal=True)
    case.mask = to_device(MASKS[mask])
    assert_keeps_what_the_original_keeps(case, 6, run_drop_in(case, 6))


@pytest.mark.parametrize("mask", ["none", "causal", "holes"])
def test_every_dtype(dtype: torch.dtype, mask: str) -> None:
    case = make_case(dtype=dtype, bias=PER_KEY, is_causal=True, head_dim=64)
    case.mask = to_device(MASKS[mask])
    got = run_drop_in(case, 6)
    assert got["dbias"].dtype == dtype
    assert_keeps_what_the_original_keeps(case, 6, got)


def test_options() -> None:
    case = make_case(bias=PER_KEY, is_causal=True, scale=0.3, softcap=2.0)
    assert_keeps_what_the_original_keeps(case, 6, run_drop_in(case, 6))
    again = [run_drop_in(case, 6, deterministic=True) for _ in range(2)]
    assert_same_bits(*again)


@pytest.mark.parametrize("mask", [None, torch.rand(2, 1, 1, KEYS, generator=torch.Generator().manual_seed(2)) < 0.7])
def test_decode(mask: Tensor | None) -> None:
    """One row sees all keys, whatever is_causal says."""
    case = make_case(rows=1, bias=PER_KEY, is_causal=True)
    case.mask = to_device(mask)
    assert_keeps_what_the_original_keeps(case, 6, run_drop_in(case, 6))


def test_without_bias() -> None:
    for mask in ("none", "padding", "causal", "holes"):
        case = make_case(is_causal=True)
        case.mask = to_device(MASKS[mask])
        got = run_drop_in(case, KEYS)
        visible = None if case.mask is None else case.mask
        if mask == "padding":
            visible = case.mask[:, None, None]
        assert_case_close(replace(case, mask=visible), got)


def test_window_and_causality_come_from_module_or_arguments() -> None:
    case = make_case(bias=PER_KEY, is_causal=True)
    expected = run_drop_in(case, 6, deterministic=True)
    both = {"is_causal": True, "deterministic": True}
    for module, options in (
        (attention_module(), {"keep_window_size": 6}),
        (attention_module(), {"window_size": 6}),
        (attention_module(keep_window_size=9, is_causal=False), {"keep_window_size": 6}),
        (attention_module(keep_window_size=6, is_causal=False, layer_idx=3), {"window_size": None}),
    ):
        assert_same_bits(run_drop_in(case, None, module, **both, **options), expected)
    plain = attention_module(is_causal=True)  # no window at all: nothing is selected
    assert_case_close(case, run_drop_in(case, None, plain))


def test_selection_is_detached() -> None:
    """A bias of all keys gets a gradient where it is kept, and none through the choice."""
    case = make_case(bias=PER_KEY, is_causal=False)
    got = run_drop_in(case, 6)
    kept = kept_by_the_original(None, case.bias, 6, rows=ROWS)[:, :, 0]
    assert (got["dbias"][~kept] == 0).all() and (got["dbias"][kept] != 0).all()


# ---- Which masks take the path through intervals


FOUR_DIMS = [name for name, mask in MASKS.items() if mask is not None and mask.dim() == 4]


@pytest.mark.parametrize("name", FOUR_DIMS)
def test_recognised_masks(name: str) -> None:
    """Within these masks a key that drops out stays out, so that nothing of size Sq * Sk is needed."""
    is_growing = not name.startswith("holes") and name not in ("future", "prefix", "causal_ahead")
    assert (_masks.growing_mask(to_device(MASKS[name])) is not None) == is_growing


def packed_mask(lengths: list[int]) -> Tensor:
    """bool (1, 1, S, S): causal, documents see only themselves."""
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (document[:, None] == document).tril()[None, None]


@pytest.mark.parametrize("window", [1, 3, 6])
def test_packed_documents(window: int) -> None:
    lengths = [1, 14, 3, 1, 28]
    case = make_case(rows=KEYS, bias=PER_KEY, is_causal=True)
    case.mask = to_device(packed_mask(lengths))
    growing = _masks.growing_mask(case.mask)
    assert growing is not None and growing.document_end is not None
    got = run_drop_in(case, window)
    assert_keeps_what_the_original_keeps(case, window, got)


SQUARES = {  # masks whose rows and keys are the same tokens, and whether they are of documents
    "window": (packed_mask([KEYS]) & ~packed_mask([KEYS]).tril(-5), False),
    "documents_and_empty_rows": (packed_mask([20, KEYS - 20]) & (torch.arange(KEYS)[:, None] < KEYS - 3), True),
    "documents_both_ways": (packed_mask([14, KEYS - 14]) | packed_mask([14, KEYS - 14]).mT, False),
    "documents_and_padding": (packed_mask([14, KEYS - 14]) & (torch.arange(KEYS) > 3), True),
}


@pytest.mark.parametrize(("mask", "are_documents"), SQUARES.values(), ids=SQUARES.keys())
def test_masks_like_documents(mask: Tensor, are_documents: bool) -> None:
    case = make_case(rows=KEYS, bias=PER_KEY, is_causal=True)
    case.mask = to_device(mask)
    assert (_masks.growing_mask(case.mask) is not None) == are_documents
    for window in (1, 6):
        assert_keeps_what_the_original_keeps(case, window, run_drop_in(case, window))


@pytest.mark.devices("cpu")
def test_documents_with_special_scores() -> None:
    """Ranks in documents order floats as they are ordered: signs, zeros, infinities and NaN."""
    values = torch.tensor([-torch.inf, torch.finfo(torch.float32).min, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0])
    values = torch.cat([values, torch.tensor([torch.inf, torch.nan])])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        scores = values.to(dtype).repeat(2)[torch.randperm(20)].view(1, 1, 20)
        mask = _masks.growing_mask(packed_mask([9, 11]))
        got = _masks.select_within(scores, 3, mask, 20).dense_mask(20)
        parts = [
            _masks.select_within(scores[..., part], 3, _masks.GrowingMask(True), size)
            for part, size in ((slice(0, 9), 9), (slice(9, 20), 11))
        ]
        assert torch.equal(got[0, 0, :9, :9], parts[0].dense_mask(9)[0, 0])
        assert torch.equal(got[0, 0, 9:, 9:], parts[1].dense_mask(11)[0, 0])
        assert not got[0, 0, 9:, :9].any()


@pytest.mark.devices("cpu")
def test_documents_of_more_keys_than_a_float64_could_rank() -> None:
    """2^21 keys and more, and neighbours in float64 that float32 cannot tell apart."""
    keys = (1 << 21) + 5
    end = torch.where(torch.arange(keys) < keys - 7, keys - 7, keys)[None, None]
    scores = torch.ones(1, 1, keys, dtype=torch.float64)
    scores[..., -7:] = 1 + torch.arange(7, 0, -1).double() * 2.0**-40
    growing = _masks.GrowingMask(True, torch.ones(1, 1, keys, dtype=torch.bool), None, end)
    got = _masks.select_within(scores, 2, growing, keys)
    assert got.begin[0, 0, -9:].tolist() == [keys - 9, keys - 8, keys - 7, keys - 6, 0, 0, 0, 0, 0]
    assert got.end[0, 0, -9:].tolist() == [keys - 7, keys - 7, keys, keys, 0, 0, 0, 0, 0]


@pytest.mark.devices("cpu")
def test_masks_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers share a tensor; one that was written to is looked at again; nothing keeps a mask alive."""
    looks = []
    prepare = _masks.prepare_mask
    monkeypatch.setattr(_masks, "prepare_mask", lambda *args: looks.append(1) or prepare(*args))
    before = len(_masks._prepared), len(_masks._growing)
    case = make_case(bias=PER_KEY, is_causal=True)
    for mask, window in ((CAUSAL[None, None].clone(), 6), (HOLES.clone(), KEYS)):
        looks.clear()
        case.mask = mask
        for _ in range(3):
            run_drop_in(case, window)
        assert len(looks) == 1
        case.mask[:, :, :, 3] = False
        assert_keeps_what_the_original_keeps(case, window, run_drop_in(case, window))
        assert len(looks) == 2
    case.mask = mask = None
    assert (len(_masks._prepared), len(_masks._growing)) == before


@pytest.mark.devices("cpu")
def test_masks_in_inference_mode() -> None:
    """Tensors made there do not tell when they are written to."""
    with torch.inference_mode():
        case = make_case(bias=PER_KEY, is_causal=True)
        case.mask = CAUSAL[None, None].clone()
        arguments = [case.query, case.key, case.value, case.mask, case.bias, ROWS, KEYS, True, None, None, 6]
        for _ in range(2):
            out = _flash_dynamic_mask_attention_forward(*arguments)
            kept = kept_by_the_original(case.mask, case.bias, 6, rows=ROWS)
            expected = _flash_dynamic_mask_attention_forward(*arguments[:3], kept, *arguments[4:10], None)
            torch.testing.assert_close(out, expected)
            case.mask[:, :, :, 20:30] = False


@pytest.mark.devices("cpu")
def test_what_attention_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases that rows share stay per key, without a dense selection; options and dtypes arrive."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("a dense selection was made")

    given = []
    attention = modeling.attention
    monkeypatch.setattr(modeling, "attention", lambda *args, **kw: given.append((args, kw)) or attention(*args, **kw))
    monkeypatch.setattr(modeling, "dense_selection", refuse)
    case = make_case(dtype=torch.float32, bias=(2, 2, 1, KEYS), is_causal=True)
    for mask in ("none", "causal_and_padding", "padding", "causal_static_cache"):
        case.mask = MASKS[mask]
        with torch.autocast("cpu", torch.bfloat16):
            run_drop_in(case, 6, deterministic=True)
        tensors, options = given.pop()
        assert options["bias"].shape == PER_KEY and isinstance(options["mask"], KeyIntervals)
        assert {tensor.dtype for tensor in (*tensors, options["bias"])} == {torch.bfloat16}
        assert options["deterministic"] is True
    run_drop_in(case, KEYS)
    assert given.pop()[1]["deterministic"] is None


# ---- Long sequences

# Dimensions of the mask, 0 for none, and of the bias.
COMBINATIONS = {"none_3d": (0, 3), "3d_3d": (3, 3), "4d_3d": (4, 3), "4d_4d": (4, 4), "none_4d": (0, 4)}


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("mask_dims", "bias_dims"), COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_gradients_are_finite_at_length(mask_dims: int, bias_dims: int, low: torch.dtype) -> None:
    length, window = 4096, 256
    bias = (1, 1, length) if bias_dims == 3 else (1, 1, length, length)
    case = make_random_case(1, 2, 1, length, length, 32, dtype=low, bias=bias, is_causal=True)
    if mask_dims == 3:
        case.mask = torch.arange(length)[None, None] >= 100
    elif mask_dims == 4:
        case.mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    got = run_drop_in(case, window)
    for name, tensor in got.items():
        assert tensor.isfinite().all(), name
        assert tensor.any(), name


# A peak never goes down again, so this runs in a process of its own.
MEMORY = """
import sys
import torch
from types import SimpleNamespace
from flash_dmattn.integrations.flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10

def run(length, with_mask):
    make = lambda heads: torch.randn(1, heads, length, 32, requires_grad=True)
    query, key, value, bias = make(2), make(1), make(1), torch.randn(1, 1, length, requires_grad=True)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril_() if with_mask else None
    module = torch.nn.Module()
    module.config, module.keep_window_size, module.is_causal = SimpleNamespace(), 64, True
    before = peak()
    out, _ = flash_dynamic_mask_attention_forward(module, query, key, value, mask, bias)
    torch.autograd.grad(out.sum(), (query, key, value, bias))
    return peak() - before

run(256, True)
print(run(16384, sys.argv[1] == "causal"))
"""


@pytest.mark.devices("cpu")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_memory_is_linear(mask: str) -> None:
    """16384 keys: a bool for every score would be 256 MiB."""
    result = subprocess.run([sys.executable, "-c", MEMORY, mask], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 64 * 2**20


# ---- Casts


def in_model_dtype(case: Case, low: torch.dtype) -> Case:
    cast = {name: getattr(case, name).to(low) for name in (*LEAVES, "dout") if getattr(case, name) is not None}
    return replace(case, **cast)


def module_of(low: torch.dtype, how: str) -> nn.Module:
    module = attention_module(keep_window_size=6, is_causal=True)
    module.projection = nn.Linear(2, 2, dtype=torch.float32 if how in ("autocast", "quantized") else low)
    if how == "quantized":
        module.config._pre_quantization_dtype = low
    return module


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("how", ["linear", "quantized", "autocast"])
def test_float32_inputs_are_cast_to_the_models_dtype(how: str, with_bias: bool) -> None:
    low = torch.bfloat16
    case = make_case(dtype=torch.float32, bias=PER_KEY if with_bias else None, is_causal=True)
    module = module_of(low, how)
    module.keep_window_size = 6 if with_bias else None
    with torch.autocast(torch.get_default_device().type, low, enabled=how == "autocast"):
        got = run_drop_in(case, 6, module)
    assert got["out"].dtype == low
    assert all(got[name].dtype == torch.float32 for name in got.keys() - {"out"})
    # Gradients are those of the low dtype, brought back to float32.
    same = in_model_dtype(case, low)
    if with_bias:
        same.mask = kept_by_the_original(None, same.bias, 6, rows=ROWS)
    assert_case_close(same, {name: tensor.to(low) for name, tensor in got.items()})


@pytest.mark.devices("cpu")
def test_casts_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    case = make_case(dtype=torch.float32, bias=PER_KEY, is_causal=True)
    module = module_of(torch.float16, "linear")
    _inputs.logger.propagate = True
    root = _inputs.logger.parent
    propagates, root.propagate = root.propagate, True
    try:
        for _ in range(2):
            run_drop_in(case, 6, module)
    finally:
        root.propagate = propagates
    told = [record.message for record in caplog.records if "Casting float32" in record.message]
    assert told == ["Casting float32 inputs of attention to the model's torch.float16."]


@pytest.mark.devices("cpu")
def test_nothing_is_cast_without_need() -> None:
    case = make_case(dtype=torch.float32, bias=PER_KEY, is_causal=True)
    for module in (attention_module(keep_window_size=6, is_causal=True), module_of(torch.float32, "linear")):
        assert run_drop_in(case, 6, module)["out"].dtype == torch.float32


# ---- The function below, with the original's arguments


def test_inner_function() -> None:
    case = make_case(bias=PER_KEY, is_causal=True)
    case.mask = to_device(MASKS["causal"])
    arguments = [case.query, case.key, case.value, case.mask, case.bias, ROWS, KEYS, True, None, None, 6]
    got = _flash_dynamic_mask_attention_forward(*arguments, deterministic=True, implementation="flash_dmattn", layer=1)
    assert_keeps_what_the_original_keeps(case, 6, {"out": got})
    low = _flash_dynamic_mask_attention_forward(
        *[t.float() for t in arguments[:3]], *arguments[3:], None, torch.float16
    )
    assert low.dtype == torch.float16
    with pytest.raises(ValueError, match="query_length and key_length must be those of query_states"):
        _flash_dynamic_mask_attention_forward(*arguments[:5], ROWS + 1, *arguments[6:])
    with pytest.raises(ValueError, match="implementation must be None or 'flash_dmattn'; got implementation 'triton'"):
        _flash_dynamic_mask_attention_forward(*arguments, implementation="triton")


@pytest.mark.devices("cpu")
def test_transformers_must_be_installed() -> None:
    code = "import sys; sys.modules['transformers'] = None; import flash_dmattn.integrations"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert result.returncode != 0
    assert "flash_dmattn.integrations needs Hugging Face Transformers, 5.17 or later: pip install" in result.stderr


@pytest.mark.devices("cpu")
def test_says_that_it_is_available() -> None:
    assert is_flash_dmattn_available() is True
