"""What is shown while preparing: a bar for each stage on a terminal, sentences elsewhere, nothing without a console."""

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class PrepareProgress:
    """Stages follow one another; advance() belongs to the latest."""

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self._task: TaskID | None = None
        self._bars: Progress | None = None
        if console is not None and console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                _Amount(),
                TimeElapsedColumn(),
                TimeRemainingColumn(compact=True),
                console=console,
                transient=True,
            )

    def stage(self, name: str, unit: str, total: int | None = None) -> None:
        """Begins a stage. total is None where it is not known beforehand."""
        if self._bars is not None:
            self.finish_stage()
            self._task = self._bars.add_task(name, total=total, unit=unit)

    def advance(self, count: int) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, count)

    def say(self, sentence: str) -> None:
        if self.console is not None:
            self.console.print(Text(sentence), style="dim", soft_wrap=True)

    def finish_stage(self) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None

    def __enter__(self) -> "PrepareProgress":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars is not None:
            self.finish_stage()
            self._bars.stop()


class _Amount(ProgressColumn):
    """Done of total with the unit of the stage, and the speed."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._count = DownloadColumn(), MofNCompleteColumn()

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == "bytes":
            return self._bytes.render(task)
        done = f"{int(task.completed):,}" + (f"/{int(task.total):,}" if task.total is not None else "")
        speed = f" · {task.speed:,.0f}/s" if task.speed else ""
        return Text(f"{done} {task.fields['unit']}{speed}", style="progress.download")
