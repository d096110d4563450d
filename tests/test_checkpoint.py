"""Checkpoints: complete or absent, the newest and the best kept, and a killed run that goes on bit for bit."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from train_cases import Rows, logged, make_job, make_run, recorded_batches
from train_worker import start_worker

from podtune.config.errors import RunFailure, UserError
from podtune.train.checkpoint import Checkpoints, check_identity, identity
from podtune.train.loop import train
from podtune.train.state import Guard, TrainState, discard, with_shardings

pytestmark = pytest.mark.usefixtures("quick_compiling")


def state_of(step: int, size: int = 8) -> TrainState:
    """A state all of whose numbers are the step."""

    def weights() -> dict[str, jax.Array]:
        return {"layers.q": jnp.full((size, 4), step, jnp.float32)}

    guard = Guard(jnp.zeros(3), jnp.int32(step), jnp.int32(step), jnp.int32(step))
    return TrainState(jnp.int32(step), weights(), {"mu": weights()}, None, guard)


def like(state: TrainState) -> TrainState:
    return with_shardings(jax.eval_shape(lambda: state), jax.tree.map(lambda leaf: leaf.sharding, state))


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(entry.name) for entry in (folder / "checkpoints").iterdir() if entry.name.isdigit())


def test_the_newest_ones_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=2, keep_best=True)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 4.0)):
        assert checkpoints.save(step, state_of(step), {"step": step}, eval_loss=loss)
    checkpoints.wait()
    assert (checkpoints.latest(), checkpoints.best()) == (5, 2)
    checkpoints.close()
    assert saved_steps(tmp_path) == [2, 4, 5]
    again = Checkpoints(str(tmp_path), keep=2, keep_best=True)
    assert (again.latest(), again.best(), again.notes(4)) == (5, 2, {"step": 4})
    again.close()


def test_a_step_saved_before_it_was_evaluated_gets_its_loss_and_can_be_the_best(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=1, keep_best=True)
    checkpoints.save(2, state_of(2), {}, eval_loss=2.0)
    checkpoints.save(4, state_of(4), {})
    assert checkpoints.save(4, state_of(4), {}, eval_loss=1.0)
    assert not checkpoints.save(4, state_of(4), {}, eval_loss=1.0)
    checkpoints.save(6, state_of(6), {})
    checkpoints.wait()
    assert checkpoints.best() == 4
    checkpoints.close()
    assert saved_steps(tmp_path) == [4, 6]


def test_reading_checkpoints_leaves_what_is_being_written_alone(tmp_path):
    writer = Checkpoints(str(tmp_path), keep=1, keep_best=False)
    writer.save(1, state_of(1), {})
    writer.close()
    unfinished = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    reader = Checkpoints(str(tmp_path), keep=1, keep_best=False, read_only=True)
    assert reader.latest() == 1
    reader.close()
    assert unfinished.is_dir()


def test_a_rollback_goes_to_the_newest_checkpoint_before_the_bad_step_and_forgets_later_ones(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=4, keep_best=False)
    for step in (0, 3, 6):
        checkpoints.save(step, state_of(step), {})
    checkpoints.wait()
    assert checkpoints.latest_before(5) == 3
    checkpoints.delete_after(3)
    assert checkpoints.latest() == 3
    assert checkpoints.save(6, state_of(6), {})
    checkpoints.close()


def test_a_state_comes_back_as_it_was_even_when_its_arrays_are_donated_right_after_the_save(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=1, keep_best=False)
    state, wanted = state_of(3, size=100_000), jax.tree.map(np.array, state_of(3, size=100_000))
    shape = like(state)
    spoil = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0 - 1, state), donate_argnums=0)
    checkpoints.save(3, state, {})
    jax.block_until_ready(spoil(state))
    checkpoints.wait()
    got = checkpoints.restore(3, shape)
    assert jax.tree.all(jax.tree.map(lambda one, other: np.array_equal(one, other), got, wanted))
    checkpoints.close()


@pytest.mark.parametrize("averaged", [False, True])
def test_the_trained_weights_alone_come_back_without_room_for_moments(tmp_path, averaged):
    checkpoints = Checkpoints(str(tmp_path), keep=1, keep_best=False)
    state = state_of(3, size=1000)
    if averaged:
        state = dataclasses.replace(state, average={"layers.q": jnp.full((1000, 4), 7.0)})
    shape = like(state)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    discard(state)
    before = {id(array) for array in jax.live_arrays()}
    got = checkpoints.restore_shown(3, shape)
    held = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    assert np.array_equal(got["layers.q"], np.full((1000, 4), 7.0 if averaged else 3.0))
    assert held == got["layers.q"].nbytes
    checkpoints.close()


def test_a_second_save_of_a_step_is_left_out(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=1, keep_best=False)
    assert checkpoints.save(3, state_of(3), {})
    assert not checkpoints.save(3, state_of(3), {})
    checkpoints.close()


SAVING = """
import sys, time
sys.path.insert(0, sys.argv[2])
from test_checkpoint import state_of
from podtune.train.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2, keep_best=False)
first = 1 + (checkpoints.latest() or 0)
for step in range(first, 10_000):
    checkpoints.save(step, state_of(step, size=300_000), {"step": step})
    print(step, flush=True)
"""


def kill_while_saving(folder: Path, moments: list[float]) -> None:
    """Starts saving without end, kills it so many seconds after its second save began, and looks at what is there."""
    for moment in moments:
        process = subprocess.Popen(
            [sys.executable, "-c", SAVING, str(folder), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        checkpoints = Checkpoints(str(folder), keep=2, keep_best=False)
        step = checkpoints.latest()
        assert step is not None
        restored = checkpoints.restore(step, like(state_of(step, size=300_000)))
        for leaf in jax.tree.leaves((restored.trainable, restored.moments, restored.step)):
            assert (np.asarray(leaf) == step).all()
        assert checkpoints.notes(step) == {"step": step}
        checkpoints.close()


# Pitfall 17.
def test_kill_9_during_a_save_always_leaves_a_complete_checkpoint(tmp_path):
    kill_while_saving(tmp_path, [0.0, 0.05, 0.13])


@pytest.mark.slow
def test_kill_9_at_20_random_moments_of_a_save_always_leaves_a_complete_checkpoint(tmp_path):
    kill_while_saving(tmp_path, list(np.random.default_rng(0).uniform(0, 0.5, 20)))


# Pitfall 16. Two batches are an epoch of 11 rows, nearly: step 13 is in the tenth.
def test_a_run_killed_at_step_13_of_20_goes_on_with_the_same_losses_and_batches_bit_for_bit(tmp_path):
    settings = {"schedule": {"name": "constant", "warmup": 0}, "steps": 20}
    worker = start_worker(
        output=str(tmp_path / "killed"),
        steps=20,
        checkpoint_every="0.001s",
        kill_at=13,
        batches=str(tmp_path / "batches"),
    )
    with recorded_batches(tmp_path / "whole batches"):
        train(make_job(make_run(tmp_path / "whole", train=settings), rows=Rows(11)))
    said = worker.communicate(timeout=250)
    assert worker.returncode == -signal.SIGKILL, said
    done = max(logged(tmp_path / "killed"))
    assert 11 <= done < 20
    with recorded_batches(tmp_path / "batches"):
        result = train(make_job(make_run(tmp_path / "killed", train=settings), rows=Rows(11)))
    assert result.resumed_from is not None
    assert 1 <= result.resumed_from <= 13
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")
    assert list(logged(tmp_path / "killed")) == list(range(1, 21))
    lines = (tmp_path / "batches").read_text().splitlines()
    assert set(lines) == set((tmp_path / "whole batches").read_text().splitlines())


def test_sigterm_saves_and_leaves_with_130(tmp_path):
    worker = start_worker(output=str(tmp_path), steps=20, interrupt_at=3)
    _, said = worker.communicate(timeout=250)
    assert worker.returncode == 130, said
    assert "SIGTERM: saving a checkpoint, then leaving" in said
    assert "Stopped by SIGTERM after step" in said
    assert max(saved_steps(tmp_path)) in (3, 4)


# A limit on the size of files makes writing fail as a full disk does.
def test_a_save_that_fails_ends_in_one_message_and_leaves_the_older_checkpoint_intact(tmp_path):
    code = (
        "import resource, signal, sys\nsys.path.insert(0, sys.argv[2])\nfrom test_checkpoint import *\n"
        "checkpoints = Checkpoints(sys.argv[1], keep=2, keep_best=False)\n"
        "checkpoints.save(1, state_of(1), {}); checkpoints.wait()\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "rng = np.random.default_rng(0)\n"
        "big = TrainState(jnp.int32(2), {'w': jnp.asarray(rng.random((500, 500)), jnp.float32)}, {}, None, "
        "Guard(*[jnp.zeros(3)] * 4))\n"
        "try:\n    checkpoints.save(2, big, {}); checkpoints.wait()\n"
        "except RunFailure as error: print('FAILED', error)\n"
        "finally: import os; sys.stdout.flush(); os._exit(0)\n"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert "FAILED" in ended.stdout, ended.stdout + ended.stderr[-3000:]
    assert "The one of step 1 is intact" in ended.stdout
    checkpoints = Checkpoints(str(tmp_path), keep=2, keep_best=False)
    assert checkpoints.latest() == 1
    assert (checkpoints.restore(1, like(state_of(1))).trainable["layers.q"] == 1).all()
    checkpoints.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_cannot_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be used for checkpoints"):
        Checkpoints(str(tmp_path / "run"), keep=2, keep_best=False)


def test_a_checkpoint_of_another_shape_is_refused_with_a_way_out(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=2, keep_best=False)
    checkpoints.save(1, state_of(1), {})
    checkpoints.wait()
    with pytest.raises(RunFailure, match=r"trainable\.layers\.q is \(8, 4\), and \(9, 4\) in this run"):
        checkpoints.restore(1, like(state_of(1, size=9)))
    checkpoints.close()


def test_identity_is_what_is_trained_and_not_where_or_how():
    one = identity(make_run("a"), {"data": "1", "model": "2"}, batch_rows=8)
    same = [
        make_run("b"),
        make_run("a", mesh={"fsdp": 8}),
        make_run("a", eval={"every": 3}),
        make_run("a", train={"log_every": 7, "checkpoint_every": "1m", "remat": "full"}),
    ]
    for run in same:
        check_identity(one, identity(run, {"data": "1", "model": "2"}, batch_rows=8), "a")
    changed = identity(make_run("a", seed=1), {"data": "1", "model": "2"}, batch_rows=16)
    with pytest.raises(UserError, match=r"(?s)batch_rows: was 8, is 16.*seed: was 0, is 1"):
        check_identity(one, changed, "a")


def test_data_that_moved_is_the_same_data_and_data_that_changed_is_named_with_its_settings():
    moved = make_run("a").model_copy(update={"data": make_run("a").data.model_copy(update={"max_length": 9})})
    one = identity(make_run("a"), {"data": "1"})
    check_identity(one, identity(moved, {"data": "1"}), "a")
    with pytest.raises(UserError, match=r"(?s)data: was 1, is 2.*data\.max_length: was None, is 9"):
        check_identity(one, identity(moved, {"data": "2"}), "a")


@pytest.mark.parametrize("content", [b"", b"{}", b"[", b"\xff"])
def test_damaged_notes_of_a_checkpoint_are_told_with_a_way_out(content, tmp_path):
    run = make_run(tmp_path, train={"steps": 2})
    train(make_job(run, rows=Rows(11)))
    (notes,) = (tmp_path / "checkpoints" / "2" / "notes").glob("metadata*")
    notes.write_bytes(content)
    with pytest.raises(RunFailure, match=r"checkpoints/2 cannot be restored .*If it is damaged, delete it"):
        train(make_job(run, rows=Rows(11)))


def test_whatever_orbax_makes_of_a_damaged_state_is_told_with_a_way_out(tmp_path, monkeypatch):
    run = make_run(tmp_path, train={"steps": 2})
    train(make_job(run, rows=Rows(11)))

    def fails(*_, **__):
        raise TypeError("orbax stumbled over what it read")

    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.item_metadata", fails)
    with pytest.raises(
        RunFailure, match=r"checkpoints/2 cannot be restored \(orbax stumbled.*If it is damaged, delete it"
    ):
        train(make_job(run, rows=Rows(11)))


@pytest.mark.parametrize("fault", [MemoryError("no more"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no more")])
def test_a_sound_checkpoint_is_not_called_damaged_where_memory_gives_out(fault, tmp_path, monkeypatch):
    run = make_run(tmp_path, train={"steps": 2})
    train(make_job(run, rows=Rows(11)))
    restore = ocp.CheckpointManager.restore

    def gives_out(self, step, args):
        if "state" in args:
            raise fault
        return restore(self, step, args=args)

    monkeypatch.setattr(ocp.CheckpointManager, "restore", gives_out)
    with pytest.raises((MemoryError, RunFailure)) as told:
        train(make_job(run, rows=Rows(11)))
    assert "damaged" not in str(told.value)
