#!/usr/bin/env python3
"""Checks that no #include goes up: a folder includes files of its own and of lower layers only."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Lowest first. Folders of one layer do not include each other either.
LAYERS = (
    ("include/flash_dmattn",),
    ("src/core",),
    ("src/plan", "src/selection"),
    ("src/cpu", "src/cuda"),
    ("src/api",),
    ("torch",),
)
LAYER_OF = {folder: layer for layer, folders in enumerate(LAYERS) for folder in folders}

INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def folder_of(file: Path) -> str | None:
    """The folder of the table that holds the file; None: no file of the project's libraries."""
    return next((folder for folder in LAYER_OF if file.is_relative_to(ROOT / folder)), None)


def included_folder(file: Path, name: str) -> str | None:
    """The folder that an include reaches; None: a header of another project."""
    candidates = [directory / name for directory in (file.parent, ROOT / "include", ROOT / "src")]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    return None if found is None else folder_of(found.resolve())


def violations(file: Path, folder: str) -> list[str]:
    """One line for each include of the file that goes up or sideways."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if (match := INCLUDE.match(line)) is None:
            continue
        target = included_folder(file, match[1])
        if target in (None, folder) or LAYER_OF[target] < LAYER_OF[folder]:
            continue
        where = "above" if LAYER_OF[target] > LAYER_OF[folder] else "beside"
        found.append(f"{file.relative_to(ROOT)}:{number}: {folder} includes {match[1]}, which lies {where} it")
    return found


def main() -> int:
    """Prints every violation; the exit status says whether there was one."""
    found = []
    for top in ("include", "src", "torch"):
        for file in sorted(path for path in (ROOT / top).rglob("*") if path.suffix in SUFFIXES):
            folder = folder_of(file)
            if folder is None:
                found.append(f"{file.relative_to(ROOT)}:1: its folder is in no layer of tools/check_layers.py")
            else:
                found += violations(file, folder)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
