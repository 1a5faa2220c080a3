"""Two pictures: how the loss fell, and which keys a late query sees."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from flash_dmattn import select_keys
from torch import Tensor

from .model import LanguageModel

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

LINE_LENGTH = 64  # characters per line of the key picture
SHOWN_KEYS = 512  # the newest keys that it shows


def plot_loss(losses: list[float], unigram: float, validation: float, path: Path) -> None:
    """Training loss per step, in bits per byte, against the entropy of the byte frequencies."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(losses) + 1)
    smooth = torch.tensor(losses).unfold(0, min(10, len(losses)), 1).mean(dim=1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(steps[len(losses) - len(smooth) :], smooth, color="tab:blue", label="training loss (mean of 10 steps)")
    axes.plot(len(losses), validation, "o", color="tab:orange", label=f"held-out text: {validation:.2f}")
    axes.axhline(
        unigram, color="gray", linestyle="--", label=f"byte frequencies alone (unigram entropy): {unigram:.2f}"
    )
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None), title="Loss")
    axes.legend()
    _save(figure, path)


@torch.no_grad()
def plot_visible_keys(model: LanguageModel, tokens: Tensor, path: Path) -> None:
    """Shows the text `tokens`, int64 (S,), as the last position's query sees it, once per layer and key head."""
    biases = _biases(model, tokens)
    layers, key_heads = len(biases), biases[0].shape[0]
    size = (6.2 * key_heads, 0.19 * (SHOWN_KEYS // LINE_LENGTH) * layers + 0.6 * layers + 0.8)
    figure, grid = plt.subplots(layers, key_heads, figsize=size, squeeze=False, layout="constrained")
    for layer, bias in enumerate(biases):
        for head in range(key_heads):
            _draw_keys(grid[layer][head], tokens, bias[head], model.config.window)
            grid[layer][head].set_title(f"layer {layer + 1}, key head {head + 1}", fontsize=9, loc="left")
    figure.suptitle(
        f"What the query at the end of the text sees: the {min(model.config.window, len(tokens))} keys of highest bias "
        f"out of {len(tokens)}\n"
        "orange: seen although older than a sliding window of that size; blue: seen inside it; "
        "darker: larger bias; grey: hidden",
        fontsize=10,
    )
    _save(figure, path)


def _biases(model: LanguageModel, tokens: Tensor) -> list[Tensor]:
    """The bias of every key, (Hkv, S), of each layer."""
    biases: list[Tensor] = []
    hooks = [
        block.attention.key_bias.register_forward_hook(
            lambda _module, _inputs, bias: biases.append(bias[0].float().cpu())
        )
        for block in model.blocks
    ]
    model(tokens[None])
    for hook in hooks:
        hook.remove()
    return biases


def _draw_keys(axes: plt.Axes, tokens: Tensor, bias: Tensor, window: int) -> None:
    """bias (S,): one head's."""
    keys = len(tokens)
    visible = select_keys(bias[None, None], window, seqlen_q=1).dense_mask(1)[0, 0, 0]
    seen = bias[visible]
    spread = (seen.max() - seen.min()).clamp(min=1e-6)
    first = max(0, keys - SHOWN_KEYS)
    for key in range(first, keys):
        line, column = divmod(key - first, LINE_LENGTH)
        if visible[key]:
            color = "tab:blue" if key >= keys - window else "tab:orange"
            strength = 0.15 + 0.55 * ((bias[key] - seen.min()) / spread).item()
            axes.add_patch(Rectangle((column, line), 1, 1, facecolor=color, alpha=strength, linewidth=0))
        axes.text(
            column + 0.5,
            line + 0.5,
            _character(int(tokens[key])),
            color="black" if visible[key] else "0.65",
            family="monospace",
            fontsize=7,
            ha="center",
            va="center",
            parse_math=False,
        )
    axes.set(xlim=(0, LINE_LENGTH), ylim=(-(-(keys - first) // LINE_LENGTH), 0), xticks=[], yticks=[])


def _character(byte: int) -> str:
    """One printable character: line ends, spaces and control bytes get signs of their own."""
    return {10: "↵", 9: "→", 32: "·"}.get(byte, chr(byte) if 32 < byte < 127 else "▯")


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)
