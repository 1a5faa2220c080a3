"""A line on the terminal that says which case is being measured: on stderr, and only where that is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class ProgressLine:
    """Drawn anew before each sample and not by a thread of its own, which would take time from what is measured."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def show(self, text: str, done: int = 0, total: int | None = None) -> None:
        """What is measured now, and how many of its samples are there."""
        self._progress.start()
        if text != self._progress.tasks[0].description:
            self._progress.reset(self._task, description=text)
        self._progress.update(self._task, description=text, completed=done, total=total)
        self._progress.refresh()

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Takes the line away, while something else is printed."""
        self._progress.stop()
        yield


PROGRESS = ProgressLine()
