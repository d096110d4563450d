"""Whether an output folder holds this run: its model, tokenizer and data by fingerprint, once they are open."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podtune import __version__
from podtune.config.errors import PodtuneError, UserError
from podtune.config.sameness import Change, changes, may_change
from podtune.config.wording import counted
from podtune.train.metrics import read_metrics
from podtune.workflow import beginning
from podtune.workflow.environment import machine, versions
from podtune.workflow.other_run import way_to_resume
from podtune.workflow.output import OutputFolder, has_checkpoint
from podtune.workflow.places import with_full_paths
from podtune.workflow.work import Work

# What enters each fingerprint, besides the content of files.
_SETTINGS_OF = {
    "model": ("model.source",),
    "tokenizer": ("model.chat_template", "model.source"),
    "data": ("data.", "seed"),
}


def check_same_run(work: Work) -> None:
    """Raises UserError when the folder holds a run of another model or other data."""
    if work.output.writes:  # the others have no record
        refuse_changes(work, fingerprints(work))


def take_folder(work: Work) -> None:
    """The folder is this run's from here on, and what an earlier one left there and is not gone on with is removed.
    Returns when that is so for every process of the run."""
    from podtune.parallel.distributed import wait_for_all

    if work.output.writes:
        work.output.take(work.run)
        work.output.update(
            podtune=__version__,
            started=work.output.record.get("started") or time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            versions=versions(),
            machine=machine(),
        )
        work.output.publish(whole=False)
    wait_for_all("the output folder is taken")


def check_finished(work: Work) -> str:
    """As `check_same_run`, for a run that is finished: nothing is prepared or written. Returns what is to be said."""
    before = work.output.load_run().model.source
    try:
        beginning.open_model(work)
        now = {"model": work.files.fingerprint, "tokenizer": work.tokenizer.fingerprint, "data": _data(work)}
    except PodtuneError as error:
        if os.path.abspath(before) != os.path.abspath(work.run.model.source):  # kept in full, whatever it is here
            raise
        return f"\nwarning: whether model and data are still those of this run cannot be told: {error}"
    refuse_changes(work, now)
    return ""


def fingerprints(work: Work) -> dict[str, str]:
    return {
        "model": work.files.fingerprint,
        "tokenizer": work.tokenizer.fingerprint,
        "data": work.prepared.fingerprint,
    }


def _data(work: Work) -> str:
    """The fingerprint that the data would be prepared under."""
    from podtune.data.prepare import default_cache
    from podtune.data.prepare_job import open_prepare_job
    from podtune.data.prepare_progress import PrepareProgress

    data = work.run.data
    cache = Path(data.cache) if data.cache else default_cache()
    length = beginning.row_tokens(work)
    return open_prepare_job(
        data, work.tokenizer, PrepareProgress(None), max_length=length, seed=work.run.seed, cache=cache
    ).fingerprint


def refuse_changes(work: Work, now: Mapping[str, str]) -> None:
    """Raises UserError when the folder's record has other fingerprints."""
    record = work.output.record
    recorded: dict[str, Any] = {
        "model": record.get("model", {}).get("fingerprint"),
        "tokenizer": record.get("model", {}).get("tokenizer_fingerprint"),
        "data": record.get("data", {}).get("fingerprint"),
    }
    changed = [name for name, before in recorded.items() if before not in (None, now[name])]
    if not changed:
        return
    old = work.output.load_run()
    before, after = (with_full_paths(run).model_dump(mode="json") for run in (old, work.run))
    differ = [change for change in changes(before, after) if not may_change(change.key)]
    if "tokenizer" in changed:  # which the data is prepared with
        changed = [name for name in changed if name != "data" or any(_is_of("data", change) for change in differ)]
    lines: list[str] = []
    for name in changed:
        told = [str(change) for change in differ if _is_of(name, change)]
        otherwise = ", or prepared by a version of podtune that makes other rows of it" if name == "data" else ""
        lines += told or [f"{name}: named as before, and with other content than it had then{otherwise}"]
    other = " and ".join("other data" if name == "data" else f"another {name}" for name in changed)
    name = work.output.address or work.output.path
    resume = f"{way_to_resume(name)}\nElse name" if differ else "Name"
    raise UserError(
        f"output: {work.run.output.path} holds a run of {other}, and this one cannot go on from it:\n  "
        + "\n  ".join(dict.fromkeys(lines))
        + f"\n{resume} another output, or start anew with --fresh."
    )


def refuse_lost_checkpoints(output: OutputFolder) -> None:
    """Raises UserError where a run has trained and what it saved is gone: it would be trained again, from its first
    step, and exported over what came of it."""
    said = "Put them back, name another output, or start anew with --fresh"
    if output.checkpoints.exists() and not output.checkpoints.is_dir():
        raise UserError(f"output: {output.checkpoints} is a file, where checkpoints would be. Move it away.")
    if output.has_reached("trained") and not has_checkpoint(output.path, output.address):
        raise UserError(f"output: {output.path}: this run has trained, and its checkpoints are gone. {said}.")
    # The folder is made before the first step, and only a person takes it away.
    if output.address is None and not output.checkpoints.exists():
        steps = max((line["step"] for line in read_metrics(output.metrics)), default=0)
        if steps > 0:
            raise UserError(
                f"output: {output.path}: {output.metrics.name} tells of {counted(steps, 'step')}, and the checkpoints "
                f"are gone. {said}."
            )


def _is_of(name: str, change: Change) -> bool:
    """Whether a change of this setting changes the fingerprint of this name."""
    return change.key.startswith(_SETTINGS_OF[name])
