"""What is said of a run file that asks for another run than the output folder holds: every setting that differs, and
how to go on with the one that is there. Used by the output folder, and once model and data are open by `identity`."""

from __future__ import annotations

from pathlib import Path

from podtune.config.errors import UserError
from podtune.config.sameness import Change, changes, may_change
from podtune.config.schema import Run
from podtune.workflow.places import with_full_paths

# Told apart by fingerprint once they are open (workflow/identity.py): files may move, and others may take their place.
_BY_FINGERPRINT = ("model", "data")
_PATHS = ("source", "chat_template", "path")  # of model and data: the file may have moved
_LENGTHS = ("train.steps", "train.epochs")


def refuse_other_settings(before: Run, run: Run, name: Path | str, *, has_model: bool) -> None:
    """Raises UserError where the run cannot go on from the one before, naming all that differs.

    name: what the folder is known by. has_model: a merged model lies in it.
    """
    changed = differences(before, run)
    if not changed:
        return
    lengths = [change.key for change in changed if change.key in _LENGTHS]
    further = f"\nA run of other {' and '.join(lengths)} has another schedule from its first step on."
    if has_model:
        further += (
            f" To train the model that came of this one further, start from it (model: {name}/model) with an output of "
            "its own."
        )
    raise UserError(
        f"output: {name} holds a run with other settings, and this one cannot go on from it:\n  "
        + "\n  ".join([*map(str, changed), *_of_model_and_data(before, run)])
        + f"\n{way_to_resume(name)}"
        + (further if lengths else "")
        + "\nElse name another folder, or start anew with --fresh."
    )


def differences(before: Run, now: Run) -> list[Change]:
    """The settings that make these two different runs, but for model and data."""
    return [
        change
        for change in changes(before.model_dump(mode="json"), now.model_dump(mode="json"))
        if change.key.split(".")[0] not in _BY_FINGERPRINT and not may_change(change.key)
    ]


def way_to_resume(name: Path | str) -> str:
    """How a run is gone on with as it was. name: its folder, or the address that is copied to."""
    again = "To go on with it, give the same settings and overrides again"
    return f"{again}." if isinstance(name, str) else f"{again}, or `podtune run {name}/run.yaml`, which holds them."


def _of_model_and_data(before: Run, now: Run) -> list[str]:
    """What else differs, and is refused by itself where it makes another model or other data (workflow/identity.py)."""
    old, new = (with_full_paths(run).model_dump(mode="json") for run in (before, now))
    found = [change for change in changes(old, new) if change.key.split(".")[0] in _BY_FINGERPRINT]
    return [
        f"{change}{' (if that is another file)' if change.key.rsplit('.', 1)[-1] in _PATHS else ''}"
        for change in found
        if not may_change(change.key)
    ]
