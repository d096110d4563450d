"""Output folders in an object store, and runs of several processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import fsspec
import pytest
from workflow_cases import a_run, run_file

from podtune.config.errors import UserError
from podtune.workflow.output import check_usable, claimed
from podtune.workflow.remote_output import listed

ADDRESS = "memory://bucket/runs/one"


@pytest.fixture
def store(monkeypatch, tmp_path):
    """An empty object store, and a cache of podtune's own for what is written before it is copied."""
    monkeypatch.setenv("PODTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("podtune.workflow.output._STORES", ("memory",))
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def test_what_is_written_is_copied_with_the_record_last_and_gone_on_with_elsewhere(store, tmp_path, monkeypatch):
    run = a_run(tmp_path, output=ADDRESS)
    order = []
    put = type(store).put_file
    monkeypatch.setattr(
        type(store), "put_file", lambda self, a, b, **k: (order.append(Path(a).name), put(self, a, b, **k))
    )
    with claimed(run) as output:
        output.take(run)
        order.clear()
        output.model.mkdir()
        (output.model / "model.safetensors").write_bytes(b"weights")
        (output.model / "config.json").write_text("{}")
        output.metrics.write_text('{"step": 1}\n')
        output.reach("trained", results={"steps": 3})
        output.publish(whole=True)
    assert listed(ADDRESS) == {"model", "metrics.jsonl", "run.json", "run.yaml"}
    assert order[:2] == ["model.safetensors", "config.json"]
    assert order[-1] == "run.json"
    monkeypatch.setenv("PODTUNE_CACHE", str(tmp_path / "another machine"))
    with claimed(run) as output:
        assert output.state == "trained"
        assert output.metrics.read_text() == '{"step": 1}\n'
        assert not output.model.exists()


def test_an_object_store_that_holds_something_else_or_another_run_is_refused(store, tmp_path):
    run = a_run(tmp_path, output=ADDRESS)
    check_usable(run)
    store.pipe_file("/bucket/runs/one/notes.txt", b"mine")
    with pytest.raises(UserError, match=r"already holds something else \(notes.txt"):
        check_usable(run)
    store.rm_file("/bucket/runs/one/notes.txt")
    other = a_run(tmp_path, output=ADDRESS, method={"lora": {"rank": 8}})
    with claimed(run) as output:
        output.publish(whole=False)
        assert listed(ADDRESS) == set()
        output.take(run)
        output.publish(whole=False)
    check_usable(other)  # nothing is lost with a run that has not begun
    store.pipe_file("/bucket/runs/one/checkpoints/3/state", b"trained")
    with pytest.raises(UserError, match=r"method\.lora\.rank: 4 -> 8"):
        check_usable(other)
    check_usable(other, fresh=True)


def test_what_a_store_no_longer_holds_is_not_believed(store, tmp_path):
    run = a_run(tmp_path, output=ADDRESS)
    with claimed(run) as output:
        output.take(run)
        output.reach("finished", results={"steps": 4})
        output.publish(whole=True)
    store.rm("/bucket/runs/one", recursive=True)
    other = a_run(tmp_path, output=ADDRESS, method={"lora": {"rank": 8}})
    with claimed(other) as output:
        assert output.anew
        output.take(other)
        assert output.state == "started"


@pytest.mark.parametrize("there", [False, True])
def test_a_run_killed_as_it_takes_a_store_leaves_it_free_for_the_next(there, store, tmp_path, monkeypatch):
    run = a_run(tmp_path, output=ADDRESS)
    if there:
        with claimed(run) as output:
            output.take(run)
            output.reach("finished")
            output.publish(whole=True)

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr("podtune.workflow.output.forget", dies)
        with pytest.raises(KeyboardInterrupt):
            stack.enter_context(claimed(run, fresh=True)).take(run)
    with claimed(run) as output:
        assert output.anew


def podtune(*arguments, **environment):
    """Starts the command in a process of its own."""
    given = {**os.environ, "XLA_FLAGS": "", "PYTHONUNBUFFERED": "1", **environment}
    command = [str(Path(sys.executable).with_name("podtune")), *map(str, arguments)]
    return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_with_130_and_the_same_command_goes_on(tmp_path):
    file = run_file(
        tmp_path, train={"steps": 400, "batch_tokens": 64, "log_every": 1}, eval={"every": None, "samples": 0}
    )
    process = podtune("run", file)
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("step 5/"):
            process.send_signal(signal.SIGINT)
            break
    said += process.communicate(timeout=120)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    again = podtune("run", file, "train.log_every=100")
    said, _ = again.communicate(timeout=240)
    assert again.returncode == 0, said
    assert "Going on from step" in said
    assert json.loads((tmp_path / "out/run.json").read_text())["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.2, 0.6, 1.2])
def test_a_run_killed_while_it_exports_leaves_whole_folders_and_ends_well_when_run_again(delay, tmp_path):
    file = run_file(tmp_path, train={"steps": 1, "batch_tokens": 64}, eval={"every": None, "samples": 0})
    process = podtune("run", file)
    for line in process.stdout:
        if line.startswith("Trained"):
            break
    time.sleep(delay)
    process.kill()
    process.communicate(timeout=60)
    for folder, names in {
        "model": ("model.safetensors", "config.json"),
        "adapter": ("adapter_model.safetensors",),
    }.items():
        if (tmp_path / "out" / folder).exists():
            assert all((tmp_path / "out" / folder / name).exists() for name in names)
    again = podtune("run", file)
    said, _ = again.communicate(timeout=240)
    assert again.returncode == 0, said
    assert not [path.name for path in (tmp_path / "out").iterdir() if ".writing-" in path.name]


# Pitfall 20: weights that no process holds whole are merged and saved.
@pytest.mark.slow
def test_two_processes_run_the_whole_job_as_one_does(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings = {"train": {"steps": 2, "batch_tokens": 256}, "mesh": {"data": 1, "fsdp": 4}}
    file = run_file(tmp_path, **settings)
    shared = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PODTUNE_COORDINATOR": f"127.0.0.1:{port}",
        "PODTUNE_PROCESSES": "2",
    }
    pair = [podtune("run", file, PODTUNE_PROCESS=str(index), **shared) for index in (0, 1)]
    said = [process.communicate(timeout=280)[0] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    alone = podtune("run", file, f"output={tmp_path / 'alone'}", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    alone.communicate(timeout=280)
    assert alone.returncode == 0
    one, two = (json.loads((tmp_path / name / "run.json").read_text())["results"] for name in ("alone", "out"))
    assert two["after"]["loss"] == pytest.approx(one["after"]["loss"], rel=1e-5)
    from safetensors.numpy import load_file

    whole, merged = (load_file(tmp_path / name / "model/model.safetensors") for name in ("alone", "out"))
    assert whole.keys() == merged.keys()
    for name in whole:
        assert whole[name] == pytest.approx(merged[name], abs=1e-5)
