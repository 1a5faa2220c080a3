"""`python -m flash_dmattn show`: that every pattern and file becomes a picture, what it prints, what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flash_dmattn import KeyIntervals, plan_report, select_keys
from flash_dmattn.__main__ import main
from flash_dmattn.commands.show import PATTERNS
from PIL import Image


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return picture.size


def has_area(path: Path, color: str) -> bool:
    """More of the colour than its patch in the legend."""
    wanted = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
    with Image.open(path) as picture:
        colors = picture.convert("RGB").getcolors()
    close = [count for count, found in colors if max(abs(a - b) for a, b in zip(wanted, found, strict=True)) <= 2]
    return sum(close) > 1000


FULL, VISIBLE, EMPTY = "#3b74c0", "#cf6a12", "#e9e9ec"


def show(tmp_path: Path, *arguments: object) -> Path:
    output = tmp_path / "picture.png"
    assert main(["show", *map(str, arguments), "--output", str(output)]) == 0
    return output


@pytest.mark.parametrize("causal", ["--causal", "--no-causal"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_draws_every_pattern(pattern: str, causal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = [] if pattern == "documents" else ["--window-size", 70]
    output = show(tmp_path, "--pattern", pattern, "--length", 300, causal, *window)
    width, height = size_of(output)
    assert width > 1000 and height > 500
    assert has_area(output, VISIBLE)
    assert has_area(output, EMPTY) or causal == "--no-causal"
    assert output.stat().st_size < 150_000
    printed = capsys.readouterr().out
    assert "scores kept" in printed and f"picture: {output}" in printed


def test_prints_the_report_of_what_it_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(tmp_path, "--pattern", "window", "--length", 300, "--window-size", 70)
    report = plan_report(
        (1, 300, 1, 64), (1, 300, 1, 64), mask=KeyIntervals.sliding_window(69, 0, 300), is_causal=True,
        deterministic=True,
    )  # fmt: skip
    assert capsys.readouterr().out.startswith(str(report))


def test_draws_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show"]) == 0
    assert has_area(tmp_path / "show.png", FULL)


SCORES = torch.randn(2, 3, 200, generator=torch.Generator().manual_seed(0))
WINDOW = KeyIntervals.sliding_window(30, 0, 150, 200).dense_mask(150)
FILES = {
    "scores": (SCORES, ["--window-size", 50, "--batch", 1, "--head", 2], 50),
    "scores_of_one_head": (SCORES[0, 0].bfloat16(), ["--window-size", 50], 50),
    "mask": (WINDOW[0, 0], [], None),
    "mask_of_heads": (WINDOW.expand(2, 3, 150, 200), ["--head", 2, "--causal"], None),
    "mask_of_keys": (SCORES > 1, ["--batch", 1], None),
    "prepared": (WINDOW, ["--prepare"], None),
}


@pytest.mark.parametrize("kind", ["pt", "npy"])
@pytest.mark.parametrize(("tensor", "options", "window"), FILES.values(), ids=FILES.keys())
def test_draws_a_file(
    tensor: torch.Tensor, options: list, window: int | None, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / f"saved.{kind}"
    if kind == "npy":
        np.save(path, (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())
    else:
        torch.save(tensor, path)
    assert has_area(show(tmp_path, path, *options), VISIBLE)
    if window is not None:
        scores = SCORES[1:, 2:] if tensor.dim() == 3 else tensor[None, None]
        kept = select_keys(scores, window).kept_scores()
    elif tensor.shape[-2:] == (150, 200):
        kept = int(WINDOW.sum())
    else:
        kept = 200 * int(tensor[1, 0].sum())
    printed = capsys.readouterr().out
    assert f" {kept} scores kept" in printed
    assert ("rule: intervals" in printed) == (window is not None or "--prepare" in options)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_draws_lists(dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = torch.arange(150)[:, None] // 30 + torch.arange(-3, 1)  # four blocks of 20 keys, some before the first
    path = tmp_path / "lists.pt"
    torch.save(blocks.to(dtype), path)
    assert has_area(show(tmp_path, path, "--keys", 200, "--block-size", 20), VISIBLE)
    printed = capsys.readouterr().out
    assert f" {20 * int((blocks >= 0).sum())} scores kept" in printed and "rule: lists of keys" in printed


def test_draws_nothing_visible(tmp_path: Path) -> None:
    path = tmp_path / "nothing.npy"
    np.save(path, np.zeros((5, 7), dtype=bool))
    assert not has_area(show(tmp_path, path), VISIBLE)


ERRORS = {
    "no_file": (["none.pt"], "none.pt cannot be read"),
    "no_array": (["text.npy"], "text.npy holds no tensor that torch.save or numpy.save wrote"),
    "no_tensor": (["text.pt"], "text.pt holds no tensor that torch.save or numpy.save wrote"),
    "list": (["list.pt"], "list.pt must hold one tensor; got list"),
    "sparse": (["sparse.pt"], "sparse.pt must hold a dense tensor; got one with layout sparse_coo"),
    "meta": (["meta.pt"], "meta.pt must hold a tensor with data; got one on meta"),
    "bytes": (["bytes.npy"], "a file must hold a bool mask, floating scores or int32 or int64 lists; bytes.npy holds"),
    "lists_of_rank_1": (["integers.npy"], "lists must be (Sq, n) or (B, heads, Sq, n); integers.npy has (4,)"),
    "lists_and_window": (
        ["lists.npy", "--window-size", "3"],
        "--window-size does not belong to lists of keys; the file",
    ),
    "no_keys": (["lists.npy", "--keys", "0"], "--keys must be between 1 and 2^31 - 1; got 0"),
    "keys_of_a_pattern": (["--keys", "9"], "--keys belongs to a file with lists of keys"),
    "blocks_of_a_mask": (["mask1.npy", "--block-size", "9"], "--block-size belongs to a file with lists of keys"),
    "mask_of_rank_1": (["mask1.npy"], "a mask must have 2, 3 or 4 dimensions; mask1.npy has (4,)"),
    "scores_of_rank_2": (["scores2.npy"], "scores must be (Sk) or (B, heads, Sk); scores2.npy has (2, 4)"),
    "scores_alone": (["scores.npy"], "--window-size must say how many"),
    "window_of_a_mask": (["mask.npy", "--window-size", "3"], "--window-size belongs to scores"),
    "window": (["--window-size", "-1"], "--window-size must not be negative; got -1"),
    "window_of_scores": (["scores.npy", "--window-size", "-1"], "--window-size must not be negative; got -1"),
    "no_window": (["--pattern", "window", "--window-size", "0"], "--window-size must be at least 1"),
    "window_of_documents": (["--pattern", "documents", "--window-size", "3"], "--window-size does not belong"),
    "batch": (["mask.npy", "--batch", "1"], "--batch must be at least 0 and below 1; got 1"),
    "head": (["mask.npy", "--head", "-1"], "--head must be at least 0 and below 1; got -1"),
    "head_of_pattern": (["--head", "1"], "--head chooses from a file"),
    "file_and_pattern": (["mask.npy", "--pattern", "random"], "--pattern belongs to a pattern; got a file too"),
    "file_and_length": (["mask.npy", "--length", "9"], "--length belongs to a pattern; got a file too"),
    "length": (["--length", "0"], "--length must be between 1 and 4096; got 0"),
    "too_long": (["--length", "9000"], "--length must be between 1 and 4096; got 9000"),
    "too_long_file": (["long.npy", "--window-size", "3"], "a picture has at most 2^24 scores; got 9000 keys"),
    "empty_file": (["empty.npy"], "a picture has 1 to 2^24 scores; got 0 rows and 4 keys"),
    "prepare": (["--prepare"], "--prepare is for a file with a mask"),
    "prepare_scores": (["scores.npy", "--window-size", "3", "--prepare"], "--prepare is for a file with a mask"),
    "pattern": (["--pattern", "spiral"], "invalid choice: 'spiral'"),
    "folder": (["--length", "50", "--output", "no/such/folder.png"], "--output cannot be written"),
    "suffix": (["--output", "picture.jpg"], "--output must end with .png; got picture.jpg"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text.npy", "text.pt"):
        Path(name).write_text("no tensor at all")
    torch.save([1, 2], "list.pt")
    torch.save(torch.ones(4, 4).to_sparse(), "sparse.pt")
    torch.save(torch.ones(4, 4, dtype=torch.bool, device="meta"), "meta.pt")
    arrays = {"mask": np.ones((4, 4), dtype=bool), "mask1": np.ones(4, dtype=bool), "integers": np.zeros(4, dtype=int)}
    arrays |= {"scores": np.zeros(4, dtype=np.float32), "scores2": np.zeros((2, 4)), "long": np.zeros(9000)}
    arrays |= {"empty": np.ones((0, 4), dtype=bool), "bytes": np.zeros(4, dtype=np.uint8)}
    arrays |= {"lists": np.zeros((4, 2), dtype=np.int32)}
    for name, array in arrays.items():
        np.save(name, array)
    with pytest.raises(SystemExit) as exit_:
        main(["show", *arguments])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m flash_dmattn show: error: ") and error.count("\n") == 1 and message in error
    assert not list(tmp_path.glob("*.png"))


def test_says_that_matplotlib_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["show"])
    assert "show needs matplotlib: pip install matplotlib" in capsys.readouterr().err
    assert main(["info", "--json"]) == 0
