"""How fast training goes: tokens per second, use of the device, waiting for data, time left."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import jax

from podtune.train.flops import TokenCost, peak_flops
from podtune.train.geometry import Geometry
from podtune.train.metrics import Stopwatch


class Pace:
    """Measures between logged steps; pauses (evaluation, samples) do not count. The first step, which compiles, is
    measured apart and left out of the rate."""

    def __init__(self, mesh: jax.sharding.Mesh, geometry: Geometry, cost: TokenCost) -> None:
        self.cost = cost
        self.first_step_seconds = math.nan
        self._geometry = geometry
        self._peak = peak_flops(mesh.devices.flat[0]) * mesh.size
        self._watch = Stopwatch()
        self._started = time.perf_counter()
        self._positions = self._trained = 0.0
        self._steps = 0
        self._waited = 0.0
        self._last: dict[str, Any] = {"tokens_per_second": math.nan, "data_wait": 0.0, "seconds_a_step": math.nan}

    def after(self, done: int, *, positions: float, trained: float, waited: float, logged: bool) -> dict[str, Any]:
        """To be called when a step's numbers are there. positions: tokens in it that are no padding; trained: those
        that bear loss; waited: seconds waited for data since the feed began."""
        self._positions += positions
        self._trained += trained
        self._steps += 1
        first = math.isnan(self.first_step_seconds)
        if first:
            self.first_step_seconds = time.perf_counter() - self._started
        if first or logged:
            seconds, cpu_share = self._watch.lap()
            rate = self._positions / seconds
            self._last = {
                "tokens_per_second": rate,
                "data_wait": min(1.0, max(0.0, waited - self._waited) / seconds),
                "seconds_a_step": seconds / self._steps,
            }
            if math.isnan(self._peak):
                self._last["cpu_share"] = cpu_share
            else:
                self._last["mfu"] = self.cost.flops(self._positions, self._trained) / seconds / self._peak
            self._positions, self._trained, self._steps, self._waited = 0.0, 0.0, 0, waited
        left = self._geometry.total_steps - done
        return {**self._last, "seconds_left": left * self._last["seconds_a_step"]}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is not counted."""
        before = time.perf_counter()
        yield
        self._watch.skip(time.perf_counter() - before)
        self._started += time.perf_counter() - before if math.isnan(self.first_step_seconds) else 0.0
