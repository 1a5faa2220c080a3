"""The settings of a run that goes on are those it began with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def check_nothing_else_is_given(
    given: Mapping[str, object], defaults: Mapping[str, object], saved: Mapping[str, object], checkpoint: Path
) -> None:
    """Exits if a setting that was given, hence not the default, is not the checkpoint's: none is ignored silently."""
    for name, value in given.items():
        if value not in (defaults[name], saved[name]):
            sys.exit(f"--resume: {checkpoint} began with {name} {saved[name]}, not {value}")
