"""When things go wrong: what becomes of bad steps, and how a signal ends a run without losing it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

from podtune.config.errors import RunFailure
from podtune.config.training import Train
from podtune.config.wording import counted
from podtune.train.step import NOT_FINITE, OUTCOMES, SPIKE

Action = Literal["none", "rollback"]


@dataclass
class BadSteps:
    """Decides what follows a bad step. The step itself has already left its update out, whatever is decided here.

    passed_over: steps whose batches were given up by a rollback; they are kept in checkpoints, so that a resumed run
    passes over them too.
    """

    settings: Train
    passed_over: set[int] = field(default_factory=set)
    rollbacks: int = 0

    def decide(self, step: int, outcome: int, *, bad_in_a_row: int, rows: list[int]) -> Action:
        """What to do about a step with this outcome (0 is a good one). step counts from 0; rows are those of its batch.

        Raises RunFailure, naming step and rows, when the run is to stop or has seen too many bad steps.
        """
        if outcome not in (NOT_FINITE, SPIKE):
            return "none"
        action = self.settings.on_nan
        if outcome == SPIKE and self.settings.spike_guard is not None:
            action = self.settings.spike_guard.action
        key = "train.on_nan" if outcome == NOT_FINITE else "train.spike_guard"
        what = f"step {step + 1} is bad: {OUTCOMES[outcome]} (rows {_short(rows)} of the prepared training data)"
        if action == "stop":
            raise RunFailure(f"{what}. {key} is stop; use skip to go on without that step.")
        limit = self.settings.max_bad_steps
        if bad_in_a_row >= limit or (action == "rollback" and self.rollbacks >= limit):
            count = (
                counted(self.rollbacks, "rollback")
                if action == "rollback"
                else f"{counted(bad_in_a_row, 'bad step')} in a row"
            )
            raise RunFailure(
                f"{what}. That makes {count} (train.max_bad_steps={limit}). A lower learning_rate, float32 as "
                f"compute_dtype or a look at those rows may help."
            )
        if action == "skip":
            return "none"
        self.passed_over.add(step)
        self.rollbacks += 1
        return "rollback"


class StopSignals:
    """While entered: the first Ctrl-C or SIGTERM asks the loop to save and leave, the second leaves at once."""

    _WATCHED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in self._WATCHED}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.received is not None:
            os.write(sys.stderr.fileno(), f"\n{name} again: leaving at once.\n".encode())
            os._exit(130)
        self.received = name
        os.write(
            sys.stderr.fileno(), f"\n{name}: saving a checkpoint, then leaving. Once more leaves at once.\n".encode()
        )


def device_failure(error: Exception, *, processes: int) -> RunFailure:
    """What a computation that broke off on the devices means to the user."""
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "RESOURCE_EXHAUSTED" in str(error):
        return RunFailure(
            f"The device ran out of memory: {said}. Take fewer rows at a time (train.accumulate), recompute more "
            f"(train.remat: full), shorten rows (data.max_length) or split the model (mesh.fsdp)."
        )
    if processes > 1:
        return RunFailure(
            f"A computation over {processes} processes broke off; most likely another process ended: {said}. Start all "
            f"of them again to go on from the last checkpoint."
        )
    return RunFailure(
        f"The computation broke off: {said}. Run the same command again to go on from the last checkpoint."
    )


def _short(rows: list[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:8])
    return shown if len(rows) <= 8 else f"{shown}, … {len(rows) - 8} more"
