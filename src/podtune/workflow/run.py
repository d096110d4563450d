"""`podtune run` as a table of stages that reads top to bottom, and the commands that use parts of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from rich.console import Console

from podtune.config.sameness import changes
from podtune.config.schema import Run
from podtune.config.wording import counted
from podtune.config.writing import scalar_as_yaml
from podtune.parallel.distributed import Processes, start_processes
from podtune.workflow import beginning, finishing, identity, training
from podtune.workflow.output import OutputFolder, claimed
from podtune.workflow.work import Work


class Stage(NamedTuple):
    name: str
    does: Callable[[Work], None]


STAGES: tuple[Stage, ...] = (
    Stage("open the model", beginning.open_model),
    Stage("check the prompts", training.check_prompts),
    Stage("check configuration and tokenizer", beginning.check_small_files),
    Stage("prepare the data", beginning.prepare_data),
    Stage("know the run again", identity.check_same_run),
    Stage("choose devices, check memory", beginning.choose_devices),
    Stage("fit the steps", training.check_steps),
    Stage("load the weights", beginning.load_model),
    Stage("rehearse the export", beginning.rehearse_export),
    Stage("take the folder", identity.take_folder),
    Stage("train", training.train_model),
    Stage("answer", training.answer_after),
    Stage("export", finishing.export_model),
    Stage("check the export", finishing.check_exported),
    Stage("report", finishing.write_report),
)
NOT_IN_TRAIN = ("export", "check the export")


def run_workflow(run: Run, console: Console, *, export: bool = True, fresh: bool = False) -> OutputFolder:
    """The whole job: all that can be wrong first, then the work, stage after stage.

    export: False stops after training; `podtune export` writes the rest. fresh: start anew although the folder holds
    this run. A run that is finished already is said to be so, and nothing is done; with another model or other data it
    is refused.
    """
    processes = start_processes()
    console = console if processes.index == 0 else Console(quiet=True)
    with claimed(run, fresh=fresh, first=processes.index == 0) as output:
        if _is_finished(output, processes):
            note = identity.check_finished(Work(run, Console(quiet=True), output)) if output.writes else ""
            said = finished_message(output) + _stopping_note(output, run) + _export_note(output, run) + note
            console.print(said, markup=False, highlight=False, soft_wrap=True)
            return output
        if output.writes and not fresh:
            identity.refuse_lost_checkpoints(output)
        work = Work(run, console, output)
        try:
            for stage in STAGES:
                if export or stage.name not in NOT_IN_TRAIN:
                    with work.timed(stage.name):
                        stage.does(work)
        except BaseException:
            output.publish(whole=False)
            raise
        output.update(timings=work.timings, devices=work.device, mesh=dict(work.mesh.shape))
        if export:
            output.reach("finished", ended=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        output.publish(whole=True)
        work.say(_farewell(output, exported=export))
        return output


def _is_finished(output: OutputFolder, processes: Processes) -> bool:
    """As the first process sees it, for it alone reads the record."""
    finished = output.has_reached("finished")
    if processes.count == 1:
        return finished
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.asarray(finished)))


def finished_message(output: OutputFolder) -> str:
    path, results = output.path, output.record.get("results") or {}
    steps = counted(results.get("steps", 0), "step")
    if results.get("stopped"):
        steps = f"stopped early, after {steps} of {results.get('total_steps', 0):,}: {results['stopped']}"
    return (
        f"{path}: this run is finished ({steps}). "
        f"Talk to it: podtune chat {path}. Look at it: {path / 'report.html'}. "
        "To train it again, name another output, or start anew with --fresh."
    )


def _stopping_note(output: OutputFolder, run: Run) -> str:
    """What is to be said where the run file asks for another early stopping than the run had, which is over."""
    if not output.writes or output.load_run().train.early_stopping == run.train.early_stopping:
        return ""
    return "\ntrain.early_stopping is another than the run had, which changes nothing in what is finished: see above."


def _export_note(output: OutputFolder, run: Run) -> str:
    """What is to be said where the run file asks for another export than the run has made."""
    if not output.writes:
        return ""
    before, now = (one.model_dump(mode="json")["export"] for one in (output.load_run(), run))
    asked = "".join(f" export.{change.key}={scalar_as_yaml(change.now)}" for change in changes(before, now))
    return f"\nIts export was made otherwise. To make it so: podtune export {output.path}{asked}" if asked else ""


def _farewell(output: OutputFolder, *, exported: bool) -> str:
    path = output.address or output.path
    if not exported:
        return f"trained: {path}. Export it: podtune export {path}. Report: {path}/report.html"
    talk = f"{path}/model" if output.address else path
    return f"done: {path}. Report: {path}/report.html. Talk to it: podtune chat {talk}"
