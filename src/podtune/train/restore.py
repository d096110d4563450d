"""Trained weights from a run's checkpoints, without its data: for export and evaluation after the fact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath
from jax.sharding import Mesh

from podtune.config.errors import UserError
from podtune.config.schema import Run
from podtune.train.checkpoint import Checkpoints, check_same_weights
from podtune.train.optimizers import make_optimizer
from podtune.train.standing import NOTED
from podtune.train.state import abstract_state, divide_weights, state_shardings, whole_weights, with_shardings


class Restored(NamedTuple):
    """weights: with what was trained in its place; notes: of the checkpoint they are from; latest: of the newest."""

    weights: Any
    notes: Mapping[str, Any]
    latest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.notes["step"])

    @property
    def eval_loss(self) -> float | None:
        """Of these weights on the held-out rows; None where they were saved without having been evaluated."""
        return self.notes["losses"]["eval"] if self.notes["evaluated_at"] == self.step else None


def restore_weights(
    run: Run, description: Any, weights: Any, *, mesh: Mesh, fingerprints: Mapping[str, str]
) -> Restored:
    """Takes the checkpoint that export.checkpoint names: the last, or the one with the lowest validation loss.
    weights: the frozen ones are taken from these; a description of them serves where none is frozen.

    Raises UserError when there is none, or it was trained from another model, with another tokenizer or by another
    method.
    """
    params, _ = divide_weights(description, run.method.name)
    _, frozen = divide_weights(weights, run.method.name)
    optimizer = make_optimizer(run.train.optimizer, params, weight_decay=run.train.weight_decay)
    window = run.train.spike_guard.window if run.train.spike_guard else 1
    abstract = abstract_state(params, optimizer, averaged=run.train.ema is not None, window=window)
    none = f"{run.output.path} holds no checkpoint yet. `podtune run` or `podtune train` makes one."
    if not (epath.Path(run.output.path) / "checkpoints").exists():
        raise UserError(none)
    checkpoints = Checkpoints(run.output.path, keep=run.output.keep_checkpoints, keep_best=True, read_only=True)
    try:
        last = checkpoints.latest()
        if last is None:
            raise UserError(none)
        step = checkpoints.best() if run.export.checkpoint == "best" else last
        if step is None:
            raise UserError(
                f"export.checkpoint=best: no checkpoint of {run.output.path} holds a validation loss, so none is the "
                "best. Take the last: export.checkpoint=last."
            )
        notes, latest = (checkpoints.notes(one, holding=("step", "identity", *NOTED)) for one in (step, last))
        check_same_weights(notes["identity"], run, fingerprints)
        trained = checkpoints.restore_shown(step, with_shardings(abstract, state_shardings(mesh, abstract, params)))
    finally:
        checkpoints.close()
    return Restored(whole_weights(trained, frozen), notes, latest)
