"""flash_dmattn.utils.mask against row-by-row versions in plain Python, and the memory that it takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from cases import INF, NAN, relayout
from flash_dmattn import attention
from flash_dmattn.utils import mask as mask_module
from flash_dmattn.utils.mask import block_smooth, create_mask, relu_mask, topk_indices, topk_mask
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
FORMS = [
    *[((2, 3, 5, 19), form) for form in (None, (2, 3, 5, 19), (1, 1, 5, 19), (2, 1, 1, 19), (2, 3, 19), (5, 19))],
    *[((2, 3, 1, 19), form) for form in (None, (1, 1, 5, 19), (2, 1, 1, 19), (1, 3, 19), (1, 19))],
    *[((2, 3, 19), form) for form in (None, (2, 1, 5, 19), (2, 3, 1, 19), (2, 1, 19), (5, 19), (1, 1, 5, 1))],
    *[((5, 19), form) for form in (None, (2, 1, 1, 19), (5, 19), (1, 19))],
    *[((1, 1, 5, 19), (2, 3, 1, 19)), ((1, 1, 19), (2, 3, 19))],
]


def distinct(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Scores of which no two in a row are equal, positive and negative."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator).argsort(-1) - shape[-1] / 2 + 0.25).to(dtype)


def random_mask(*shape: int, density: float = 0.6) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < density


def four_dims(tensor: Tensor) -> Tensor:
    return tensor[None, None] if tensor.dim() == 2 else tensor[:, :, None] if tensor.dim() == 3 else tensor


def smooth_row(row: list[bool], block: int) -> list[bool]:
    blocks = [row[start : start + block] for start in range(0, len(row), block)]
    return [2 * sum(part) > len(part) for part in blocks for _ in part]


def by_row(bias: Tensor, mask: Tensor | None, keep: Callable[[list, list], list], block: int | None) -> Tensor:
    """(B, heads, Sq, Sk): keep(scores, visible) of every row, then smoothed."""
    visible = four_dims(torch.ones(1, 1, dtype=torch.bool) if mask is None else mask)
    bias, visible = torch.broadcast_tensors(four_dims(bias.detach()), visible)
    keys = bias.size(-1)
    pairs = zip(bias.reshape(-1, keys).tolist(), visible.reshape(-1, keys).tolist(), strict=True)
    rows = [keep(scores, shown) for scores, shown in pairs]
    return torch.tensor([smooth_row(row, block) if block else row for row in rows]).view(bias.shape)


def naive_topk(bias: Tensor, mask: Tensor | None, window: int, lowest: float, block: int | None = None) -> Tensor:
    def keep(scores: list[float], visible: list[bool]) -> list[bool]:
        eligible = [key for key, score in enumerate(scores) if visible[key] and score not in (lowest, -INF)]
        best = sorted(eligible, key=lambda key: INF if scores[key] != scores[key] else scores[key], reverse=True)
        return [key in best[: max(window, 0)] for key in range(len(scores))]

    return by_row(bias, mask, keep, block)


def naive_relu(bias: Tensor, mask: Tensor | None, block: int | None = None) -> Tensor:
    return by_row(
        bias, mask, lambda scores, visible: [s > 0 and v for s, v in zip(scores, visible, strict=True)], block
    )


def assert_mask(got: Tensor, expected: Tensor) -> None:
    """Equal, got in whatever form."""
    assert got.dtype == torch.bool and not got.requires_grad and got.is_contiguous()
    assert torch.equal(four_dims(got), expected)


@pytest.mark.parametrize("window", [-3, 0, 1, 7, 18, 19, 500])
@pytest.mark.parametrize("bias_form, mask_form", FORMS, ids=str)
def test_topk_mask(bias_form: tuple[int, ...], mask_form: tuple[int, ...] | None, window: int) -> None:
    bias = distinct(*bias_form).requires_grad_()
    mask = None if mask_form is None else random_mask(*mask_form)
    assert_mask(topk_mask(bias, mask, window, LOWEST), naive_topk(bias, mask, window, LOWEST))


@pytest.mark.parametrize("bias_form, mask_form", FORMS, ids=str)
def test_relu_mask(bias_form: tuple[int, ...], mask_form: tuple[int, ...] | None) -> None:
    bias = distinct(*bias_form).requires_grad_()
    mask = None if mask_form is None else random_mask(*mask_form)
    # Were hidden scores replaced by min_dtype, as in the original, 1 would show them.
    for min_dtype in (LOWEST, 1.0):
        assert_mask(relu_mask(bias, mask, min_dtype), naive_relu(bias, mask))


def test_result_has_the_form_of_the_bias_if_it_can() -> None:
    def shape(bias: tuple[int, ...], mask: tuple[int, ...] | None) -> tuple[int, ...]:
        of_topk = topk_mask(distinct(*bias), None if mask is None else random_mask(*mask), 3, LOWEST).shape
        of_relu = relu_mask(distinct(*bias), None if mask is None else random_mask(*mask), LOWEST).shape
        assert of_topk == of_relu
        return tuple(of_topk)

    assert shape((2, 3, 19), None) == (2, 3, 19)
    assert shape((2, 3, 19), (2, 1, 1, 19)) == (2, 3, 19)
    assert shape((2, 3, 19), (1, 1, 5, 19)) == (2, 3, 5, 19)
    assert shape((5, 19), (5, 19)) == (5, 19)
    assert shape((5, 19), (2, 1, 19)) == (2, 1, 5, 19)
    assert shape((2, 3, 1, 19), None) == (2, 3, 1, 19)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 19, 40])
@pytest.mark.parametrize("mask_form", [None, (1, 1, 6, 19), (2, 1, 19)], ids=str)
def test_masks_smoothed_in_blocks(mask_form: tuple[int, ...] | None, block: int) -> None:
    bias, mask = distinct(2, 2, 6, 19), None if mask_form is None else random_mask(*mask_form)
    assert_mask(topk_mask(bias, mask, 9, LOWEST, block), naive_topk(bias, mask, 9, LOWEST, block))
    assert_mask(relu_mask(bias, mask, LOWEST, block), naive_relu(bias, mask, block))


def test_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that split batch, heads or rows, and that are shorter than a row."""
    bias, mask = distinct(2, 3, 5, 19), random_mask(2, 1, 5, 19)
    topk, relu = naive_topk(bias, mask, 6, LOWEST, 4), naive_relu(bias, mask, 4)
    for scores in (1, 20, 40, 100, 200, 300, 1000):
        monkeypatch.setattr(mask_module, "_CPU_CHUNK_SCORES", scores)
        assert_mask(topk_mask(bias, mask, 6, LOWEST, 4), topk)
        assert_mask(relu_mask(bias, mask, LOWEST, 4), relu)
        smoothed = block_smooth(mask.clone(), 19, 4)
        assert smoothed[1, 0, 3].tolist() == smooth_row(mask[1, 0, 3].tolist(), 4)


def test_zero_sizes() -> None:
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 2, 4), (3, 0)):
        bias = torch.empty(shape)
        assert topk_mask(bias, None, 3, LOWEST, 2).shape == shape
        assert relu_mask(bias, None, LOWEST, 2).shape == shape
        assert block_smooth(torch.empty(shape, dtype=torch.bool), shape[-1], 2).shape == shape


def test_dtypes_and_their_lowest(dtype: torch.dtype) -> None:
    """A score equal to min_dtype, rounded to the bias's dtype, is never kept, nor is -inf; NaN ranks highest."""
    for lowest in (torch.finfo(dtype).min, -1e4, -12345.678):
        bias = distinct(2, 2, 4, 12, dtype=dtype)
        bias[..., 3], bias[..., 5], bias[:, 1, 2, 7] = lowest, -INF, NAN
        mask = random_mask(2, 1, 4, 12)
        rounded = float(torch.tensor(lowest, dtype=dtype))
        for window in (1, 5, 12):
            assert_mask(topk_mask(bias, mask, window, lowest), naive_topk(bias, mask, window, rounded))


def test_hidden_scores_never_displace_visible_ones() -> None:
    """A floor that is safe for fp16 may lie above a visible score."""
    bias = torch.tensor([[[5.0, -20000.0, 4.0, -30000.0]]])
    mask = torch.tensor([[[False, True, False, True]]])
    assert topk_mask(bias, mask, 1, -1e4).tolist() == [[[False, True, False, False]]]


@pytest.mark.parametrize("layout", ["transposed", "padded", "offset", "expanded", "strided"])
def test_layouts(layout: str) -> None:
    bias, mask = relayout(distinct(2, 3, 5, 19), layout), relayout(random_mask(2, 3, 5, 19), layout)
    before = bias.clone(), mask.clone()
    assert_mask(topk_mask(bias, mask, 6, LOWEST, 3), naive_topk(bias, mask, 6, LOWEST, 3))
    assert_mask(relu_mask(bias, mask, LOWEST, 3), naive_relu(bias, mask, 3))
    assert torch.equal(bias, before[0]) and torch.equal(mask, before[1]), "an input was written to"


@pytest.mark.parametrize("window", [0, 4, 19, 30])
def test_topk_indices(window: int) -> None:
    bias = distinct(2, 3, 19).requires_grad_()
    indices = topk_indices(bias, window)
    assert indices.dtype == torch.int64 and indices.shape == (2, 3, min(window, 19)) and not indices.requires_grad
    expected = [sorted(sorted(range(19), key=row.__getitem__)[19 - indices.size(-1) :]) for row in bias[1].tolist()]
    assert indices[1].tolist() == expected
    assert topk_indices(bias[0, 0], -2).shape == (0,)


@pytest.mark.parametrize("block", [1, 2, 4, 7, 19, 100])
@pytest.mark.parametrize("key_len", [0, 6, 16, 19])
def test_block_smooth(key_len: int, block: int) -> None:
    for layout in ("contiguous", "transposed", "padded", "strided"):
        mask = relayout(random_mask(3, 2, 5, 19, density=0.5), layout)
        rows = mask.reshape(-1, 19).tolist()
        expected = [smooth_row(row[:key_len], block) + row[key_len:] for row in rows]
        assert block_smooth(mask, key_len, block) is mask
        assert mask.reshape(-1, 19).tolist() == expected


def test_block_of_which_half_is_kept_goes() -> None:
    mask = torch.tensor([True, True, False, False, True, True, True, False, True, False])
    assert block_smooth(mask, 10, 4).tolist() == [False] * 4 + [True] * 4 + [False] * 2


# ---- create_mask


@pytest.mark.parametrize("kind", ["topk", "relu"])
@pytest.mark.parametrize("bias_form", [(2, 3, 5, 19), (2, 3, 1, 19), (2, 3, 19), (1, 1, 5, 19), (5, 19)], ids=str)
@pytest.mark.parametrize("mask_form", [None, (2, 19), (1, 19), (2, 5), (2, 1, 5, 19), (2, 3, 1, 19)], ids=str)
def test_create_mask(bias_form: tuple[int, ...], mask_form: tuple[int, ...] | None, kind: str) -> None:
    bias, mask = distinct(*bias_form), None if mask_form is None else random_mask(*mask_form)
    full = mask
    if mask_form is not None and len(mask_form) == 2:
        history = torch.ones(mask_form[0], 19 - mask_form[1], dtype=torch.bool)
        full = torch.cat([history, mask], 1)[:, None, None]
    for block in (None, 4):
        got = create_mask(bias, mask, 2, 5, 19, 7, LOWEST, block, type=kind)
        naive = naive_topk(bias, full, 7, LOWEST, block) if kind == "topk" else naive_relu(bias, full, block)
        assert_mask(got, naive)
    names = dict(attention_bias=bias, attention_mask=mask, batch_size=2, query_len=5, key_len=19)
    again = create_mask(**names, window_size=7, min_dtype=LOWEST, block_size=4, type=kind)
    assert torch.equal(got, again)


def test_three_dimensional_bias_with_padding_stays_per_key() -> None:
    mask = create_mask(distinct(2, 3, 19), random_mask(2, 19), 2, 5, 19, 7, LOWEST)
    assert mask.shape == (2, 3, 19)


def test_attention_takes_the_masks() -> None:
    query, key, value = torch.randn(2, 5, 6, 8), torch.randn(2, 19, 3, 8), torch.randn(2, 19, 3, 8)
    bias = distinct(2, 3, 19)
    causal = torch.ones(5, 19, dtype=torch.bool).tril(14)
    per_row = topk_mask(bias, causal, 4, LOWEST)
    assert per_row.shape == (2, 3, 5, 19) and (per_row.sum(-1) == 4).all()
    shown = attention(query, key, value, mask=per_row, bias=bias)
    biased = bias[:, :, None].masked_fill(~per_row, -INF)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *[tensor.transpose(1, 2) for tensor in (query, key, value)],
        attn_mask=biased.repeat_interleave(2, 1),
        enable_gqa=True,
    )
    torch.testing.assert_close(shown, expected.transpose(1, 2), atol=1e-5, rtol=1e-5, check_stride=False)
    assert attention(query, key, value, mask=topk_mask(bias, None, 4, LOWEST)).isfinite().all()


# ---- Errors

BIAS, MASK = torch.zeros(2, 3, 5, 19), torch.ones(2, 3, 5, 19, dtype=torch.bool)
ERRORS = {
    "bias type": (
        TypeError,
        {"attention_bias": 3},
        "attention_bias must be a torch.Tensor; got attention_bias of type",
    ),
    "bias dtype": (
        ValueError,
        {"attention_bias": BIAS.long()},
        "attention_bias must be floating point; got attention_bias torch.int64",
    ),
    "bias rank": (
        ValueError,
        {"attention_bias": BIAS[None]},
        "attention_bias must have 2 to 4 dimensions; got attention_bias (1, 2, 3, 5, 19)",
    ),
    "bias keys": (
        ValueError,
        {"attention_bias": BIAS[..., 1:], "attention_mask": None, "key_len": 19},
        "attention_bias must agree with batch_size, query_len and key_len; got attention_bias (2, 3, 5, 18), "
        "batch_size 2, query_len 5, key_len 19",
    ),
    "mask type": (
        TypeError,
        {"attention_mask": [True]},
        "attention_mask must be a torch.Tensor or None; got attention_mask of type list",
    ),
    "mask dtype": (
        ValueError,
        {"attention_mask": MASK.int()},
        "attention_mask must be bool, True = visible; got attention_mask torch.int32",
    ),
    "mask rank": (
        ValueError,
        {"attention_mask": MASK[0, 0, 0]},
        "attention_mask must have 2 to 4 dimensions; got attention_mask (19,)",
    ),
    "mask device": (
        ValueError,
        {"attention_mask": MASK.to("meta")},
        "attention_mask must be on attention_bias's device; got attention_mask on meta, attention_bias on cpu",
    ),
    "mask shape": (
        ValueError,
        {"attention_mask": MASK[:, :2]},
        "attention_mask must broadcast with attention_bias; got attention_mask (2, 2, 5, 19), attention_bias "
        "(2, 3, 5, 19)",
    ),
    "min_dtype": (TypeError, {"min_dtype": "low"}, "min_dtype must be a number; got min_dtype of type str"),
    "block type": (TypeError, {"block_size": 2.0}, "block_size must be an int; got block_size of type float"),
    "block size": (ValueError, {"block_size": 0}, "block_size must be at least 1; got block_size 0"),
    "window type": (TypeError, {"window_size": 2.0}, "window_size must be an int; got window_size of type float"),
    "window bool": (TypeError, {"window_size": True}, "window_size must be an int; got window_size of type bool"),
    "batch size": (
        ValueError,
        {"batch_size": 4},
        "attention_bias must agree with batch_size, query_len and key_len; got attention_bias (2, 3, 5, 19), "
        "batch_size 4, query_len 5, key_len 19",
    ),
    "mask rows": (
        ValueError,
        {"attention_bias": BIAS[:, :, :1], "query_len": 4},
        "attention_mask must agree with batch_size, query_len and key_len; got attention_mask (2, 3, 5, 19), "
        "batch_size 2, query_len 4, key_len 19",
    ),
    "padding length": (
        ValueError,
        {"attention_mask": MASK[0, 0, :2, :7]},
        "attention_mask with 2 dimensions must be (batch_size or 1, key_len) or (batch_size or 1, query_len) with "
        "query_len at most key_len; got attention_mask (2, 7), batch_size 2, query_len 5, key_len 19",
    ),
    "padding batch": (
        ValueError,
        {"attention_mask": MASK[0, :, 0]},
        "attention_mask must agree with batch_size, query_len and key_len; got attention_mask (3, 1, 19), batch_size 2",
    ),
    "query_len type": (TypeError, {"query_len": None}, "query_len must be an int; got query_len of type NoneType"),
    "kind": (ValueError, {"type": "window"}, "type must be 'topk' or 'relu'; got type 'window'"),
}


def check_error(function: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        function()
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    error, changes, message = ERRORS[name]
    sizes = {"batch_size": 2, "query_len": 5, "key_len": 19}
    sound = {"attention_bias": BIAS, "attention_mask": MASK, "window_size": 3, "min_dtype": LOWEST, "block_size": 2}
    check_error(lambda: create_mask(**{**sound, **sizes, **changes}), error, message)
    if changes.keys() <= sound.keys() and "agree" not in message and "padding" not in name:
        check_error(lambda: topk_mask(**{**sound, **changes}), error, message)
        if "window_size" not in changes:
            sound.pop("window_size")
            check_error(lambda: relu_mask(**{**sound, **changes}), error, message)


def test_errors_of_smoothing_and_indices() -> None:
    mask = MASK.clone()
    check_error(lambda: block_smooth(None, 19, 2), TypeError, "attention_mask must be a torch.Tensor; got")
    check_error(lambda: block_smooth(BIAS, 19, 2), ValueError, "must be bool, True = visible; got attention_mask torch")
    check_error(lambda: block_smooth(MASK[0, 0, 0, 0], 1, 2), ValueError, "must have at least 1 dimension; got")
    check_error(
        lambda: block_smooth(mask, 20, 2), ValueError, "key_len must be within [0, Sk]; got key_len 20, attention"
    )
    check_error(lambda: block_smooth(mask, -1, 2), ValueError, "key_len must be within [0, Sk]; got key_len -1")
    check_error(lambda: block_smooth(mask, 19, 0), ValueError, "block_size must be at least 1; got block_size 0")
    check_error(
        lambda: block_smooth(mask, 19, None), TypeError, "block_size must be an int; got block_size of type None"
    )
    expanded = mask[:1].expand(2, 3, 5, 19)
    check_error(
        lambda: block_smooth(expanded, 19, 2), ValueError, "must not be an expanded view, since it is written to"
    )
    check_error(
        lambda: topk_indices(torch.tensor(1.0), 2), ValueError, "attention_bias must have 1 to 4 dimensions; got"
    )
    check_error(lambda: topk_indices(BIAS, 2.5), TypeError, "window_size must be an int; got window_size of type float")


# ---- Memory

# Runs in a process of its own, because a peak never goes down again.
PEAK = """
import torch
from flash_dmattn.utils.mask import create_mask, relu_mask, topk_mask

def kib(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name + ":"))

def run(length, what):
    bias = torch.randn(1, 4, length)
    causal = torch.ones(length, length, dtype=torch.bool).tril_()
    before = kib("VmRSS")
    if what == "topk":
        kept = topk_mask(bias, causal, 64, -1e30, 2)
    elif what == "relu":
        kept = relu_mask(bias, causal, -1e30, 2)
    else:  # no mask: a dense bias
        kept = create_mask(bias[:, :, None].expand(1, 4, length, length), None, 1, length, length, 64, -1e30)
    assert kept.shape == (1, 4, length, length)
    return (kib("VmHWM") - before) * 1024 - kept.nbytes

torch.set_num_threads(1)
what = "{what}"
run(256, what)
print(run(3072, what) / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("what", ["topk", "relu", "no mask"])
def test_memory_is_the_result_and_a_chunk(what: str) -> None:
    """36 MiB of result; the scores of all rows, masked, would be another 144 MiB."""
    program = PEAK.replace("{what}", what)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 12, f"{result.stdout.strip()} MiB beyond the result"
