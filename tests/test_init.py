"""`podtune init DATA`: says what the data is and writes a run file that loads."""

import json
from pathlib import Path

import pytest

from podtune.cli.init import init
from podtune.cli.main import with_exit_statuses
from podtune.config.loading import load_run


def run(capsys: pytest.CaptureFixture[str], data: str, **options) -> tuple[int, str, str]:
    """The command as the command line calls it: its exit status, what it printed, and where."""
    status = 0
    try:
        with_exit_statuses(init)(data, **options)
    except SystemExit as left:
        status = int(left.code or 0)
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello there, how are you?"}]
    path = tmp_path / "support chats.jsonl"
    path.write_text(
        json.dumps({"messages": turns[:1] * 2 + turns[1:], "id": 1}) + "\n\n" + json.dumps({"messages": turns})
    )
    return path


def test_init_says_what_the_data_is_and_writes_four_lines_that_load(chats: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = run(capsys, chats.name, model="owner/model")
    assert status == 0
    assert "messages (column messages; not used: id)" in out
    assert "2 in 1 file" in out
    assert "35 characters, about 8 tokens (support chats.jsonl:1)" in out
    assert "3 user, 2 assistant" in out
    run_file = load_run(Path("run.yaml"), ())
    assert run_file.data.train[0].path.endswith("support chats.jsonl")
    assert (run_file.model.source, run_file.method.name) == ("owner/model", "lora")
    assert len(Path("run.yaml").read_text().splitlines()) == 4


def test_init_writes_over_no_file_unless_told_to(chats: Path, capsys: pytest.CaptureFixture[str]):
    Path("run.yaml").write_text("mine")
    status, _, err = run(capsys, chats.name)
    assert status == 2
    assert "--force" in err
    assert Path("run.yaml").read_text() == "mine"
    assert run(capsys, chats.name, force=True)[0] == 0
    assert Path("run.yaml").read_text().startswith("model: ")


@pytest.mark.parametrize(("text", "says"), [
    ("", "there are no rows in 1 file"), ('{"question": "q"}', "cannot tell the shape"),
    ('{"promt": "q", "completion": "a"}', "Did you mean prompt by promt"),
    ('{"text": 1', "it is cut off here, as if the file were not whole"),
])  # fmt: skip
def test_init_writes_nothing_for_data_that_cannot_be_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, says: str
):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(text)
    status, _, err = run(capsys, "a.jsonl")
    assert status == 2
    assert says in err
    assert not Path("run.yaml").exists()


def test_questions_and_answers_under_other_names_are_mapped_in_the_run_file_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("faq.csv").write_text("id,Question,the answer,Answer\n1,q,x,a\n2,r,x,b\n")
    status, out, _ = run(capsys, "faq.csv")
    assert status == 0
    assert "2 user, 2 assistant" in out
    assert "columns  taken for what their names usually mean" in out
    assert load_run(Path("run.yaml")).data.columns == {"instruction": "Question", "output": "Answer"}
    assert len(Path("run.yaml").read_text().splitlines()) == 4


def test_a_context_that_the_first_row_has_not_got_is_mapped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    rows = ({"question": "q", "answer": "a"}, {"question": "r", "context": "here", "answer": "b"})
    Path("faq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(capsys, "faq.jsonl")[0] == 0
    columns = load_run(Path("run.yaml")).data.columns
    assert columns == {"instruction": "question", "input": "context", "output": "answer"}


def test_columns_that_cannot_be_told_are_left_to_fill_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("tickets.csv").write_text("ticket,category\nno light,power\n")
    status, out, _ = run(capsys, "tickets.csv")
    assert status == 0
    assert "cannot tell the shape from the columns ticket, category" in out
    assert "in the place of NAME, then podtune check run.yaml" in out
    assert load_run(Path("run.yaml")).data.columns == {"instruction": "NAME", "output": "NAME"}


def test_a_long_text_is_proposed_paragraph_by_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("manual.txt").write_text("\n\n".join(f"Paragraph {n}." for n in range(30)))
    status, out, _ = run(capsys, "manual.txt")
    assert status == 0
    assert "rows     30 in 1 file" in out
    assert "each paragraph is one" in out
    assert load_run(Path("run.yaml")).data.train[0].documents == "paragraph"
    Path("note.txt").write_text("One paragraph.")
    assert run(capsys, "note.txt", force=True)[0] == 0
    assert load_run(Path("run.yaml")).data.train[0].documents == "file"


@pytest.mark.parametrize(("completion", "said"), [("power", True), (" power", False)])
def test_pairs_without_a_space_between_them_are_hinted_at(
    completion: str, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "no light", "completion": completion}))
    _, out, _ = run(capsys, "pairs.jsonl")
    assert ("put together as they stand" in out) == said


def test_rows_with_faults_are_counted_and_keep_no_run_file_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "a"}\n{"text": 5}\n{"txt"\n{"text": "b"}\n')
    status, out, _ = run(capsys, "a.jsonl")
    assert status == 0
    assert "rows     2 in 1 file" in out
    assert "2 rows with faults, the first a.jsonl:2: column text is a number" in out
    assert Path("run.yaml").exists()


@pytest.mark.parametrize("place", ["file/run.yaml", "folder"])
def test_where_no_file_can_be_is_said_before_the_data_is_read(
    chats: Path, capsys: pytest.CaptureFixture[str], place: str
):
    Path("file").write_text("")
    Path("folder").mkdir()
    status, _, err = run(capsys, "none.jsonl", output=Path(place), force=True)
    assert status == 2
    assert "a file cannot be there" in err


@pytest.mark.parametrize(
    "data",
    [
        "hub://owner/name@v1:train",
        "it's: a #1 file.jsonl",
        "*.jsonl",
        "-x.jsonl",
        "yes",
        "0x1",
        "true",
        "null",
        "~",
        "",
        "a\nb",
        "\x7f\x85",
    ],
)
def test_any_path_survives_yaml(data: str):
    from ruamel.yaml import YAML

    from podtune.cli.init import _run_name
    from podtune.config.writing import as_yaml

    assert YAML(typ="safe").load(f"data: {as_yaml(data)}\noutput: {as_yaml(_run_name(data))}")["data"] == data
