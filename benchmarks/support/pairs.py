"""Two programs measured turn by turn: each in a process of its own, one step of the one, then one of the other.

The machine's other load then falls on both alike. A side is a module of this package that calls `serve_steps`; the
parent starts it with `Side`, asks for steps, and at the end for its peak memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BENCHMARKS = Path(__file__).resolve().parent.parent
_MARK = "@@ "

# torch's OpenMP workers otherwise spin between parallel regions and take the cores from whatever else runs.
TORCH_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}


@dataclass
class Side:
    """One program under measurement. `arguments` reach its module as a JSON object."""

    name: str
    module: str
    arguments: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"support.{self.module}", json.dumps(self.arguments)],
            cwd=_BENCHMARKS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )
        self.ready = self._answer()

    def step(self) -> dict[str, Any]:
        """Has one step done, and returns what it says of it (`seconds`, `tokens`, `loss`)."""
        done = self._ask("step")
        self.steps.append(done)
        print(f"{self.name}: {done['seconds']:.1f} s", file=sys.stderr, flush=True)
        return done

    def finish(self) -> dict[str, Any]:
        """Ends the process; returns its last words, with `peak_bytes` of its whole life."""
        with self._process:
            return self._ask("finish")

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line[len(_MARK) :])
        raise RuntimeError(f"{self.name} ended early with status {self._process.wait()}; its messages are above")


def serve_steps(ready: dict[str, Any], step: Callable[[], dict[str, Any]]) -> None:
    """The side's half: does a step for each one asked for, timing it, until told to finish."""
    turns = Turns(ready)
    while turns.wait():
        turns.done(step())


class Turns:
    """The side's half for programs that run their own loop: `wait` before each step, `done` after it."""

    def __init__(self, ready: dict[str, Any]) -> None:
        _say(ready)
        self._started = self._worked = 0.0

    def wait(self) -> bool:
        """Returns when the next step is asked for; False when there is none to come, after the last words."""
        if sys.stdin.readline().strip() != "step":
            _say({"peak_bytes": peak_bytes()})
            return False
        self._started, self._worked = time.perf_counter(), time.process_time()
        return True

    def done(self, said: dict[str, Any]) -> None:
        """Reports the step, with the time since `wait` returned."""
        seconds, worked = time.perf_counter() - self._started, time.process_time() - self._worked
        _say({"seconds": seconds, "core_seconds": worked, **said})


def _say(words: dict[str, Any]) -> None:
    print(_MARK + json.dumps(words), flush=True)


def all_core_seconds() -> float:
    """Processor time of this process and of those it started and has seen end."""
    return sum(os.times()[:4])


def peak_bytes() -> int:
    """The most memory this process has held so far (resident, Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


def rate(step: dict[str, Any]) -> float:
    """Useful tokens a second in one step."""
    return step["tokens"] / step["seconds"]


def paired_ratios(ours: Side, theirs: Side) -> list[float]:
    """Our tokens a second over theirs, pair by pair."""
    return [rate(one) / rate(other) for one, other in zip(ours.steps, theirs.steps, strict=True)]


def core_ratios(ours: Side, theirs: Side) -> list[float]:
    """The same for tokens per second of processor time, which other load on the machine hardly moves."""
    pairs = zip(ours.steps, theirs.steps, strict=True)
    return [(one["tokens"] / one["core_seconds"]) / (two["tokens"] / two["core_seconds"]) for one, two in pairs]


def spread(values: list[float]) -> str:
    """`median (lowest to highest, n)`."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}, {len(values)} pairs)"
