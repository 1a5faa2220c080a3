"""benchmarks/: what is measured is kept, the pages show what is kept, and the plots are drawn from it."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from launching import run_script
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted((BENCHMARKS / "results").glob("*.json"))
CPU_SCRIPTS = {path.stem for path in BENCHMARKS.glob("cpu_*.py") if "benchmark_parser" in path.read_text()}
# Sections with figures that have no file in benchmarks/results, since they were measured before files were kept.
MEASURED_BEFORE = {
    ("docs/benchmarks.md", "bfloat16 products without AMX"),
    ("docs/benchmarks.md", "Earlier figures"),
}
SAYS_SO = "easured before results were kept"
# Scripts whose figures differ in kind between machines: with AMX and without, with faster memory and slower, on two
# GPUs and on four.
SEVERAL_MACHINES = {"cpu_attention", "cpu_dynamic_mask", "gpu_attention", "gpu_distributed"}
# Of gpu_attention, what only the file of an H200 has.
OF_AN_H200 = {"batches", "sustained", "densities", "windows", "lengths", "model_lengths", "kept"}
# What it says of Hopper's own kernels alone, and what is the same for every family of kernels.
OF_HOPPER = {"dense", "tiles", "dynamic", "original", "sliding", "biases", "deterministic", "lists"}
OF_EVERY_FAMILY = {"prepass", "selection", "decode"}
# Cases that a file does not have: they failed, for reasons of their own, or came later.
WITHOUT = {
    "2-x-nvidia-h200-gpu_distributed": {"strong", "weak"},  # which the file of four GPUs has
    "nvidia-h200-sm80-kernels-gpu_attention": OF_AN_H200 | OF_HOPPER | OF_EVERY_FAMILY,
    "nvidia-h100-80gb-hbm3-gpu_attention": OF_AN_H200,
}


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def sections(page: str) -> dict[str, str]:
    """What stands below each heading, up to the next one."""
    text = (ROOT / page).read_text()
    parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert len(found) == len(parts) // 2, f"two headings of {page} are the same"
    return found


# ---- Files


def test_make_results_runs_every_cpu_script() -> None:
    listed = re.search(r"^CPU_BENCHMARKS = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert set(listed.split()) == CPU_SCRIPTS and len(CPU_SCRIPTS) == 5


def test_every_cpu_script_has_its_results() -> None:
    """And none but those of `SEVERAL_MACHINES` two: the pages show one machine. A picture is drawn from one file."""
    kept = sorted(json.loads(file.read_text())["script"] for file in FILES)
    assert set(kept) >= CPU_SCRIPTS, CPU_SCRIPTS - set(kept)
    of_one_machine = [script for script in kept if script not in SEVERAL_MACHINES]
    assert len(set(of_one_machine)) == len(of_one_machine), kept
    pictures = [name for name, _ in drawn()]
    assert len(set(pictures)) == len(pictures), pictures


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_results_are_whole(file: Path) -> None:
    import report
    import results

    content = results.read(file)
    assert file.stem == f"{report.slug(content['machine']['name'])}-{content['script']}"
    left_out = WITHOUT.get(file.stem, set())
    assert ("--only" in content["command"]) == bool(left_out) and not left_out & content["seconds"].keys()
    assert not results.is_quick(content)  # figures of small sizes mean nothing
    assert not [note for note in content["notes"] if "ended early" in note]
    assert {line["group"] for line in content["comparisons"]} == set(content["seconds"])
    for line in content["comparisons"]:
        given = {name: value for name, value in line.items() if name != "reached"}
        assert report.Comparison(**given).reached == line.get("reached"), line
        if line["theirs"] is not None:
            assert line["other"] and line["ratio_low"] <= line["ratio"] <= line["ratio_high"], line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(schema=2), "schema 2"),
        (lambda content: content.pop("versions"), "versions"),
        (lambda content: content["comparisons"][0].pop("unit"), "unit of"),
    ],
)
def test_files_that_lack_something_are_refused(change: Callable, message: str, tmp_path: Path) -> None:
    import results

    content = json.loads(FILES[0].read_text())
    change(content)
    (tmp_path / "broken.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        results.read(tmp_path / "broken.json")


# ---- Pages


def test_pages_show_what_is_kept() -> None:
    import tables

    pages = {page.relative_to(ROOT).as_posix(): page.read_text() for page in tables.pages()}
    assert "<!-- results:" in pages["docs/benchmarks.md"] and "<!-- results:" in pages["README.md"]
    stale = [page for page, text in pages.items() if tables.render(text) != text]
    assert not stale, f"{stale}: make figures"


def test_a_changed_figure_is_noticed() -> None:
    import tables

    text = (ROOT / "docs" / "benchmarks.md").read_text()
    block = tables.BLOCK.search(text)
    changed = text[: block.start("body")] + re.sub(r"\d", "7", block["body"]) + text[block.end("body") :]
    assert tables.render(changed) == text != changed


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("{file} pairs nothing", "no such lines"),
        ("{file} graph dense", "no layout"),
        ("{file} lines dense", "has no <!-- end"),
    ],
)
def test_tables_that_cannot_be_made_are_refused(query: str, message: str) -> None:
    import tables

    page = f"<!-- results: {query.format(file=FILES[0].name)} -->\n"
    with pytest.raises(ValueError, match=message):
        tables.render(page if "end" in message else page + "<!-- end of results -->\n")


@pytest.mark.parametrize(("page", "section"), sorted(MEASURED_BEFORE))
def test_sections_without_results_say_so(page: str, section: str) -> None:
    found = sections(page)
    assert section in found, f"{page} has no section {section} any more"
    assert SAYS_SO in re.sub(r"\s+", " ", found[section])


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "README.md"])
def test_figures_elsewhere_are_generated(page: str) -> None:
    """A time, a rate, a size or a decimal stands in what is generated, or in a section that was measured before."""
    import tables

    checked = sections(page)
    if page == "README.md":
        checked = {name: text for name, text in checked.items() if name in ("How fast", "On a CPU", "On a GPU")}
        assert len(checked) == 3
    for section, text in checked.items():
        if (page, section) in MEASURED_BEFORE:
            continue
        by_hand = tables.BLOCK.sub("", text)
        by_hand = re.sub(r"`[^`]*`|^    .*$|\]\([^)]*\)", "", by_hand, flags=re.MULTILINE)
        figures = re.findall(r"\d+\.\d+|\b\d+ (?:ns|us|ms|s|MiB|GiB|GFLOPS|TFLOPS)\b", by_hand)
        allowed = ALLOWED.get((page, section), [])
        assert figures == allowed, f"{page}, {section}"


# Facts of a machine and rules of how it is measured, which are no results.
ALLOWED = {
    ("docs/benchmarks.md", "On the GPU"): ["2 ms", "4 GiB", "2.5"],
    ("docs/benchmarks.md", "How it measures"): [],
}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.01234, "0.0123"),
        (1.0, "1.00"),
        (1.4e-5, "1.40e-5"),
        (123.4, "123"),
        (999.9, "1000"),
        (12345, "12300"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    import tables

    assert tables.number(value) == text


# ---- Plots


def drawn() -> list[tuple[str, Path]]:
    """Which picture every kept file makes."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import plot
    finally:
        sys.path.pop(0)
    contents = [(file, json.loads(file.read_text())) for file in FILES]
    return [(name, file) for file, content in contents for name, _ in plot.pictures_of(content)]


def test_pictures_are_drawn_from_what_is_kept() -> None:
    """matplotlib's bytes differ between versions: the pictures say what they were drawn from."""
    import results
    from PIL import Image

    pictures = drawn()
    assert {"cpu_lengths", "cpu_windows", "cpu_sliding", "cpu_densities", "cpu_decode"} <= {
        name for name, _ in pictures
    }
    for name, file in pictures:
        with Image.open(ROOT / "docs" / "images" / f"{name}.png") as image:
            assert image.text["Source"] == f"{file.name} {results.digest(file)}", f"{name}: make figures"


def test_every_peer_of_a_sweep_is_drawn() -> None:
    import plot

    for name, file in drawn():
        content, picture = json.loads(file.read_text()), plot.PICTURES[name]
        curves = [picture.curves(content["comparisons"], panel) for panel in picture.panels]
        assert all(len(points) >= 2 for panel in curves for points in panel.values()), name
        assert all(len(panel) >= 2 for panel in curves), name
        lines = [line for line in content["comparisons"] if line["group"] in picture.groups]
        ours = {point.median for panel in curves for label, points in panel.items() for point in points}
        peers = {line["other"] for line in lines if line["theirs"] in ours}
        assert peers >= {line["other"] for line in lines if line["theirs"] is not None} - {"dense"}, name


def test_colors_stand_out_from_light_and_dark_pages() -> None:
    """Contrast as WCAG 2 defines it, of which it asks 3 for graphics."""
    import plot
    from matplotlib.colors import to_rgb

    def luminance(color: str) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in (*(color for color, _ in plot.STYLES.values()), plot.TEXT):
        for page in ("#FFFFFF", "#0D1117", "#1E2129"):
            dark, light = sorted([luminance(color), luminance(page)])
            assert (light + 0.05) / (dark + 0.05) > 2.8, (color, page)


# ---- Measuring


def test_samples_alternate_and_have_quartiles() -> None:
    import common

    called: list[str] = []

    def sampler(name: str, values: list[float]) -> Callable[[], float]:
        taken = iter([0.0, *values])  # the first is the warm-up

        def sample() -> float:
            called.append(name)
            return next(taken)

        return sample

    ours, theirs = sampler("ours", [1.0, 2.0, 3.0, 4.0, 5.0]), sampler("theirs", [2.0, 8.0, 3.0, 16.0, 10.0])
    first, second = common.compare_all(
        "a case", "forward", torch.float32, "ms", ours, {"peer": theirs, "other peer": "not installed"},
        repeats=5, goals={"peer": 3.0}, sizes={"length": 8},
    )  # fmt: skip
    assert called == ["ours", "theirs"] * 6
    assert (first.ours_low, first.ours, first.ours_high) == (2, 3, 4)
    assert (first.theirs_low, first.theirs, first.theirs_high) == (3, 8, 10)
    assert (first.ratio_low, first.ratio, first.ratio_high) == (2, 2, 4)
    assert first.reached is False and first.samples == 5
    assert (second.other, second.missing, second.theirs, second.reached) == ("other peer", "not installed", None, None)
    assert second.ours == 3 and second.sizes == {"length": 8}


def test_absent_peers_stand_in_the_table() -> None:
    import report

    line = report.Comparison("a case", "forward", "float32", "ms", 1.0, other="a peer", missing="GPUs only")
    console = Console(file=io.StringIO(), width=120)
    report.Report({"name": "x"}, comparisons=[line], versions={}).print_table(console)
    assert "GPUs only" in console.file.getvalue() and "a peer" in console.file.getvalue()
    assert "GPUs only" in line.text


def progress_on(terminal: bool) -> str:
    import progress

    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    line = progress.ProgressLine(console)
    line.show("dense, forward", 1, 11)
    with line.cleared():
        pass
    return console.file.getvalue()


def test_progress_says_the_case_on_a_terminal_only() -> None:
    assert "dense, forward" in progress_on(True) and "1/11" in progress_on(True)
    assert progress_on(False) == ""


def test_a_script_writes_what_is_documented(tmp_path: Path) -> None:
    import results

    flags = ["--quick", "--repeats", "2", "--threads", "1", "--json", str(tmp_path)]
    done = run_script("benchmarks/cpu_key_indices.py", *flags)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (file,) = tmp_path.glob("*-cpu_key_indices.json")
    content = results.read(file)
    assert content["command"][:2] == ["benchmarks/cpu_key_indices.py", "--quick"]
    assert {"flash_dmattn", "commit", "torch", "python"} <= set(content["versions"])
    assert content["machine"]["threads"] == 1 and content["machine"]["cores"] >= 1
    documented = (BENCHMARKS / "README.md").read_text()
    names = {*content, *(name for line in content["comparisons"] for name in line)}
    assert all(f"`{name}`" in documented for name in names), [name for name in names if f"`{name}`" not in documented]


def test_a_sweep_names_what_it_cannot_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cpu_sweeps

    monkeypatch.setattr(cpu_sweeps.DynamicProblem, "flex_forward", compiled_never)
    monkeypatch.setattr(cpu_sweeps, "LENGTHS", [2048, 32768])
    found = list(cpu_sweeps.lengths(cpu_sweeps.Settings(repeats=1, quick=True)))
    missing = {(line.sizes["length"], line.what, line.other): line.missing for line in found if line.missing}
    assert missing[128, "backward", "FlexAttention"] == "no backward on CPUs"
    assert missing[128, "forward", "flash-dmattn 1.x"] == "GPUs only"
    assert missing[2048, "selection + forward", "topk mask + SDPA"] == "too long"
    figures = [line for line in found if line.theirs is not None]
    assert {line.other for line in figures} == {"SDPA", "topk mask + SDPA", "FlexAttention"}


def compiled_never(problem: ModuleType, intervals: object) -> Callable[[], torch.Tensor]:
    """In the place of the compiled FlexAttention, which takes a minute."""
    return lambda: problem.theirs(problem.their_mask())
