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
from podtune.train.state import abstract_state, divide_weights, state_shardings, whole_weights, with_shardings


class Restored(NamedTuple):
    """weights: with what was trained in its place; step: when; identity: of the run that saved them."""

    weights: Any
    step: int
    identity: Mapping[str, str]


def restore_weights(
    run: Run, description: Any, weights: Any, *, mesh: Mesh, fingerprints: Mapping[str, str]
) -> Restored:
    """Takes the checkpoint that export.checkpoint names: the last, or the one with the lowest validation loss.
    weights: the frozen ones are taken from these; a description of them serves where none is frozen.

    Raises UserError when it was trained from another model, with another tokenizer or by another method.
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
        best = checkpoints.best() if run.export.checkpoint == "best" else None
        step = checkpoints.latest() if best is None else best
        if step is None:
            raise UserError(none)
        identity = checkpoints.notes(step, holding=("identity",))["identity"]
        check_same_weights(identity, run, fingerprints)
        trained = checkpoints.restore_shown(step, with_shardings(abstract, state_shardings(mesh, abstract, params)))
    finally:
        checkpoints.close()
    return Restored(whole_weights(trained, frozen), step, identity)
