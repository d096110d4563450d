"""Whose an output folder is: what --fresh leaves, and what happens when another model or other data is given to it."""

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from workflow_cases import a_console, a_run, chats, one_device_shown, write_jsonl

from podtune.config.errors import RunFailure, UserError
from podtune.config.loading import dump_run, load_run
from podtune.config.schema import Run
from podtune.train.checkpoint import Checkpoints
from podtune.workflow.afterwards import evaluate_run, export_run
from podtune.workflow.checking import faults_of
from podtune.workflow.output import check_usable, claimed, open_output
from podtune.workflow.run import run_workflow

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = {"train": {"steps": 1, "batch_tokens": 64}, "eval": {"samples": 0, "every": None}}
OLD = ("checkpoints/1/state", "model/vocab.json", "adapter/a", "tensorboard/e", "metrics.jsonl", "samples.jsonl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run."""
    with one_device_shown():
        folder = tmp_path_factory.mktemp("run")
        run_workflow(a_run(folder, **SMALL), a_console())
        return folder


def a_model_like_it(base, folder):
    """Another model of the same shapes."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))


def test_fresh_leaves_nothing_of_the_old_run(tmp_path):
    run = a_run(tmp_path)
    with claimed(run) as output:
        output.take(run)
        output.reach("finished", results={"steps": 4})
        for name in (*OLD, "report.html", "README.md", "notes.txt"):
            (output.path / name).parent.mkdir(parents=True, exist_ok=True)
            (output.path / name).write_text("old")
    with claimed(run, fresh=True) as output:
        assert {path.name for path in output.path.iterdir()} > {
            "report.html",
            "model",
        }  # until all is known to be right
        output.take(run)
        names = {path.name for path in output.path.iterdir()}
        assert names == {"run.json", "run.yaml", ".lock", "notes.txt"}
        assert json.loads((output.path / "run.json").read_text()) == {"state": "started"}


def test_fresh_trains_from_the_beginning_with_other_settings(tmp_path):
    run_workflow(a_run(tmp_path, **SMALL), a_console())
    console = a_console()
    other = a_run(tmp_path, **{**SMALL, "train": {"steps": 2, "batch_tokens": 64}})
    output = run_workflow(other, console, fresh=True)
    assert "Going on from" not in console.export_text()
    assert (output.state, output.record["results"]["steps"]) == ("finished", 2)


@pytest.mark.parametrize("dying", ["shutil.rmtree", "OutputFolder._keep"])
def test_a_removal_that_was_killed_is_done_again_by_the_next_run(dying, tmp_path, monkeypatch):
    run, other = a_run(tmp_path), a_run(tmp_path, train={"learning_rate": 0.5})
    with claimed(run) as output:
        output.take(run)
        output.reach("finished")
        output.checkpoints.mkdir()
        output.model.mkdir()

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(f"podtune.workflow.output.{dying}", dies)
        with pytest.raises(KeyboardInterrupt):
            stack.enter_context(claimed(other, fresh=True)).take(other)
    with claimed(other) as output:
        assert output.state is None  # not the finished run that it was, with the other's settings
        output.take(other)
        assert output.state == "started"
        assert not output.checkpoints.exists()
        assert not output.model.exists()


@pytest.mark.parametrize("dying", ["OutputFolder._keep", "write_json"])
def test_a_run_killed_as_it_takes_a_new_folder_leaves_it_free_for_the_next(dying, tmp_path, monkeypatch):
    run = a_run(tmp_path)

    def dies(*_):
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(f"podtune.workflow.output.{dying}", dies)
        with pytest.raises(KeyboardInterrupt):
            stack.enter_context(claimed(run)).take(run)
    with claimed(run) as output:
        output.take(run)
        assert output.state == "started"


@pytest.mark.parametrize("fault", [FileNotFoundError, KeyboardInterrupt])
def test_what_ends_a_run_within_its_folder_is_not_swallowed_with_the_folder(fault, tmp_path):
    run = a_run(tmp_path, output=str(tmp_path / "deep" / "one"))
    with pytest.raises(fault), claimed(run):
        raise fault
    assert not (tmp_path / "deep").exists()


def test_a_folder_that_cannot_be_made_is_said_at_once(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise FileNotFoundError(2, "No such file or directory")  # as /proc answers, however often it is asked

    run = a_run(tmp_path)
    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(UserError, match="cannot be made"), claimed(run):
        pass


def test_a_folder_that_may_not_be_looked_into_is_told_as_a_fault_of_the_output(tmp_path, monkeypatch):
    run = a_run(tmp_path)

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.is_dir", refuse)
    with pytest.raises(UserError, match=r"output: .*out cannot be used \(Permission denied\)\. Name another"):
        check_usable(run)


def test_a_lock_that_was_removed_before_it_was_held_is_not_relied_on(tmp_path, monkeypatch):
    run = a_run(tmp_path)
    opened = []

    def open_and_lose(folder):
        lock = (folder / ".lock").open("a")
        if not opened:  # as another run does that leaves its folder at this moment
            (folder / ".lock").unlink()
            folder.rmdir()
        opened.append(lock)
        return lock

    monkeypatch.setattr("podtune.workflow.output._open_if_there", open_and_lose)
    with claimed(run) as output:
        assert len(opened) == 2
        assert (output.path / ".lock").exists()


@pytest.mark.parametrize("what", ["model", "data"])
@pytest.mark.parametrize("state", ["finished", "trained"])
def test_another_model_or_other_data_is_refused_and_run_yaml_stays(what, state, trained, tmp_path):
    output = open_output(trained / "out")
    before = (output.path / "run.yaml").read_bytes()
    record = (output.path / "run.json").read_text()
    if what == "model":
        a_model_like_it(trained / "base", tmp_path / "other")
        other = a_run(trained, model=str(tmp_path / "other"), **SMALL)
    else:
        rows = write_jsonl(tmp_path / "other.jsonl", chats(30))
        data = {"train": str(rows), "validation": 4, "max_length": 64, "workers": 0, "cache": str(trained / "prepared")}
        other = a_run(trained, data=data, **SMALL)
    (output.path / "run.json").write_text(json.dumps({**json.loads(record), "state": state}))
    try:
        with pytest.raises(
            UserError,
            match=rf"run of (another|other) {what}.*\n  {what}\.[a-z0-9.]*: .* -> .*other.*\n"
            r"To go on with it, .* or `podtune run .*out/run\.yaml`.*\nElse .*--fresh",
        ):
            run_workflow(other, a_console())
    finally:
        (output.path / "run.json").write_text(record)
    assert (output.path / "run.yaml").read_bytes() == before


def test_a_refused_change_is_told_by_the_setting_that_makes_it(trained):
    a_run(trained, **SMALL)
    data = json.loads((trained / "run.yaml").read_text())["data"]
    with pytest.raises(UserError, match=r"other data, .*:\n  data\.validation: 4 -> 5\nTo go on"):
        run_workflow(a_run(trained, data={**data, "validation": 5}, **SMALL), a_console())
    rows = (trained / "chats.jsonl").read_text()
    write_jsonl(trained / "chats.jsonl", chats(25))
    try:
        with pytest.raises(UserError, match=r"other data, .*\n  data: named as before, and with other content.*\nName"):
            run_workflow(a_run(trained, **SMALL), a_console())
    finally:
        (trained / "chats.jsonl").write_text(rows)


def test_more_steps_are_another_run_and_the_way_on_is_told(trained):
    longer = a_run(trained, **{**SMALL, "train": {"steps": 2, "batch_tokens": 64}})
    with pytest.raises(UserError, match=r"train\.steps: 1 -> 2\nTo go .*\n.*start from it \(model: .*out/model\)"):
        run_workflow(longer, a_console())
    (trained / "out/model").rename(trained / "out/away")
    try:
        with pytest.raises(UserError, match=r"`podtune run .*out/run\.yaml`") as refused:
            run_workflow(longer, a_console())
    finally:
        (trained / "out/away").rename(trained / "out/model")
    assert "out/model" not in str(refused.value)


def test_settings_that_differ_are_all_named_at_once(trained, tmp_path):
    a_run(trained, **SMALL)
    given = json.loads((trained / "run.yaml").read_text())
    changed = {**given["data"], "validation": 5, "train": str(write_jsonl(tmp_path / "other.jsonl", chats(9)))}
    longer = a_run(trained, **{**SMALL, "data": changed, "train": {"steps": 2, "batch_tokens": 64}})
    with pytest.raises(UserError) as refused:
        run_workflow(longer, a_console())
    a_run(trained, **SMALL)
    said = str(refused.value)
    assert "train.steps: 1 -> 2" in said
    assert "data.validation: 4 -> 5" in said
    assert re.search(r"data\.train\.0\.path: .* -> .*other\.jsonl.* \(if that is another file\)", said)


@pytest.mark.parametrize("key", ["model", "data.cache", "data.train"])
def test_nothing_that_is_read_may_lie_in_what_is_written(key, trained, tmp_path):
    inside = {"model": trained / "out/model", "data.cache": trained / "out/prep", "data.train": trained / "out/x.jsonl"}
    write_jsonl(inside["data.train"], chats(4))
    run = a_run(trained, **SMALL)
    run = load_run(trained / "run.yaml", [f"{key}={inside[key]}"])
    try:
        for fresh in (False, True):
            with pytest.raises(UserError, match="holds what the run reads"), claimed(run, fresh=fresh):
                pass
    finally:
        inside["data.train"].unlink()
    assert (trained / "out/model/config.json").exists()


def test_a_run_file_that_someone_wrote_is_not_written_over(tmp_path):
    run = a_run(tmp_path, output=str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    mine = "# my notes\nmodel: a/b\ndata: x.jsonl\nmethod: lora\noutput: .\n"
    (tmp_path / "out/run.yaml").write_text(mine)
    with pytest.raises(UserError, match=r"already holds something else \(run\.yaml"), claimed(run):
        pass
    assert (tmp_path / "out/run.yaml").read_text() == mine
    (tmp_path / "out/run.yaml").write_text(dump_run(run))  # as a run leaves it that was killed at its very start
    with claimed(run) as output:
        output.take(run)


def test_trained_weights_are_never_put_into_another_model(trained, tmp_path):
    output = open_output(trained / "out")
    before = (output.path / "run.yaml").read_text()
    a_model_like_it(trained / "base", tmp_path / "other")
    (output.path / "run.yaml").write_text(before.replace(str(trained / "base"), str(tmp_path / "other")))
    try:
        for command in (lambda: evaluate_run(output.load_run(), a_console()), lambda: export_run(output, a_console())):
            with pytest.raises(UserError, match=r"weights that were trained otherwise(.|\n)*model: was") as refused:
                command()
            assert "--fresh" not in str(refused.value)
    finally:
        (output.path / "run.yaml").write_text(before)


@pytest.mark.parametrize("name", ["run.json", "run.yaml"])
@pytest.mark.parametrize("content", [b"", b"[", b"\xff\xfe\x00", b"[" * 99999, b'{"results": null, "model": "x"}'])
def test_a_damaged_record_is_told_with_a_way_out_and_fresh_is_one(name, content, trained, tmp_path):
    shutil.copytree(trained / "out", tmp_path / "out")
    (tmp_path / "out" / name).write_bytes(content)
    run = a_run(trained, output=str(tmp_path / "out"), **SMALL)
    with pytest.raises(RunFailure, match=rf"out/{name}.*(\n.*)*--fresh"):
        run_workflow(run, a_console())
    assert (tmp_path / "out" / name).read_bytes() == content
    with claimed(run, fresh=True) as output:
        output.take(run)
        assert output.state == "started"


def test_the_checkpoints_of_a_folder_that_was_moved_are_evaluated(trained, tmp_path, capsys):
    from podtune.cli.eval import evaluate

    shutil.copytree(trained / "out", tmp_path / "moved")
    (tmp_path / "moved/run.yaml").write_text(
        (trained / "out/run.yaml").read_text().replace(str(trained / "out"), "out")
    )
    evaluate(str(tmp_path / "moved"))
    said = capsys.readouterr().out
    assert f"step 1 of {tmp_path / 'moved'}" in said
    assert "untrained" not in said


def test_the_untrained_model_is_never_evaluated_in_the_place_of_one_whose_checkpoints_are_gone(trained, tmp_path):
    shutil.copytree(trained / "out", tmp_path / "out")
    shutil.rmtree(tmp_path / "out/checkpoints")
    run = a_run(trained, output=str(tmp_path / "out"), **SMALL)
    with pytest.raises(UserError, match="its checkpoints are gone"):
        evaluate_run(run, a_console())


@pytest.mark.parametrize(
    ("state", "lost", "said"),
    [
        ("trained", "the checkpoints", "this run has trained, and its checkpoints are gone.*--fresh"),
        ("started", "the folder", "tells of 1 step, and the checkpoints are gone"),
        ("started", "made a file", "checkpoints is a file, where checkpoints would be"),
    ],
)
def test_a_run_whose_checkpoints_are_gone_is_not_trained_again_unasked(state, lost, said, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    run = a_run(tmp_path / "run", **SMALL)
    folder = tmp_path / "run" / "out"
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "state": state}))
    shutil.rmtree(folder / "checkpoints")
    if lost == "the checkpoints":
        (folder / "checkpoints").mkdir()
    elif lost == "made a file":
        (folder / "checkpoints").write_text("")
    before = (folder / "model/model.safetensors").stat().st_mtime_ns
    with pytest.raises(UserError, match=said):
        run_workflow(run, a_console())
    assert any(re.search(said, fault) for fault in faults_of(run, a_console()))
    assert (folder / "model/model.safetensors").stat().st_mtime_ns == before
    run_workflow(run, a_console(), fresh=True)
    if lost == "made a file":
        shutil.rmtree(folder / "checkpoints")
        (folder / "checkpoints").write_text("")
        with pytest.raises(UserError, match=said):
            Checkpoints(str(folder), keep=1, keep_best=False)


def test_a_disk_that_fills_is_told_once_with_the_folder_and_the_way_on(tmp_path):
    run = a_run(tmp_path)
    said = rf"output: {tmp_path}/out: the disk is full .* same command again"
    with pytest.raises(RunFailure, match=said), claimed(run):
        raise OSError(28, "No space left on device")


def test_check_tries_whether_the_output_can_be_written_and_leaves_nothing(tmp_path, monkeypatch):
    run = a_run(tmp_path)
    before = sorted(tmp_path.iterdir())
    check_usable(run)
    assert sorted(tmp_path.iterdir()) == before

    def refused(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("podtune.workflow.output.tempfile.mkdtemp", refused)
    with pytest.raises(UserError, match=r"output: .* cannot be written to \(Read-only file system\)"):
        check_usable(run)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_place_that_takes_no_folders_whoever_asks_is_refused():
    with pytest.raises(UserError, match="output: /proc cannot be written to"):
        check_usable(Run.model_validate({"model": "a/b", "data": "x.jsonl", "method": "lora", "output": "/proc/xx"}))


def test_runs_in_an_object_store_are_not_taken_for_untrained_ones(tmp_path):
    from podtune.cli.eval import evaluate
    from podtune.cli.export import export

    for command in (evaluate, export):
        with pytest.raises(
            UserError, match=rf"gs://b/r: `podtune {command.__name__[:4]}.*gcloud storage cp -r gs://b/r"
        ):
            command("gs://b/r")
    with pytest.raises(UserError, match=r"s3://b/r.*aws s3 cp --recursive"):
        evaluate_run(a_run(tmp_path, output="s3://b/r"), a_console())


@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_is_refused_at_its_beginning_leaves_no_trace(there, tmp_path):
    run = a_run(tmp_path, **SMALL)
    if there:
        (tmp_path / "out").mkdir()
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "only asked"}]}])
    with pytest.raises(UserError, match="nothing to train"):
        run_workflow(run, a_console())
    assert [path.name for path in tmp_path.glob("out/*") if path.name != ".lock"] == []
    assert (tmp_path / "out").exists() is there


def test_a_folder_in_which_nothing_was_trained_yet_is_free_for_the_next_run(tmp_path):
    first, other = a_run(tmp_path), a_run(tmp_path, method={"lora": {"rank": 8}})
    with claimed(first) as output:
        output.take(first)
    with claimed(other) as output:
        output.take(other)
        (output.checkpoints / "3").mkdir(parents=True)
    with pytest.raises(UserError, match=r"method\.lora\.rank: 8 -> 4"), claimed(first):
        pass


@pytest.mark.parametrize(
    ("fault", "said"), [("data", "not valid JSON"), ("weights", "holds NaN or infinity"), ("steps", "does not divide")]
)
def test_fresh_loses_nothing_to_a_run_that_is_refused(fault, said, trained, tmp_path):
    run = a_run(tmp_path, **SMALL)
    shutil.copytree(trained / "out", tmp_path / "out")
    before = {path.name for path in (tmp_path / "out").iterdir()}
    if fault == "steps":
        run = run.model_copy(update={"train": run.train.model_copy(update={"accumulate": 7})})
    elif fault == "data":
        (tmp_path / "chats.jsonl").write_text("not JSON\n")
    else:
        weights = load_file(tmp_path / "base" / "model.safetensors")
        weights["model.norm.weight"][0] = np.nan
        save_file(weights, tmp_path / "base" / "model.safetensors")
    with pytest.raises(UserError, match=said):
        run_workflow(run, a_console(), fresh=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == before
    assert open_output(tmp_path / "out").state == "finished"
