"""What the loop is given, what must be right about it, and what it gives back. The workflow fills a Job in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.sharding import Mesh

from podtune.config.errors import UserError
from podtune.config.schema import Run
from podtune.objectives.language import LanguageModel


@dataclass(frozen=True)
class Job:
    """One training run.

    model: embed, hidden, unembedding. description, weights: the same tree, of Params and of arrays on the mesh, with
    adapters attached. The arrays that are trained are taken over: use the result's weights afterwards.
    train_split, validation_split: `data.prepared.PreparedSplit`, or rows with the same name, fingerprint, rows,
    row_tokens and read(index).
    fingerprints: of what the run file only names (model, tokenizer, data); a resumed run must have the same.
    output: the run's folder, a path or gs://….
    console: a rich Console to show progress on; None is quiet.
    """

    run: Run
    model: LanguageModel
    description: Any
    weights: Any
    mesh: Mesh
    train_split: Any
    validation_split: Any = None
    output: str = ""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    console: Any = None


EventKind = Literal["start", "resume", "eval", "checkpoint", "skip", "rollback", "stop", "few steps", "end"]


@dataclass(frozen=True)
class Event:
    """Something that happened; text says it in one line."""

    kind: EventKind
    text: str
    step: int
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Hooks:
    """Called by the loop. on_samples(weights, step, label) may generate from the weights as they are at that step:
    label is before, during (at evaluations) or after (the weights that are given back)."""

    on_samples: Callable[[Any, int, str], None] | None = None
    on_event: Callable[[Event], None] | None = None


@dataclass(frozen=True)
class TrainResult:
    """weights: the whole tree as trained, averaged where an average is kept; the best step's where that is exported.

    steps: done in all, earlier runs included; weights_step: the step that `weights` are from; skipped: steps whose
    update was left out; seconds: spent on all of them, earlier runs included; peak_learning_rate: as used, grown with
    the batch where that was asked; stopped: why it ended before its last step, if it did.
    """

    weights: Any
    steps: int
    weights_step: int
    total_steps: int
    loss: float
    eval_loss: float | None
    first_eval_loss: float | None
    best_eval_loss: float | None
    best_step: int | None
    skipped: int
    peak_learning_rate: float
    seconds: float
    stopped: str | None = None
    resumed_from: int | None = None
    first_step_seconds: float = float("nan")


def check_validation(run: Run, validation_split: Any) -> None:
    """Raises UserError when a setting needs validation rows and too few were left to hold any out."""
    needing = {
        "train.early_stopping": run.train.early_stopping is not None,
        "export.checkpoint: best": run.export.checkpoint == "best",
        "output.keep_best": run.output.keep_best is True,
    }
    asked = [key for key, wanted in needing.items() if wanted]
    if asked and validation_split is None:
        raise UserError(
            f"{' and '.join(asked)} cannot be followed: no rows are held out for validation. "
            f"Give data.validation a file or a number of rows, or take {'it' if len(asked) == 1 else 'them'} out."
        )
