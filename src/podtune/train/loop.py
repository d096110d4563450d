"""The training loop. It reads top to bottom: decide, restore, then step by step until the end, then give back.

The device never waits for the host: a step's numbers are fetched while the next one runs, so whatever the loop decides
from them (log, save, roll back, stop) happens one step late, at the same step on every host.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from podtune.config.errors import Interrupted
from podtune.config.wording import counted
from podtune.parallel.mesh import describe_mesh
from podtune.train.cache import enable_compile_cache
from podtune.train.checkpoint import Checkpoints, check_identity, identity
from podtune.train.display import Display, clock
from podtune.train.evaluation import Best, evaluate
from podtune.train.feed import NO_REQUEST, SAVE, STOP, Feed, loader_for
from podtune.train.flops import token_cost
from podtune.train.geometry import Geometry, plan_geometry
from podtune.train.job import Event, EventKind, Hooks, Job, TrainResult, check_validation
from podtune.train.metrics import MetricsLog
from podtune.train.output import local_folder
from podtune.train.pace import Pace
from podtune.train.program import make_program
from podtune.train.recovery import BadSteps, StopSignals, device_failure
from podtune.train.standing import NOTED, Standing
from podtune.train.state import TrainState, discard
from podtune.train.step import OUTCOMES, TRAINED

DECIDED = ("step", "identity", "batch_rows")
"""What a checkpoint notes besides where the run stands."""


def train(job: Job, hooks: Hooks | None = None) -> TrainResult:
    """Trains as the job says, going on from the newest checkpoint in its output folder.

    Raises UserError when the settings do not fit together or the folder holds another run, RunFailure when training
    breaks down, Interrupted after a Ctrl-C or SIGTERM, when everything is saved.
    """
    enable_compile_cache()
    run = job.run
    check_validation(job.run, job.validation_split)
    keep_best = job.validation_split is not None if run.output.keep_best == "auto" else run.output.keep_best
    checkpoints = Checkpoints(job.output, keep=run.output.keep_checkpoints, keep_best=keep_best)
    try:
        found = checkpoints.latest()
        notes = None if found is None else checkpoints.notes(found, holding=(*DECIDED, *NOTED))
        geometry = _geometry(job, notes)
        names = identity(run, job.fingerprints, batch_rows=geometry.batch_rows, total_steps=geometry.total_steps)
        if notes is not None:
            check_identity(notes["identity"], names, job.output)
        result = _Training(job, hooks or Hooks(), checkpoints, geometry, names).run(notes)
    except jax.errors.JaxRuntimeError as error:
        # Not closed: that would wait for the others, and they may be gone.
        raise device_failure(error, processes=jax.process_count()) from error
    except BaseException:
        checkpoints.close()
        raise
    checkpoints.close()
    return result


def _geometry(job: Job, notes: dict[str, Any] | None) -> Geometry:
    """Decided once in the life of a run: a resumed one keeps its batches, whatever devices it has now."""
    return plan_geometry(
        job.run.train,
        rows=job.train_split.rows,
        row_tokens=job.train_split.row_tokens,
        mesh=job.mesh,
        batch_rows=None if notes is None else notes["batch_rows"],
    )


class _Training:
    """The state of one call of `train`."""

    def __init__(
        self, job: Job, hooks: Hooks, checkpoints: Checkpoints, geometry: Geometry, names: dict[str, str]
    ) -> None:
        self.job, self.hooks, self.checkpoints, self.geometry, self.names = job, hooks, checkpoints, geometry, names
        self.settings = job.run.train
        self.program, self.trainable = make_program(
            job.run, job.model, job.description, weights=job.weights, mesh=job.mesh, geometry=geometry
        )
        patience = self.settings.early_stopping
        best = Best(min_improvement=patience.min_improvement if patience else 0.0)
        self.standing = Standing(BadSteps(self.settings), best)
        self.display = Display(job.console if jax.process_index() == 0 else None, total_steps=geometry.total_steps)
        self.loader = loader_for(job.train_split, job.mesh, seed=job.run.seed, batch_rows=geometry.batch_rows)
        self.pace = Pace(job.mesh, geometry, token_cost(job.description, job.run.method.name))
        self.log: MetricsLog | None = None
        self.saved_when = time.monotonic()
        self.began = time.perf_counter()  # as if no other process had trained a part, and none had paused in between
        self.interrupted = False
        self.stopped: str | None = None

    def run(self, notes: dict[str, Any] | None) -> TrainResult:
        """From the newest checkpoint, or the beginning, to the end."""
        started = self.began = time.perf_counter()
        with StopSignals() as signals, self.display:
            state, first = self._start(notes)
            self.began -= self.standing.seconds
            evaluated = self.standing.evaluated_at == first
            if jax.process_index() == 0:
                self.log = MetricsLog(local_folder(self.job.output), after_step=first, evaluated=evaluated)
            try:
                self._announce(first)
                if first == 0 and not evaluated:
                    self._samples(state, 0, "before")
                    self._evaluate(state, 0)
                    # Now, not after the first ten minutes: a disk that cannot be written to shows before any step.
                    self._save(state, 0, eval_loss=self.standing.first_eval_loss)
                # A run that had stopped by itself, and was killed before its export, has stopped.
                state, done = (state, first) if self._is_out_of_patience(first) else self._steps(state, first, signals)
                if self.interrupted:
                    self._leave(state, done, signals.received or "another process")
                if self.standing.evaluated_at != done:
                    self._evaluate(state, done)
                self._save(state, done)
                self.checkpoints.wait()
                if _any_process(signals.received is not None):
                    self._leave(state, done, signals.received or "another process")
                weights, weights_step = self._chosen_weights(state, done)
            finally:
                if self.log is not None:
                    self.log.close()
            seconds, now = time.perf_counter() - self.began, time.perf_counter() - started
            self._say("end", done, f"Trained {counted(done - first, 'step')} in {clock(now)}.")
        if self.hooks.on_samples is not None:
            self.hooks.on_samples(weights, weights_step, "after")
        return TrainResult(
            weights=weights,
            steps=done,
            weights_step=weights_step,
            total_steps=self.geometry.total_steps,
            loss=math.nan if self.standing.loss is None else self.standing.loss,
            eval_loss=self.standing.eval_loss,
            first_eval_loss=self.standing.first_eval_loss,
            best_eval_loss=self.standing.best.loss,
            best_step=self.standing.best.step,
            skipped=self.standing.skipped,
            peak_learning_rate=self.program.peak_learning_rate,
            seconds=seconds,
            stopped=self.stopped,
            resumed_from=None if notes is None else first,
            first_step_seconds=self.pace.first_step_seconds,
        )

    def _start(self, notes: dict[str, Any] | None) -> tuple[TrainState, int]:
        if notes is None:
            return self.program.start(self.trainable), 0
        step = int(notes["step"])
        self.standing.resume(notes)
        state = self.checkpoints.restore(step, self.program.restorable)
        self._say("resume", step, f"Going on from step {step}, found in {self.checkpoints.folder}.")
        return state, step

    def _announce(self, first: int) -> None:
        rate = self.program.peak_learning_rate
        self._say("start", first, f"{describe_mesh(self.job.mesh)}. {self.geometry}.")
        self._say(
            "start",
            first,
            f"{self.settings.optimizer.name}, {self.settings.schedule.name} schedule, peak learning rate {rate:.3g}, "
            f"{self.program.settings.language.compute_dtype} arithmetic, FLOP a token: {self.pace.cost}.",
        )
        advice = self.geometry.advice(max_length=self.job.run.data.max_length)
        if first == 0 and self.settings.steps is None and advice is not None:
            self._say("few steps", first, advice)

    def _steps(self, state: TrainState, step: int, signals: StopSignals) -> tuple[TrainState, int]:
        """All steps from `step` on. Returns the state and how many steps it has seen."""
        feed = self._feed(step)
        alone = jax.process_count() == 1
        behind: _Running | None = None
        try:
            while True:
                request = self._request(signals)
                saving = False
                stopping = alone and request == STOP
                evaluating = self._is_eval_step(step)
                running: _Running | None = None
                if step < self.geometry.total_steps and not stopping and not evaluating:
                    state, measured = self.program.step(state, self.program.frozen, feed.next(request))
                    running = _Running(step, measured)
                    step += 1
                if behind is not None:
                    values = self._fetch(behind, feed)
                    if self._must_roll_back(behind.step, values):
                        state, step = self._roll_back(state, behind.step)
                        feed.close()
                        feed, behind = self._feed(step), None
                        continue
                    agreed = request if alone else int(values["request"])
                    unsaved = behind.step >= self.standing.saved_at and step < self.geometry.total_steps
                    saving = agreed == SAVE and unsaved
                    # A step that is to be evaluated is saved after that, with its loss.
                    if saving and not self._is_eval_step(step):
                        self._save(state, step)
                    if agreed == STOP and not alone:
                        stopping = True
                        if running is not None:
                            self._fetch(running, feed)
                behind = None if stopping else running
                if behind is None:
                    if stopping or step >= self.geometry.total_steps:
                        self.interrupted = stopping
                        return state, step
                    if evaluating:
                        self._samples(state, step, "during")
                        stopping = self._evaluate(state, step)
                        if saving:
                            self._save(state, step)
                        if stopping:
                            return state, step
        finally:
            feed.close()

    def _feed(self, step: int) -> Feed:
        return Feed(self.loader, self.job.mesh, start_step=step, passed_over=self.standing.bad.passed_over)

    def _request(self, signals: StopSignals) -> int:
        if signals.received:
            return STOP
        return SAVE if time.monotonic() - self.saved_when >= self.settings.checkpoint_every else NO_REQUEST

    def _fetch(self, running: _Running, feed: Feed) -> dict[str, Any]:
        """The numbers of a step, as soon as it is done; shows and logs them."""
        values = {name: value.item() for name, value in jax.device_get(running.measured).items()}
        done, outcome = running.step + 1, int(values["outcome"])
        self.standing.skipped, self.standing.loss = int(values["skipped"]), values["loss"]
        last = done == self.geometry.total_steps
        logged = done % self.settings.log_every == 0 or done == 1 or last or outcome != TRAINED
        shown = {
            "loss": values["loss"],
            "learning_rate": values["learning_rate"],
            "grad_norm": values["grad_norm"],
            "tokens": int(values["tokens"]),
            "epoch": round(done * self.geometry.batch_rows / self.job.train_split.rows, 4),
            "skipped": self.standing.skipped,
            **self.pace.after(
                done, positions=values["positions"], trained=values["tokens"], waited=feed.waited, logged=logged
            ),
        }
        if outcome != TRAINED:
            so_far = f"({self.standing.skipped} so far)"
            self._say("skip", done, f"step {done}: {OUTCOMES[outcome]}; its update is left out {so_far}.")
        if logged and self.log is not None:
            self.log.write(done, shown)
        self.display.progress(done, shown, logged=logged)
        return values

    def _must_roll_back(self, step: int, values: dict[str, Any]) -> bool:
        rows = self.loader.rows_at(step).tolist()
        bad_in_a_row = int(values["bad_in_a_row"])
        action = self.standing.bad.decide(step, int(values["outcome"]), bad_in_a_row=bad_in_a_row, rows=rows)
        return action == "rollback"

    def _roll_back(self, state: TrainState, bad_step: int) -> tuple[TrainState, int]:
        """To the newest checkpoint before the bad step. What was learnt and evaluated since is forgotten."""
        self.checkpoints.wait()
        found = self.checkpoints.latest_before(bad_step)
        discard(state)  # there may be no room for two
        state = self.checkpoints.restore(found, self.program.restorable)
        self.standing.go_back(self.checkpoints.notes(found))
        self.checkpoints.delete_after(found)
        passed = ", ".join(str(step + 1) for step in sorted(self.standing.bad.passed_over))
        self._say(
            "rollback", found, f"Back to the checkpoint of step {found}; step {passed} is passed over from now on."
        )
        if self.log is not None:
            self.log.drop_after(found, evaluated=self.standing.evaluated_at == found)
        return state, found

    def _is_eval_step(self, done: int) -> bool:
        every = self.job.run.eval.every
        if every is None or done in (0, self.standing.evaluated_at) or done >= self.geometry.total_steps:
            return False
        steps = every if isinstance(every, int) else max(1, round(every * self.geometry.total_steps))
        return done % steps == 0

    def _samples(self, state: TrainState, done: int, label: str) -> None:
        if self.hooks.on_samples is not None:
            with self.pace.paused():
                self.hooks.on_samples(self.program.weights(state), done, label)

    def _evaluate(self, state: TrainState, done: int) -> bool:
        """Loss on the held-out rows. True when training should stop here."""
        self.standing.evaluated_at = done
        job = self.job
        if job.validation_split is None:
            return False
        rows = self.geometry.micro_rows  # no more at a time than in training, so that it needs no more memory
        loader = loader_for(job.validation_split, job.mesh, seed=job.run.seed, batch_rows=rows, once=True)
        with self.pace.paused():
            seen = evaluate(self.program.eval_step, self.program.shown(state), self.program.frozen, loader, job.mesh)
        self.standing.eval_loss = seen.loss
        if done == 0:
            self.standing.first_eval_loss = seen.loss
        improved = self.standing.best.see(seen.loss, done)
        values = {"eval_loss": seen.loss, "eval_perplexity": seen.perplexity, "eval_tokens": seen.tokens}
        if self.log is not None:
            self.log.write(done, values)
        text = f"step {done}: validation loss {seen.loss:.4f}, perplexity {seen.perplexity:.2f}"
        self._say("eval", done, text + (", the best so far" if improved and done else ""), values)
        if done and improved:
            self._save(state, done, eval_loss=seen.loss)
        return self._is_out_of_patience(done)

    def _is_out_of_patience(self, done: int) -> bool:
        """Whether training should stop here, early; says so."""
        stopping = self.settings.early_stopping
        if stopping is None or self.standing.best.evaluations_since < stopping.patience:
            return False
        if done >= self.geometry.total_steps:
            return False
        self.stopped = f"no better validation loss in {counted(stopping.patience, 'evaluation')}"
        self._say("stop", done, f"Stopping after step {done}: {self.stopped}.")
        return True

    def _save(self, state: TrainState, step: int, *, eval_loss: float | None = None) -> None:
        self.saved_when, self.standing.saved_at = time.monotonic(), step
        self.standing.seconds = time.perf_counter() - self.began
        decided = {"step": step, "identity": self.names, "batch_rows": self.geometry.batch_rows}
        notes = {**decided, **self.standing.notes()}
        if self.checkpoints.save(step, state, notes, eval_loss=eval_loss):
            self._say("checkpoint", step, f"step {step}: saving a checkpoint")

    def _leave(self, state: TrainState, done: int, reason: str) -> None:
        self._save(state, done)
        self.checkpoints.wait()
        raise Interrupted(
            f"Stopped by {reason} after step {done} of {self.geometry.total_steps}; it is saved. Run the same command "
            f"again to go on."
        )

    def _chosen_weights(self, state: TrainState, done: int) -> tuple[Any, int]:
        """The weights to give back: of the last step, or of the best checkpoint where that is to be exported."""
        wanted = self.job.run.export.checkpoint == "best"
        best = self.checkpoints.best() if wanted else None
        if wanted and best is None:
            self._say("end", done, "No checkpoint holds a validation loss: the last weights are taken, not the best.")
        if best is None or best == done:
            return self.program.weights(state), done
        self._say("end", done, f"Taking the weights of step {best}, whose validation loss was the lowest.")
        discard(state)  # it is saved, and there may be no room for both
        return self.program.with_trained(self.checkpoints.restore_shown(best, self.program.restorable)), best

    def _say(self, kind: EventKind, step: int, text: str, values: dict[str, Any] | None = None) -> None:
        if kind != "checkpoint":
            self.display.say(text)
        if self.hooks.on_event is not None:
            self.hooks.on_event(Event(kind, text, step, values or {}))


def _any_process(said: bool) -> bool:
    """Whether any process says so: the same answer on all."""
    if jax.process_count() == 1:
        return said
    return bool(np.any(multihost_utils.process_allgather(np.asarray(said))))


class _Running(NamedTuple):
    """A step that the device is at; its numbers are not there yet."""

    step: int
    measured: dict[str, Any]
