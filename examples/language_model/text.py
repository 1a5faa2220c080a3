"""The text to learn: bytes from files, cut into a training and a held-out part."""

from __future__ import annotations

import math
import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Directories whose contents are tests, tables, or not part of the standard library.
SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class Text:
    """`train` and `validation`: uint8 tensors (bytes,) on the CPU."""

    name: str
    train: Tensor
    validation: Tensor

    def unigram_bits(self) -> float:
        """Entropy in bits per byte of the byte frequencies: what a model reaches that never looks at the context."""
        frequency = torch.bincount(self.train.long(), minlength=256).double() / self.train.numel()
        frequency = frequency[frequency > 0]
        return -(frequency * frequency.log2()).sum().item()

    def train_batch(self, step: int, batch_size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 (batch_size, context). Depends on `step` and `seed` only, so that a run which was
        resumed sees the same batches as one that never stopped."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(self.train.numel() - context, (batch_size,), generator=generator)
        return _windows(self.train, starts, context)

    def validation_batch(self, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets spread evenly over the held-out part, always the same ones."""
        starts = torch.linspace(0, self.validation.numel() - context - 1, batch_size).long()
        return _windows(self.validation, starts, context)


def load_text(path: str | None, max_bytes: int, context: int) -> Text:
    """Reads a file, every .py file below a directory, or (None) the Python standard library.

    Raises:
        ValueError: the path does not exist, or holds too little text for sequences of `context` bytes.
    """
    root = Path(path) if path else Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        content = root.read_bytes()[:max_bytes]
    elif root.is_dir():
        content = _read_sources(root, max_bytes)
    else:
        raise ValueError(f"text: {root} does not exist")
    held_out = math.ceil(len(content) * HELD_OUT_SHARE)
    if held_out <= context + 1:
        raise ValueError(f"text: {root} holds {len(content)} bytes, too few for a context of {context}")
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    name = str(root) if path else f"the Python {sysconfig.get_python_version()} standard library"
    return Text(name, train=data[:-held_out], validation=data[-held_out:])


def _read_sources(root: Path, max_bytes: int) -> bytes:
    # Ordered by a hash of the path: as good as shuffled, yet the same on every run, so that the held-out end is a
    # fair sample of files that were never trained on.
    paths: list[Path] = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = set(subdirectories) - SKIPPED_DIRECTORIES
        paths += [Path(directory, name).relative_to(root) for name in files if name.endswith(".py")]
    paths.sort(key=lambda path: (zlib.crc32(path.as_posix().encode()), path.as_posix()))
    content = bytearray()
    for path in paths:
        content += (root / path).read_bytes()
        if len(content) >= max_bytes:
            break
    return bytes(content[:max_bytes])


def _windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(context + 1)
    window = data[index].long()
    return window[:, :-1], window[:, 1:]
