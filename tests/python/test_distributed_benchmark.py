"""benchmarks/gpu_distributed.py runs without GPUs, small, and counts the bytes of docs/distributed.md."""

from __future__ import annotations

import json
from pathlib import Path

from launching import run_script


def test_small_sizes_on_the_cpu(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    flags = ["--quick", "--threads", "1", "--repeats", "2", "--json", str(figures)]
    done = run_script("benchmarks/gpu_distributed.py", *flags, ranks=2, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    lines = json.loads(figures.read_text())["comparisons"]
    assert {line["case"].partition(" w")[0] for line in lines} == {"H32 Hkv8 D128", "H8 Hkv2 D64"}
    sent = {line["what"].split(" by ")[1].split(",")[0]: line["ours"] for line in lines if "sent by" in line["what"]}
    kept = 2048 // 1024 * 8  # of 8 heads
    assert abs(sent["all-gather"] - kept * (2 * 128 + 1) * 2 / 1e6) < 48 / 1e6
    assert abs(sent["reduce-scatter"] - kept * (2 * 128 + 1) * 4 / 1e6) < 1e-9
    assert all("limit" not in line and "goal" not in line for line in lines)  # which are for other sizes
    for line in lines:
        assert line["what"] in done.stdout
