"""The training loop. It reads top to bottom: decide, restore, then step by step until the end, then give back.

The device never waits for the host: a step's numbers are fetched while the next one runs, so whatever the loop decides
from them (log, save, roll back, stop) happens one step late, at the same step on every host.
"""

from __future__ import annotations

import math
import time
from typing import Any

import jax

from podtune.config.errors import Interrupted, RunFailure
from podtune.parallel.mesh import describe_mesh
from podtune.train.cache import enable_compile_cache
from podtune.train.checkpoint import Checkpoints, check_identity, identity
from podtune.train.display import Display, clock
from podtune.train.evaluation import Best, evaluate
from podtune.train.feed import NO_REQUEST, SAVE, STOP, Feed, loader_for
from podtune.train.flops import token_cost
from podtune.train.geometry import Geometry, plan_geometry
from podtune.train.job import Event, Hooks, Job, TrainResult
from podtune.train.metrics import MetricsLog
from podtune.train.output import local_folder
from podtune.train.pace import Pace
from podtune.train.program import make_program
from podtune.train.recovery import BadSteps, StopSignals
from podtune.train.state import TrainState
from podtune.train.step import NOTHING_TRAINED, TRAINED


def train(job: Job, hooks: Hooks | None = None) -> TrainResult:
    """Trains as the job says, going on from the newest checkpoint in its output folder.

    Raises UserError when the settings do not fit together or the folder holds another run, RunFailure when training
    breaks down, Interrupted after a Ctrl-C or SIGTERM, when everything is saved.
    """
    enable_compile_cache()
    run = job.run
    keep_best = job.validation_split is not None if run.output.keep_best == "auto" else run.output.keep_best
    checkpoints = Checkpoints(job.output, keep=run.output.keep_checkpoints, keep_best=keep_best)
    try:
        if job.fresh:
            checkpoints.delete_all()
        found = checkpoints.latest()
        notes = None if found is None else checkpoints.notes(found)
        geometry = _geometry(job, notes)
        names = identity(run, job.fingerprints, batch_rows=geometry.batch_rows, total_steps=geometry.total_steps)
        if notes is not None:
            check_identity(notes["identity"], names, job.output)
        return _Training(job, hooks or Hooks(), checkpoints, geometry, names).run(notes)
    finally:
        checkpoints.close()


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
        self.bad = BadSteps(self.settings)
        patience = self.settings.early_stopping
        self.best = Best(min_improvement=patience.min_improvement if patience else 0.0)
        self.display = Display(job.console if jax.process_index() == 0 else None, total_steps=geometry.total_steps)
        self.loader = loader_for(job.train_split, job.mesh, seed=job.run.seed, batch_rows=geometry.batch_rows)
        self.losses: dict[str, float | None] = {"loss": math.nan, "eval": None, "first_eval": None}
        self.eval_step_of: int | None = None
        self.stopped: str | None = None
        self.skipped = 0

    def run(self, notes: dict[str, Any] | None) -> TrainResult:
        """From the newest checkpoint, or the beginning, to the end."""
        started = time.perf_counter()
        state, first = self._start(notes)
        with StopSignals() as signals, self.display:
            log = MetricsLog(local_folder(self.job.output), after_step=first) if jax.process_index() == 0 else None
            self.pace = Pace(self.job.mesh, self.geometry, token_cost(self.job.description, self.job.run.method.name))
            try:
                self._announce(first)
                if first == 0:
                    self._evaluate(state, 0, log, save=False)
                state, done = self._steps(state, first, signals, log)
                if self.eval_step_of != done:
                    self._evaluate(state, done, log)
                self._save(state, done)
                self.checkpoints.wait()
                weights, weights_step = self._chosen_weights(state, done)
            finally:
                if log is not None:
                    log.close()
        if signals.received and done < self.geometry.total_steps:
            raise Interrupted(
                f"Stopped by {signals.received} after step {done} of {self.geometry.total_steps}; it is saved. "
                f"Run the same command again to go on."
            )
        self._say("end", done, f"Trained {done} steps in {clock(time.perf_counter() - started)}.")
        return TrainResult(
            weights=weights,
            steps=done,
            weights_step=weights_step,
            total_steps=self.geometry.total_steps,
            loss=float(self.losses["loss"] or math.nan),
            eval_loss=self.losses["eval"],
            first_eval_loss=self.losses["first_eval"],
            best_eval_loss=self.best.loss,
            best_step=self.best.step,
            skipped=self.skipped,
            seconds=time.perf_counter() - started,
            stopped=self.stopped,
            resumed_from=first or None,
            first_step_seconds=self.pace.first_step_seconds,
        )

    def _start(self, notes: dict[str, Any] | None) -> tuple[TrainState, int]:
        if notes is None:
            return self.program.start(self.trainable), 0
        step = int(notes["step"])
        self.bad.passed_over |= set(notes["passed_over"])
        self.bad.rollbacks = notes["rollbacks"]
        self.best.restore(notes["best"])
        self.losses |= notes["losses"]
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
            f"{self.program.settings.language.compute_dtype} arithmetic, {self.pace.cost} FLOP a token.",
        )

    def _steps(
        self, state: TrainState, step: int, signals: StopSignals, log: MetricsLog | None
    ) -> tuple[TrainState, int]:
        """All steps from `step` on. Returns the state and how many steps it has seen."""
        feed = self._feed(step)
        saved_at = time.monotonic()
        pending: tuple[int, dict[str, Any]] | None = None
        alone = jax.process_count() == 1
        try:
            while step < self.geometry.total_steps or pending is not None:
                asked = self._request(signals, saved_at)
                ahead: tuple[int, dict[str, Any]] | None = None
                if step < self.geometry.total_steps and not (alone and asked == STOP):
                    batch = feed.next(asked)
                    state, measured = self.program.step(state, self.program.frozen, batch)
                    ahead = (step, measured)
                    step += 1
                if pending is not None:
                    values = self._fetch(*pending, feed, log)
                    agreed = asked if alone else int(values["request"])
                    if self._must_roll_back(pending[0], values):
                        state, step = self._roll_back(state)
                        feed.close()
                        feed, pending = self._feed(step), None
                        continue
                    if agreed == STOP:
                        pending = ahead
                        if pending is not None:
                            self._fetch(*pending, feed, log)
                        break
                    if agreed == SAVE and step < self.geometry.total_steps:
                        self._save(state, step)
                        saved_at = time.monotonic()
                elif alone and asked == STOP:
                    break
                pending = ahead
                if self._is_eval_step(step) and pending is not None:
                    # The state is that after `pending`; its numbers are due first.
                    values = self._fetch(*pending, feed, log)
                    if self._must_roll_back(pending[0], values):
                        state, step = self._roll_back(state)
                        feed.close()
                        feed, pending = self._feed(step), None
                        continue
                    pending = None
                    if self._evaluate(state, step, log):
                        break
        finally:
            feed.close()
        return state, step

    def _feed(self, step: int) -> Feed:
        return Feed(self.loader, self.job.mesh, start_step=step, passed_over=self.bad.passed_over)

    def _request(self, signals: StopSignals, saved_at: float) -> int:
        if signals.received:
            return STOP
        return SAVE if time.monotonic() - saved_at >= self.settings.checkpoint_every else NO_REQUEST

    def _fetch(self, step: int, measured: dict[str, Any], feed: Feed, log: MetricsLog | None) -> dict[str, Any]:
        """The numbers of a step, as soon as it is done; shows and logs them."""
        values = {name: value.item() for name, value in jax.device_get(measured).items()}
        self.skipped = int(values["skipped"])
        self.losses["loss"] = values["loss"]
        done, outcome = step + 1, int(values["outcome"])
        last = done == self.geometry.total_steps
        logged = done % self.settings.log_every == 0 or done == 1 or last or outcome != TRAINED
        shown = {
            "loss": values["loss"],
            "learning_rate": values["learning_rate"],
            "grad_norm": values["grad_norm"],
            "tokens": int(values["tokens"]),
            "epoch": round(done * self.geometry.batch_rows / self.job.train_split.rows, 4),
            "skipped": self.skipped,
            **self.pace.after(done, positions=values["positions"], waited=feed.waited, logged=logged),
        }
        if outcome == NOTHING_TRAINED:
            self._say("skip", done, f"step {done}: nothing to train in its rows; skipped ({self.skipped} so far).")
        if logged and log is not None:
            log.write(done, shown)
        self.display.progress(done, shown, logged=logged)
        return values

    def _must_roll_back(self, step: int, values: dict[str, Any]) -> bool:
        outcome = int(values["outcome"])
        if outcome in (TRAINED, NOTHING_TRAINED):
            return False
        rows = self.loader.rows_at(step).tolist()
        action = self.bad.decide(step, outcome, bad_in_a_row=int(values["bad_in_a_row"]), rows=rows)
        if action == "none":
            why = "not finite" if not math.isfinite(values["loss"] + values["grad_norm"]) else "a spike"
            self._say("skip", step + 1, f"step {step + 1}: {why}; its update is left out ({self.skipped} so far).")
        return action == "rollback"

    def _roll_back(self, state: TrainState) -> tuple[TrainState, int]:
        self.checkpoints.wait()
        found = self.checkpoints.latest()
        if found is None:
            raise RunFailure(
                "a step was bad and there is no checkpoint to roll back to yet. Use train.on_nan: skip, or a shorter "
                "train.checkpoint_every."
            )
        del state
        restored = self.checkpoints.restore(found, self.program.restorable)
        self._say("rollback", found, f"Back to step {found}; passing over steps {sorted(self.bad.passed_over)}.")
        return restored, found

    def _is_eval_step(self, done: int) -> bool:
        every = self.job.run.eval.every
        if every is None or done == 0 or done >= self.geometry.total_steps:
            return False
        steps = every if isinstance(every, int) else max(1, round(every * self.geometry.total_steps))
        return done % steps == 0

    def _evaluate(self, state: TrainState, done: int, log: MetricsLog | None, *, save: bool = True) -> bool:
        """Loss on the held-out rows, and samples. True when training should stop here."""
        self.eval_step_of = done
        label = "before" if done == 0 else "after" if done >= self.geometry.total_steps else "during"
        if self.hooks.on_samples is not None:
            self.hooks.on_samples(self.program.weights(state), done, label)
        if self.job.validation_split is None:
            return False
        with self.pace.paused():
            seen = evaluate(
                self.program.eval_step,
                self.program.shown(state),
                self.program.frozen,
                loader_for(
                    self.job.validation_split,
                    self.job.mesh,
                    seed=self.job.run.seed,
                    batch_rows=self.geometry.micro_rows,
                    once=True,
                ),
                self.job.mesh,
            )
        self.losses["eval"] = seen.loss
        if self.losses["first_eval"] is None:
            self.losses["first_eval"] = seen.loss
        improved = self.best.see(seen.loss, done)
        values = {"eval_loss": seen.loss, "eval_perplexity": seen.perplexity, "eval_tokens": seen.tokens}
        if log is not None:
            log.write(done, values)
        text = f"step {done}: validation loss {seen.loss:.4f}, perplexity {seen.perplexity:.2f}"
        self._say("eval", done, text + (", the best so far" if improved and done else ""), values)
        if improved and save:
            self._save(state, done, eval_loss=seen.loss)
        patience = self.settings.early_stopping
        if patience is not None and self.best.evaluations_since >= patience.patience:
            self.stopped = f"no better validation loss in {patience.patience} evaluations"
            self._say("stop", done, f"Stopping after step {done}: {self.stopped}.")
            return True
        return False

    def _save(self, state: TrainState, step: int, *, eval_loss: float | None = None) -> None:
        notes = {
            "step": step,
            "identity": self.names,
            "batch_rows": self.geometry.batch_rows,
            "passed_over": sorted(self.bad.passed_over),
            "rollbacks": self.bad.rollbacks,
            "best": self.best.to_json(),
            "losses": {
                name: None if value is None or math.isnan(value) else value for name, value in self.losses.items()
            },
        }
        if self.checkpoints.save(step, state, notes, eval_loss=eval_loss):
            self._say("checkpoint", step, f"step {step}: saving a checkpoint")

    def _chosen_weights(self, state: TrainState, done: int) -> tuple[Any, int]:
        """The weights to give back: the last, or those of the best checkpoint where that is what is exported."""
        best = self.checkpoints.best() if self.job.run.export.checkpoint == "best" else None
        if best is None or best == done or self.job.validation_split is None:
            return self.program.weights(state), done
        self._say("end", done, f"Taking the weights of step {best}, whose validation loss was the lowest.")
        return self.program.weights(self.checkpoints.restore(best, self.program.restorable)), best

    def _say(self, kind: str, step: int, text: str, values: dict[str, Any] | None = None) -> None:
        if kind != "checkpoint":
            self.display.say(text)
        if self.hooks.on_event is not None:
            self.hooks.on_event(Event(kind, text, step, values or {}))  # type: ignore[arg-type]
