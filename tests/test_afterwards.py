"""`podtune export` and `podtune eval`: a run that has trained, or was broken off, exported again and evaluated."""

import json
import math
import os
import signal

import pytest
from train_cases import at_step
from workflow_cases import a_console, a_run, chats, one_device_shown, run_file, write_jsonl

from podtune.cli.main import main
from podtune.config.errors import Interrupted, UserError
from podtune.config.loading import load_run
from podtune.train.checkpoint import Checkpoints
from podtune.train.metrics import read_metrics
from podtune.workflow.afterwards import convert_model, evaluate_run, export_run
from podtune.workflow.output import open_output
from podtune.workflow.run import run_workflow
from podtune.workflow.samples import read_samples

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def wandering(tmp_path_factory):
    """The output of a run whose held-out loss rises, for those rows say other things: its best is not its last step."""
    with one_device_shown():
        folder = tmp_path_factory.mktemp("wandering")
        content = json.loads(run_file(folder).read_text())
        contrary = [
            {"messages": [row["messages"][0], {"role": "assistant", "content": "0123456789" * 3}]} for row in chats(4)
        ]
        data = content["data"] | {"validation": str(write_jsonl(folder / "contrary.jsonl", contrary))}
        train = {"steps": 8, "batch_tokens": 128, "learning_rate": 0.3, "schedule": "constant", "log_every": 1}
        return run_workflow(
            a_run(folder, data=data, train=train, eval={"samples": 2, "max_new_tokens": 4, "every": 1}), a_console()
        )


def test_the_export_of_other_weights_states_their_step_loss_and_answers(wandering):
    path = wandering.path
    before, samples = open_output(path).record["results"], wandering.samples.read_bytes()
    losses = {line["step"]: line["eval_loss"] for line in read_metrics(wandering.metrics) if "eval_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert best != before["weights_step"] == 8
    export_run(open_output(path), a_console(), overrides=["export.checkpoint=best"])
    after = open_output(path).record["results"]
    assert after["weights_step"] == best
    assert after["after"] == {"loss": losses[best], "perplexity": pytest.approx(math.exp(losses[best]))}
    assert after == {**before, "weights_step": best, "after": after["after"]}
    for card in ("README.md", "model/README.md", "adapter/README.md"):
        assert f"| {losses[best]:.4f} |" in (path / card).read_text()
    answers = {
        one["prompt"]: one["answer"] for one in evaluate_run(load_run(path / "run.yaml"), a_console())["answers"]
    }
    assert {one.prompt: one.answers["after"] for one in read_samples(wandering.samples)} == answers
    export_run(open_output(path), a_console(), overrides=["export.checkpoint=last"])
    assert open_output(path).record["results"] == before
    assert wandering.samples.read_bytes() == samples


def test_an_export_that_is_killed_before_its_answers_gives_them_the_next_time(wandering, monkeypatch):
    output = open_output(wandering.path)
    before, samples = output.record["results"], output.samples.read_bytes()

    def dies(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("podtune.workflow.training.restored_record", dies)
        with pytest.raises(KeyboardInterrupt):
            export_run(output, a_console(), overrides=["export.checkpoint=best"])
    assert output.samples.read_bytes() != samples
    export_run(open_output(output.path), a_console())
    assert open_output(output.path).record["results"] == before
    assert output.samples.read_bytes() == samples


def test_warnings_of_training_stay_in_the_record_of_an_export(wandering):
    output = open_output(wandering.path)
    output.update(warnings=["step 3: its loss is not finite"])
    timings = output.record["timings"]
    export_run(open_output(output.path), a_console())
    record = open_output(output.path).record
    assert "step 3: its loss is not finite" in record["warnings"]
    assert record["timings"] == timings


def test_the_best_of_no_evaluated_checkpoints_is_refused_and_nothing_is_written(wandering, monkeypatch):
    before = {name: (wandering.path / name).read_bytes() for name in ("run.yaml", "run.json", "README.md")}
    monkeypatch.setattr(Checkpoints, "best", lambda self: None)
    with pytest.raises(UserError, match=r"export\.checkpoint=best: no checkpoint .*export\.checkpoint=last"):
        export_run(open_output(wandering.path), a_console(), overrides=["export.checkpoint=best"])
    assert {name: (wandering.path / name).read_bytes() for name in before} == before


def test_the_best_of_a_run_that_held_nothing_out_is_refused_and_nothing_is_written(tmp_path):
    file = run_file(tmp_path, train={"steps": 1, "batch_tokens": 64}, eval={"samples": 0, "every": 0.5})
    write_jsonl(tmp_path / "chats.jsonl", chats(12))  # too few to hold any out of
    content = json.loads(file.read_text())
    content["data"]["validation"] = "auto"
    file.write_text(json.dumps(content))
    output = run_workflow(load_run(file), a_console())
    before = (output.path / "run.yaml").read_bytes()
    with pytest.raises(UserError, match=r"export\.checkpoint: best cannot be followed: no rows are held out"):
        export_run(open_output(output.path), a_console(), overrides=["export.checkpoint=best"])
    assert (output.path / "run.yaml").read_bytes() == before


@pytest.mark.parametrize(("quiet", "terminal"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_long_export_says_how_far_it_is_unless_it_is_to_be_quiet(quiet, terminal, wandering, tmp_path, monkeypatch):
    monkeypatch.setattr("podtune.workflow.writing.SECONDS_BETWEEN_LINES", 0)
    for export in (
        lambda console: export_run(open_output(wandering.path), console),
        lambda console: convert_model(str(wandering.model), tmp_path / "copy", console),
    ):
        console = a_console(terminal=terminal)
        console.quiet = quiet
        export(console)
        said = console.file.getvalue()
        assert ("writing " in said) == (not quiet)
        assert quiet or terminal or " kB of " in said


@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_an_evaluation_as_json_is_all_there_is_on_stdout(quiet, wandering, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["eval", str(wandering.path), "--json", *quiet])
    assert leaving.value.code == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert list(found) == ["step", "loss", "perplexity", "tokens", "answers"]
    assert found["step"] == 8
    assert found["loss"] == pytest.approx(wandering.record["results"]["after"]["loss"], rel=1e-5)
    assert [list(one) for one in found["answers"]] == 2 * [["prompt", "answer", "expected"]]
    assert ("held-out loss" in said.err) == (not quiet)
    assert quiet == [] or not said.err


def test_a_run_whose_every_step_made_it_worse_says_that_the_model_is_as_it_came(wandering, tmp_path):
    run = load_run(wandering.path / "run.yaml", [f"output.path={tmp_path / 'out'}", "export.checkpoint=best"])
    console = a_console()
    output = run_workflow(run, console)
    losses = {line["step"]: line["eval_loss"] for line in read_metrics(output.metrics) if "eval_loss" in line}
    assert min(losses, key=lambda step: losses[step]) == output.record["results"]["weights_step"] == 0
    assert "what is exported is the model as it came" in " ".join(console.export_text().split())
    for card in ("README.md", "model/README.md", "adapter/README.md"):
        assert (
            "step 0 of 8, whose loss on held-out rows was the lowest: those before" in (output.path / card).read_text()
        )


def test_the_export_of_a_model_trained_whole_does_not_read_the_one_it_started_from(tmp_path, monkeypatch):
    output = run_workflow(a_run(tmp_path, method="full"), a_console())
    weights = (output.path / "model/model.safetensors").read_bytes()
    monkeypatch.setattr("podtune.families.loading.load_weights", lambda *_, **__: pytest.fail("it was read"))
    export_run(open_output(output.path), a_console())
    assert (output.path / "model/model.safetensors").read_bytes() == weights


def test_the_export_of_an_interrupted_run_leaves_its_training_to_be_gone_on_with(tmp_path):
    run = a_run(tmp_path)
    with at_step(2, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(Interrupted):
        run_workflow(run, a_console())
    console = a_console()
    (tmp_path / "chats.jsonl").rename(tmp_path / "gone.jsonl")  # the prepared data is there still
    export_run(open_output(tmp_path / "out"), console)
    assert f"training is not finished: `podtune run {tmp_path / 'out'}/run.yaml` goes on" in console.export_text()
    assert (tmp_path / "out/model/model.safetensors").exists()
    exported = open_output(tmp_path / "out")
    results = exported.record["results"]
    assert (results["steps"], results["weights_step"], results["total_steps"]) == (2, 2, 4)
    assert results["seconds"] > 0
    assert {sample.prompt for sample in read_samples(exported.samples) if "after" in sample.answers}
    assert "2 of 4" in (exported.path / "report.html").read_text()
    (tmp_path / "gone.jsonl").rename(tmp_path / "chats.jsonl")
    output = run_workflow(run, a_console())
    assert output.record["results"]["steps"] == 4
    assert output.state == "finished"


def test_another_export_of_a_finished_run_is_said_to_be_asked_for_and_made(tmp_path):
    run_workflow(a_run(tmp_path), a_console())
    console = a_console()
    other = a_run(tmp_path, export={"dtype": "float16", "adapter": True})
    run_workflow(other, console)
    (told,) = [line for line in console.export_text().splitlines() if "podtune export" in line]
    overrides = told.partition(f"podtune export {tmp_path / 'out'} ")[2].split()  # as it is told, so it is taken
    assert sorted(overrides) == ["export.adapter=true", "export.dtype=float16"]
    export_run(open_output(tmp_path / "out"), a_console(), overrides=overrides)
    assert open_output(tmp_path / "out").record["exported"]["model"]["dtype"] == "float16"
    console = a_console()
    run_workflow(other, console)
    assert "made otherwise" not in console.export_text()
