"""Shapes are sniffed from the first rows, said, and enforced; every fault names its place and a way out."""

# ruff: noqa: E501 (tables of rows read best with one on a line)

import json
import re
from typing import Any

import pytest

from podtune.config.errors import UserError
from podtune.data.rows import Completion, Conversation, Message, Record, Row, Text, Tokens
from podtune.data.shapes import sniff_shape, to_row

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def records(*values: dict[str, Any], origin: str = "a.jsonl") -> list[Record]:
    return [Record(origin, number, value) for number, value in enumerate(values, 1)]


def row(value: dict[str, Any], *, chat: bool = True, origin: str = "a.jsonl", **given: Any) -> Row:
    (record,) = records(value, origin=origin)
    return to_row(record, sniff_shape([record], **given), chat=chat)


def chat(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in turns))


QUESTION = chat(("user", "q"), ("assistant", "a"))
OPENAI = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]

SHAPES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "messages": ({"messages": OPENAI}, "messages", QUESTION),
    "messages under another usual name": ({"conversation": OPENAI}, "messages", QUESTION),
    "messages written as JSON, as in a CSV": ({"messages": json.dumps(OPENAI)}, "messages", QUESTION),
    "ShareGPT": ({"id": "x", "conversations": SHAREGPT}, "conversations", QUESTION),
    "ShareGPT written as JSON": ({"conversations": json.dumps(SHAREGPT)}, "conversations", QUESTION),
    "role and content under conversations": ({"conversations": OPENAI}, "messages", QUESTION),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, "prompt_completion", Completion("q", "a")),
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, "alpaca", QUESTION),
    "alpaca with an input": (
        {"instruction": "q", "input": "i", "output": "a"}, "alpaca", chat(("user", "q\n\ni"), ("assistant", "a"))
    ),
    "alpaca without the column input": ({"instruction": "q", "output": "a"}, "alpaca", QUESTION),
    "alpaca that also has the whole text": ({"instruction": "q", "output": "a", "text": "all"}, "alpaca", QUESTION),
    "text": ({"text": "t", "url": "u"}, "text", Text("t")),
    "tokens": ({"input_ids": [0, 5]}, "tfrecord", Tokens((0, 5))),
    "tokens with a mask": ({"tokens": [0, 5], "trained": [0, 1]}, "tfrecord", Tokens((0, 5), (False, True))),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_is_sniffed_and_read(name: str):
    value, shape, wanted = SHAPES[name]
    found = sniff_shape(records(value))
    assert found.name == shape
    assert row(value).value == wanted


def test_what_was_sniffed_is_said_with_what_is_not_used():
    value = {"messages": OPENAI, "tools": None, "id": 1, "text": "x"}
    assert sniff_shape(records(value)).describe() == "messages (columns messages, tools; not used: id, text)"
    mapped = sniff_shape(
        records({"question": "q", "answer": "a"}), columns={"instruction": "question", "output": "answer"}
    )
    assert mapped.describe() == "alpaca (columns question as instruction, answer as output)"


def test_questions_and_answers_are_chats_or_plain_text_as_they_are_mapped():
    value = {"question": "q", "answer": "a"}
    assert row(value, columns={"instruction": "question", "output": "answer"}).value == QUESTION
    assert row(value, columns={"prompt": "question", "completion": "answer"}).value == Completion("q", "a")
    assert row(value, columns={"text": "answer"}).value == Text("a")


def test_a_mapping_wins_over_what_would_be_sniffed():
    value = {"messages": OPENAI, "text": "t", "body": "b"}
    assert row(value, columns={"text": "body"}).value == Text("b")
    assert row(value, shape="text").value == Text("t")


def test_alpaca_without_a_chat_template_is_the_prompt_that_alpaca_was_trained_with():
    value = row({"instruction": "Say {input}.", "input": "now", "output": "a"}, chat=False).value
    assert isinstance(value, Completion)
    assert value.prompt.startswith("Below is an instruction that describes a task, paired with an input")
    assert value.prompt.endswith("### Instruction:\nSay {input}.\n\n### Input:\nnow\n\n### Response:\n")
    without = row({"instruction": "q", "output": "a"}, chat=False).value
    assert isinstance(without, Completion)
    assert without.prompt.endswith("the request.\n\n### Instruction:\nq\n\n### Response:\n")


def test_prompt_and_completion_may_be_messages_on_either_side():
    (ask,), (answer,) = OPENAI[:1], OPENAI[1:]
    for value in ({"prompt": [ask], "completion": [answer]}, {"prompt": [ask], "completion": "a"}, {"prompt": "q", "completion": [answer]}):  # fmt: skip
        assert row(value).value == Conversation(QUESTION.messages, (), 1)
    history = row({"prompt": [*OPENAI, ask], "completion": [answer]}).value
    assert isinstance(history, Conversation)
    assert history.prompt_messages == 3


def test_every_part_of_a_message_is_read():
    value = row({
        "system": "Be short.",
        "tools": [{"name": "weather", "parameters": {}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}], "name": "Ann"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
            {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "Rain.", "train": False, "channel": "final", "refusal": None},
            {"role": "assistant", "content": "Yes.", "weight": 1},
        ],
    }).value  # fmt: skip
    assert value == Conversation(
        (
            Message("system", "Be short."),
            Message("user", "What is it?", name="Ann"),
            Message("assistant", None, reasoning="hm", tool_calls=({"id": "call_1", **CALL},)),
            Message("tool", "rain", tool_call_id="call_1"),
            Message("assistant", "Rain.", train=False, extra={"channel": "final"}),
            Message("assistant", "Yes.", train=True),
        ),
        ({"type": "function", "function": {"name": "weather", "parameters": {}}},),
    )


def test_sharegpt_roles_become_those_of_templates():
    turns = [
        {"from": "system", "value": "s"}, {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "rain"}, {"from": "gpt", "value": "a", "weight": 0},
    ]  # fmt: skip
    assert row({"conversations": turns}).value == Conversation(
        (Message("system", "s"), Message("user", "q"), Message("assistant", None, tool_calls=(CALL,)), Message("tool", "rain"),
         Message("assistant", "a", train=False))
    )  # fmt: skip


def test_keys_within_messages_may_have_other_names():
    value = {"turns": [{"speaker": "user", "says": "q"}, {"speaker": "bot", "says": "a", "learn": False}]}
    columns = {"messages": "turns", "role": "speaker", "content": "says", "train": "learn"}
    read = row(value, columns=columns).value
    assert read == Conversation((Message("user", "q"), Message("assistant", "a", train=False)))


def test_nulls_that_parquet_adds_to_structs_were_never_there(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from record_cases import read_records

    from podtune.config.rows import Source

    calls = [{**CALL, "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
             {**CALL, "function": {"name": "time", "arguments": {"zone": "CET"}}}]  # fmt: skip
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    pq.write_table(pa.Table.from_pylist([{"messages": turns}]), tmp_path / "a.parquet")
    (record,) = read_records(Source(path=str(tmp_path / "a.parquet")))
    value = to_row(record, sniff_shape([record]), chat=True).value
    assert value == Conversation((Message("user", "q"), Message("assistant", None, tool_calls=tuple(calls))))


def one(*turns: Any) -> dict[str, Any]:
    return {"messages": [OPENAI[0], *turns]}


# a row, and what the message must say after its place
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "null content": (one({"role": "assistant", "content": None}), r"messages\[1\]\.content is null; a text is wanted"),
    "no content": (one({"role": "assistant"}), r"messages\[1\]\.content is missing"),
    "a number for content": (one({"role": "assistant", "content": 12}), r"messages\[1\]\.content is a number \(12\), a text"),
    "an object for content": (one({"role": "user", "content": {"a": 1}}), r"messages\[1\]\.content is an object"),
    "an image": (one({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}),
                 r"messages\[1\]\.content\[0\] is of type image_url; podtune trains on parts of type text alone"),
    "a part without text": (one({"role": "user", "content": [{"type": "text"}]}), r"content\[0\]\.text is missing"),
    "no role": (one({"content": "a"}), r"messages\[1\]\.role is missing; a role such as .* The message has content"),
    "a number for role": (one({"role": 1, "content": "a"}), r"messages\[1\]\.role is a number"),
    "a text among messages": (one("hello"), r"messages\[1\] is a text, an object with role and content"),
    "no messages": ({"messages": []}, r"column messages is empty"),
    "train that is a text": (one({"role": "user", "content": "a", "train": "no"}), r"messages\[1\]\.train is a text \(\"no\"\)"),
    "half a weight": (one({"role": "user", "content": "a", "weight": 0.5}), r"messages\[1\]\.weight is 0\.5; 0 .* or 1"),
    "arguments cut off": (one({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a'}}]}),
                          r"messages\[1\]\.tool_calls\[0\]: the arguments are not JSON"),
    "an argument given twice": (one({"role": "assistant", "tool_calls": [
                                     {"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}]}),
                                r'the key "a" stands twice'),
    "arguments that are a list": (one({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}),
                                  r"the arguments are a list, an object is wanted"),
    "a call without a name": (one({"role": "assistant", "tool_calls": [{"function": {}}]}), r"has no function name"),
    "tools that are no JSON": ({"messages": OPENAI, "tools": "weather"}, r"column tools is a text that is not JSON"),
    "tools that are texts": ({"messages": OPENAI, "tools": ["weather"]}, r"tools\[0\] is a text"),
    "an unknown ShareGPT role": ({"conversations": [*SHAREGPT, {"from": "narrator", "value": "x"}]},
                                 r"conversations\[2\]\.from is narrator; known are human"),
    "a ShareGPT call that is no JSON": ({"conversations": [*SHAREGPT, {"from": "function_call", "value": "f()"}]},
                                        r"conversations\[2\]\.value is not JSON"),
    "messages as python wrote them": ({"messages": str(OPENAI)}, r"column messages is a text that is not JSON.*json\.dumps"),
    "a number for text": ({"text": 5}, r"column text is a number, a text is wanted"),
    "null for text": ({"text": None}, r"column text is null, a text is wanted"),
    "a number for a completion": ({"prompt": "q", "completion": 4}, r"column completion is a number"),
    "an empty list for a completion": ({"prompt": "q", "completion": []}, r"column completion is empty"),
    "a list for an instruction": ({"instruction": ["q"], "output": "a"}, r"column instruction is a list"),
    "true among tokens": ({"tokens": [1, True]}, r"column tokens is a list that holds true or false, a list of whole"),
    "a text among segments": ({"tokens": [1, 2], "segments": [1, "b"]}, r"column segments is a list that holds a text"),
    "lists for segments": ({"tokens": [1, 2], "segments": [[1], [1]]}, r"column segments is a list that holds a list"),
    "fractions for tokens": ({"tokens": [1, 2, 3, 4, 5.5]}, r"column tokens is a list that holds a number, a list of whole"),
    "two system messages": ({"messages": [{"role": "system", "content": "Be short."}, *OPENAI[-2:]], "system": "Be long."},
                            r"column system and messages\[0\] are two system messages .* take messages\[0\] out"),
    "tools beside plain texts": ({"prompt": "q", "completion": "a", "tools": [{"name": "f"}]},
                                 r"column tools stands beside a plain prompt .* lists of messages, or leave the column out"),
    "a call said twice": (one({"role": "assistant", "function_call": {"name": "f"}, "tool_calls": [{"function": {"name": "g"}}]}),
                          r"messages\[1\] has function_call and tool_calls, which mean one thing and say two"),
    "reasoning said twice": (one({"role": "assistant", "content": "a", "reasoning": "x", "thinking": "y"}),
                             r'has reasoning and thinking, which .* say two \("x" and "y"\)\. Keep one'),
    "train against weight": (one({"role": "assistant", "content": "a", "train": True, "weight": 0}), r"has train and weight"),
    "content against value": (one({"role": "assistant", "content": "a", "value": "b"}), r"has content and value"),
    "role against from": (one({"role": "assistant", "content": "a", "from": "human"}), r"has role and from"),
    "arguments against parameters": (one({"role": "assistant", "tool_calls": [
                                          {"function": {"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}}]}),
                                     r"has arguments and parameters"),
    "tools against functions": ({"messages": OPENAI, "tools": [{"name": "f"}], "functions": [{"name": "g"}]},
                                r"the row has tools and functions"),
    "trained against loss_mask": ({"tokens": [1, 2], "trained": [1, 0], "loss_mask": [1, 1]}, r"has trained and loss_mask"),
}  # fmt: skip


def test_what_is_said_twice_alike_is_read_once():
    """And a key that is null or empty says nothing against the other."""
    call, system = {"name": "f", "arguments": {"a": 1}}, {"role": "system", "content": "Be short."}
    said = {"role": "assistant", "from": "gpt", "content": "", "value": "a", "reasoning": "x", "thinking": "x",
            "reasoning_content": None, "train": False, "weight": 0, "function_call": call,
            "tool_calls": [{"id": "1", "function": call}]}  # fmt: skip
    value = row({"messages": [system, OPENAI[0], said], "system": "Be short.", "functions": [], "tools": None}).value
    assert isinstance(value, Conversation)
    assert [message.role for message in value.messages].count("system") == 1
    calls = ({"type": "function", "id": "1", "function": call},)
    assert value.messages[-1] == Message("assistant", "a", train=False, reasoning="x", tool_calls=calls)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_row_names_its_place_and_what_is_wanted(fault: str):
    value, says = FAULTS[fault]
    with pytest.raises(UserError) as caught:
        row(value)
    assert re.match(r"a\.jsonl:1: .*" + says, str(caught.value)), str(caught.value)


def test_a_record_of_parquet_is_named_by_its_number():
    with pytest.raises(UserError, match=r"^a\.parquet: record 1: column text is null"):
        row({"text": None}, origin="a.parquet")


def test_unknown_columns_are_listed_with_how_to_map_them():
    with pytest.raises(UserError, match=r"a\.jsonl:1: cannot tell the shape from the columns question, answer\. .*"
                       r"columns: \{instruction: question, output: answer\}"):  # fmt: skip
        sniff_shape(records({"question": "q", "answer": "a"}))
    with pytest.raises(UserError, match=r"maps prompt to ask, and there is no such column\. There is question"):
        sniff_shape(records({"question": "q"}), columns={"prompt": "ask", "completion": "question"})
    with pytest.raises(UserError, match=r"maps text to boddy, .* Did you mean body by boddy\?"):
        sniff_shape(records({"body": "q"}), columns={"text": "boddy"})
    with pytest.raises(
        UserError, match=r"instruction to questoin and output to anwser, .* question by questoin, answer"
    ):
        sniff_shape(records({"question": "q", "answer": "a"}), columns={"instruction": "questoin", "output": "anwser"})
    with pytest.raises(UserError, match=r"data\.shape is messages, which reads messages; the row has text"):
        sniff_shape(records({"text": "a"}), shape="messages")
    with pytest.raises(
        UserError, match=r"of its own, under data\.train or data\.validation: \{path: \.\.\., columns: \{"
    ):
        sniff_shape(records({"prompt": "q", "completion": "a"}), columns={"prompt": "ticket"})
    with pytest.raises(UserError, match="the row has no columns"):
        sniff_shape(records({}))


@pytest.mark.parametrize(
    ("value", "columns", "wanted"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"instruction": "prompt", "output": "chosen"}, QUESTION),
        ({"chosen": OPENAI, "rejected": OPENAI}, {"messages": "chosen"}, QUESTION),
        ({"chosen": "q a", "rejected": "q b"}, {"text": "chosen"}, Text("q a")),
    ],
)
def test_preference_data_is_refused_with_the_columns_that_train_on_the_chosen_answers(
    value: dict[str, Any], columns: dict[str, str], wanted: Any
):
    with pytest.raises(UserError, match="preference data") as refused:
        sniff_shape(records(value))
    assert f"{{{', '.join(f'{role}: {name}' for role, name in columns.items())}}}" in str(refused.value)
    assert row(value, columns=columns).value == wanted


@pytest.mark.parametrize("other", [{"text": "t"}, {"chats": SHAREGPT}, {"other": 1}, {}])
@pytest.mark.parametrize("at", [0, 1, 90])
def test_a_row_of_another_shape_is_a_fault_where_it_stands_and_hides_no_others(other: dict[str, Any], at: int):
    rows = [{"messages": OPENAI}] * 100
    rows[at] = other
    read = records(*rows)
    shape = sniff_shape(read)
    assert shape.name == "messages"
    with pytest.raises(UserError, match=rf"a\.jsonl:{at + 1}: column messages is missing; .* sources of their own"):
        to_row(read[at], shape, chat=True)


def test_chats_of_both_kinds_under_one_name_are_read_each_as_it_is():
    read = records({"conversations": OPENAI}, {"conversations": SHAREGPT}, {"conversations": SHAREGPT})
    shape = sniff_shape(read)
    assert [to_row(record, shape, chat=True).value for record in read] == [QUESTION] * 3


@pytest.mark.parametrize(("usual", "late"), [
    ({"instruction": "q", "output": "a"}, {"input": "context"}),
    ({"messages": OPENAI}, {"system": "Be short."}),
    ({"messages": OPENAI}, {"functions": [CALL["function"]]}),
    ({"tokens": [0, 5]}, {"trained": [0, 1]}),
])  # fmt: skip
def test_a_column_that_a_late_row_is_the_first_to_have_is_read(usual: dict[str, Any], late: dict[str, Any]):
    read = records(*[usual] * 20, {**usual, **late})
    shape = sniff_shape(read)
    assert to_row(read[-1], shape, chat=True).value == row({**usual, **late}).value
    assert to_row(read[-1], shape, chat=True).value != to_row(read[0], shape, chat=True).value


def test_rows_that_name_one_thing_in_two_ways_are_read_each_by_its_own():
    tools = [CALL["function"]]
    read = records({"messages": OPENAI, "tools": tools}, {"messages": OPENAI, "functions": tools})
    shape = sniff_shape(read)
    one, other = (to_row(record, shape, chat=True).value for record in read)
    assert one == other
    assert one.tools


def test_one_row_of_a_known_shape_does_not_outvote_many_of_none():
    with pytest.raises(UserError, match=r"a\.jsonl:1: cannot tell the shape from the columns question, answer"):
        sniff_shape(records(*[{"question": "q", "answer": "a"}] * 15, {"text": "t"}))
    with pytest.raises(UserError, match=r"a\.jsonl:3: cannot tell the shape from the columns question, answer"):
        sniff_shape(records({"text": "t"}, {}, *[{"question": "q", "answer": "a"}] * 14))


@pytest.mark.parametrize(("names", "meant"), [
    (("question", "answer"), "instruction: question, output: answer"),
    (("instruction", "context", "response"), "instruction: instruction, input: context, output: response"),
    (("id", "prompt", "response"), "instruction: prompt, output: response"),
    (("input", "output"), "instruction: input, output: output"),
    (("Question", "Answer", "Context"), "instruction: Question, input: Context, output: Answer"),
])  # fmt: skip
def test_usual_names_for_questions_and_answers_are_offered(names: tuple[str, ...], meant: str):
    with pytest.raises(UserError, match=re.escape(f"columns: {{{meant}}} for a question")):
        sniff_shape(records(dict.fromkeys(names, "x")))


@pytest.mark.parametrize(("names", "slip"), [
    (("promt", "completion"), "prompt by promt"), (("Messages",), "messages by Messages"),
    (("instruction", "ouput"), "output by ouput"), (("Text", "id"), "text by Text"),
])  # fmt: skip
def test_a_column_written_almost_right_is_named(names: tuple[str, ...], slip: str):
    with pytest.raises(UserError, match=f"Did you mean {slip}"):
        sniff_shape(records(dict.fromkeys(names, "x")))


@pytest.mark.parametrize("names", [("Question: what?", "no"), ("{q}", "#a"), ("yes, please", '"a"')])
def test_a_mapping_that_is_offered_can_be_pasted(names: tuple[str, str]):
    from ruamel.yaml import YAML

    with pytest.raises(UserError) as caught:
        row(dict.fromkeys(names, "words"))
    found = re.search(r"columns: (\{.*\}) for a question and its answer", str(caught.value))
    assert found, str(caught.value)
    assert YAML(typ="safe").load(found[1]) == {"instruction": names[0], "output": names[1]}


def test_columns_that_only_some_rows_have_are_found():
    shape = sniff_shape(records({"messages": OPENAI}, {"messages": OPENAI, "tools": [CALL["function"]]}))
    assert "tools" in shape.columns
    assert to_row(Record("a.jsonl", 3, {"messages": OPENAI}), shape, chat=True).value == QUESTION
