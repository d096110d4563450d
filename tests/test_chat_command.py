"""`podtune chat`: answers a prompt, piped lines and a person, from a run, an adapter or any model."""

import io
import sys

import pytest
from export_cases import model_folder

from podtune.cli.main import main
from podtune.config.errors import Interrupted, UserError
from podtune.serve.chat import Conversation, talk
from podtune.serve.generate import Generator
from podtune.serve.loading import load_for_serving
from podtune.serve.prompts import chat_prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder("llama-tied", tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def generator(folder):
    loaded = load_for_serving(str(folder))
    return Generator(loaded.model, loaded.weights, loaded.tokenizer)


@pytest.fixture
def conversation(generator):
    return Conversation(generator, max_new_tokens=5)


def command(capsys, *arguments, status=0):
    with pytest.raises(SystemExit) as leaving:
        main(["chat", *map(str, arguments)])
    assert leaving.value.code == status
    return capsys.readouterr()


def answer_of(generator, messages, *, max_new_tokens):
    """The assistant's next turn in a chat, whole."""
    prompt = chat_prompt(generator.tokenizer, messages)
    return "".join(generator.pieces(prompt, max_new_tokens=max_new_tokens))


def piped(conversation, text):
    out = io.StringIO()
    talk(conversation, source=io.StringIO(text), out=out)
    return out.getvalue()


def test_one_prompt_is_answered_and_nothing_else_is_on_stdout(folder, generator, capsys):
    said = command(capsys, folder, "--prompt", "Hi", "--max-new-tokens", 5)
    assert said.out == answer_of(generator, [{"role": "user", "content": "Hi"}], max_new_tokens=5) + "\n"


def test_piped_lines_are_turns_of_one_conversation(conversation, generator):
    first = answer_of(generator, [{"role": "user", "content": "Hi"}], max_new_tokens=5)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}]
    second = answer_of(generator, [*turns, {"role": "user", "content": "So?"}], max_new_tokens=5)
    alone = answer_of(generator, [{"role": "user", "content": "So?"}], max_new_tokens=5)
    assert second != alone
    assert piped(conversation, "Hi\n\nSo?") == f"{first}\n{second}\n"
    assert piped(conversation, "/reset\nSo?\n") == f"(forgotten)\n{alone}\n"


def test_a_system_message_is_heard_and_begins_anew(conversation, generator):
    expected = answer_of(
        generator, [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}], max_new_tokens=5
    )
    assert piped(conversation, "Hi\n/system Be brief\nHi\n/quit\nnever read\n").splitlines()[1:] == [
        "(system: Be brief)",
        expected,
    ]


def test_an_unknown_command_lists_those_there_are(conversation):
    assert "/system TEXT" in piped(conversation, "/what\n")


class Terminal(io.StringIO):
    """Pretends to be one."""

    def isatty(self):
        return True


def typed(monkeypatch, *lines):
    """What a person types: text, or an exception for a key."""
    waiting = iter(lines)

    def read(prompt=""):
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_ctrl_c_stops_the_answer_keeps_what_was_said_and_twice_leaves(conversation, monkeypatch):
    out = Terminal()

    def interrupted(*_, **__):
        yield "well"
        raise KeyboardInterrupt

    monkeypatch.setattr(conversation.generator, "pieces", interrupted)
    typed(monkeypatch, "Hi", KeyboardInterrupt)
    with pytest.raises(Interrupted) as leaving:
        talk(conversation, source=Terminal(), out=out)
    assert leaving.value.exit_status == 130
    assert "well (stopped; Ctrl-C again leaves)" in out.getvalue()
    assert conversation.turns[-1] == {"role": "assistant", "content": "well"}


def test_one_ctrl_c_at_the_prompt_does_not_leave(conversation, monkeypatch):
    out = Terminal()
    typed(monkeypatch, KeyboardInterrupt, "Hi", KeyboardInterrupt, EOFError)
    talk(conversation, source=Terminal(), out=out)
    assert len(conversation.turns) == 2


def test_a_full_conversation_is_said_and_can_be_begun_anew(conversation, monkeypatch):
    out = Terminal()
    typed(monkeypatch, "x" * 80, "Hi", EOFError)
    talk(conversation, source=Terminal(), out=out)
    assert "/reset begins anew" in out.getvalue()
    assert len(conversation.turns) == 2
    with pytest.raises(UserError, match="context is 64"):
        piped(conversation, "x" * 80)


def test_a_model_without_a_chat_template_goes_on_from_the_text(tmp_path, capsys):
    folder = model_folder("qwen3", tmp_path / "plain", chat=False)
    said = command(capsys, folder, "--prompt", "One, two", "--max-new-tokens", 3)
    assert "no chat template" in said.err
    assert said.out.strip("\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./absent"], "absent"),
        (["MODEL", "--prompt", " "], "--prompt is empty"),
        (["MODEL", "--temperature", "-1"], "temperature=-1.0 is below 0"),
        (["MODEL", "--top-p", "0"], "top_p=0.0"),
        (["MODEL", "--max-new-tokens", "0"], "leaves no room"),
        (["MODEL", "--prompt", "x" * 80], "context is 64"),
    ],
)
def test_bad_input_is_one_message_and_status_2(arguments, words, folder, capsys):
    said = command(capsys, *(str(folder) if one == "MODEL" else one for one in arguments), status=2)
    assert words in said.err
    assert "Traceback" not in said.err


def test_a_run_without_an_export_says_how_to_get_one(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    assert "podtune export" in command(capsys, tmp_path, status=2).err


def test_lines_can_be_piped_into_the_command(folder, capsys, monkeypatch, generator):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    said = command(capsys, folder, "--max-new-tokens", 5)
    assert said.out == answer_of(generator, [{"role": "user", "content": "Hi"}], max_new_tokens=5) + "\n"
