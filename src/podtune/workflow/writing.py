"""What is shown while a model is written: a bar on a terminal, a line now and then elsewhere, nothing when quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from podtune.config.wording import readable_bytes

SECONDS_BETWEEN_LINES = 20.0


@contextmanager
def shown_writing(console: Console, folder: Path) -> Iterator[Callable[[int, int], None]]:
    """A function that is told the bytes written to the folder so far, and those in all."""
    if console.is_terminal and not console.quiet:
        columns = (BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
        with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as bars:
            task = bars.add_task(f"writing {folder.name}", total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)
    else:
        yield _Lines(console, folder).tell


class _Lines:
    def __init__(self, console: Console, folder: Path) -> None:
        self._console, self._folder, self._said = console, folder, time.monotonic()

    def tell(self, done: int, total: int) -> None:
        if done < total and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            text = f"writing {self._folder}: {readable_bytes(done)} of {readable_bytes(total)}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
