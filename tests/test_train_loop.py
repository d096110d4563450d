"""The loop from start to end on tiny shapes: steps, evaluation, bad steps, stopping and going on."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from train_cases import (
    ROW_TOKENS,
    Rows,
    at_step,
    logged,
    make_job,
    make_run,
    one_device_mesh,
    poisoned_steps,
    random_weights,
    recorded_batches,
    tiny_model,
)

from podtune.config.errors import Interrupted, RunFailure, UserError
from podtune.config.schema import Mesh
from podtune.config.wording import counted
from podtune.parallel.mesh import build_mesh
from podtune.train.cache import enable_compile_cache
from podtune.train.checkpoint import Checkpoints
from podtune.train.job import Hooks
from podtune.train.loop import train
from podtune.weights.tree import named_leaves

pytestmark = pytest.mark.usefixtures("quick_compiling")

STEADY = {"schedule": {"name": "constant", "warmup": 0}, "steps": 6}


def run_in(folder, *, rows=None, hooks=None, mesh=None, console=None, validation=None, **blocks):
    blocks["train"] = {**STEADY, **blocks.pop("train", {})}
    run = make_run(folder, **blocks)
    job = make_job(
        run, rows=rows or Rows(11), validation=validation, mesh=mesh, console=console,
        fingerprints={"data": (rows or Rows(11)).fingerprint},
    )  # fmt: skip
    return train(job, hooks)


# Pitfalls 13 and 36.
@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (2, 1), (7, 3)])
def test_data_sets_smaller_than_a_batch_train_for_exactly_the_steps_that_are_printed(tmp_path, rows, steps):
    console = Console(file=io.StringIO(), width=200)
    result = run_in(tmp_path, rows=Rows(rows), console=console, train={"steps": None, "epochs": 3.0})
    assert result.steps == result.total_steps == steps
    assert f"{counted(steps, 'step')} of 8 rows x 24 tokens" in console.file.getvalue()
    assert list(logged(tmp_path)) == list(range(1, steps + 1))


def test_training_lowers_the_loss_on_rows_it_has_seen(tmp_path):
    result = run_in(tmp_path, method="full", train={"steps": 40, "learning_rate": 1e-2}, rows=Rows(8))
    losses = logged(tmp_path)
    assert losses[40] < 0.7 * losses[1]
    assert result.loss == losses[40]


def test_evaluation_takes_every_held_out_row_once_and_weighs_every_trained_token_alike(tmp_path):
    held_out = Rows(11, name="validation", seed=3)
    result = run_in(tmp_path, validation=held_out, train={"steps": 1, "learning_rate": 1e-9}, eval={"every": None})
    model = tiny_model()
    weights = random_weights(make_job(make_run(), rows=held_out).description, one_device_mesh())
    rows = [held_out.read(index) for index in range(held_out.rows)]
    padded = {
        name: jnp.asarray([np.pad(getattr(row, name), (0, ROW_TOKENS - len(row.tokens))) for row in rows])
        for name in ("tokens", "segments", "trained")
    }
    logits = model.unembed(weights, model.hidden(weights, padded["tokens"], segments=padded["segments"]).states)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    total = count = 0.0
    for index, row in enumerate(rows):
        for at in range(len(row.tokens) - 1):
            if row.trained[at + 1] and row.segments[at] == row.segments[at + 1]:
                total, count = total - log_p[index, at, row.tokens[at + 1]], count + 1
    assert result.first_eval_loss == pytest.approx(total / count, rel=1e-5)
    assert logged(tmp_path, "eval_tokens")[0] == count


def test_evaluations_come_every_so_often_and_the_best_is_kept_and_exported(tmp_path):
    labels = []
    result = run_in(
        tmp_path,
        validation=Rows(4, name="validation", seed=0),  # four of the training rows: their loss falls and then rises
        hooks=Hooks(on_samples=lambda weights, step, label: labels.append((step, label))),
        eval={"every": 2},
        train={"learning_rate": 0.05},
        export={"checkpoint": "best"},
    )
    losses = logged(tmp_path, "eval_loss")
    assert list(losses) == [0, 2, 4, 6]
    assert result.best_step == min((step for step in losses if step), key=losses.get)
    assert result.weights_step == result.best_step
    assert result.best_step in [int(entry.name) for entry in (tmp_path / "checkpoints").iterdir()]
    assert labels == [(0, "before"), (2, "during"), (4, "during"), (result.weights_step, "after")]


def test_early_stopping_ends_after_its_patience_and_says_so(tmp_path):
    result = run_in(
        tmp_path,
        validation=Rows(4, name="validation", seed=5),
        eval={"every": 1},
        train={"early_stopping": {"patience": 2, "min_improvement": 3.0}},  # no step lowers the loss so far
    )
    assert (result.steps, result.total_steps) == (2, 6)
    assert result.stopped == "no better validation loss in 2 evaluations"
    losses = logged(tmp_path, "eval_loss")
    assert (result.best_step, result.best_eval_loss) == (2, losses[2])  # the lowest is the best, by however little
    assert losses[2] < losses[0]


IMPATIENT = {
    "validation": Rows(4, name="validation", seed=5),
    "eval": {"every": 1},
    "train": {"early_stopping": {"patience": 2, "min_improvement": 3.0}},
}


def test_a_run_that_had_stopped_early_has_stopped_when_it_is_run_again(tmp_path):
    first, again = run_in(tmp_path, **IMPATIENT), run_in(tmp_path, **IMPATIENT)
    assert (again.steps, again.stopped, again.resumed_from) == (2, first.stopped, 2)
    for name, leaf in named_leaves(first.weights).items():
        np.testing.assert_array_equal(leaf, named_leaves(again.weights)[name])


def test_a_run_that_was_interrupted_at_its_start_evaluates_that_once_and_stops_where_it_would_have(tmp_path):
    def interrupt(event):
        if event.kind == "eval":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run_in(tmp_path / "cut", hooks=Hooks(on_event=interrupt), **IMPATIENT)
    whole, resumed = run_in(tmp_path / "whole", **IMPATIENT), run_in(tmp_path / "cut", **IMPATIENT)
    assert (resumed.steps, resumed.resumed_from) == (whole.steps, 0)
    assert logged(tmp_path / "cut", "eval_loss") == logged(tmp_path / "whole", "eval_loss")
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert sum('"step": 0' in line for line in lines) == 1


def test_a_bad_step_is_skipped_counted_and_named(tmp_path):
    events = []
    with poisoned_steps(3):
        result = run_in(tmp_path, hooks=Hooks(on_event=events.append))
    assert result.skipped == 1
    assert logged(tmp_path)[3] is None
    assert [event.text for event in events if event.kind == "skip"] == [
        "step 3: its loss or gradient is not finite; its update is left out (1 so far)."
    ]
    assert all(np.isfinite(leaf).all() for leaf in named_leaves(result.weights).values())


def test_rollback_goes_back_to_the_checkpoint_and_passes_over_the_step_deterministically(tmp_path):
    skipped, rolled = tmp_path / "skipped", tmp_path / "rolled"
    with poisoned_steps(3):
        run_in(skipped)
    events = []
    with poisoned_steps(3):
        result = run_in(rolled, train={"on_nan": "rollback"}, hooks=Hooks(on_event=events.append))
    assert [event.kind for event in events if event.kind == "rollback"] == ["rollback"]
    assert result.skipped == 1
    # What was trained is what skipping the step gives: the steps before it are exactly those before.
    assert {k: v for k, v in logged(rolled).items() if k != 3} == {k: v for k, v in logged(skipped).items() if k != 3}


def test_stop_names_the_step_and_the_rows(tmp_path):
    with poisoned_steps(2), pytest.raises(RunFailure, match=r"step 2 is bad: .* \(rows \d+, .*train\.on_nan is stop"):
        run_in(tmp_path, train={"on_nan": "stop"})


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path):
    with poisoned_steps(2, 3, 4, 5), pytest.raises(RunFailure, match=r"step 4 is bad.*3 bad steps in a row"):
        run_in(tmp_path, train={"max_bad_steps": 3})


# Pitfall 18, and a first Ctrl-C.
def test_a_run_interrupted_on_8_devices_goes_on_on_4_and_on_1_with_the_same_batches_and_losses(tmp_path):
    whole, batches = tmp_path / "whole", tmp_path / "batches"

    def mesh(devices):
        return build_mesh(Mesh(fsdp=devices, data=1), jax.devices()[:devices])

    with recorded_batches(batches):
        run_in(whole, mesh=mesh(8))
    wanted = batches.read_text()
    stopped = tmp_path / "stopped"
    with (
        at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(Interrupted, match="Ctrl-C after step") as e,
    ):
        run_in(stopped, mesh=mesh(8))
    assert e.value.exit_status == 130
    done = Checkpoints(str(stopped), keep=2, keep_best=False).latest()
    assert done in (3, 4)
    for devices in (4, 1):
        again = shutil.copytree(stopped, tmp_path / f"on {devices}")
        batches.unlink()
        with recorded_batches(batches):
            result = run_in(again, mesh=mesh(devices))
        assert result.resumed_from == done
        assert batches.read_text() == "".join(wanted.splitlines(keepends=True)[done:])
        assert list(logged(again)) == [1, 2, 3, 4, 5, 6]
        np.testing.assert_allclose(list(logged(again).values()), list(logged(whole).values()), rtol=1e-5)


def test_a_finished_run_started_again_trains_no_step_and_gives_the_same_weights(tmp_path):
    first = run_in(tmp_path, validation=Rows(3, name="validation"))
    again = run_in(tmp_path, validation=Rows(3, name="validation"))
    assert again.resumed_from == again.steps == 6
    assert (again.loss, again.eval_loss) == (first.loss, first.eval_loss)
    assert list(logged(tmp_path)) == [1, 2, 3, 4, 5, 6]
    for name, leaf in named_leaves(first.weights).items():
        np.testing.assert_array_equal(leaf, named_leaves(again.weights)[name])


def test_another_run_in_the_same_output_is_refused_naming_what_changed(tmp_path):
    run_in(tmp_path)
    with pytest.raises(UserError, match=r"(?s)train\.learning_rate: was 0\.01, is 0\.02.*--fresh") as refused:
        run_in(tmp_path, train={"learning_rate": 0.02})
    assert refused.value.exit_status == 2
    with pytest.raises(UserError, match=r"(?s)data: was 11-24-0, is 12-24-0"):
        run_in(tmp_path, rows=Rows(12))
    # Where and how it runs may change.
    assert run_in(tmp_path, train={"checkpoint_every": "1h", "log_every": 3}).resumed_from == 6


def test_the_step_is_compiled_once_and_a_second_run_finds_it_in_the_persistent_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PODTUNE_COMPILE_CACHE", str(tmp_path / "cache"))
    seen = []

    def listener(event, **_):
        seen.append(event)

    jax.monitoring.register_event_listener(listener)
    try:
        found = []
        for number in range(2):
            seen.clear()
            jax.clear_caches()
            run_in(tmp_path / str(number), train={"learning_rate": 3e-3})
            found.append(
                (seen.count("/jax/compilation_cache/cache_hits"), seen.count("/jax/compilation_cache/cache_misses"))
            )
    finally:
        jax.monitoring.unregister_event_listener(listener)
        monkeypatch.delenv("PODTUNE_COMPILE_CACHE")
        enable_compile_cache()
    assert found[0][0] == 0
    assert found[1][0] >= 1
    assert found[1][1] == 0


def test_metrics_of_every_step_are_plain_json_and_tensorboard_events(tmp_path):
    run_in(tmp_path, validation=Rows(3, name="validation"), eval={"every": 3})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert {"step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "data_wait", "cpu_share",
            "skipped", "epoch", "seconds_left"} <= set(steps[0])  # fmt: skip
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 3, 6]
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("ending", ["Ctrl-C", "killed"])
def test_the_seconds_of_a_run_are_those_of_all_its_processes(ending, tmp_path, monkeypatch):
    passed = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + passed[0], monotonic=time.monotonic)
    monkeypatch.setattr("podtune.train.loop.time", clock)

    def ends():
        if ending == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            raise MemoryError  # as a kill: nothing more is saved

    settings = {"validation": Rows(3, seed=1), "eval": {"every": 2}}
    ended = pytest.raises((Interrupted, MemoryError))
    with at_step(1, lambda: passed.append(passed.pop() + 1000)), at_step(5, ends), ended:
        run_in(tmp_path, **settings)
    result = run_in(tmp_path, **settings)
    assert result.steps == 6
    assert 1000 < result.seconds < 1900
