"""A page of the site for each public C++ header: its declarations in its own order, and comments above them as text.

The headers are written to be read, in plain comments, and formatted by clang-format: at the level of the namespace
blank lines part declarations, and a comment holds for all that follow it without a blank line. mkdocs.yml names this
as a hook; pages of docs/ link to ../include/flash_dmattn/NAME.h.
"""

import re
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

FOLDER = "include/flash_dmattn"
_LINK = re.compile(rf"\]\(\.\./{FOLDER}/(\w+)\.h\)")
# What a line at the level of the namespace declares: a type, a macro, a constant, a function.
_DECLARED = re.compile(
    r"^(?:struct|class|enum class)(?: \[\[\w+\]\])? (\w+)|^#define (\w+)|^constexpr [\w:]+ (\w+) ="
    r"|^\w[\w:&*<> ]*?[ *&](\w+)\("
)


class Block(NamedTuple):
    """Declarations that share a comment."""

    text: str  # Markdown
    code: str
    names: list[str]


def markdown_of(comment: list[str]) -> str:
    """A comment as Markdown: what is indented in it is a table or a formula, and stays as it is written."""
    lines = [line.removeprefix("//").removeprefix(" ") for line in comment]
    parts = []
    for indented, run in groupby(lines, key=lambda line: line.startswith("  ")):
        text = "\n".join(run)
        parts.append(f"```text\n{dedent(text)}\n```" if indented else text)
    return "\n\n".join(parts)


def blocks_of(header: str) -> tuple[str, list[Block]]:
    """What the comment at the top says of the header, and its blocks."""
    top, _, rest = header.partition("#pragma once\n")
    rest = re.sub(r"^#include .*\n", "", rest, flags=re.M)
    rest = re.sub(r"^(?:namespace .*\{|\}  // namespace .*)\n", "", rest, flags=re.M)
    blocks = []
    # A line that is indented or only closes a brace goes on with what is above the blank line.
    for part in re.split(r"\n\n+(?![ }])", rest.strip("\n")):
        lines = part.split("\n")
        first = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
        code = lines[first:]
        names = [next(filter(None, match.groups())) for match in map(_DECLARED.match, code) if match]
        if not names:
            raise PluginError(f"no declaration was found in:\n{part}")
        blocks.append(Block(markdown_of(lines[:first]), "\n".join(code), list(dict.fromkeys(names))))
    return markdown_of(top.strip("\n").split("\n")), blocks


def page_of(name: str, header: str, pages: dict[str, str]) -> str:
    """The header's page; `pages` says on which header's page each name of the library is."""
    about, blocks = blocks_of(header)

    def linked(text: str) -> str:
        def link(match: re.Match) -> str:
            word = match[0]
            # Words of a sentence that are names as well, such as version, are left alone.
            is_name = word in pages and re.search(r"[A-Z_]", word)
            where = "" if pages.get(word) == name else f"{pages.get(word)}.md"
            return f"[{word}]({where}#{word})" if is_name else word

        fences = re.split(r"(```text\n.*?```)", text, flags=re.S)
        prose = [re.sub(r"`[^`]*`|\w+", link, part) if i % 2 == 0 else part for i, part in enumerate(fences)]
        return re.sub(r"docs/(\w+\.md)", r"[docs/\1](../\1)", "".join(prose))

    parts = [f"# {name}.h", linked(about), f"```cpp\n#include <flash_dmattn/{name}.h>\n```"]
    seen: set[str] = set()
    for block in blocks:
        new = [word for word in block.names if word not in seen]
        seen.update(new)
        parts += [f'<span id="{word}"></span>' for word in new[1:]]
        anchor = f" {{ #{new[0]} }}" if new else ""
        parts += [f"## {', '.join(block.names)}{anchor}", linked(block.text), f"```cpp\n{block.code}\n```"]
    return "\n\n".join(filter(None, parts)) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    folder = Path(config.config_file_path).parent / FOLDER
    # Of export.h a user needs nothing.
    headers = {path.stem: path.read_text() for path in sorted(folder.glob("*.h")) if path.stem != "export"}
    pages = {word: name for name, text in headers.items() for block in blocks_of(text)[1] for word in block.names}
    for name, text in headers.items():
        files.append(File.generated(config, f"cpp/{name}.md", content=page_of(name, text, pages)))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    return _LINK.sub(r"](cpp/\1.md)", markdown)
