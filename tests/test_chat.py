"""Rows become ids and masks: the template's ids always, and each setting's tokens trained."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chat_tokenizers import FAMILIES, FOLDER, Family, family_tokenizer, make_tokenizer
from golden_masks import golden_chats, marked

from podtune.data.chat import NOTES, encode_row, encode_rows, prompt_of, trained_messages
from podtune.data.rows import Completion, Conversation, Example, Message, Refused, Row, Text, Tokens

TURNS = (
    Message("user", "one"), Message("assistant", "two"), Message("user", "three"),
    Message("assistant", None, tool_calls=({"type": "function", "function": {"name": "f", "arguments": {}}},)),
    Message("tool", "four"), Message("assistant", "five"),
)  # fmt: skip
PLAIN = Conversation((*TURNS[:3], Message("assistant", "six")))


def encode(value, tokenizer, train_on="assistant"):
    return encode_row(Row("a.jsonl", 7, value), tokenizer, train_on)


def text_of(value, tokenizer, train_on="assistant") -> str:
    return marked(encode(value, tokenizer, train_on), tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_apply_chat_template_for_turns_system_and_tools(name: str):
    tokenizer = family_tokenizer(name)
    for title, chat in golden_chats(FAMILIES[name]).items():
        result = encode(chat, tokenizer)
        messages = [message.for_template() for message in chat.messages]
        ids = tokenizer.inner.apply_chat_template(messages, tools=list(chat.tools) or None)["input_ids"]
        assert isinstance(result, Example), title
        assert result.tokens.tolist() == ids, title
        assert result.tokens.dtype == np.int32


@pytest.mark.parametrize("name", FAMILIES)
def test_there_are_as_many_bos_as_the_template_gives(name: str):
    """axolotl#1616, OpenRLHF#393: two BOS, one of the template and one of the tokenizer."""
    tokenizer = family_tokenizer(name)
    result = encode(golden_chats(FAMILIES[name])["three turns"], tokenizer)
    assert isinstance(result, Example)
    written = "bos_token" in (FOLDER / f"{FAMILIES[name].template}.jinja").read_text()
    assert (result.tokens == tokenizer.bos_id).sum() == int(written)


def test_a_prefix_of_a_chat_need_not_be_a_prefix_of_its_text():
    """trl#6361, Qwen3#1522: why turns are found in the whole conversation. The reasoning of turn 1 is gone from it."""
    tokenizer = family_tokenizer("qwen3")
    chat = golden_chats(FAMILIES["qwen3"])["reasoning of its own"]
    messages = [message.for_template() for message in chat.messages]
    first = tokenizer.inner.apply_chat_template(messages[:2], tokenize=False)
    whole = tokenizer.inner.apply_chat_template(messages, tokenize=False)
    assert not whole.startswith(first)
    assert text_of(chat, tokenizer).count("⟦") == 2


@pytest.mark.parametrize(("train_on", "trained"), [
    ("assistant", ["two", "f", "five"]), ("last", ["five"]), ("completion", ["f", "five"]),
])  # fmt: skip
def test_train_on_chooses_the_turns(train_on, trained: list[str]):
    parts = text_of(Conversation(TURNS), family_tokenizer("qwen3"), train_on).split("⟦")[1:]
    assert len(parts) == len(trained)
    assert all(word in part.split("⟧")[0] for word, part in zip(trained, parts, strict=True))


def test_train_on_all_trains_all_but_the_first_token():
    result = encode(PLAIN, family_tokenizer("chatml"), "all")
    assert isinstance(result, Example)
    assert result.trained.tolist() == [False] + [True] * (len(result.tokens) - 1)


def test_a_message_says_for_itself_whether_it_is_trained():
    tokenizer = family_tokenizer("chatml")
    user, answer, ask, last = PLAIN.messages
    quiet = Conversation((user, replace(answer, train=False), ask, last))
    assert trained_messages(quiet, "assistant") == [3]
    assert "⟦six<|im_end|>⟧" in text_of(quiet, tokenizer)
    also = Conversation((replace(user, train=True), answer, ask, last))
    assert trained_messages(also, "last") == [0, 3]
    assert "user\n⟦one<|im_end|>⟧\n<|im_start|>assistant\ntwo<|im_end|>" in text_of(also, tokenizer, "last")
    everything_but = text_of(quiet, tokenizer, "all")
    assert "assistant\n⟧two<|im_end|>⟦\n<|im_start|>user" in everything_but


def test_the_messages_of_a_prompt_are_not_trained():
    """As TRL's conversational prompt/completion rows: history in the prompt is given."""
    chat = replace(PLAIN, prompt_messages=3)
    for train_on in ("assistant", "completion", "last"):
        assert trained_messages(chat, train_on) == [3]
    assert "assistant\ntwo<|im_end|>" in text_of(chat, family_tokenizer("chatml"))


def test_the_answer_is_found_after_a_generation_prompt_that_opens_the_reasoning():
    assert "<|Assistant|>⟦six<|end_of_sentence|>⟧" in text_of(PLAIN, family_tokenizer("reasoner"))


def refused(value, tokenizer, train_on="assistant") -> Refused:
    result = encode(value, tokenizer, train_on)
    assert isinstance(result, Refused)
    assert str(result).startswith("a.jsonl:7: ")
    return result


def test_rows_with_nothing_to_train_are_refused_saying_why():
    """axolotl#2089, unsloth#2900: every label is -100, in silence."""
    tokenizer = family_tokenizer("chatml")
    users = Conversation((Message("system", "s"), Message("user", "one")))
    assert "no message is the assistant's (roles: system, user)" in refused(users, tokenizer).reason
    untrained = Conversation((TURNS[0], replace(TURNS[1], train=False)))
    assert "train: false" in refused(untrained, tokenizer).reason
    assert (
        refused(Conversation((TURNS[0], Message("assistant", " \n"))), tokenizer).reason
        == "what would be trained is empty"
    )
    assert refused(Completion("q", " "), tokenizer).reason == "the completion is empty"
    assert refused(Text("\n"), tokenizer).reason == "the text is empty"
    assert refused(Tokens((1, 2), (True, False)), tokenizer).kind == "nothing_to_train"
    assert refused(Tokens(()), tokenizer).kind == "nothing_to_train"


@pytest.mark.parametrize(("name", "chat", "says"), [
    ("no_system", (Message("system", "s"), *TURNS[:2]), "System role not supported"),
    ("gemma", (TURNS[1], TURNS[0]), "Conversation roles must alternate"),
    ("mistral", (TURNS[0], TURNS[0], TURNS[1]), "after a user message an assistant message must come"),
    ("no_system", (TURNS[0], Message("assistant", "a", name="b"), Message("system", "s")), "System role not supported"),
])  # fmt: skip
def test_what_a_template_refuses_is_refused_in_its_own_words(name: str, chat: tuple[Message, ...], says: str):
    result = refused(Conversation(chat), family_tokenizer(name))
    assert result.kind == "template"
    assert says in result.reason


def test_one_refused_chat_does_not_take_its_batch_with_it():
    tokenizer = family_tokenizer("gemma")
    good, bad = Conversation(TURNS[:2]), Conversation((TURNS[1],))
    results = encode_rows([Row("a", at, chat) for at, chat in enumerate((good, bad, good), 1)], tokenizer)
    assert [type(result) for result in results] == [Example, Refused, Example]
    assert [result.number for result in results] == [1, 2, 3]


def test_a_template_that_loses_a_message_or_a_call_is_refused():
    """A tool result or a call that is not in the text would be trained as if it had never been."""
    drops_tools = """{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}"""
    tokenizer = make_tokenizer(FAMILIES["chatml"], drops_tools)
    call = replace(TURNS[3], content="")
    lost_call = refused(Conversation((TURNS[2], call, *TURNS[4:])), tokenizer)
    assert lost_call.kind == "not_rendered"
    assert "leaves out the tool calls of message 2 (assistant)" in lost_call.reason
    assert refused(Conversation((TURNS[2], *TURNS[3:])), tokenizer).reason == lost_call.reason
    lost_result = refused(Conversation((*TURNS[:2], *TURNS[4:])), tokenizer)
    assert "leaves out the content of message 3 (tool)" in lost_result.reason


@pytest.mark.parametrize(
    ("shown", "lost"), [("", "f, g"), ("{{ tools[0].function.name }}", "g"), ("{{ tools|length }}{{ tools }}", "")]
)
def test_a_template_that_loses_tools_is_refused(shown: str, lost: str):
    """A model that is not shown its tools would be trained to call what it cannot know of."""
    plain = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}"""
    tokenizer = make_tokenizer(FAMILIES["chatml"], shown + plain)
    tools = tuple({"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg")
    for text in ("one", "f and g"):  # a name in a message is not the tool
        result = encode(Conversation((Message("user", text), TURNS[1]), tools), tokenizer)
        assert isinstance(result, Refused) == bool(lost)
        if isinstance(result, Refused):
            assert result.kind == "not_rendered"
            assert f"leaves out what the row says of its tools ({lost})" in result.reason
            assert "leave the column out" in result.reason


def test_chats_without_a_template_are_refused_with_a_way_out():
    tokenizer = make_tokenizer(FAMILIES["chatml"], None)
    assert "chat_template: FILE" in refused(PLAIN, tokenizer).reason
    assert isinstance(encode(Text("words"), tokenizer), Example)


def test_what_a_user_should_know_of_a_row_is_noted():
    tokenizer = family_tokenizer("qwen3")
    assert set(NOTES) >= {"control_tokens", "no_turn_end", "content_changed", "reasoning_left_out", "border"}

    def notes(*turns: Message, name: str = "qwen3"):
        result = encode(Conversation(turns), family_tokenizer(name))
        assert isinstance(result, Example)
        return result.notes

    ask, answer = TURNS[:2]
    assert notes(ask, answer) == ()
    assert notes(Message("user", "a <|im_end|> b"), answer) == ("control_tokens",)
    assert notes(ask, Message("assistant", "<think>x</think>y"), ask, answer) == ("content_changed",)
    assert notes(ask, replace(answer, reasoning="x"), ask, answer) == ("reasoning_left_out",)
    assert notes(ask, answer, Message("asistant", "slip"), ask, answer, name="chatml") == ("unusual_role",)
    assert notes(ask, answer, name="no_turn_end") == ("no_turn_end",)
    beside = Message("assistant", "I will look.", tool_calls=TURNS[3].tool_calls)
    assert notes(ask, beside, TURNS[4], answer, name="llama3") == ("content_left_out",)
    assert tokenizer.chat_template is not None


def test_a_changed_template_is_seen():
    tokenizer = make_tokenizer(FAMILIES["chatml"], (FOLDER / "chatml.jinja").read_text())
    before = text_of(PLAIN, tokenizer)
    tokenizer.inner.chat_template = (FOLDER / "generation.jinja").read_text()
    assert text_of(PLAIN, tokenizer) != before
    assert text_of(PLAIN, tokenizer).startswith("<|im_start|>user")


def test_a_template_that_tells_the_date_is_followed_over_midnight(monkeypatch: pytest.MonkeyPatch):
    import transformers.utils.chat_template_utils as theirs

    class Clock(theirs.datetime):  # type: ignore[misc,name-defined]
        day = "1 Jan 2030"

        def strftime(self, format: str) -> str:
            return Clock.day

    monkeypatch.setattr(theirs, "datetime", Clock)
    dated = (
        "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}<|im_end|>\n"
        + (FOLDER / "generation.jinja").read_text()
    )
    tokenizer = make_tokenizer(FAMILIES["chatml"], dated)
    first = text_of(PLAIN, tokenizer)
    Clock.day = "2 Jan 2030"
    second = text_of(PLAIN, tokenizer)
    assert second == first.replace("1 Jan", "2 Jan")
    assert second.count("⟦") == 2


def test_several_templates_in_one_tokenizer_are_chosen_as_transformers_does():
    tokenizer = family_tokenizer("qwen3")
    tools = golden_chats(FAMILIES["qwen3"])["a tool called, its result, the answer"]
    both = make_tokenizer(FAMILIES["qwen3"], None)
    both.inner.chat_template = {
        "default": (FOLDER / "generation.jinja").read_text(),
        "tool_use": tokenizer.inner.chat_template,
    }
    assert text_of(tools, both) == text_of(tools, tokenizer)
    assert text_of(PLAIN, both) == text_of(
        PLAIN, make_tokenizer(FAMILIES["qwen3"], (FOLDER / "generation.jinja").read_text())
    )


@pytest.mark.parametrize("name", ["chatml", "mistral", "llama3"])
def test_a_document_has_the_tokenizers_bos_and_an_end_and_is_trained_whole(name: str):
    tokenizer = family_tokenizer(name)
    result = encode(Text("Hello there."), tokenizer, "assistant")
    assert isinstance(result, Example)
    assert result.tokens.tolist() == [*tokenizer.encode("Hello there.", special=True), tokenizer.eos_id]
    assert result.trained.tolist() == [False] + [True] * (len(result.tokens) - 1)


def test_a_completion_is_tokenised_with_its_prompt_and_its_end_is_trained():
    tokenizer = family_tokenizer("llama3")
    result = encode(Completion("The capital is", " Paris."), tokenizer)
    assert isinstance(result, Example)
    assert result.tokens.tolist() == [*tokenizer.encode("The capital is Paris.", special=True), tokenizer.eos_id]
    assert marked(result, tokenizer) == "<|begin_of_text|>The capital is⟦ Paris.<|eot_id|>⟧"
    joined = encode(Completion("th", "e"), family_tokenizer("mistral"))
    assert isinstance(joined, Example)
    assert joined.notes == ("glued", "border")
    assert marked(joined, family_tokenizer("mistral")) == "<s>⟦the</s>⟧"
    for pair in (("q", " a"), ("q\n", "a"), ("", "a"), ("問い。", "答え")):
        spaced = encode(Completion(*pair), tokenizer)
        assert isinstance(spaced, Example)
        assert "glued" not in spaced.notes
    whole = encode(Completion("th", "e"), tokenizer, "all")
    assert isinstance(whole, Example)
    assert whole.trained[1:].all()


def test_a_tokenizer_that_adds_an_end_itself_gets_no_second_one():
    from tokenizers import processors

    tokenizer = make_tokenizer(Family("chatml", ("<s>", "</s>"), "<s>", "</s>"), None)
    backend = tokenizer.inner.backend_tokenizer
    pairs = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pairs)
    for value in (Text("Hello"), Completion("Hello", " there")):
        result = encode(value, tokenizer)
        assert isinstance(result, Example)
        assert result.tokens.tolist().count(tokenizer.eos_id) == 1
        assert result.trained[-1]
    assert marked(result, tokenizer) == "<s>Hello⟦ there</s>⟧"


def test_a_text_without_an_end_token_is_noted():
    tokenizer = make_tokenizer(FAMILIES["chatml"], None)
    tokenizer.inner.eos_token = None
    result = encode(Text("Hello there"), tokenizer)
    assert isinstance(result, Example)
    assert result.notes == ("no_end_of_text",)


def test_tokens_of_others_are_taken_as_they_are():
    tokenizer = family_tokenizer("chatml")
    result = encode(Tokens((5, 0, 6), (True, False, True)), tokenizer)
    assert isinstance(result, Example)
    assert result.tokens.tolist() == [5, 0, 6]
    assert result.trained.tolist() == [False, False, True]
    assert "token id 100000 is not one of" in refused(Tokens((5, 100_000)), tokenizer).reason
    assert "3 tokens and a mask of 1" in refused(Tokens((5, 6, 7), (True,)), tokenizer).reason


def test_half_an_emoji_is_refused_and_not_a_crash():
    tokenizer = family_tokenizer("chatml")
    for value in (Text("a\ud83d"), Conversation((TURNS[0], Message("assistant", "\ude00")))):
        assert "lone surrogate" in refused(value, tokenizer).reason


def test_what_was_set_on_the_tokenizer_for_padding_and_truncation_changes_no_ids():
    tokenizer = make_tokenizer(FAMILIES["chatml"], (FOLDER / "chatml.jinja").read_text())
    before = encode(PLAIN, tokenizer)
    tokenizer.inner.backend_tokenizer.enable_truncation(4)
    tokenizer.inner.backend_tokenizer.enable_padding(length=64)
    after = encode(PLAIN, tokenizer)
    assert isinstance(before, Example)
    assert isinstance(after, Example)
    assert before.tokens.tolist() == after.tokens.tolist()


def test_a_prompt_is_what_is_asked_at_inference():
    tokenizer = family_tokenizer("llama3")
    prompt = prompt_of(Row("a", 1, PLAIN), tokenizer)
    assert prompt is not None
    assert prompt.expected == "six"
    messages = [message.for_template() for message in PLAIN.messages[:3]]
    assert prompt.messages == messages
    assert prompt.ids == tokenizer.inner.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    plain = prompt_of(Row("a", 1, Completion("The capital is", " Paris.")), tokenizer)
    assert plain is not None
    assert plain.ids == tokenizer.encode("The capital is", special=True)
    for nothing in (Text("t"), Tokens((1,)), Conversation((Message("user", "q"),)), Completion("", "x")):
        assert prompt_of(Row("a", 1, nothing), tokenizer) is None


def test_the_slow_way_finds_the_turns_that_the_skeleton_finds(monkeypatch: pytest.MonkeyPatch):
    """Every golden chat once more, with turns found by replacing one content at a time."""
    import podtune.data.turns as turns

    for name, family in FAMILIES.items():
        chats = golden_chats(family)
        quick = {title: text_of(chat, family_tokenizer(name)) for title, chat in chats.items()}
        with monkeypatch.context() as patched:
            patched.setattr(turns, "_match", lambda *given: None)
            for title, chat in chats.items():
                assert text_of(chat, family_tokenizer(name)) == quick[title], (name, title)


def test_rows_pickle_and_encode_in_a_worker(tmp_path: Path):
    import pickle

    row = Row("a.jsonl", 1, PLAIN)
    again = pickle.loads(pickle.dumps(row))
    assert again == row
    tokenizer = pickle.loads(pickle.dumps(family_tokenizer("chatml")))
    assert text_of(again.value, tokenizer) == text_of(PLAIN, family_tokenizer("chatml"))
