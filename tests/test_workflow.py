"""The whole job on a tiny model: what it writes, what it says, and what happens when it is run again."""

import json
import os
import shutil
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models as tiny
from export_cases import our_logits, some_tokens
from workflow_cases import a_console, a_run, one_device_shown, run_file, write_jsonl

from podtune.config.errors import UserError
from podtune.config.loading import load_run
from podtune.workflow.afterwards import evaluate_run, export_run
from podtune.workflow.other_run import differences
from podtune.workflow.output import OutputFolder, check_usable, open_output
from podtune.workflow.run import STAGES, run_workflow
from podtune.workflow.training import check_steps, plan_steps
from podtune.workflow.work import Work

pytestmark = pytest.mark.usefixtures("one_device")
TOKENS = some_tokens()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, output, console text) of a run that was made once."""
    with one_device_shown():
        folder = tmp_path_factory.mktemp("run")
        console = a_console()
        output = run_workflow(a_run(folder), console)
        return folder, output, console.export_text()


def test_the_output_folder_holds_what_the_documentation_says(finished):
    _, output, _ = finished
    names = {path.name for path in output.path.iterdir() if not path.name.startswith(".")}
    assert names == {
        "run.yaml", "run.json", "metrics.jsonl", "samples.jsonl", "tensorboard", "checkpoints", "model", "adapter",
        "report.html", "README.md",
    }  # fmt: skip
    assert [path for path in output.path.iterdir() if path.name.startswith(".")] == [output.path / ".lock"]


def test_the_record_says_what_ran_and_what_came_of_it(finished):
    folder, output, _ = finished
    record = json.loads((output.path / "run.json").read_text())
    assert record["state"] == "finished"
    assert record["results"]["steps"] == 4
    assert record["results"]["after"]["loss"] < record["results"]["before"]["loss"]
    assert record["data"]["fingerprint"]
    assert record["data"]["form"] == "chat"
    assert record["model"]["trained_parameters"] < record["model"]["parameters"]
    assert {"jax", "python", "podtune"} <= set(record["versions"])
    assert load_run(output.path / "run.yaml") == a_run(folder)


def test_transformers_and_peft_load_the_results_with_the_same_logits(finished):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, output, _ = finished
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load = partial(AutoModelForCausalLM.from_pretrained, attn_implementation="eager")
        tokens = torch.as_tensor(TOKENS, dtype=torch.long)
        base = load(folder / "base")
        plain = base(tokens).logits.numpy()
        merged = load(output.model)(tokens).logits.numpy()
        adapted = PeftModel.from_pretrained(base, output.adapter)(tokens).logits.numpy()
    assert np.abs(merged - adapted).max() < 1e-4
    assert np.abs(merged - plain).max() > 1e-2
    config = json.loads((output.adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 32, str(folder / "base"))


def test_answers_before_during_and_after_are_kept_and_shown_side_by_side(finished):
    _, output, said = finished
    rows = [json.loads(line) for line in output.samples.read_text().splitlines()]
    assert [(row["moment"], row["step"]) for row in rows] == [
        *3 * [("before", 0)], *3 * [("step 2", 2)], *3 * [("after", 4)],
    ]  # fmt: skip
    assert {row["prompt"] for row in rows if row["expected"] is None} == {"Is <b>this</b> escaped?"}
    for word in ("Q: ", "before: ", "after: ", "expected: ", "held-out loss", "perplexity"):
        assert word in said


def test_status_lines_are_few_and_say_what_matters(finished):
    _, _, said = finished
    for words in (
        "parameters",
        "lora: training",
        "device: CPU",
        "4 steps of 2 rows x 64",
        "export rehearsed",
        "done: ",
    ):
        assert words in said
    assert len(said.splitlines()) < 60


def test_a_finished_run_says_so_and_does_nothing(finished):
    folder, output, _ = finished
    before = {
        path: path.stat().st_mtime_ns for path in output.path.rglob("*") if path.name not in (".lock", "run.yaml")
    }
    console = a_console()
    run_workflow(a_run(folder), console)
    said = console.export_text()
    assert "is finished" in said
    assert "podtune chat" in said
    assert "--fresh" in said
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_that_stopped_early_says_so_and_that_another_patience_comes_too_late(finished, tmp_path):
    folder, output, _ = finished
    stopping = {"steps": 4, "batch_tokens": 128, "learning_rate": 1e-2, "log_every": 1, "early_stopping": 9}
    shutil.copytree(output.path, tmp_path / "out")
    record = open_output(tmp_path / "out")
    stopped = {**record.record["results"], "steps": 2, "stopped": "no better validation loss in 1 evaluation"}
    record.update(results=stopped)
    console = a_console()
    run_workflow(a_run(folder, train=stopping, output=str(tmp_path / "out")), console)
    said = console.export_text()
    run_file(folder)
    assert "finished (stopped early, after 2 steps of 4: no better validation loss in 1 evaluation)" in said
    assert "train.early_stopping is another than the run had, which changes nothing in what is finished" in said


def test_what_was_said_of_evaluation_holds_when_it_is_evaluated_again(finished):
    folder, output, _ = finished
    seen = evaluate_run(a_run(folder), a_console())
    assert seen["step"] == 4
    assert seen["loss"] == pytest.approx(output.record["results"]["after"]["loss"], rel=1e-5)


def test_report_and_card_hold_the_results_and_escape_what_was_asked(finished):
    _, output, _ = finished
    page = (output.path / "report.html").read_text()
    assert "Is &lt;b&gt;this&lt;/b&gt; escaped?" in page
    assert "<b>this</b>" not in page
    assert "<polyline" in page
    card = (output.path / "README.md").read_text()
    assert f"{output.record['results']['after']['loss']:.4f}" in card
    assert 'PeftModel.from_pretrained(base, "adapter")' in card
    assert (output.model / "README.md").exists()
    assert (output.adapter / "README.md").exists()


def test_train_then_export_gives_what_run_gives(finished, tmp_path):
    folder, whole, _ = finished
    run = a_run(folder, output=str(tmp_path / "out"))
    output = run_workflow(run, a_console(), export=False)
    assert not output.model.exists()
    assert output.state == "trained"
    export_run(open_output(output.path), a_console())
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (output.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert open_output(output.path).state == "finished"


def test_what_training_wrote_is_published_before_the_export_begins(tmp_path, monkeypatch):
    published = []
    monkeypatch.setattr(OutputFolder, "publish", lambda self, *, whole: published.append((self.state, whole)))
    run_workflow(a_run(tmp_path, eval={"samples": 0, "every": None}), a_console())
    assert published == [("started", False), ("trained", False), ("finished", True)]


def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(finished, tmp_path, monkeypatch):
    folder, whole, _ = finished
    run = a_run(folder, output=str(tmp_path / "out"))

    def dies(work):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            "podtune.workflow.run.STAGES", tuple(s._replace(does=dies) if s.name == "export" else s for s in STAGES)
        )
        with pytest.raises(KeyboardInterrupt):
            run_workflow(run, a_console())
    console = a_console()
    output = run_workflow(run, console)
    assert "Going on from step 4" in console.export_text()
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors", "samples.jsonl"):
        assert (output.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_the_run_file_that_the_output_keeps_is_the_same_run_from_anywhere(tmp_path, monkeypatch):
    content = json.loads(run_file(tmp_path).read_text())
    content |= {
        "model": "./base",
        "output": "out",
        "data": {**content["data"], "train": "chats.jsonl", "cache": "prep"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    run_workflow(load_run("run.yaml"), a_console())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    console = a_console()
    run_workflow(load_run(tmp_path / "out/run.yaml"), console)
    assert "is finished" in console.export_text()
    assert "warning" not in console.export_text()
    assert evaluate_run(load_run("../out/run.yaml"), a_console())["step"] == 4
    assert not list((tmp_path / "elsewhere").iterdir())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").rename(tmp_path / "gone")
    console = a_console()
    run_workflow(load_run("run.yaml"), console)  # its model is named as before, though kept in full
    assert "cannot be told" in console.export_text()


def test_full_training_of_a_model_without_a_chat_template(tmp_path):
    from export_cases import model_folder

    model_folder("qwen3", tmp_path / "plain", chat=False)
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": f"{n} plus {n} is {2 * n}."} for n in range(20)])
    run = a_run(
        tmp_path,
        model=str(tmp_path / "plain"),
        method="full",
        data={"train": str(texts), "max_length": 64, "workers": 0, "cache": str(tmp_path / "prepared")},
        train={"steps": 2, "batch_tokens": 128, "scale_learning_rate_from": 64},
        eval={"samples": 1, "max_new_tokens": 4},
    )
    output = run_workflow(run, a_console())
    assert output.model.exists()
    assert output.record["results"]["peak_learning_rate"] == pytest.approx(4e-5)  # 2e-5 on twice the batch
    assert "4e-05, cosine" in (output.path / "report.html").read_text()
    assert not output.adapter.exists()


def test_an_adapter_that_cannot_be_served_is_exported_merged_as_well(tmp_path):
    run = a_run(
        tmp_path,
        method={"lora": {"rank": 2, "targets": ["embedding"]}},
        export={"merged": False},
        train={"steps": 1, "batch_tokens": 64},
        eval={"samples": 0, "every": None},
    )
    console = a_console()
    output = run_workflow(run, console)
    assert "vLLM" in console.export_text()
    assert output.model.exists()
    assert output.adapter.exists()
    assert "vLLM" in (output.path / "report.html").read_text()


@pytest.mark.parametrize("content", ["notes.txt", "run.json"])
def test_a_folder_that_holds_something_else_is_refused_and_left_alone(content, tmp_path):
    run = a_run(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / content).write_text("mine")
    with pytest.raises(UserError, match="already holds something else"):
        run_workflow(run, a_console())
    assert [path.name for path in (tmp_path / "out").iterdir()] == [content]


def test_another_run_is_refused_naming_what_differs(finished):
    folder, _, _ = finished
    run = a_run(folder, train={"steps": 4, "batch_tokens": 128, "learning_rate": 5e-3, "log_every": 1})
    with pytest.raises(UserError, match=r"train\.learning_rate: 0\.01 -> 0\.005"):
        check_usable(run)
    check_usable(run, fresh=True)
    run_file(folder)


def test_what_changes_nothing_in_training_may_change():
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = a_run(folder)
        other = a_run(folder, mesh={"data": 4, "fsdp": 2}, eval={"samples": 1}, export={"merged": False})
        assert differences(one, other) == []
        other = a_run(folder, method={"lora": {"rank": 8}})
        assert list(map(str, differences(one, other))) == ["method.lora.rank: 4 -> 8"]


def test_two_runs_never_share_a_folder(tmp_path):
    from podtune.workflow.output import claimed

    run = a_run(tmp_path)
    with claimed(run), pytest.raises(UserError, match="another podtune is running"), claimed(run):
        pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"train": "chats.jsonl", "max_length": 128}}, "max_length=128 is more than the model's context"),
        ({"model": {"source": "base", "chat_template": "absent.jinja"}}, "chat_template"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_data_is_prepared(changes, words, tmp_path, monkeypatch):
    run_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        run_workflow(a_run(tmp_path, **changes), a_console())
    assert not (tmp_path / "prepared").exists()


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("podtune.workflow.beginning.host_memory", lambda: 10_000)
    monkeypatch.setattr("podtune.workflow.beginning.load_model", lambda work: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"needs about .* GiB a device"):
        run_workflow(a_run(tmp_path, method="full"), a_console())


def test_logits_of_the_export_are_those_of_training(finished):
    """The merged folder by our own reader gives the logits of the weights in the checkpoint."""
    from podtune.serve.loading import load_for_serving

    _, output, _ = finished
    merged = load_for_serving(str(output.path))
    adapted = load_for_serving(str(output.adapter))
    one, other = (our_logits(loaded.model, loaded.weights, TOKENS) for loaded in (merged, adapted))
    assert np.abs(one - other).max() < 1e-4


def test_held_out_prompts_too_long_to_answer_are_left_out_and_counted():
    from types import SimpleNamespace

    from podtune.workflow.samples import choose_prompts

    prepared = SimpleNamespace(
        held_out_prompts=lambda count: [
            SimpleNamespace(prompt_ids=list(range(n)), prompt_text="x", expected_text="y", messages=[]) for n in (3, 90)
        ]
    )
    said = []
    chosen = choose_prompts(prepared, None, samples=2, own=(), form=None, most_tokens=50, warn=said.append)
    assert [len(prompt.ids) for prompt in chosen] == [3]
    assert len(said) == 1
    assert "1 of 2 held-out prompts" in said[0]


def test_a_prompt_of_the_users_that_is_too_long_is_refused_before_data_is_prepared(tmp_path):
    run = a_run(tmp_path, eval={"prompts": ["short", "long " * 200], "max_new_tokens": 8})
    with pytest.raises(UserError, match=r"eval\.prompts\[1\] \('long .*…'\) has [0-9,]+ tokens"):
        run_workflow(run, a_console())
    assert not (tmp_path / "prepared").exists()


def test_a_batch_that_is_less_than_a_row_is_said(tmp_path):
    run = a_run(tmp_path, train={"steps": 1, "batch_tokens": 32}, eval={"every": None})
    work = Work(run, a_console(), OutputFolder(tmp_path / "out"))
    work.prepared = SimpleNamespace(validation=None, train=SimpleNamespace(row_tokens=64))
    check_steps(work)
    assert work.warnings == [
        "train.batch_tokens=32 is less than a row of 64 tokens: a step takes whole rows. Shorten them with "
        "data.max_length for smaller steps."
    ]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("hub://owner/name@abc", ("owner/name", "abc")),
        ("owner/name", ("owner/name", None)),
        ("gs://bucket/a@b", ("gs://bucket/a@b", None)),
        ("./here@2", (f"{os.getcwd()}/here@2", None)),
    ],
)
def test_an_adapter_names_its_base_as_peft_takes_it(source, named, tmp_path, monkeypatch):
    from podtune.workflow.beginning import base_name

    monkeypatch.setattr("podtune.hub.sources.check_address", lambda _: None)  # gs:// needs a package
    run = a_run(tmp_path)
    run = run.model_copy(update={"model": run.model.model_copy(update={"source": source})})
    assert base_name(Work(run, a_console(), OutputFolder(tmp_path / "out"))) == named


@pytest.mark.parametrize(
    ("steps", "said"), [(8, "train.steps=8: 8 of 48 packed rows are seen; an epoch is 48 steps of 1."), (48, None)]
)
def test_steps_that_end_before_all_rows_were_seen_are_said(steps, said, tmp_path):
    run = a_run(tmp_path, train={"steps": steps}, eval={"every": None})
    work = Work(run, a_console(), OutputFolder(tmp_path / "out"))
    work.prepared = SimpleNamespace(validation=None, train=SimpleNamespace(rows=48, row_tokens=64))
    plan_steps(work, tiny.mesh_of())
    assert [warning.partition(" Raise")[0] for warning in work.warnings] == ([said] if said else [])
