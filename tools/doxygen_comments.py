"""Prints a header with its `//` comments as doxygen reads them: `///` above a declaration, `///<` beside one.

The headers are written for people, in plain comments. mkdocs.yml names this as doxygen's INPUT_FILTER.
"""

import re
import sys
from pathlib import Path


def doxygen_lines(text: str) -> list[str]:
    lines, beside = [], -1  # column of the comment that began beside a declaration
    for line in text.splitlines():
        column = line.find("//")
        if column < 0:
            beside = -1
        elif line[:column].strip():
            beside = column
            line = line[:column] + "///<" + line[column + 2 :]
        elif column == beside:
            line = line[:column] + "///<" + line[column + 2 :]
        else:
            beside = -1
            line = line[:column] + "///" + line[column + 2 :]
        lines.append(line)
    # A comment at the top of a file, before its first line of code, is about the file.
    if lines and re.match(r"///", lines[0]):
        lines.insert(0, "/// @file")
    return lines


print("\n".join(doxygen_lines(Path(sys.argv[1]).read_text())))
