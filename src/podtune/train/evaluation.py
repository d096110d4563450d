"""Loss and perplexity on the held-out split: every row once, every trained token with the same weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from podtune.data.loader import Loader
from podtune.train.feed import on_mesh


@dataclass(frozen=True)
class Evaluation:
    """loss: nats per trained token; tokens: how many there were."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """exp of a loss in nats per token; finite, for JSON has no word for infinity."""
    return math.exp(min(loss, 700.0))


def evaluate(
    eval_step: Callable[..., Any],
    trainable: Mapping[str, jax.Array],
    frozen: Any,
    loader: Loader,
    mesh: jax.sharding.Mesh,
) -> Evaluation:
    """One pass over the loader's rows. Only two numbers per batch are kept, never logits."""
    sums: Any = None
    for step in range(loader.steps_per_epoch):
        batch = on_mesh(loader.batch_at(step), mesh, loader=loader)
        loss, tokens = eval_step(trainable, frozen, {name: a for name, a in batch.items() if name != "requests"})
        sums = (loss, tokens) if sums is None else (sums[0] + loss, sums[1] + tokens)
    loss, tokens = (float(part) for part in jax.device_get(sums))
    return Evaluation(loss / tokens if tokens else math.nan, int(tokens))


class Best:
    """The lowest validation loss so far; and, for stopping early, how many evaluations ago there was one lower by
    min_improvement than the last that was."""

    def __init__(self, *, min_improvement: float = 0.0) -> None:
        self._min_improvement = min_improvement
        self._to_beat: float | None = None
        self.loss: float | None = None
        self.step: int | None = None
        self.evaluations_since = 0

    def see(self, loss: float, step: int) -> bool:
        """Whether this loss is the lowest so far. A loss that is no number never is."""
        lowest = math.isfinite(loss) and (self.loss is None or loss < self.loss)
        if lowest:
            self.loss, self.step = loss, step
        if math.isfinite(loss) and (self._to_beat is None or loss < self._to_beat - self._min_improvement):
            self._to_beat, self.evaluations_since = loss, 0
        else:
            self.evaluations_since += 1
        return lowest

    def to_json(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "step": self.step,
            "to_beat": self._to_beat,
            "evaluations_since": self.evaluations_since,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.loss, self.step, self._to_beat = saved["loss"], saved["step"], saved["to_beat"]
        self.evaluations_since = saved["evaluations_since"]
