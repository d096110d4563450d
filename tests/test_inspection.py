"""inspect: what is shown of a row is what is trained, readable with and without colour, and safe as a page."""

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import typer
from chat_tokenizers import FAMILIES, family_tokenizer
from hub_server import FakeHub, serve
from prepare_cases import chat, chats, prepare_chats, write_rows
from rich.console import Console

from podtune.cli.main import COMMANDS, load, with_exit_statuses
from podtune.data.inspection import inspect_row, legend, print_row, rows_to_show, token_pieces
from podtune.data.inspection_html import page_of

UNICODE = "Ünïcödé: naïve café, 東京, привет, 🙂👩‍👩‍👧 \t tab\r\n<b>&amp;"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pieces_of_a_text_are_all_of_it_whatever_the_characters_are_cut_into(family: str) -> None:
    tokenizer = family_tokenizer(family)
    ids = np.array(tokenizer.encode(UNICODE, special=False), np.int32)
    pieces = list(token_pieces(ids, [True] * len(ids), tokenizer))
    assert [token for piece in pieces for token in piece.ids] == ids.tolist()
    assert "".join(piece.text for piece in pieces).strip() == tokenizer.decode(ids.tolist()).strip()
    starts = np.cumsum([0] + [len(piece.ids) for piece in pieces])[:-1]
    assert [piece.position for piece in pieces] == starts.tolist()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("inspected")
    rows = [*chats(30), chat("<script>alert(1)</script>", 'A "quoted" <img src=x onerror=alert(2)> answer & more')]
    return prepare_chats(folder, write_rows(folder / "a.jsonl", rows))


def all_inspected(prepared):
    return [inspect_row(prepared.train, index, family_tokenizer("chatml")) for index in range(prepared.train.rows)]


def test_a_row_without_colour_marks_exactly_what_is_trained(prepared) -> None:
    """Pitfall 2, as one sees it: each trained span, decoded, is the answer and the end of its turn."""
    out = io.StringIO()
    console = Console(file=out, width=80)
    for row in all_inspected(prepared):
        print_row(console, row)
    spans = re.findall("⟦(.*?)⟧", out.getvalue(), re.DOTALL)
    assert len(spans) == prepared.train.examples
    assert all(re.fullmatch(r"(The answer is (\d+)\. )(\1)*<\|im_end\|>|A .* more<\|im_end\|>", span) for span in spans)
    assert "\x1b" not in out.getvalue()


def test_a_row_in_colour_needs_no_marks(prepared) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system="truecolor")
    console.print(legend(coloured=True))
    print_row(console, all_inspected(prepared)[0])
    assert "\x1b[" in out.getvalue()
    assert "⟦" not in out.getvalue()


def test_ids_are_shown_on_request(prepared) -> None:
    out = io.StringIO()
    row = all_inspected(prepared)[0]
    print_row(Console(file=out, width=80), row, with_ids=True)
    shown = [int(number) for numbers in re.findall(r"\[([\d ]+)\]", out.getvalue()) for number in numbers.split()]
    assert shown == prepared.train.read(0).tokens.tolist()


def test_a_control_character_in_the_data_does_not_reach_the_terminal(tmp_path: Path) -> None:
    data = {"train": str(write_rows(tmp_path / "a.jsonl", [chat("x", "a\x1b[2Jb\u202ec")])), "validation": "none"}
    prepared = prepare_chats(tmp_path, data)
    out = io.StringIO()
    print_row(Console(file=out, width=80), all_inspected(prepared)[0])
    assert "\x1b" not in out.getvalue()
    assert "\\u001b[2Jb\\u202ec" in out.getvalue()


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.tips: list[str] = []
        self.outside: list[str] = []
        self.trained = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.outside += [name for name in values if name in ("src", "href", "onerror")]
        if "data-id" in values:
            self.tips.append(values["data-tip"] or "")
            self.trained += len((values["data-id"] or "").split()) if " y" in (values["class"] or "") else 0

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_shows_every_token_and_takes_nothing_from_the_data_as_markup(prepared) -> None:
    html = page_of(all_inspected(prepared), prepared, prepared.train, title="<run>.yaml")
    page = _Page()
    page.feed(html)
    assert page.trained == prepared.train.trained_tokens
    assert not {"script", "img", "b", "run"} & set(page.tags) - {"b"}
    assert page.outside == []
    assert "http" not in html
    text = "".join(page.text)
    assert "<script>alert(1)</script>" in text
    assert 'A "quoted" <img src=x onerror=alert(2)> answer & more' in text
    assert re.fullmatch(r"id \d+( \d+)* · position 0 · example 1 · given", page.tips[0])


def test_rows_to_show_are_spread_over_the_split(prepared) -> None:
    shown = rows_to_show(prepared.train, 3)
    assert shown[0] == 0
    assert shown[-1] == prepared.train.rows - 1
    assert rows_to_show(prepared.train, 10_000) == list(range(prepared.train.rows))


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose model is a folder with a tokenizer and a configuration."""
    folder = tmp_path_factory.mktemp("run")
    family_tokenizer("chatml").inner.save_pretrained(folder / "model")
    config = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 100}'
    (folder / "model" / "config.json").write_text(config)
    write_rows(folder / "a.jsonl", chats(30))
    (folder / "run.yaml").write_text(
        f"model: {folder / 'model'}\ndata: {{train: {folder / 'a.jsonl'}, cache: {folder / 'cache'}}}\n"
        f"method: lora\noutput: {folder / 'out'}\n"
    )
    return folder / "run.yaml"


@pytest.fixture
def podtune(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs the command in this process: (status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(command: str, *arguments: str) -> tuple[int, str, str]:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(with_exit_statuses(load(COMMANDS[command].place)))
        with pytest.raises(SystemExit) as left:
            app(args=list(arguments))
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return run


def test_the_commands_prepare_once_and_show_it(run_file: Path, podtune) -> None:
    status, out, err = podtune("prepare", str(run_file))
    assert status == 0, err
    assert "prepared" in err
    assert (Path(out.splitlines()[-1]) / "manifest.json").exists()
    status, out, err = podtune("inspect", str(run_file), "--row", "0")
    assert status == 0, err
    assert "nothing to do" in err
    assert "⟦The answer is" in out
    assert "of 100 tokens" in out  # the model's context
    page = run_file.parent / "pages" / "rows.html"
    assert podtune("inspect", str(run_file), "--html", str(page), "--split", "validation")[0] == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("command", ["prepare", "inspect"])
def test_a_model_on_the_hub_lends_its_tokenizer_alone(run_file, podtune, tmp_path, monkeypatch, command):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    files = {file.name: file.read_bytes() for file in (run_file.parent / "model").iterdir()}
    with serve(FakeHub(files={"someone/model": {**files, "model.safetensors": b"x" * 5000}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        status, out, err = podtune(command, str(run_file), "model=someone/model", f"data.cache={tmp_path / 'data'}")
    assert status == 0, err
    assert out
    assert "tokenizer.json" in hub.sent
    assert "model.safetensors" not in hub.sent


@pytest.mark.parametrize("command", ["prepare", "inspect"])
def test_a_model_in_an_object_store_lends_its_tokenizer(run_file, podtune, tmp_path, monkeypatch, command):
    import fsspec

    monkeypatch.setenv("PODTUNE_CACHE", str(tmp_path))
    memory = fsspec.filesystem("memory")
    for file in (run_file.parent / "model").iterdir():
        memory.pipe_file(f"/bucket/lender/{file.name}", file.read_bytes())
    settings = ("model=memory://bucket/lender", f"data.cache={tmp_path / 'data'}")
    status, out, err = podtune(command, str(run_file), *settings)
    assert status == 0, err
    assert out


@pytest.mark.parametrize("command", ["prepare", "inspect"])
@pytest.mark.parametrize(
    ("template", "words"),
    [
        (b"{% for m in messages %}{{ m.content }}", "line 1 of the template: "),
        ("{{ 'é' }}".encode("latin-1"), "cannot be read (it is not UTF-8)"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_named(run_file, podtune, tmp_path, command, template, words):
    if template is not None:
        (tmp_path / "own.jinja").write_bytes(template)
    status, _, err = podtune(command, str(run_file), f"model.chat_template={tmp_path / 'own.jinja'}")
    assert status == 2
    assert f"model.chat_template: {tmp_path / 'own.jinja'}" in err
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--row", "999"], "the train split has rows 0 to"),
        (["data.validation=none", "--split", "validation"], "no validation split"),
        (["data.max_length=101"], "more than the model's context of 100 tokens"),
    ],
)
def test_what_cannot_be_shown_is_said_with_status_2(run_file: Path, podtune, arguments: list[str], words: str) -> None:
    status, _, err = podtune("inspect", str(run_file), *arguments)
    assert status == 2
    assert words in err
    assert "Traceback" not in err
