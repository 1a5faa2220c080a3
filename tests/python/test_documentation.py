"""Every code block of README.md, CONTRIBUTING.md, docs/ and docstrings: Python runs, shell runs or is parsed.

A block says in its first line what it is where it is not a program of its own:

    ```python                                runs by itself; lines "# > ..." are what it prints
    ```python {test="continued"}             runs after the blocks above it on its page
    ```python {test="gpu"}                   needs a GPU: runs where there is one, is compiled elsewhere
    ```python {test="torchrun"}              runs on several ranks: compiled
    ```python {test="fragment"}              uses names of the reader's: compiled
    ```python {test="excerpt" of="path"}     stands in that file, word for word
    ```sh                                    runs in an empty folder
    ```sh {test="setup"}                     installs, builds or trains: parsed, and its Make targets and files exist

C++ blocks are compiled by tests/cpp/readme_test.cmake; text and CMake are not run.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
KINDS = {
    "python": {"", "continued", "gpu", "torchrun", "fragment", "excerpt"},
    "sh": {"", "setup"},
    "cpp": {""},
    "cmake": {""},
    "text": {""},
}


class Block(NamedTuple):
    path: Path
    line: int  # of its first line of code, from 0
    language: str
    kind: str
    source: str
    of: str  # the file of an excerpt

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks_of(path: Path, text: str, first_line: int = 0) -> list[Block]:
    blocks = []
    for token in MarkdownIt().enable("table").parse(text):
        if token.type != "fence":
            continue
        language, _, rest = token.info.partition(" ")
        given = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        line = first_line + token.map[0] + 1
        blocks.append(Block(path, line, language, given.get("test", ""), token.content, given.get("of", "")))
    return blocks


def docstring_blocks(path: Path) -> list[Block]:
    blocks = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            blocks += blocks_of(path, ast.get_docstring(node), node.body[0].lineno - 1)
    return blocks


BLOCKS = [block for page in PAGES if page.exists() for block in blocks_of(page, page.read_text())]
BLOCKS += [block for path in sorted((ROOT / "python").rglob("*.py")) for block in docstring_blocks(path)]


def in_language(language: str) -> pytest.MarkDecorator:
    chosen = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", chosen, ids=[block.name for block in chosen])


def test_every_block_is_of_a_known_kind() -> None:
    """What no test knows, no test would look at."""
    unknown = [block for block in BLOCKS if block.kind not in KINDS.get(block.language, ())]
    assert not unknown, [(block.name, block.language, block.kind) for block in unknown]


@in_language("python")
def test_python(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if block.kind in ("torchrun", "fragment") or (block.kind == "gpu" and not torch.cuda.is_available()):
        code_of(block)
        return
    if block.kind == "excerpt":
        assert lines_of(block.source) in lines_of((ROOT / block.of).read_text())
        return
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "documentation"}
    if block.kind == "continued":
        for earlier in BLOCKS:
            is_above = earlier.path == block.path and earlier.line < block.line
            if is_above and earlier.language == "python" and earlier.kind in ("", "continued"):
                run(earlier, names)
    printed = run(block, names)
    expected = re.findall(r"^ *# > ?(.*)$", block.source, re.MULTILINE)
    if expected:
        assert printed.splitlines() == expected


def lines_of(text: str) -> str:
    """The text without indentation and empty lines."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def code_of(block: Block) -> object:
    """Its code, whose lines are numbered as on the page."""
    return compile("\n" * block.line + block.source, str(block.path), "exec")


def run(block: Block, names: dict[str, object]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code_of(block), names)
    return printed.getvalue()


@in_language("sh")
def test_shell(block: Block, tmp_path: Path) -> None:
    parsed = subprocess.run(["bash", "-n"], input=block.source, capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr
    if block.kind == "setup":
        check_targets_and_files(block.source)
        return
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = ["bash", "-euo", "pipefail", "-c", block.source]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_targets_and_files(source: str) -> None:
    """What a block that is not run names: targets of the Makefile, files of the repository."""
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"^\s*make ([a-z][a-z0-9-]*)", source, re.MULTILINE):
        assert target in targets, f"make {target}"
    for file in re.findall(r"(?<![\w/])(?:examples|benchmarks|tools|tests)/[\w/]+\.(?:py|sh)", source):
        assert (ROOT / file).is_file(), file


def test_messages_are_those_of_the_sources() -> None:
    """docs/troubleshooting.md is found by the words of messages, so that these have to be the messages' own."""
    sources = [*(ROOT / "src").rglob("*.cpp"), *(ROOT / "torch").glob("*.h"), *(ROOT / "python").rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    text = re.sub(r'"\s*\n\s*(?:\+ )?f?"', "", text)  # a message may go on in the next line
    headings = re.findall(r"^### (`.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) > 30
    for message in (message for heading in headings for message in re.findall(r"`([^`]+)`", heading)):
        for part in message.split("…"):
            words = re.sub(r"; got.*", "", part).strip()
            assert words in text, message


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "How fast"), ("docs/performance.md", "Below which density")]
)
def test_figures_are_those_of_the_benchmarks(page: str, heading: str) -> None:
    """A page that quotes a time or a ratio quotes docs/benchmarks.md."""
    section = re.search(rf"^## {heading}.*?(?=^## )", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)[0]
    tables = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    figures = set(re.findall(r"\d+\.\d+", tables))
    assert len(figures) >= 4
    known = set(re.findall(r"\d+\.\d+", (ROOT / "docs" / "benchmarks.md").read_text()))
    assert figures <= known, figures - known
