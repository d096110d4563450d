"""The record of a run: one JSON line per logged step in metrics.jsonl, and the same as TensorBoard events."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from podtune.config.errors import RunFailure
from podtune.parallel.devices import core_count

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Writes to a local folder. `step` of a line counts finished steps.

    A resumed run drops the lines after the step it goes on from, so that no step is there twice; evaluated says whether
    the evaluation at that very step is part of what it goes on from.
    """

    def __init__(self, folder: Path, *, after_step: int, evaluated: bool = False, tensorboard: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_FILE
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        self.drop_after(after_step, evaluated=evaluated)
        self._events: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter  # slow to import, and not needed by readers of this module

            # purge_step: TensorBoard, too, forgets what an earlier process wrote beyond this step.
            self._events = SummaryWriter(
                str(folder / "tensorboard"), purge_step=after_step + 1 if after_step else None, flush_secs=30
            )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds a line. Numbers that are no numbers become null: the file is plain JSON."""
        line = {"step": step, **{key: _plain(value) for key, value in values.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._events is not None:
            for key, value in line.items():
                if key != "step" and isinstance(value, int | float):
                    self._events.add_scalar(_tag(key), float(value), step)

    def drop_after(self, step: int, *, evaluated: bool) -> None:
        """Forgets the lines after this step."""
        self._file.close()
        lines = read_metrics(self.path)
        kept = [
            line for line in lines if line["step"] < step or (line["step"] == step and (evaluated or "loss" in line))
        ]
        unfinished = self.path.with_name(self.path.name + ".tmp")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        unfinished.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        for one in (self._file, self._events):
            try:
                if one is not None:
                    one.close()
            except OSError as error:  # what ended the run is told, and not that its last lines could not be written
                logging.getLogger(__name__).warning("the log %s is not whole: %s", self.path, error.strerror or error)


class Stopwatch:
    """Time, processor time and counts since the last `lap`."""

    def __init__(self) -> None:
        self._cores = core_count()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        """(seconds, share of its cores that this process kept busy) since the last lap."""
        wall, cpu = time.perf_counter(), time.process_time()
        seconds = max(wall - self._wall, 1e-9)
        share = (cpu - self._cpu) / (seconds * self._cores)
        self._wall, self._cpu = wall, cpu
        return seconds, min(share, 1.0)

    def skip(self, seconds: float) -> None:
        """Leaves these seconds out of the present lap."""
        self._wall += seconds


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, up to the first that a crash has cut off. Only a line feed ends a line: U+2028 and
    the like may stand in an answer. Raises RunFailure for a file that cannot be read."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RunFailure(f"{path}: cannot be read ({error.strerror}). Take it away to go on without it.") from error
    for text in filter(None, texts):
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or "step" not in line:
            break
        lines.append(cast(dict[str, Any], line))
    return lines


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tag(key: str) -> str:
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
