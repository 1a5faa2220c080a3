"""The example: the command trains, stops, resumes and draws; its model is what its text says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flash_dmattn import dynamic_mask_attention
from launching import refusal, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_language_model  # noqa: E402
from language_model.comparison import topk_mask_attention  # noqa: E402
from language_model.model import LanguageModel, ModelConfig  # noqa: E402
from language_model.text import load_text  # noqa: E402

STEPS = 100
PAUSE = 35
TINY = ["--context", "64", "--window", "16", "--batch-size", "8", "--layers", "2", "--width", "32", "--sample", "20"]
TINY += ["--max-bytes", "2000000", "--checkpoint-every", "20", "--learning-rate", "0.01", "--device", "cpu"]
OUTPUTS = ["checkpoint.pt", "loss.png", "sample.txt", "summary.json", "visible_keys.png"]


def run_example(output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_script("examples/train_language_model.py", "--output", str(output), *TINY, *flags)


def run_here(monkeypatch: pytest.MonkeyPatch, output: Path, *flags: str) -> None:
    """The same without an interpreter of its own, which takes seconds to start."""
    monkeypatch.setattr(sys, "argv", ["train_language_model.py", "--output", str(output), *TINY, *flags])
    train_language_model.main()


def refused(output: Path, *flags: str) -> str:
    return refusal(train_language_model.main, "--output", str(output), *TINY, *flags)


def test_nothing_is_resumed_before_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_language_model, "train", interrupted)
    with pytest.raises(SystemExit, match="before the first checkpoint"):
        run_here(monkeypatch, tmp_path)
    assert not (tmp_path / "checkpoint.pt").exists()


def summary_of(output: Path) -> dict[str, object]:
    return json.loads((output / "summary.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that was never interrupted: its output directory and what it printed."""
    output = tmp_path_factory.mktemp("whole")
    result = run_example(output, "--steps", str(STEPS))
    assert result.returncode == 0, result.stderr
    return output, result.stdout


def test_loss_falls_below_unigram_entropy(finished: tuple[Path, str]) -> None:
    output, printed = finished
    summary = summary_of(output)
    losses, unigram = summary["train_bits_per_byte"], summary["unigram_bits_per_byte"]
    assert len(losses) == STEPS
    assert 3.5 < unigram < 6  # bits per byte of program text
    assert losses[0] > 7  # an untrained model knows nothing: about 8 bits
    assert sum(losses[-10:]) / 10 < unigram - 0.4
    assert summary["validation_bits_per_byte"] < unigram - 0.4
    speeds = summary["step_tokens_per_second"]
    assert sorted(speeds) == ["dynamic_mask_attention", "sdpa_topk_mask"]
    assert all(speed > 0 and f"{speed:,.0f} tokens/s" in printed for speed in speeds.values())
    assert f"{unigram:.3f}" in printed and f"{summary['validation_bits_per_byte']:.3f}" in printed


def test_writes_pictures_and_sample(finished: tuple[Path, str]) -> None:
    output, printed = finished
    assert sorted(path.name for path in output.iterdir()) == OUTPUTS
    for picture in ("loss.png", "visible_keys.png"):
        content = (output / picture).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000
    assert len((output / "sample.txt").read_bytes()) >= 32 + 20  # half a context as the prompt, then the sample
    assert "the model continues" in printed


def test_resumed_run_equals_uninterrupted_one(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(monkeypatch, tmp_path, "--steps", str(STEPS), "--pause-at", str(PAUSE))
    assert f"Paused at step {PAUSE} of {STEPS}" in capsys.readouterr().out
    resumed = run_example(tmp_path, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    expected, actual = summary_of(finished[0]), summary_of(tmp_path)
    torch.testing.assert_close(actual["train_bits_per_byte"], expected["train_bits_per_byte"], rtol=1e-3, atol=1e-3)
    assert actual["validation_bits_per_byte"] == pytest.approx(expected["validation_bits_per_byte"], rel=1e-3)


def test_resume_refuses_what_it_cannot_honour(finished: tuple[Path, str], tmp_path: Path) -> None:
    assert "there is no" in refused(tmp_path, "--resume")
    assert f"began with steps {STEPS}, not 41" in refused(finished[0], "--resume", "--steps", "41")


def test_bad_settings_are_explained(tmp_path: Path) -> None:
    width = ["--width", "20"], "error: width must be a multiple of 8, twice the heads; got 20"
    for flags, message in (
        width,
        (["--text", str(tmp_path / "missing")], "missing does not exist"),
        (["--steps", "0"], "must be at least 1, got 0"),
    ):
        assert message in refused(tmp_path, *flags)
    flags, message = width
    result = run_example(tmp_path, *flags)
    assert result.returncode != 0 and message in result.stderr and "Traceback" not in result.stderr


def test_trains_under_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(monkeypatch, tmp_path, "--steps", "10", "--dtype", "bfloat16")
    losses = summary_of(tmp_path)["train_bits_per_byte"]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("window", [1, 7, 40, 50])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_comparison_attends_to_the_same_keys(window: int, rows: int) -> None:
    leaves = [
        torch.randn(2, size, heads, 16).double().requires_grad_() for size, heads in ((rows, 4), (40, 2), (40, 2))
    ]
    leaves.append(torch.randn(2, 2, 40).double().requires_grad_())
    results = []
    for function in (dynamic_mask_attention, topk_mask_attention):
        out = function(*leaves, window)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def small_model() -> LanguageModel:
    model = LanguageModel(ModelConfig(layers=2, width=32, window=8))
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.key_bias.strength)  # away from 0, where all scores are equal
    return model


def test_cached_steps_equal_one_pass() -> None:
    model, tokens = small_model(), torch.randint(0, 256, (2, 40))
    whole = model(tokens)
    caches = model.empty_caches()
    parts = [model(tokens[:, :25], caches)] + [model(tokens[:, row : row + 1], caches) for row in range(25, 40)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_no_position_sees_the_future() -> None:
    model, tokens = small_model(), torch.randint(0, 256, (1, 40))
    changed = tokens.clone()
    changed[:, 30:] = (tokens[:, 30:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :30], before[:, :30], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after[:, 30:], before[:, 30:], atol=1e-2)


def test_loss_teaches_the_key_scores() -> None:
    model = small_model()
    model(torch.randint(0, 256, (1, 40))).square().mean().backward()
    for block in model.blocks:
        for parameter in block.attention.key_bias.parameters():
            assert parameter.grad.abs().sum() > 0


def test_text_must_exist_and_suffice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_text(str(tmp_path / "missing"), 1000, context=8)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ValueError, match="too few"):
        load_text(str(short), 1000, context=8)


def test_text_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "tests/skipped.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n" * 20)
    first, second = (load_text(str(tmp_path), 10_000, context=4) for _ in range(2))
    assert torch.equal(first.train, second.train)
    content = bytes(torch.cat([first.train, first.validation]).tolist()).decode()
    assert sorted(set(content.splitlines())) == ["# a.py", "# b.py"]
    (inputs, targets), again = first.train_batch(3, 2, 8, seed=0), second.train_batch(3, 2, 8, seed=0)
    assert torch.equal(inputs, again[0]) and torch.equal(inputs[:, 1:], targets[:, :-1])
