"""Where a run stands beside the state of its weights: what it has seen, and what every checkpoint notes of that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podtune.train.evaluation import Best
from podtune.train.recovery import BadSteps

NOTED = ("passed_over", "rollbacks", "best", "losses", "evaluated_at", "skipped", "seconds")


@dataclass
class Standing:
    """loss: of the last step; eval_loss, first_eval_loss: on the held-out rows, last and before the first step;
    evaluated_at, saved_at: the steps (how many were done) of the last evaluation and the last checkpoint; skipped:
    steps whose update was left out; seconds: spent in training up to the last checkpoint, by earlier processes too."""

    bad: BadSteps
    best: Best
    loss: float | None = None
    eval_loss: float | None = None
    first_eval_loss: float | None = None
    evaluated_at: int | None = None
    saved_at: int = -1
    skipped: int = 0
    seconds: float = 0.0

    def notes(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        return {
            "passed_over": sorted(self.bad.passed_over),
            "rollbacks": self.bad.rollbacks,
            "best": self.best.to_json(),
            "losses": {
                "loss": _number(self.loss),
                "eval": _number(self.eval_loss),
                "first_eval": _number(self.first_eval_loss),
            },
            "evaluated_at": self.evaluated_at,
            "skipped": self.skipped,
            "seconds": round(self.seconds, 3),
        }

    def resume(self, notes: Mapping[str, Any]) -> None:
        """As it was when the checkpoint was saved."""
        self.bad.passed_over |= set(notes["passed_over"])
        self.bad.rollbacks = notes["rollbacks"]
        self.skipped, self.seconds = notes["skipped"], notes["seconds"]
        self.go_back(notes)

    def go_back(self, notes: Mapping[str, Any]) -> None:
        """As it was, but for the time since, and the bad steps seen: they are counted, and passed over from now on."""
        losses = notes["losses"]
        self.loss, self.eval_loss, self.first_eval_loss = losses["loss"], losses["eval"], losses["first_eval"]
        self.best.restore(notes["best"])
        self.evaluated_at, self.saved_at = notes["evaluated_at"], int(notes["step"])


def _number(value: float | None) -> float | None:
    """JSON has no word for what is not a number."""
    return None if value is None or math.isnan(value) else value
