"""Reads what benchmarks wrote with --json. README.md says what is in such a file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

SCHEMA = 1  # of the JSON: larger where a field changes its meaning or goes
FIELDS = ("script", "command", "date", "machine", "versions", "seconds", "notes", "comparisons")
LINE_FIELDS = ("case", "what", "dtype", "unit", "ours", "theirs", "other", "samples", "group")


def read(file: Path) -> dict:
    """The content of a results file.

    Raises:
        ValueError: it is of another schema, or lacks what every file has.
    """
    content = json.loads(file.read_text())
    if content.get("schema") != SCHEMA:
        raise ValueError(f"{file} is of schema {content.get('schema')}, not {SCHEMA}: measure again")
    missing = [name for name in FIELDS if name not in content]
    missing += [
        f"{name} of {line}" for line in content.get("comparisons", ()) for name in LINE_FIELDS if name not in line
    ]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}")
    return content


def is_quick(content: dict) -> bool:
    """Whether the sizes were small, to check the script: such figures mean nothing."""
    return "--quick" in content["command"]


def digest(file: Path) -> str:
    """Tells versions of a file apart."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
