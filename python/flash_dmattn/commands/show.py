"""`show`: a picture of a mask, of its tiles and of what attention makes of it."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..key_indices import KeyIndices
from ..planning import PlannedChunk, PlanReport, plan_chunks, plan_report
from ..prepared import Mask, prepare_mask
from ..selection import KeyIntervals, select_keys

# By name: what makes the scores of `length` keys, normal ones being given.
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda normal: normal,
    # Rising by four standard deviations along the sequence: newer keys push out older ones.
    "recency": lambda normal: normal + 4 * torch.arange(len(normal)) / len(normal),
    # A few neighbourhoods of keys are better than the rest.
    "clustered": lambda normal: normal / 4 + torch.sin(torch.arange(len(normal)) * (11 * math.pi / len(normal))),
}
PATTERNS = (*SCORES, "window", "documents")
# Where the documents of that pattern end, as shares of the length.
DOCUMENT_ENDS = (0.12, 0.45, 0.62, 0.7, 1.0)

MAX_SCORES = 1 << 24  # drawing takes some 40 bytes for each
MAX_PIXELS = 512  # of a side of a panel, about; more scores than that are averaged
HEAD_DIM = 64  # for the report, which does not depend on it


@dataclass(frozen=True)
class Subject:
    """One head of a mask, ready to be planned."""

    title: str
    mask: Mask
    rows: int
    keys: int
    is_causal: bool

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (1, self.rows, 1, HEAD_DIM), (1, self.keys, 1, HEAD_DIM)

    def chunks(self) -> list[PlannedChunk]:
        return plan_chunks(*self._shapes(), mask=self.mask, is_causal=self.is_causal)

    def report(self) -> PlanReport:
        return plan_report(*self._shapes(), mask=self.mask, is_causal=self.is_causal, deterministic=True)


class BadArgument(Exception):
    """What the user should be told."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the command to the parser of `python -m flash_dmattn`."""
    parser = commands.add_parser(
        "show",
        help="draw a mask, its tiles and its plan",
        description="Draws one head's mask, its tiles, and the plan that attention makes of it, as a PNG.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        help="torch.save or .npy file: a bool mask (Sq, Sk), (B, heads, Sk) or (B, heads, Sq, Sk), True = visible; "
        "or scores (Sk) or (B, heads, Sk), of which --window-size are kept; or integers, lists of keys per query "
        "(Sq, n) or (B, heads, Sq, n)",
    )
    parser.add_argument("--pattern", choices=PATTERNS, help="a mask made up instead of a file (default: random)")
    parser.add_argument("--length", type=int, help="query rows and keys of the pattern (default: 2048)")
    parser.add_argument("--window-size", type=int, help="keys that a row keeps (default for patterns: 384)")
    parser.add_argument("--keys", type=int, help="Sk, for a file with lists of keys (default: as many as rows)")
    parser.add_argument("--block-size", type=int, help="keys that an entry of a list stands for (default: 1)")
    parser.add_argument("--seed", type=int, help="of the pattern's scores (default: 0)")
    parser.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        help="the causal rule (default: yes, but for a file with a mask or lists)",
    )
    parser.add_argument("--prepare", action="store_true", help="plan what prepare_mask makes of a file's mask")
    parser.add_argument("--batch", type=int, default=0, help="batch element of the file (default: 0)")
    parser.add_argument("--head", type=int, default=0, help="head of the file (default: 0)")
    parser.add_argument("--output", type=Path, default=Path("show.png"), help="PNG to write (default: show.png)")
    parser.set_defaults(run=run, refuse=parser.error)


def run(options: argparse.Namespace) -> int:
    """Writes the picture and prints the report."""
    try:
        if options.output.suffix.lower() != ".png":
            raise BadArgument(f"--output must end with .png; got {options.output}")
        pyplot = _import_pyplot()
        subject = from_pattern(options) if options.file is None else from_file(options)
        if not 0 < subject.rows * subject.keys <= MAX_SCORES:
            raise BadArgument(f"a picture has 1 to 2^24 scores; got {subject.rows} rows and {subject.keys} keys")
        report = subject.report()
        content = draw(subject, report, pyplot)
        try:
            options.output.write_bytes(content)
        except OSError as error:
            raise BadArgument(f"--output cannot be written: {error}") from error
    except BadArgument as error:
        options.refuse(str(error))
    print(report)
    print(f"picture: {options.output}")
    return 0


def _import_pyplot() -> object:
    try:
        import matplotlib
    except ImportError as error:
        raise BadArgument("show needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


# ---- What is drawn


def from_pattern(options: argparse.Namespace) -> Subject:
    """The mask that --pattern and its options describe."""
    for name in ("batch", "head"):
        if getattr(options, name) != 0:
            raise BadArgument(f"--{name} chooses from a file; a pattern has one")
    _refuse_list_options(options)
    if options.prepare:
        raise BadArgument("--prepare is for a file with a mask; a pattern is intervals already")
    pattern = options.pattern or "random"
    length = 2048 if options.length is None else options.length
    if not 1 <= length <= math.isqrt(MAX_SCORES):
        raise BadArgument(f"--length must be between 1 and {math.isqrt(MAX_SCORES)}; got {length}")
    is_causal = options.causal is not False
    if pattern == "documents":
        if options.window_size is not None:
            raise BadArgument("--window-size does not belong to the pattern documents")
        ends = [0, *(round(share * length) for share in DOCUMENT_ENDS)]
        title = f"{len(DOCUMENT_ENDS)} packed documents" + (", causal" if is_causal else "")
        return Subject(title, KeyIntervals.documents(ends), length, length, is_causal)
    window = _window_size(384 if options.window_size is None else options.window_size)
    if pattern == "window":
        if window == 0:
            raise BadArgument("--window-size must be at least 1 for the pattern window; got 0")
        intervals = KeyIntervals.sliding_window(window - 1, 0 if is_causal else window - 1, length)
        title = f"sliding window of {window} keys" + ("" if is_causal else " to either side")
        return Subject(title, intervals, length, length, is_causal)
    normal = torch.randn(length, generator=torch.Generator().manual_seed(options.seed or 0))
    return _selected(SCORES[pattern](normal)[None, None], window, is_causal, f"{pattern} scores")


def from_file(options: argparse.Namespace) -> Subject:
    """One head of what the file holds."""
    for name in ("pattern", "length", "seed"):
        if getattr(options, name) is not None:
            raise BadArgument(f"--{name} belongs to a pattern; got a file too")
    tensor = _load(options.file)
    name, shape = options.file.name, tuple(tensor.shape)
    if tensor.dtype in (torch.int32, torch.int64):
        return _listed(tensor, options)
    _refuse_list_options(options)
    if tensor.dtype == torch.bool:
        if options.window_size is not None:
            raise BadArgument("--window-size belongs to scores; the file holds a bool mask")
        if tensor.dim() not in (2, 3, 4):
            raise BadArgument(f"a mask must have 2, 3 or 4 dimensions; {name} has {shape}")
        if tensor.dim() == 3:
            tensor = tensor[:, :, None].expand(-1, -1, tensor.shape[2], -1)  # a mask of keys, for as many rows
        mask = _one_head(tensor if tensor.dim() == 4 else tensor[None, None], options)
        is_causal = bool(options.causal)
        rows, keys = mask.shape[2:]
        title = f"mask {shape} of {name}" + (", causal" if is_causal else "")
        if options.prepare and mask.numel() > 0:
            mask = prepare_mask(mask, rows, is_causal=is_causal)
            title += f", prepared: {mask.kind}"
        return Subject(title, mask, rows, keys, is_causal)
    if not tensor.is_floating_point():
        raise BadArgument(
            f"a file must hold a bool mask, floating scores or int32 or int64 lists; {name} holds {tensor.dtype}"
        )
    if tensor.dim() not in (1, 3):
        raise BadArgument(f"scores must be (Sk) or (B, heads, Sk); {name} has {shape}")
    if options.prepare:
        raise BadArgument("--prepare is for a file with a mask; scores are selected as intervals already")
    if options.window_size is None:
        raise BadArgument("--window-size must say how many of the scores' keys a row keeps")
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = tensor.float()
    scores = _one_head(tensor if tensor.dim() == 3 else tensor[None, None], options)
    return _selected(scores, _window_size(options.window_size), options.causal is not False, f"scores of {name}")


def _listed(indices: Tensor, options: argparse.Namespace) -> Subject:
    name, shape = options.file.name, tuple(indices.shape)
    if indices.dim() not in (2, 4):
        raise BadArgument(f"lists must be (Sq, n) or (B, heads, Sq, n); {name} has {shape}")
    for option, given in (("window-size", options.window_size is not None), ("prepare", options.prepare)):
        if given:
            raise BadArgument(f"--{option} does not belong to lists of keys; the file holds integers")
    indices = _one_head(indices if indices.dim() == 4 else indices[None, None], options)
    rows, keys = indices.shape[2], indices.shape[2] if options.keys is None else options.keys
    block_size = 1 if options.block_size is None else options.block_size
    for option, value in (("keys", keys), ("block-size", block_size)):
        if not 1 <= value < 2**31:
            raise BadArgument(f"--{option} must be between 1 and 2^31 - 1; got {value}")
    is_causal = bool(options.causal)
    title = f"lists {shape} of {name}" + ("" if block_size == 1 else f", blocks of {block_size}")
    return Subject(title + (", causal" if is_causal else ""), KeyIndices(indices, block_size), rows, keys, is_causal)


def _refuse_list_options(options: argparse.Namespace) -> None:
    for name in ("keys", "block_size"):
        if getattr(options, name) is not None:
            raise BadArgument(f"--{name.replace('_', '-')} belongs to a file with lists of keys")


def _selected(scores: Tensor, window: int, is_causal: bool, what: str) -> Subject:
    length = scores.shape[2]
    if length**2 > MAX_SCORES:
        raise BadArgument(f"a picture has at most 2^24 scores; got {length} keys and as many rows")
    title = f"{'causal' if is_causal else 'per key'} top {window} of {length} keys, {what}"
    return Subject(title, select_keys(scores, window, causal=is_causal), length, length, is_causal)


def _window_size(window: int) -> int:
    if window < 0:
        raise BadArgument(f"--window-size must not be negative; got {window}")
    return window


def _one_head(tensor: Tensor, options: argparse.Namespace) -> Tensor:
    for name, size in (("batch", tensor.shape[0]), ("head", tensor.shape[1])):
        if not 0 <= getattr(options, name) < size:
            raise BadArgument(f"--{name} must be at least 0 and below {size}; got {getattr(options, name)}")
    return tensor[options.batch, options.head][None, None]


def _load(path: Path) -> Tensor:
    try:
        if path.suffix == ".npy":
            import numpy

            return torch.from_numpy(numpy.load(path, allow_pickle=False))
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise BadArgument(f"{path} cannot be read: {error}") from error
    except (
        Exception
    ) as error:  # whatever a file of another kind leads the readers to, with advice for code that calls them
        kind = type(error).__name__
        raise BadArgument(f"{path} holds no tensor that torch.save or numpy.save wrote ({kind})") from error
    if not isinstance(loaded, Tensor):
        raise BadArgument(f"{path} must hold one tensor; got {type(loaded).__name__}")
    if loaded.layout is not torch.strided:
        layout = str(loaded.layout).removeprefix("torch.")
        raise BadArgument(f"{path} must hold a dense tensor; got one with layout {layout}")
    if loaded.is_meta:
        raise BadArgument(f"{path} must hold a tensor with data; got one on meta")
    return loaded.detach()


# ---- Drawing

# Colours of scores: in an empty tile, hidden or visible in a partial one, in a full one.
_EMPTY, _HIDDEN, _VISIBLE, _FULL = range(4)
_COLORS = {_EMPTY: "#e9e9ec", _HIDDEN: "#fbdcae", _VISIBLE: "#cf6a12", _FULL: "#3b74c0"}
_INK = "#20304c"


def draw(subject: Subject, report: PlanReport, pyplot: object) -> bytes:
    """A PNG of three panels: the mask, its tiles, and its plan."""
    chunks = subject.chunks()
    visible = torch.zeros(subject.rows, subject.keys, dtype=torch.bool)
    for chunk in chunks:
        visible[chunk.row_begin : chunk.row_begin + chunk.rows, chunk.keys.long()] = chunk.visible
    with pyplot.rc_context({"font.size": 11, "axes.titlesize": 12}):
        figure, panels = pyplot.subplots(1, 3, figsize=(16.5, 7.6), layout="constrained")
        figure.get_layout_engine().set(rect=(0, 0.115, 1, 0.885), wspace=0.04)
        figure.suptitle(f"{subject.title}: {report.kept_scores:,} scores kept", fontsize=15)
        _draw_mask(panels[0], visible, subject)
        _draw_tiles(panels[1], visible, report)
        _draw_plan(panels[2], chunks, report)
        _draw_legend(figure, report)
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=100)
        pyplot.close(figure)
    return _with_palette(buffer)


def _draw_mask(axes: object, visible: Tensor, subject: Subject) -> None:
    share = visible.sum().item() / visible.numel()
    rule = ", causal rule included" if subject.is_causal else ""
    axes.set_title(f"the mask{rule}\n{share:.1%} of {subject.rows} × {subject.keys} scores are visible")
    _show(axes, torch.ones(*visible.shape, 3), visible, _INK)
    axes.set(xlabel="key", ylabel="query row")


def _draw_tiles(axes: object, visible: Tensor, report: PlanReport) -> None:
    rows, keys = visible.shape
    height, width = report.row_tile, report.key_tile
    padded = torch.nn.functional.pad(visible.float(), (0, -keys % width, 0, -rows % height))
    kept = padded.view(padded.shape[0] // height, height, -1, width).sum((1, 3))
    sizes = torch.tensor([min(height, rows - top) * width for top in range(0, rows, height)])[:, None]
    computed = int(((kept > 0) * sizes).sum())
    full = kept == sizes  # as the planner says: a tile that the last key cuts off is masked there
    classes = torch.where(kept == 0, 0, torch.where(full, 2, 1))
    axes.set_title(
        f"its tiles, {height} rows × {width} keys: skipping the empty\n{_cost(computed, report.kept_scores)}"
    )
    image, dots = _painted(visible, classes, height, width)
    _show(axes, image, dots, _COLORS[_VISIBLE])
    axes.set(xlabel="key", ylabel="query row")


def _draw_plan(axes: object, chunks: list[PlannedChunk], report: PlanReport) -> None:
    rows = sum(chunk.rows for chunk in chunks)
    # To whole tiles: what is computed of the last one.
    widest = max(math.ceil(max(len(chunk.keys), 1) / chunk.key_tile) * chunk.key_tile for chunk in chunks)
    image, dots = torch.ones(rows, widest, 3), torch.zeros(rows, widest, dtype=torch.bool)
    for chunk in chunks:
        width = chunk.tiles.shape[1] * chunk.key_tile
        shown = torch.nn.functional.pad(chunk.visible, (0, width - len(chunk.keys)))
        place = slice(chunk.row_begin, chunk.row_begin + chunk.rows), slice(0, width)
        image[place], dots[place] = _painted(shown, chunk.tiles, chunk.row_tile, chunk.key_tile)
    axes.set_title(
        f"its plan: the keys that {chunks[0].rows} rows see, put together\n"
        f"{_cost(report.computed_scores, report.kept_scores)}"
    )
    _show(axes, image, dots, _COLORS[_VISIBLE])
    for chunk in chunks:
        if chunk.row_begin > 0:
            axes.axhline(chunk.row_begin, color=_INK, linewidth=0.8)
        survivors = int(chunk.visible[:1].sum())
        if (
            chunk.is_list
            and chunk.has_bitmap
            and chunk.visible[0, :survivors].all()
            and 0 < survivors < len(chunk.keys)
        ):
            axes.plot([survivors] * 2, [chunk.row_begin, chunk.row_begin + chunk.rows], color=_INK, linewidth=1.4)
    axes.set(xlabel=f"key, in the order of the plan ({report.keys} of keys)", ylabel="query row")


def _draw_legend(figure: object, report: PlanReport) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = {
        _FULL: "full tile: no mask needed",
        _VISIBLE: "partial tile, visible",
        _HIDDEN: "partial tile, computed and hidden",
        _EMPTY: "empty tile: skipped",
    }
    handles = [Patch(facecolor=_COLORS[kind], edgecolor="#808080", label=name) for kind, name in names.items()]
    handles.append(Line2D([], [], color=_INK, linewidth=0.8, label="chunk of rows"))
    if report.lists > 0 and report.rule.startswith("intervals:"):
        label = "left: keys that the chunk's first row sees; right: keys that arrive in it"
        handles.append(Line2D([], [], color=_INK, linewidth=1.4, marker="|", markersize=11, linestyle="", label=label))
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, bbox_to_anchor=(0.5, 0.035))
    figure.text(0.5, 0.015, f"plan by {report.rule}", ha="center", fontsize=11, color="#505050")


def _painted(visible: Tensor, classes: Tensor, row_tile: int, key_tile: int) -> tuple[Tensor, Tensor]:
    """(rows, keys, 3), every score in the colour of its tile's class, and (rows, keys), the visible ones of partial
    tiles, which have a colour of their own."""
    rows, keys = visible.shape
    spread = classes.repeat_interleave(row_tile, 0).repeat_interleave(key_tile, 1)[:rows, :keys].long()
    by_class = torch.stack([_rgb(_COLORS[kind]) for kind in (_EMPTY, _HIDDEN, _FULL)])
    return by_class[spread], visible & (spread == 1)


def _show(axes: object, image: Tensor, dots: Tensor, color: str) -> None:
    """Draws (rows, keys, 3) and, on top, the dots (rows, keys) in their colour."""
    rows, keys = dots.shape
    image = _averaged(image)
    # The root: where a pixel stands for many scores, few dots among them would vanish.
    density = _averaged(dots.float()[..., None]).sqrt()
    image = image + (_rgb(color) - image) * density
    axes.imshow(image.numpy(), extent=(0, keys, rows, 0), aspect="auto", interpolation="antialiased")


def _averaged(image: Tensor) -> Tensor:
    """(rows, keys, channels) with at most MAX_PIXELS rows and keys."""
    sizes = [min(size, MAX_PIXELS) for size in image.shape[:2]]
    if sizes == list(image.shape[:2]):
        return image
    return torch.nn.functional.adaptive_avg_pool2d(image.movedim(2, 0), sizes).movedim(0, 2)


def _cost(computed: int, kept: int) -> str:
    ratio = f"{computed / kept:.2f} × what is kept" if kept else "none is kept"
    return f"computes {computed:,} scores, {ratio}"


def _rgb(color: str) -> Tensor:
    return torch.tensor([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])


def _with_palette(png: io.BytesIO) -> bytes:
    """The same picture in a third of the bytes. matplotlib brings PIL."""
    from PIL import Image

    picture = Image.open(png).convert("RGB")
    # The legend's colours, which few pixels may have, and those that most pixels have.
    named = torch.stack([255 * _rgb(color) for color in ("#ffffff", *_COLORS.values(), _INK)])
    common = torch.tensor(picture.quantize(90).getpalette()[: 3 * 90], dtype=torch.float32).view(-1, 3)
    palette = torch.cat([named, common])
    pixels = torch.frombuffer(bytearray(picture.convert("RGBA").tobytes()), dtype=torch.int32)
    colors, place = pixels.unique(return_inverse=True)
    colors = colors.view(torch.uint8).view(-1, 4)[:, :3]
    nearest = torch.cdist(colors.float(), palette).argmin(1).to(torch.uint8)
    smaller = Image.frombytes("P", picture.size, nearest[place].numpy().tobytes())
    smaller.putpalette(palette.round().to(torch.uint8).flatten().tolist())
    result = io.BytesIO()
    smaller.save(result, "PNG", optimize=True)
    return result.getvalue()
