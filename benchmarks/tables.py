"""Writes the tables of README.md and docs/ from the files in benchmarks/results.

    python benchmarks/tables.py            writes them into the pages
    python benchmarks/tables.py --check    only says which pages are out of date; the exit status is then 1

A page says what it shows between two comments, and all between them is replaced:

    <!-- results: FILE LAYOUT ARGUMENTS -->
    <!-- end of results -->

FILE is one of benchmarks/results. LAYOUT is one of

    machine                     sentences: machine, versions, command, date, notes
    lines GROUP ...             every line of these cases, as it is
    pairs GROUP ...             a row for each case and dtype: figures of ours and the ratios to others
    peers GROUP WHAT            figures of ours and of every other, a row for each case
    sweep GROUP WHAT SIZE ...   the same, a row for each value of these sizes

where GROUP is a case of the script as --only names it, WHAT the work of its lines, and SIZE a name of their sizes.
Words with blanks are quoted, as in a shell. Ratios and figures that miss their aim are bold.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from results import is_quick, read
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- results: (?P<query>.*?) -->\n)(?P<body>.*?)(<!-- end of results -->)", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render(page: str) -> str:
    """The page with what its comments ask for.

    Raises:
        ValueError: a comment has no end, or asks for what no file has.
    """
    if page.count("<!-- results:") != len(BLOCK.findall(page)):
        raise ValueError("a comment <!-- results: ... --> has no <!-- end of results -->")
    return BLOCK.sub(lambda found: f"{found[1]}\n{answer(found['query'])}\n{found[4]}", page)


def answer(query: str) -> str:
    """What stands between the comments: Markdown that ends in a line's end."""
    file, layout, *arguments = shlex.split(query)
    if layout not in LAYOUTS:
        raise ValueError(f"{query}: no layout is called {layout}")
    content = read(RESULTS / file)
    rendered = LAYOUTS[layout](content, *arguments)
    if not rendered:
        raise ValueError(f"{query}: {file} has no such lines")
    return rendered


# ---- Layouts


def machine(content: dict) -> str:
    about, versions = content["machine"], content["versions"]
    parts = [f"flash_dmattn {versions['flash_dmattn']}", f"torch {versions['torch']}"]
    parts += [f"{name} {versions[name]}" for name in ("transformers", "flash-attn-4") if name in versions]
    if commit := versions["commit"]:
        parts.append(f"commit {commit[:10]}{' and changes' if commit.endswith('-dirty') else ''}")
    sentences = [
        f"{about['name']}, {about['threads']} threads of {about['cores']} cores, kernels {about['cpu']['isa_float']} "
        f"(float32) and {about['cpu']['isa_bfloat16']} (bfloat16)",
        f"{', '.join(parts)}, {content['date']}",
        f"`{shlex.join(_command(content))}`, {number(sum(content['seconds'].values()) / 60)} minutes",
        *content["notes"],
    ]
    quick = "**Small sizes, which only check the script: the figures mean nothing.** " if is_quick(content) else ""
    return f"{quick}*{'. '.join(sentences)}.*\n"


def _command(content: dict) -> list[str]:
    """With what started it, and without where the file went."""
    ranks = content["machine"].get("ranks")
    start = ["torchrun", "--nproc-per-node", str(len(ranks))] if ranks else ["python"]
    command = start + content["command"]
    if "--json" in command:
        at = command.index("--json")
        del command[at : at + 2]
    return command


def lines(content: dict, *groups: str) -> str:
    found = [line for line in content["comparisons"] if line["group"] in groups]
    rows = [
        (line["case"], line["what"], line["dtype"], ours_of(line), _theirs_of(line), ratio_of(line), _aim_of(line))
        for line in found
    ]
    return table(("case", "", "dtype", "ours", "other", "other / ours (quartiles)", "aim"), rows)


def pairs(content: dict, *groups: str) -> str:
    found = [line for line in content["comparisons"] if line["group"] in groups]
    columns: dict[str, Callable[[dict], str]] = {}
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for line in found:
        row = cells.setdefault((line["case"], line["dtype"]), {})
        row.setdefault(line["what"], ours_of(line))
        columns[line["what"]] = ours_of
        if line["theirs"] is not None:
            name = f"{line['other']} / ours, {line['what']}"
            columns[name] = ratio_of
            row[name] = ratio_of(line)
    rows = [(*key, *(row.get(name, "") for name in columns)) for key, row in cells.items()]
    return table(("case", "dtype", *columns), rows)


def peers(content: dict, group: str, what: str) -> str:
    found = [line for line in content["comparisons"] if line["group"] == group and line["what"] == what]
    others = list(dict.fromkeys(line["other"] for line in found))
    cells: dict[str, dict[str, str]] = {}
    for line in found:
        row = cells.setdefault(line["case"], {})
        row.setdefault("flash_dmattn", ours_of(line))
        row[line["other"]] = _theirs_of(line, with_name=False)
    rows = [(case, *(row.get(name, "") for name in ("flash_dmattn", *others))) for case, row in cells.items()]
    return table(("", "flash_dmattn", *others), rows)


def sweep(content: dict, group: str, what: str, *sizes: str) -> str:
    found = [line for line in content["comparisons"] if line["group"] == group and line["what"] == what]
    others = list(dict.fromkeys(line["other"] for line in found))
    shown = [other for other in others if any(line["theirs"] is not None for line in found if line["other"] == other)]
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for line in found:
        row = cells.setdefault(tuple(_size(line["sizes"][name]) for name in sizes), {})
        row.setdefault("flash_dmattn", ours_of(line))
        row[line["other"]] = _theirs_of(line, with_name=False)
    rows = [(*key, *(row.get(name, "") for name in ("flash_dmattn", *shown))) for key, row in cells.items()]
    made = table((*sizes, "flash_dmattn", *shown), rows)
    absent = {line["other"]: line["missing"] for line in found if line["other"] not in shown and "missing" in line}
    if absent and made:
        made += f"\nWithout a figure: {', '.join(f'{name} ({why})' for name, why in absent.items())}.\n"
    return made


LAYOUTS: dict[str, Callable[..., str]] = {
    "machine": machine,
    "lines": lines,
    "pairs": pairs,
    "peers": peers,
    "sweep": sweep,
}

# ---- Cells


def number(value: float) -> str:
    """Three digits that count: 0.123, 1.23, 123, 1230."""
    value = float(f"{value:.3g}")
    if value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return re.sub(r"e-0?(\d+)$", r"e-\1", f"{value:#.3g}").removesuffix(".")


def ours_of(line: dict) -> str:
    is_missed = line.get("reached") is False and "goal" not in line
    return _bold(f"{number(line['ours'])} {line['unit']}", is_missed)


def ratio_of(line: dict) -> str:
    if line["theirs"] is None:
        return ""
    figure = _bold(number(line["ratio"]), line.get("reached") is False and "goal" in line)
    return f"{figure} ({number(line['ratio_low'])} – {number(line['ratio_high'])})"


def _theirs_of(line: dict, with_name: bool = True) -> str:
    figure = f"{number(line['theirs'])} {line['unit']}" if line["theirs"] is not None else line.get("missing", "")
    return f"{line['other']}: {figure}" if figure and with_name else figure


def _aim_of(line: dict) -> str:
    aims = {"goal": "ratio ≥ {:g}", "limit": "≤ {:g} {unit}", "least": "≥ {:g} {unit}"}
    return ", ".join(text.format(line[name], unit=line["unit"]) for name, text in aims.items() if name in line)


def _size(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}" if value < 1 else f"{value:.0f}"


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown, without columns that are empty; nothing if there is no row."""
    columns = [(name, *cells) for name, cells in zip(head, zip(*rows, strict=True), strict=False) if any(cells)]
    if not columns:
        return ""
    names, *kept = zip(*columns, strict=True)
    return tabulate(kept, headers=names, tablefmt="github", disable_numparse=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    stale = [page for page in pages() if render(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)} {'is out of date' if arguments.check else 'written'}")
        if not arguments.check:
            page.write_text(render(page.read_text()))
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
