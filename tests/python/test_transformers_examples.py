"""The examples for Transformers: they train, stop, resume, and leave what the next one starts from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import refusal, run_script
from transformers import DogeForCausalLM

ROOT = Path(__file__).parents[2]
EXAMPLES, BENCHMARKS = ROOT / "examples", ROOT / "benchmarks"
sys.path.insert(0, str(EXAMPLES))

import finetune_lora  # noqa: E402
import train_doge  # noqa: E402

STEPS = 100
TINY = ["--context", "128", "--window", "32", "--batch-size", "8", "--layers", "2", "--width", "64", "--cpu"]
TINY += ["--max-bytes", "1000000", "--learning-rate", "0.003", "--steps", str(STEPS)]


def run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_script(script, *flags, environment={"HF_HUB_OFFLINE": "1"})


def train(output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run("examples/train_doge.py", "--output", str(output), *TINY, *flags)


def losses_of(output: Path) -> dict[str, object]:
    return json.loads((output / "losses.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that was never interrupted."""
    output = tmp_path_factory.mktemp("whole")
    result = train(output)
    assert result.returncode == 0, result.stderr
    assert "the model continues held-out text" in result.stdout
    return output


def test_doge_learns(finished: Path) -> None:
    found = losses_of(finished)
    assert len(found["train_bits_per_byte"]) == STEPS
    assert found["train_bits_per_byte"][0] > 7.5  # about 8 bits, which know nothing
    assert found["validation_bits_per_byte"] < 4.3  # bytes by themselves have 4.5
    model = DogeForCausalLM.from_pretrained(finished / "model")
    assert model.config._attn_implementation != "dmattn"  # what is saved is Transformers' own
    assert all(layer.self_attn.A.any() for layer in model.model.layers)


def test_resumed_run_equals_uninterrupted_one(finished: Path, tmp_path: Path) -> None:
    paused = train(tmp_path, "--pause-at", "50", "--no-checkpointing")
    assert paused.returncode == 0, paused.stderr
    assert f"Paused at step 50 of {STEPS}" in paused.stdout
    other = refusal(train_doge.main, "--output", str(tmp_path), *TINY, "--resume", "--width", "32")
    assert "began with width 64, not 32" in other
    assert len(other.splitlines()) == 1  # not a page of sizes that do not match
    resumed = run("examples/train_doge.py", "--output", str(tmp_path), "--resume", "--cpu")
    assert resumed.returncode == 0, resumed.stderr  # with the settings of the checkpoint
    expected, found = (torch.tensor(losses_of(output)["train_bits_per_byte"]) for output in (finished, tmp_path))
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.02)  # bfloat16, any number of threads


def test_bad_settings_are_explained(tmp_path: Path) -> None:
    nothing = refusal(train_doge.main, "--resume", "--output", str(tmp_path), *TINY)
    assert "--resume: there is no" in nothing
    assert "there is no model in" in refusal(finetune_lora.main, "--model", str(tmp_path))


def test_lora_adapts_to_another_text(finished: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy.\n" * 500)
    flags = ["--model", str(finished / "model"), "--text", str(text), "--output", str(tmp_path / "lora")]
    flags += ["--steps", "60", "--context", "64", "--batch-size", "8", "--learning-rate", "0.02", "--device", "cpu"]
    result = run("examples/finetune_lora.py", *flags)
    assert result.returncode == 0, result.stderr
    found = losses_of(tmp_path / "lora")
    assert found["validation_after"] < found["validation_before"] - 1
    assert (tmp_path / "lora" / "adapter_model.safetensors").exists()


DOCUMENTED = re.findall(
    r"```python\n(import torch\n.*?)```", (ROOT / "docs" / "transformers.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize("code", DOCUMENTED, ids=["ordinary", "doge"])
def test_code_in_the_docs_runs(code: str) -> None:
    exec(compile(code, "docs/transformers.md", "exec"), {})


def test_benchmark_runs(tmp_path: Path) -> None:
    flags = ["--quick", "--repeats", "2", "--threads", "1", "--json", str(tmp_path / "out.json")]
    result = run("benchmarks/gpu_doge.py", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads((tmp_path / "out.json").read_text())["comparisons"]
    assert {"sdpa", "eager"} <= {line["other"] for line in lines}
    assert {line["case"].split()[0] for line in lines} == {"training", "one", "decode", "generate", "layer"}
    compared = [line for line in lines if line["theirs"] is not None]
    assert all(line["ours"] > 0 and line["theirs"] > 0 for line in compared)
    compilations = [(line["what"], line["ours"]) for line in lines if line["theirs"] is None]
    assert compilations == [("graph breaks", 0), ("compiled", 1)]
    assert "note:" not in result.stdout


@pytest.mark.parametrize("lengths", [[8, 16, 24], [1, 5, 2]])
def test_benchmark_extrapolates_exactly(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_doge import parabola_at

    def peak(length: int) -> float:
        return 3 + 0.5 * length + 0.25 * length**2

    assert parabola_at(32, lengths, [peak(length) for length in lengths]) == pytest.approx(peak(32))
