"""Draws what the benchmarks measured, from the JSON that they wrote.

    python benchmarks/plot.py benchmarks/results/*.json --out docs/images

One picture for every sweep that the files hold: benchmarks/README.md lists them. Axes are logarithmic, so that straight
lines are powers: slope 1 is time in proportion. Bars are quartiles. The pictures have no background, and colours that
stand out from white and from black, so that they fit light and dark pages; the colours are four of Okabe and Ito's
("Color Universal Design", 2008), which most colour-blind readers tell apart, and every line has a marker of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from results import digest, is_quick, read

OURS = "flash_dmattn"
# By the first words of a line's label, the most telling first.
STYLES = {
    "flash_dmattn, kept": ("#CC79A7", "D"),
    "flash_dmattn": ("#0072B2", "o"),
    "own": ("#CC79A7", "D"),
    "projection": ("#CC79A7", "D"),
    "SDPA": ("#D55E00", "s"),
    "FlexAttention": ("#009E73", "^"),
    "FA4": ("#009E73", "^"),
}
TEXT = "#7A7A7A"
STYLE = {
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.edgecolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": TEXT,
    "grid.alpha": 0.3,
    "axes.titlesize": "medium",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


class Point(NamedTuple):
    x: float
    low: float
    median: float
    high: float


Curves = dict[str, list[Point]]  # by label, this library's first


@dataclass(frozen=True)
class Picture:
    """Panels beside one another, each of lines of one script."""

    title: str
    script: str
    groups: tuple[str, ...]
    x: str  # which of a line's sizes
    x_label: str
    panels: tuple[str, ...]  # titles
    panel_of: Callable[[dict], str | None]  # of a line; None: not drawn
    label_of: Callable[[dict], str] = lambda line: OURS
    other_label_of: Callable[[dict], str | None] = lambda line: line["other"]

    def curves(self, lines: list[dict], panel: str) -> Curves:
        """What a panel shows. The figures of ours stand in a line for every other and are taken once."""
        found: dict[str, dict[float, Point]] = {}
        for line in lines:
            if line["group"] not in self.groups or self.panel_of(line) != panel:
                continue
            x = line["sizes"][self.x]
            ours = Point(x, line["ours_low"], line["ours"], line["ours_high"])
            found.setdefault(self.label_of(line), {}).setdefault(x, ours)
            other = self.other_label_of(line)
            if other is not None and line.get("theirs") is not None:
                theirs = Point(x, line["theirs_low"], line["theirs"], line["theirs_high"])
                found.setdefault(other, {}).setdefault(x, theirs)
        return {label: [points[x] for x in sorted(points)] for label, points in found.items()}


def _forward_or_backward(line: dict) -> str | None:
    return {"forward": "forward", "backward": "backward"}.get(line["what"])


def _whole_forward(line: dict) -> str | None:
    """The forward from scores to output: ours with its selection, SDPA with torch.topk's mask; FlexAttention, which
    gets its block mask, beside them."""
    if line["what"] == "selection + forward" or (line["what"] == "forward" and line["other"] == "FlexAttention"):
        return "forward, the keys chosen in it"
    return "backward" if line["what"] == "backward" else None


def _whole_other(line: dict) -> str:
    return {"FlexAttention": "FlexAttention, keys given", "topk mask + SDPA": "SDPA", "SDPA": "SDPA"}[line["other"]]


def _batch(line: dict) -> str:
    return f"batch {line['sizes']['batch']}"


def _tokens(line: dict) -> str | None:
    """Of the large problem; the other has no projection."""
    each = " each" if line["group"] == "weak" else ""
    return f"{line['sizes']['tokens']} tokens{each}" if line["case"].startswith("H32 ") else None


def _decode(heads: str, script: str) -> Picture:
    """Of the script's `batches`."""
    return Picture(
        f"one query row, all keys or 2048 kept, {heads}",
        script,
        ("batches",),
        "keys",
        "keys in the cache",
        ("batch 1", "batch 8", "batch 32"),
        _batch,
        label_of=lambda line: f"{OURS}, {line['what']}",
        other_label_of=lambda line: None if line["other"] == "dense" else line["other"],
    )


def _gpu_sweep(title: str, group: str, x: str, x_label: str) -> Picture:
    """Of one of gpu_sweep_cases.py."""
    panels = ("forward, the keys chosen in it", "backward")
    return Picture(title, "gpu_attention", (group,), x, x_label, panels, _whole_forward)


PICTURES = {
    "cpu_lengths": Picture(
        "every row keeps 1024 keys, H2 Hkv1 D128", "cpu_sweeps", ("lengths",), "length", "sequence length",
        ("forward, the keys chosen in it", "backward"), _whole_forward, other_label_of=_whole_other,
    ),
    "cpu_windows": Picture(
        "8192 keys, H2 Hkv1 D128", "cpu_sweeps", ("windows",), "window", "keys that a row keeps",
        ("forward, the keys chosen in it", "backward"), _whole_forward, other_label_of=_whole_other,
    ),
    "cpu_sliding": Picture(
        "8192 keys, H2 Hkv1 D64", "cpu_sweeps", ("sliding",), "window", "keys that a row sees, the last",
        ("forward", "backward"), _forward_or_backward,
    ),
    "cpu_densities": Picture(
        "forward, 4096 keys, H2 Hkv1 D64", "cpu_sweeps", ("densities",), "share", "share of the scores that is kept",
        ("tiles", "keys", "scores", "top w"),
        lambda line: line["sizes"]["kind"] if line["what"] == "forward" else None,
    ),
    "cpu_decode": _decode("H8 Hkv2 D128", "cpu_decode"),
    "gpu_decode": _decode("H32 Hkv8 D128", "gpu_attention"),
    "gpu_lengths": _gpu_sweep("every row keeps 1024 keys, H2 Hkv1 D128", "lengths", "length", "sequence length"),
    "gpu_model_lengths": _gpu_sweep(
        "every row keeps 2048 keys, H32 Hkv8 D128", "model_lengths", "length", "sequence length"
    ),
    "gpu_kept": _gpu_sweep("16384 keys, H2 Hkv1 D128", "kept", "window", "keys that a row keeps"),
    "gpu_windows": Picture(
        "bool mask, H2 Hkv1 D32 S16384", "gpu_attention", ("windows",), "window", "keys that a row sees, the last",
        ("forward", "backward"), _forward_or_backward,
    ),
    "gpu_ranks": Picture(
        "forward + backward, H32 Hkv8 D128, 2048 kept", "gpu_distributed", ("strong", "weak"), "ranks", "GPUs",
        ("262144 tokens", "1048576 tokens", "131072 tokens each"), _tokens,
        other_label_of=lambda line: line["other"] if line["other"] == "projection" else None,
    ),
}  # fmt: skip


def draw(picture: Picture, content: dict, path: Path, source: Path) -> None:
    """Writes the PNG, whose text says from which file it was drawn."""
    with matplotlib.rc_context(STYLE):
        width = 3.6 * len(picture.panels)
        figure, axes = pyplot.subplots(
            1, len(picture.panels), figsize=(width, 4), layout="constrained", sharey=True, squeeze=False
        )
        for axis, panel in zip(axes[0], picture.panels, strict=True):
            _panel(axis, picture.curves(content["comparisons"], panel))
            axis.set_title(panel)
            axis.set_xlabel(picture.x_label)
        axes[0][0].set_ylabel("milliseconds")
        dtype = next(line["dtype"] for line in content["comparisons"] if line["group"] in picture.groups)
        title = "small sizes, without meaning" if is_quick(content) else picture.title
        figure.suptitle(f"{title}, {dtype}; {content['machine']['name']}", fontsize="medium")
        lines = {line.get_label(): line for axis in axes[0] for line in axis.containers}
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False)
        figure.savefig(path, dpi=120, metadata={"Source": f"{source.name} {digest(source)}"})
        pyplot.close(figure)


def _panel(axis: Axes, curves: Curves) -> None:
    for label, points in curves.items():
        color, marker = next(style for start, style in STYLES.items() if label.startswith(start))
        x, median = [point.x for point in points], [point.median for point in points]
        errors = [[point.median - point.low for point in points], [point.high - point.median for point in points]]
        axis.errorbar(
            x, median, errors, color=color, marker=marker, markersize=5, capsize=2, label=label,
            linestyle="-" if label.startswith(OURS) else "--",
        )  # fmt: skip
    ticks = sorted({point.x for points in curves.values() for point in points})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [_short(tick) for tick in ticks], rotation=45 if len(ticks) > 6 else 0)
    axis.minorticks_off()
    axis.grid()


def _short(size: float) -> str:
    return f"{size / 1024:g}k" if size >= 1024 else f"{size:g}"


def pictures_of(content: dict) -> Iterator[tuple[str, Picture]]:
    """Those whose lines the file holds."""
    groups = {line["group"] for line in content["comparisons"]}
    for name, picture in PICTURES.items():
        if picture.script == content["script"] and groups.issuperset(picture.groups):
            yield name, picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="what the benchmarks wrote with --json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures; it is made")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file in arguments.files:
        content = read(file)
        for name, picture in pictures_of(content):
            path = arguments.out / f"{name}.png"
            draw(picture, content, path, file)
            print(path)


if __name__ == "__main__":
    main()
