#!/usr/bin/env python3
"""Checks what is given to strangers: source distributions and wheels.

.venv-packaging/bin/python tools/check_package.py dist/*

A source distribution holds the files that git knows, less those that pyproject.toml leaves out. A wheel holds the
package, its licence and one library, which finds torch by name, exports nothing of its own C++, and names no folder of
the machine that built it; its platform is a manylinux one.
"""

import argparse
import fnmatch
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from io import BytesIO
from pathlib import Path

import tomllib
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent.parent

# Torch's libraries, which Python has loaded before, and those that every Linux of the platform tag has.
NEEDED = re.compile(r"lib(torch\w*|c10\w*)\.so|lib(stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
# Folders where people and machines build. Torch's headers and this project's sources are named without theirs.
BUILD_FOLDER = re.compile(rb"/(?:tmp|home|root|work|builds?|github|opt|mnt|Users)/[\w./+-]+|/[\w./+-]*/site-packages/")


def sdist_problems(path: Path) -> Iterator[str]:
    with tarfile.open(path) as archive:
        top = path.name.removesuffix(".tar.gz") + "/"
        names = [member.name for member in archive.getmembers()]
    yield from (f"{name} lies outside {top}" for name in names if not name.startswith(top))
    left_out = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["sdist"]["exclude"]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted = {name for name in tracked.splitlines() if not any(_matches(name, pattern) for pattern in left_out)}
    found = {name.removeprefix(top) for name in names} - {"PKG-INFO"}
    yield from (f"has {name}, which git does not know" for name in sorted(found - wanted))
    yield from (f"lacks {name}" for name in sorted(wanted - found))


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern) or name.startswith(f"{pattern}/")


def wheel_problems(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    info = "-".join(path.name.split("-")[:2]) + ".dist-info/"
    wanted = {str(file.relative_to(ROOT / "python")) for file in (ROOT / "python/flash_dmattn").rglob("*.py")}
    wanted |= {"flash_dmattn/py.typed", "flash_dmattn/_C/libflash_dmattn_torch.so"}
    wanted |= {info + name for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    yield from (f"lacks {name}" for name in sorted(wanted - files.keys()))
    yield from (f"has {name}" for name in sorted(files.keys() - wanted))
    tags = HeaderParser().parsestr(files[f"{info}WHEEL"].decode()).get_all("Tag", [])
    if not all(re.fullmatch(r"py3-none-manylinux_2_\d+_\w+", tag) for tag in tags):
        yield f"is tagged {', '.join(tags)}, not py3-none-manylinux"
    here = [str(folder).encode() for folder in (ROOT, Path.home(), tempfile.gettempdir()) if str(folder) != "/"]
    for name, data in files.items():
        yield from (f"{name} names {folder.decode()}" for folder in here if folder + b"/" in data)
        if data.startswith(b"\x7fELF"):
            yield from (f"{name} names {match.decode()}" for match in sorted(set(BUILD_FOLDER.findall(data))))
            yield from (f"{name} {problem}" for problem in library_problems(ELFFile(BytesIO(data))))


def library_problems(library: ELFFile) -> Iterator[str]:
    for section in library.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                if tag.entry.d_tag == "DT_NEEDED" and not NEEDED.fullmatch(tag.needed):
                    yield f"needs {tag.needed}"
                if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                    yield f"has a {tag.entry.d_tag}"
    own = [
        symbol.name
        for symbol in library.get_section_by_name(".dynsym").iter_symbols()
        if symbol.entry.st_shndx != "SHN_UNDEF" and symbol.name.startswith("_ZN12flash_dmattn")
    ]
    if own:
        yield f"exports {len(own)} names of the C++ library, {own[0]} among them"
    if library.get_section_by_name(".debug_info") or library.get_section_by_name(".symtab"):
        yield "is not stripped"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path)
    status = 0
    for path in parser.parse_args().packages:
        problems = list(wheel_problems(path) if path.suffix == ".whl" else sdist_problems(path))
        for problem in problems:
            print(f"check_package: {path.name} {problem}", file=sys.stderr)
        if problems:
            status = 1
        else:
            print(f"check_package: {path.name} is as it should be")
    return status


if __name__ == "__main__":
    sys.exit(main())
