"""Worker processes for preparing: tasks stream in, results stream out, and little work needs no process at all."""

import atexit
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from podtune.config.errors import RunFailure

Shared = TypeVar("Shared")
Result = TypeVar("Result")

_AHEAD = 2  # tasks that each other process has at hand

_shared_file: Path | None = None  # of a worker process: what its tasks have in common


class Workers(Generic[Shared]):
    """Runs function(shared, *task) for many tasks in `count` processes, of which this one is the first: it works on a
    task whenever the others have enough to do.

    Processes are spawned, not forked: the parent may hold threads of tokenizers or an accelerator. They read `shared`
    from a file in `folder`: sent through a pipe, it would hold up this process until the other has started.
    """

    def __init__(self, count: int, shared: Shared, folder: Path) -> None:
        self.count = count
        self.shared = shared
        self._file = folder / "shared.pickle"
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]) -> Iterator[Result]:
        """Results in the order in which they are ready. Raises what a task raised, RunFailure when a worker died."""
        waiting: set[Future[Result]] = set()
        try:
            for task in tasks:
                done = {future for future in waiting if future.done()}
                waiting -= done
                yield from (future.result() for future in done)
                if len(waiting) < _AHEAD * (self.count - 1):
                    waiting.add(self._started().submit(_run_task, function, task))
                else:
                    yield function(self.shared, *task)
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BrokenProcessPool as error:
            raise RunFailure(
                "a preparing process was killed, most often for lack of memory. What is finished is kept: "
                "run again with data.workers: 1, or on a machine with more memory."
            ) from error

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._file.write_bytes(pickle.dumps(self.shared))
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count - 1, context, _begin_worker, (self._file, os.getpid()))
        return self._pool

    def __enter__(self) -> "Workers[Shared]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._file.unlink(missing_ok=True)


def _begin_worker(shared: Path, parent: int) -> None:
    global _shared_file
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then sends no more tasks
    threading.Thread(target=_leave_with_parent, args=(parent,), daemon=True).start()
    _shared_file = shared
    atexit.register(os._exit, 0)  # gives the memory back at once, where taking it down object by object takes its time
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process per core is threads enough


def _leave_with_parent(parent: int) -> None:
    """A parent killed outright cannot tell its workers."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _run_task(function: Callable[..., Result], task: tuple[Any, ...]) -> Result:
    return function(_shared(), *task)


@cache
def _shared() -> Any:
    """Read by the first task, whose failure is told as it is; that of a starting process breaks the pool unsaid."""
    assert _shared_file is not None, "set when the process begins"
    return pickle.loads(_shared_file.read_bytes())
