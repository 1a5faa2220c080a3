"""The command line: `python -m flash_dmattn <command>`."""

import argparse
import sys
from typing import NoReturn

from .commands import info, show

_COMMANDS = (info, show)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line; --help tells how a command is used."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns the process's exit status."""
    parser = _Parser(prog="python -m flash_dmattn", description="Tools around flash_dmattn attention.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in _COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
