#!/usr/bin/env python3
"""Checks that what is said twice is said alike: the version, and the formatters' pins.

python3 tools/check_versions.py              what every commit keeps
python3 tools/check_versions.py --release    also what a release needs: a date in CHANGELOG.md and CITATION.cff, nothing
                                             uncommitted, no tag of that version yet
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find(pattern: str, name: str) -> str:
    """The first group of the pattern's first match in the file."""
    match = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
    if match is None:
        sys.exit(f"check_versions: {name} has nothing like {pattern}")
    return match[1]


def disagreements() -> list[str]:
    version = find(r"^project\(flash_dmattn VERSION ([0-9.]+)", "CMakeLists.txt")
    pairs = [
        (version, find(r"^## \[([0-9.]+)\]", "CHANGELOG.md"), "the version in CMakeLists.txt and CHANGELOG.md"),
        (version, find(r"^version: ([0-9.]+)", "CITATION.cff"), "the version in CMakeLists.txt and CITATION.cff"),
    ]
    parts = [find(rf"VERSION_{part} (\d+)$", "include/flash_dmattn/version.h") for part in ("MAJOR", "MINOR", "PATCH")]
    pairs.append((version, ".".join(parts), "the version in CMakeLists.txt and version.h"))
    for tool, repository in (("ruff", "ruff-pre-commit"), ("clang-format", "mirrors-clang-format")):
        pin = find(rf"^{tool}==(\S+)", "requirements-dev.txt")
        revision = find(rf"{repository}\n\s+rev: v(\S+)", ".pre-commit-config.yaml")
        pairs.append((pin, revision, f"{tool} in requirements-dev.txt and .pre-commit-config.yaml"))
    for tool, other in (("ruff", "requirements-docs.txt"), ("scikit-build-core", "requirements-packaging.txt")):
        pin = find(rf"^{tool}==(\S+)", "requirements-dev.txt")
        pairs.append((pin, find(rf"^{tool}==(\S+)", other), f"{tool} in requirements-dev.txt and {other}"))
    return [f"{what}: {one}, {other}" for one, other, what in pairs if one != other]


def lacking_for_release() -> list[str]:
    version = find(r"^project\(flash_dmattn VERSION ([0-9.]+)", "CMakeLists.txt")
    lacking = []
    for name, pattern in (
        ("CHANGELOG.md", rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"),
        ("CITATION.cff", r"^date-released: "),
    ):
        if not re.search(pattern, (ROOT / name).read_text(), re.MULTILINE):
            lacking.append(f"{name} has no date of {version}")
    if git("status", "--porcelain"):
        lacking.append("there are uncommitted changes")
    if git("tag", "--list", f"v{version}"):
        lacking.append(f"the tag v{version} exists already")
    return lacking


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    problems = disagreements() + (lacking_for_release() if "--release" in sys.argv[1:] else [])
    for problem in problems:
        print(f"check_versions: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)
