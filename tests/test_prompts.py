"""Prompts take the form that was trained: those of eval.prompts, and those of `podtune chat` with a run."""

from pathlib import Path

import pytest
from workflow_cases import QUESTIONS, a_console, a_run, chats, one_device_shown, write_jsonl

from podtune.config.rows import Data
from podtune.data.forms import trained_form
from podtune.data.prepared import open_prepared
from podtune.hub.sources import resolve_model
from podtune.hub.tokenizer import load_tokenizer
from podtune.serve.prompts import chat_prompt
from podtune.workflow.afterwards import export_run
from podtune.workflow.output import open_output
from podtune.workflow.run import run_workflow

pytestmark = pytest.mark.usefixtures("one_device")

SHAPES_OF_TEXT = {
    "text": [{"text": f"{word} and {word} {n} times over"} for n, word in enumerate(QUESTIONS * 3)],
    "completion": [{"prompt": f"{word} {n} is", "completion": " a colour"} for n, word in enumerate(QUESTIONS * 3)],
}


@pytest.mark.parametrize("form", SHAPES_OF_TEXT)
def test_prompts_take_the_form_that_was_trained_and_begin_as_its_rows_do(form, tmp_path, capsys, monkeypatch):
    from podtune.cli.main import main
    from podtune.serve.generate import Generator

    rows = SHAPES_OF_TEXT[form]
    start = rows[0].get("prompt", rows[0].get("text", "")[:9])
    write_jsonl(tmp_path / "rows.jsonl", rows)
    data = {
        "train": str(tmp_path / "rows.jsonl"), "validation": "none", "max_length": 64, "packing": False, "workers": 0,
        "cache": str(tmp_path / "prepared"),
    }  # fmt: skip
    ask = {"samples": 0, "max_new_tokens": 4, "prompts": [start]}
    run = a_run(tmp_path, data=data, eval=ask, train={"steps": 1, "batch_tokens": 64})
    console = a_console()
    with one_device_shown():
        output = run_workflow(run, console)
    assert f"eval.prompts are continued as plain text, as this run is trained ({form} rows)" in console.export_text()
    assert output.record["data"]["form"] == form

    split = open_prepared(Path(output.record["data"]["folder"])).train
    trained = [split.read(row).tokens.tolist() for row in range(split.rows)]
    given = []

    def pieces(self, ids, **_):
        given.append((list(ids), self.tokenizer.chat_template is not None))
        return iter(["x"])

    monkeypatch.setattr(Generator, "pieces", pieces)

    def asked(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main(["chat", *map(str, arguments), "--prompt", start])
        return leaving.value.code, capsys.readouterr().err, given[-1][0]

    for folder in (output.path, output.model, output.adapter):
        status, said, ids = asked(folder)
        assert (status, given[-1][1]) == (0, True), "the template is there, and not what was trained"
        assert any(row[: len(ids)] == ids for row in trained)
        assert "as this run was trained on" in said
    tokenizer = load_tokenizer(resolve_model(str(output.model)))
    assert asked(output.path, "--chat")[2] == chat_prompt(tokenizer, [{"role": "user", "content": start}])
    assert asked(tmp_path / "base")[2] == asked(output.path, "--chat")[2], "of a model that is no run's: the template"
    status, said, ids = asked(tmp_path / "base", "--raw")
    assert "as --raw asks" in said
    assert any(row[: len(ids)] == ids for row in trained)
    status, said, _ = asked(output.path, "--system", "Be brief")
    assert status == 2
    assert "plain text has no system message" in said


def test_an_export_that_answers_again_asks_in_the_form_that_was_trained(tmp_path, monkeypatch):
    data = {"train": str(write_jsonl(tmp_path / "rows.jsonl", SHAPES_OF_TEXT["text"])), "validation": "none"}
    data |= {"max_length": 64, "packing": False, "workers": 0, "cache": str(tmp_path / "prepared")}
    ask = {"samples": 0, "max_new_tokens": 4, "prompts": [SHAPES_OF_TEXT["text"][0]["text"][:9]]}
    output = run_workflow(a_run(tmp_path, data=data, eval=ask, train={"steps": 1, "batch_tokens": 64}), a_console())
    before = [line for line in output.samples.read_text().splitlines() if '"after"' not in line]
    output.samples.write_text("\n".join(before) + "\n")
    asked = []

    def answers(generator, prompts, **_):
        asked.extend(prompts)
        return ["x"] * len(prompts)

    monkeypatch.setattr("podtune.workflow.training.answer_all", answers)
    export_run(open_output(output.path), a_console())
    split = open_prepared(Path(output.record["data"]["folder"])).train
    trained = [split.read(row).tokens.tolist() for row in range(split.rows)]
    (one,) = asked
    assert any(row[: len(one.ids)] == list(one.ids) for row in trained)


def test_prompts_of_a_run_on_chats_and_texts_are_chats(tmp_path):
    texts = write_jsonl(tmp_path / "texts.jsonl", SHAPES_OF_TEXT["text"])
    both = Data.model_validate({"train": [str(texts), str(write_jsonl(tmp_path / "chats.jsonl", chats()))]})
    assert trained_form(both, chat=True) == "chat"
    absent = Data.model_validate({"train": str(tmp_path / "absent.jsonl")})
    assert trained_form(absent, chat=True) is None, "preparing tells what is wrong with it"
    far = Data.model_validate({"train": "hub://owner/name"})
    assert trained_form(far, chat=True, offline=True) is None
