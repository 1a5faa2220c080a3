"""One small call of every kernel, forward and backward: what `make test-sanitize` reruns under compute-sanitizer.

Inputs are made and results are judged on the CPU, so that the GPU runs nothing but what is tested.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import assert_hidden_products_do_not_matter, make_case, poison_unseen, run_library, to_device
from compare import assert_case_close
from flash_dmattn import KeyIndices, KeyIntervals, prepare_mask, select_keys
from oracle import Case
from torch import Tensor

pytestmark = pytest.mark.devices("cuda")
# Of queries and keys, and of values: one in every bucket, the first with padding; then others.
HEAD_DIMS = [(24, 24), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (40, 72)]
on_cpu = torch.device("cpu")


def assert_right(case: Case, mask: KeyIntervals | KeyIndices | None = None, **options: Any) -> None:
    """`case` is on the CPU; intervals or lists may stand for its mask on the GPU."""
    moved = Case(**to_device(vars(case if mask is None else replace(case, mask=mask))))
    got = run_library(moved, **options)
    with on_cpu:
        assert_case_close(case, {name: tensor.cpu() for name, tensor in got.items()})


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("row_bias", [False, True])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("head_dim, value_dim", HEAD_DIMS)
def test_attention(
    dtype: torch.dtype, head_dim: int, value_dim: int, planned: bool, row_bias: bool, deterministic: bool
) -> None:
    rows, keys = 70, 133
    bias = (1, 2, rows, keys) if row_bias else (2, 1, keys)
    with on_cpu:
        options = {"seqlens_k": torch.tensor([keys, 77], dtype=torch.int32), "is_causal": True, "with_dlse": True}
        case = make_case(2, 2, 1, rows, keys, head_dim, value_dim=value_dim, dtype=dtype, bias=bias, **options)
        if planned:
            case = replace(case, mask=torch.rand(2, 1, rows, keys) < 0.3)
        case = poison_unseen(case)
    assert_right(case, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("head_dim, value_dim", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_several_works_a_block(
    dtype: torch.dtype, head_dim: int, value_dim: int, planned: bool, deterministic: bool
) -> None:
    """Tiles of rows, and of keys, for every multiprocessor twice over: blocks that stay take several."""
    rows = keys = 140
    with on_cpu:
        case = make_case(4, 40, 40, rows, keys, head_dim, value_dim=value_dim, dtype=dtype, is_causal=True)
        if planned:
            case = replace(case, mask=torch.rand(1, 1, rows, keys) < 0.3)
        case = poison_unseen(case)
    assert_right(case, deterministic=deterministic)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim, value_dim", [(128, 128), (192, 128)])
@pytest.mark.parametrize("keys", [1060, 1088, 1100])
def test_many_steps_a_work(
    dtype: torch.dtype, head_dim: int, value_dim: int, is_causal: bool, planned: bool, keys: int
) -> None:
    """Keys that end within or with the first, or within the second, of the tiles of 64 that two blocks of a cluster
    own; with a bias where there is a mask."""
    with on_cpu:
        options = {"value_dim": value_dim, "dtype": dtype, "is_causal": is_causal}
        options["bias"] = (1, 8, keys) if planned else None
        case = make_case(1, 8, 2, 1150, keys, head_dim, **options)
        if planned:
            case = replace(case, mask=torch.rand(1, 1, 1150, keys) < 0.3)
        case = poison_unseen(case)
    assert_right(case)


@pytest.mark.parametrize("largest", [None, 15000.0], ids=["usual scores", "huge scores"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim, value_dim", HEAD_DIMS)
def test_without_mask_and_bias(
    dtype: torch.dtype, head_dim: int, value_dim: int, is_causal: bool, largest: float | None
) -> None:
    """Several tiles of rows and keys. Huge scores are computed again, in a safe way."""
    with on_cpu:
        lengths = torch.tensor([257, 0, 70], dtype=torch.int32)
        # Products of normal numbers reach three times their spread, which is the root of the head dim.
        scale = None if largest is None else largest / (3 * head_dim**0.5)
        options = {"seqlens_k": lengths, "is_causal": is_causal, "scale": scale}
        case = poison_unseen(make_case(3, 2, 1, 270, 257, head_dim, value_dim=value_dim, dtype=dtype, **options))
    assert_right(case)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("form", ["per key", "per score", "in boxes", "in shared boxes", "float32"])
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("head_dim, value_dim", HEAD_DIMS)
def test_biases(dtype: torch.dtype, head_dim: int, value_dim: int, planned: bool, form: str, softcap: float) -> None:
    """Several tiles of rows and keys. A bias by row is copied in boxes where its rows begin at multiples of 16 bytes,
    and read entry by entry elsewhere."""
    rows, keys = 270, 264 if "boxes" in form else 257
    shape = {"per key": (2, 1, 1, keys), "in shared boxes": (1, 2, rows, keys)}.get(form, (2, 4, rows, keys))
    with on_cpu:
        options = {"seqlens_k": torch.tensor([keys, 140], dtype=torch.int32), "is_causal": True, "softcap": softcap}
        options |= {"bias": shape, "bias_dtype": torch.float32 if form == "float32" else None}
        case = make_case(2, 4, 2, rows, keys, head_dim, value_dim=value_dim, dtype=dtype, **options)
        if planned:
            case = replace(case, mask=torch.rand(2, 1, rows, keys) < 0.3)
        case = poison_unseen(case)
    assert_right(case)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("rows, keys", [(3, 600), (270, 257)])
@pytest.mark.parametrize("head_dim, value_dim", HEAD_DIMS)
def test_sinks(dtype: torch.dtype, head_dim: int, value_dim: int, rows: int, keys: int, planned: bool) -> None:
    """Few rows and many."""
    with on_cpu:
        options = {"seqlens_k": torch.tensor([keys, 140], dtype=torch.int32), "is_causal": True}
        case = make_case(2, 4, 2, rows, keys, head_dim, value_dim=value_dim, dtype=dtype, with_sink=True, **options)
        if planned:
            case = replace(case, mask=torch.rand(2, 1, rows, keys) < 0.3)
        case = poison_unseen(case)
    assert_right(case)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", ["mask", "lists", "lists of one sequence"])
@pytest.mark.parametrize("head_dim, value_dim", HEAD_DIMS)
def test_decode_by_clusters(dtype: torch.dtype, head_dim: int, value_dim: int, form: str, rows: int) -> None:
    """Steps of decoding whose parts are put together by clusters of blocks on Hopper GPUs: of up to eight (mask), and
    of more. With five query rows three heads are more than eight rows."""
    keys, batch = (4096, 35) if form == "mask" else (1500, 1 if "one" in form else 9)
    with on_cpu:
        case = make_case(batch, 6, 2, rows, keys, head_dim, value_dim=value_dim, dtype=dtype, with_sink=True)
        mask = torch.rand(batch, 2 if form == "lists" else 1, 1, keys) < 0.3
        mask[0] = False  # rows without keys
        case = poison_unseen(replace(case, mask=mask))
        indices = None
        if form != "mask":
            places = torch.where(mask, torch.arange(keys), -1)
            indices = KeyIndices(places[..., torch.randperm(keys)].int())
    assert_right(case, indices, needs=())


@pytest.mark.parametrize("form", ["plain", "biased", "deterministic"])
@pytest.mark.parametrize("head_dim, value_dim", HEAD_DIMS)
def test_hidden_products_out_of_range(head_dim: int, value_dim: int, form: str) -> None:
    def run(case: Case) -> dict[str, Tensor]:
        results = run_library(Case(**to_device(vars(case))), deterministic=form == "deterministic")
        return {name: tensor.cpu() for name, tensor in results.items()}

    with on_cpu:
        bias = (2, 1, 257) if form == "biased" else None
        case = make_case(2, 4, 2, 270, 257, head_dim, value_dim=value_dim, dtype=torch.bfloat16, bias=bias)
    assert_hidden_products_do_not_matter(case, run)


# Of 16 MiB of sums or more, from which on gradients of such queries are stored at once.
@pytest.mark.parametrize(
    "heads, rows, head_dim, value_dim",
    [(200, 330, 64, 40), (136, 330, 96, 96), (100, 330, 128, 128), (32, 1100, 128, 96)],
)
@pytest.mark.parametrize("form", ["documents", "tiles", "biased tiles"])
def test_rows_met_once(dtype: torch.dtype, heads: int, rows: int, head_dim: int, value_dim: int, form: str) -> None:
    """Rows that see keys of one tile alone, between others."""
    intervals = None
    with on_cpu:
        options = {"value_dim": value_dim, "dtype": dtype, "bias": (1, 1, rows) if "biased" in form else None}
        case = make_case(1, heads, heads // 4, rows, rows, head_dim, is_causal=True, **options)
        if form == "documents":
            bounds = [0, 60, 61, 200, 264, min(rows, 1000), rows]
            intervals = KeyIntervals.documents(bounds, rows, is_causal=True)
            mask = intervals.dense_mask(rows)
        else:
            tiles = torch.rand(1, 1, (rows + 63) // 64, (rows + 127) // 128) < 0.4
            mask = tiles.repeat_interleave(64, 2).repeat_interleave(128, 3)[..., :rows, :rows]
        case = poison_unseen(replace(case, mask=mask))
    assert_right(case, intervals)


@pytest.mark.parametrize("form", ["key", "row and key", "transposed", "intervals"])
def test_masks(form: str) -> None:
    """Both ways to read a mask, lists and ranges, over two chunks of rows."""
    rows, keys = 1100, 200
    intervals = None
    with on_cpu:
        case = make_case(1, 2, 1, rows, keys, 32, dtype=torch.bfloat16, bias=(1, 1, keys))
        mask = {
            "key": lambda: torch.rand(1, 1, keys) < 0.3,
            "row and key": lambda: torch.rand(1, 1, rows, keys) < 0.01,
            "transposed": lambda: torch.rand(1, 1, keys, rows).mT < 0.01,
            "intervals": lambda: select_keys(torch.randn(1, 1, keys), 20, seqlen_q=rows),
        }[form]()
        if form == "intervals":
            intervals, mask = mask, mask.dense_mask(rows)
    assert_right(replace(case, mask=mask), intervals)
    if form != "key":
        begin, _, exact = torch.ops.flash_dmattn.mask_intervals(to_device(mask), False)
        assert exact == (form == "intervals")
        assert not exact or torch.equal(begin.cpu(), prepare_mask(mask).intervals.begin)


@pytest.mark.parametrize("keys", [50, 3000, 40000])
@pytest.mark.parametrize("scores", [torch.float32, torch.bfloat16], ids=str)
def test_selection(keys: int, scores: torch.dtype) -> None:
    with on_cpu:
        values = torch.randn(1, 2, keys).to(scores)
    got, expected = select_keys(to_device(values), 33), select_keys(values, 33)
    assert torch.equal(got.begin.cpu(), expected.begin) and torch.equal(got.end.cpu(), expected.end)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arch", "kernels"), [("sm_86", "sm80, narrow tiles"), ("sm80", "sm80"), ("sm_90", "sm90")], ids=lambda value: value
)
def test_family_of_an_architecture(arch: str, kernels: str) -> None:
    """The same on what GPUs with less shared memory run, those without kernels of their own, and Hopper."""
    if arch == "sm_90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    chosen = "test_without or test_biases or test_sinks"
    if arch != "sm_90":
        chosen += " or test_attention or test_masks"
    lines = run_tests(chosen, FLASH_DMATTN_ARCH=arch, FLASH_DMATTN_LOG="1")
    for direction in ("forward", "backward"):
        assert re.search(rf"cuda/{kernels} \w+ {direction} ", lines), direction
    assert ("cuda/sm90" in lines) == (kernels == "sm90")


BIASED_CALLS = """
import torch
import flash_dmattn

torch.manual_seed(0)
for head_dim, shape, learned, deterministic in CALLS:
    tensors = [torch.randn(2, rows, 3, head_dim, device="cuda", dtype=torch.bfloat16) for rows in (70, 72, 72)]
    bias = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=learned)
    tensors[0].requires_grad_()
    flash_dmattn.attention(*tensors, bias=bias, deterministic=deterministic).sum().backward()
"""


@pytest.mark.skipif(os.environ.get("FLASH_DMATTN_ARCH") == "sm80", reason="asks for other kernels")
def test_family_of_a_backward_with_a_bias_by_row() -> None:
    """Hopper's where each score has its own, or where nobody asks for a gradient that several would be added up for."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    full, of_all = (2, 3, 70, 72), (1, 1, 70, 72)
    calls = {  # head dim, shape of the bias, whether its gradient is asked for, deterministic
        (128, full, True, False): "sm90",
        (96, full, True, False): "sm90",
        (72, of_all, False, False): "sm90",
        (128, of_all, True, False): "sm80",
        (128, full, True, True): "sm80",
        (64, full, True, False): "sm80",
        (192, full, True, False): "sm80",
    }
    program = BIASED_CALLS.replace("CALLS", repr(list(calls)))
    environment = {**os.environ, "FLASH_DMATTN_LOG": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"cuda/(\w+) \w+ backward ", done.stderr) == list(calls.values()), done.stderr


@pytest.mark.timeout(600)
def test_output_without_the_copy_engine() -> None:
    """As it is stored under initcheck; else only head dims that are no multiple of 8 are stored by element."""
    run_tests("bfloat16 and (test_several_works and 128 or test_without and usual)", FLASH_DMATTN_BULK_STORES="0")


def run_tests(chosen: str, **environment: str) -> str:
    """Tests of this file, in a process of their own. What it writes to stderr."""
    arguments = [__file__, "-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-4000:]
    return result.stderr
