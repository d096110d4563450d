"""Checkpoints through orbax: written in the background, complete or absent, restored onto whatever mesh there is.

A checkpoint holds the trained weights (adapters alone for LoRA), moments, average, guard and step; the place in the
data is the step. Beside it lie notes: what the run is, so that another run is never mistaken for it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from podtune.config.errors import RunFailure, UserError
from podtune.config.sameness import may_change
from podtune.config.schema import Run
from podtune.hub.addresses import is_address
from podtune.train.state import TrainState
from podtune.weights.tree import named_leaves

Notes = dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, newest `keep` of them and the one with the lowest validation loss."""

    def __init__(self, output: str, *, keep: int, keep_best: bool, read_only: bool = False) -> None:
        """read_only: to look at them while another process may be writing; nothing is made, cleaned up or deleted."""
        # orbax remarks on its own settings there, and tells every failure twice, with a traceback; what a user has to
        # know comes as an exception.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.folder = epath.Path(output) / "checkpoints"
        if not is_address(output) and self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"output: {self.folder} is a file, where checkpoints would be. Move it away.")
        policies: list[Any] = [ocp.checkpoint_managers.LatestN(keep)]
        if keep_best:
            policies.append(
                ocp.checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: -metrics["eval_loss"], n=1, keep_checkpoints_without_metrics=False
                )
            )
        try:
            self._manager = ocp.CheckpointManager(
                self.folder if is_address(output) else self.folder.resolve(),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
                    # Not to choose what is kept, which the policy does: without it orbax writes no metrics.
                    best_fn=lambda metrics: metrics["eval_loss"],
                    best_mode="min",
                    cleanup_tmp_directories=not read_only,
                    create=not read_only,
                    read_only=read_only,
                ),
                item_handlers={"state": ocp.PyTreeCheckpointHandler(), "notes": ocp.JsonCheckpointHandler()},
            )
        except OSError as error:
            raise UserError(f"output: {self.folder} cannot be used for checkpoints ({error}).") from error

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step of the checkpoint with the lowest validation loss, when one has any."""
        return self._manager.best_step()

    def latest_before(self, step: int) -> int:
        """The newest checkpoint of that step or an earlier one; the oldest there is when all are later."""
        steps = sorted(self._manager.all_steps())
        assert steps, "one is saved before the first step"
        return max((one for one in steps if one <= step), default=steps[0])

    def delete_after(self, step: int) -> None:
        """Forgets the checkpoints of later steps: the run goes another way from here."""
        for later in [one for one in self._manager.all_steps() if one > step]:
            self._manager.delete(later)

    def notes(self, step: int, *, holding: Collection[str] = ()) -> Notes:
        """The notes of the checkpoint of that step. Raises RunFailure when they cannot be read or lack these."""
        try:
            found: Any = self._manager.restore(step, args=ocp.args.Composite(notes=ocp.args.JsonRestore()))
            notes = dict(found.notes)
            if missing := set(holding) - notes.keys():
                raise ValueError(f"its notes lack {', '.join(sorted(missing))}")
        except Exception as error:  # whatever orbax makes of a file that is not as it wrote it
            raise self._unreadable(step, error) from error
        return notes

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state at that step, laid out as `like` (shapes with shardings), whatever mesh it was saved from."""
        flat = named_leaves(like)
        found = self._read(step, flat, flat)
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in flat])

    def restore_shown(self, step: int, like: TrainState) -> dict[str, jax.Array]:
        """The trained weights at that step alone, their average where one is kept: no moments are read."""
        part = "trainable" if like.average is None else "average"
        names = {f"{part}.{name}": name for name in like.trainable}
        found = self._read(step, named_leaves(like), names)
        return {name: found[key] for key, name in names.items()}

    def _read(self, step: int, flat: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """The wanted arrays of a state whose arrays are `flat`, shapes with shardings by name."""
        # Compared first: orbax, told of a wrong shape, fails in the middle of reading.
        try:
            there = self._manager.item_metadata(step)["state"]
            held = {name: tuple(array.shape) for name, array in dict(there).items()}
        except Exception as error:
            raise self._unreadable(step, error) from error
        shapes = {name: tuple(array.shape) for name, array in flat.items()}
        if held != shapes:
            name = next(name for name in (*shapes, *held) if held.get(name) != shapes.get(name))
            raise RunFailure(
                f"the checkpoint {self.folder / str(step)} is of another model or optimizer: {name} is "
                f"{held.get(name, 'not in it')}, and {shapes.get(name, 'not in')} in this run. Start anew with --fresh."
            )
        asked = {name: array if name in wanted else ocp.PLACEHOLDER for name, array in flat.items()}
        places = ocp.checkpoint_utils.construct_restore_args({name: flat[name] for name in wanted})
        try:
            restoring = ocp.args.PyTreeRestore(asked, restore_args={**asked, **places})
            found: Any = self._manager.restore(step, args=ocp.args.Composite(state=restoring))
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # the device or the host gave out, and the checkpoint is as good as it was
        except Exception as error:
            raise self._unreadable(step, error) from error
        return dict(found.state)

    def save(self, step: int, state: TrainState, notes: Notes, *, eval_loss: float | None = None) -> bool:
        """Starts writing the state of that step; returns once it is copied off the devices. False: it is there
        already. Raises RunFailure when this or the save before it failed; older checkpoints are then untouched."""
        steps = self._manager.all_steps()
        if step in steps:
            # Saved when the run was interrupted, evaluated only now: it is written again, with its loss, so that it can
            # be the best. Not when it is the only one, which a kill between the two would lose.
            if eval_loss is None or len(steps) == 1 or self._manager.metrics(step):
                return False
            self.wait()
            self._manager.delete(step)
        metrics = None if eval_loss is None else {"eval_loss": eval_loss}
        try:
            return self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(named_leaves(state)), notes=ocp.args.JsonSave(notes)),
                metrics=metrics,
                force=True,
            )
        except Exception as error:
            raise self._failure(error, step) from error

    def wait(self) -> None:
        """Until what was started is written. Raises RunFailure when it could not be."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error, None) from error

    def close(self) -> None:
        try:
            self._manager.close()
        except Exception:
            logging.getLogger(__name__).warning("closing the checkpoints of %s failed", self.folder, exc_info=True)

    def _unreadable(self, step: int, error: Exception) -> RunFailure:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return RunFailure(
            f"the checkpoint {self.folder / str(step)} cannot be restored ({said}). Run again if it could not be "
            "reached. If it is damaged, delete it to go on from the one before, or start anew with --fresh."
        )

    def _failure(self, error: Exception, step: int | None) -> RunFailure:
        which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        last = self.latest()
        before = (
            "There is no earlier one." if last is None else f"The one of step {last} is intact: run again to resume."
        )
        return RunFailure(f"{which} could not be written to {self.folder}: {error}. {before}")


def identity(run: Run, fingerprints: Mapping[str, str], **decided: Any) -> dict[str, str]:
    """What must be equal between a run and its resumption, by key: settings, fingerprints and what was decided."""
    settings = _flat(run.model_dump(mode="json"), "")
    kept = {key: value for key, value in settings.items() if not may_change(key)}
    return {key: str(value) for key, value in {**kept, **fingerprints, **decided}.items()}


def check_identity(saved: Mapping[str, str], now: Mapping[str, str], output: str) -> None:
    """Raises UserError naming every key in which this run differs from the one that wrote the checkpoints."""
    if lines := _differences(saved, now):
        raise UserError(
            f"output: {output} holds checkpoints of another run. What differs:\n" + "\n".join(lines) + "\n"
            "Set those back to resume it, choose another output, or start anew with --fresh."
        )


def _differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each key in which two identities differ."""
    changed = [key for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
    # A file that moved is the same file: its content has a fingerprint of its own.
    same = [subject for subject in ("model", "data") if subject in now and subject not in changed]
    changed = [key for key in changed if key.split(".")[0] not in same]
    return [f"  {key}: was {saved.get(key, 'absent')}, is {now.get(key, 'absent')}" for key in changed]


def check_same_weights(saved: Mapping[str, str], run: Run, fingerprints: Mapping[str, str]) -> None:
    """Raises UserError when trained weights do not belong into this run's model. The data may be other."""
    decisive = ("model", "tokenizer", "method")
    now = {key: value for key, value in identity(run, fingerprints).items() if key.split(".")[0] in decisive}
    trained = {key: value for key, value in saved.items() if key.split(".")[0] in decisive}
    if lines := _differences(trained, now):
        raise UserError(
            f"output: {run.output.path} holds weights that were trained otherwise, and only fit what they were trained "
            "as. What differs:\n" + "\n".join(lines) + "\n"
            "Leave those settings as the run had them, which is what the folder alone gives: podtune eval OUTPUT, "
            "podtune export OUTPUT."
        )


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, part in value.items():
        flat |= _flat(part, f"{prefix}.{key}" if prefix else str(key))
    return flat
