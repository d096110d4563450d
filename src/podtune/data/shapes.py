"""What the records of a source look like: sniffed from the first, said, then enforced on all; and records made rows.

A shape names the columns it reads. Every fault names the file, the line, the column, the rule and a way out.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from podtune.config.errors import UserError
from podtune.config.rows import Shape
from podtune.config.writing import as_yaml
from podtune.data.column_names import meant_by, slip_in
from podtune.data.messages import SHAREGPT_KEYS, Fault, read_messages, read_tools, refuse_difference, says_something
from podtune.data.read_json import kind_of
from podtune.data.rows import Completion, Conversation, Message, Record, Row, Text, Tokens, place

ShapeName = Literal["messages", "conversations", "prompt_completion", "alpaca", "text", "tfrecord"]

SNIFFED_RECORDS = 16

_CHAT_COLUMNS = ("messages", "conversations", "conversation", "dialogue", "chat")
# What each shape reads: the columns it must have, and those it takes when they are there.
_READS: Mapping[ShapeName, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("tools", "system")),
    "conversations": (("messages",), ("tools", "system")),
    "prompt_completion": (("prompt", "completion"), ("tools",)),
    "alpaca": (("instruction", "output"), ("input", "system")),
    "text": (("text",), ()),
    "tfrecord": (("tokens",), ("trained", "segments")),
}
_WITHIN_MESSAGES = ("role", "content", "train")  # keys of a message, not columns
_USUAL: Mapping[str, tuple[str, ...]] = {
    "messages": _CHAT_COLUMNS,
    "tools": ("tools", "functions"),
    "trained": ("trained", "loss_mask", "labels_mask"),
    "tokens": ("tokens", "input_ids"),
}
_KNOWN_COLUMNS = dict.fromkeys(
    name for required, _ in _READS.values() for role in required for name in _USUAL.get(role, (role,))
)
# The prompt that Stanford Alpaca was trained with (github.com/tatsu-lab/stanford_alpaca, train.py).
_ALPACA_START = "Below is an instruction that describes a task"
_ALPACA_WITH_INPUT = (
    _ALPACA_START + ", paired with an input that provides further context. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALPACA_WITHOUT_INPUT = (
    _ALPACA_START
    + ". Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "### Response:\n"
)


class UnknownShape(UserError):
    """The columns are not those of any shape. nameable: a question and its answer may be among them, once named."""

    def __init__(self, message: str, *, nameable: bool = False) -> None:
        super().__init__(message)
        self.nameable = nameable


@dataclass(frozen=True)
class RowShape:
    """How the records of a source are read. columns: what a shape looks for -> its name in the data, as sniffed; what a
    record may have besides is looked for in each. given: the names that the user gave; keys: those within messages."""

    name: ShapeName
    columns: Mapping[str, str]
    unused: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    given: Mapping[str, str] = field(default_factory=dict[str, str])

    def optional(self, value: Mapping[str, Any], role: str) -> str | None:
        """The column of this record for what not every record has: rows behind the first may be the first to have it,
        or name it otherwise. Raises Fault where two of its usual names stand there and say two things."""
        if role not in self.given:
            refuse_difference({name: value.get(name) for name in _USUAL.get(role, ())}, "the row")
        return _column(value, role, self.given)

    def describe(self) -> str:
        """What was sniffed, for people."""
        read = ", ".join(name if role == name else f"{name} as {role}" for role, name in self.columns.items())
        left = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        return f"{self.name} (column{'s' if len(self.columns) > 1 else ''} {read}{left})"


def sniff_shape(
    records: Sequence[Record], *, shape: Shape = "auto", columns: Mapping[str, str] | None = None
) -> RowShape:
    """The shape that most of the first records of a source have, or the given one checked against them. Records of
    another are faults of their own, told when they are read. Raises UserError naming the columns found and how to map
    them."""
    given = dict(columns or {})
    if not records:
        raise ValueError("no records to look at")
    looked_at = records[:SNIFFED_RECORDS]
    first = looked_at[0]
    absent = [
        (role, name)
        for role, name in given.items()
        if role not in _WITHIN_MESSAGES and not any(name in record.value for record in looked_at)
    ]
    if absent:
        near = {name: difflib.get_close_matches(name, first.value, n=1) for _, name in absent}
        meant = ", ".join(f"{close[0]} by {name}" for name, close in near.items() if close)
        raise UserError(
            f"{place(first.origin, first.number)}: data.columns maps "
            f"{' and '.join(f'{role} to {name}' for role, name in absent)}, and there is no such column. There is "
            f"{_listed(first.value)}.{f' Did you mean {meant}?' if meant else ''} A source that names its columns "
            "otherwise than the rest has columns of its own, under data.train or data.validation: "
            "{path: ..., columns: {...}}, or columns: {} where none need be named."
        )
    seen = [candidates[0] for record in looked_at if (candidates := _candidates(record.value, shape, given))]
    if 2 * len(seen) < len(looked_at):
        unknown = [record for record in looked_at if not _candidates(record.value, shape, given)]
        raise _unknown_shape(next((record for record in unknown if record.value), unknown[0]), shape)
    found = max(seen, key=seen.count)
    optional = {role: name for record in looked_at for role, name in _optional(record, found, given)}
    read = {**found.columns, **optional}
    all_columns = dict.fromkeys(name for record in looked_at for name in record.value)
    keys = {role: given[role] for role in _WITHIN_MESSAGES if role in given}
    return RowShape(found.name, read, tuple(name for name in all_columns if name not in read.values()), keys, given)


def has_usual_columns(records: Sequence[Record]) -> bool:
    """Whether a shape can be told from the first records without mapping their columns."""
    looked_at = records[:SNIFFED_RECORDS]
    return 2 * sum(bool(_candidates(record.value, "auto", {})) for record in looked_at) >= len(looked_at)


def to_row(record: Record, shape: RowShape, *, chat: bool) -> Row:
    """A record as a row. chat: the tokenizer has a chat template, so instructions become chats. Raises UserError."""
    try:
        value = _TO_VALUE[shape.name](record.value, shape, chat)
    except Fault as fault:
        raise UserError(f"{place(record.origin, record.number)}: {fault}") from fault
    return Row(record.origin, record.number, value)


def _chosen_alone(value: Mapping[str, Any]) -> str:
    """The columns that make ordinary rows of preference data."""
    if isinstance(value["chosen"], list):
        return "{messages: chosen}"
    asked = next((name for name in ("prompt", "question", "instruction", "input") if name in value), None)
    return f"{{instruction: {asked}, output: chosen}}" if asked else "{text: chosen}"


def _unknown_shape(record: Record, shape: Shape) -> UnknownShape:
    """Why a record has no shape, and what to do about it."""
    where, names = place(record.origin, record.number), tuple(record.value)
    if not names:
        return UnknownShape(f"{where}: the row has no columns.")
    if {"chosen", "rejected"} <= set(names):
        return UnknownShape(
            f"{where}: this is preference data (chosen, rejected), which podtune does not train on yet. To train on "
            f"the chosen answers alone: data.columns: {_chosen_alone(record.value)}."
        )
    if shape != "auto":
        wanted = ", ".join(_READS[shape][0])
        return UnknownShape(
            f"{where}: data.shape is {shape}, which reads {wanted}; the row has {_listed(record.value)}. Map its "
            f"columns (columns: {{{_READS[shape][0][0]}: NAME}}), or use shape: auto."
        )
    cannot_tell = f"{where}: cannot tell the shape from the columns {_listed(record.value)}."
    if slip := slip_in(names, _KNOWN_COLUMNS):
        written, known = slip
        said = f"Did you mean {known} by {written}? Rename or map it: columns: {{{known}: {as_yaml(written)}}}."
        return UnknownShape(f"{cannot_tell} {said}")
    meant = meant_by(record.value) or _first_texts(record.value)
    mapping = ", ".join(f"{role}: {as_yaml(name)}" for role, name in meant.items())
    pair = f"{{{mapping}}} for a question and its answer, " if mapping else ""
    return UnknownShape(
        f"{cannot_tell} Name them, for example columns: {pair}{{prompt: ..., completion: ...}} for a text and what "
        "follows it, {text: ...} for documents, {messages: ...} for chats.",
        nameable=bool(meant),
    )


def _candidates(value: Mapping[str, Any], shape: Shape, given: Mapping[str, str]) -> list[RowShape]:
    """The shapes that a record may have, most telling first."""
    found: list[RowShape] = []
    for name, (required, _) in _READS.items():
        if shape not in ("auto", name):
            continue
        columns: dict[str, str] = {}
        for role in required:
            column = _column(value, role, given)
            if column is None:
                break
            columns[role] = column
        else:
            mapped = [role for role in given if role in _READS[name][0]]
            if _looks_right(name, value, columns) and (mapped or not _maps_shape(given)):
                found.append(RowShape(name, columns))
    return found


def _maps_shape(given: Mapping[str, str]) -> bool:
    """Whether the columns given name what some shape must have, so that shapes without them are out."""
    return any(role in required for required, _ in _READS.values() for role in given)


def _column(value: Mapping[str, Any], role: str, given: Mapping[str, str]) -> str | None:
    if role in given:
        return given[role] if given[role] in value else None
    there = [name for name in _USUAL.get(role, (role,)) if name in value]
    return next((name for name in there if says_something(value[name])), next(iter(there), None))


def _optional(record: Record, shape: RowShape, given: Mapping[str, str]) -> list[tuple[str, str]]:
    found = [(role, _column(record.value, role, given)) for role in _READS[shape.name][1]]
    return [(role, name) for role, name in found if name is not None]


def _looks_right(name: ShapeName, value: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether the columns hold what this shape wants, as far as shapes must be told apart."""
    if name in ("messages", "conversations"):
        turns = value[columns["messages"]]
        if isinstance(turns, str):
            return turns.lstrip().startswith("[") and (("from" in turns[:200]) == (name == "conversations"))
        if not isinstance(turns, list):
            return False
        first = next(iter(cast(list[object], turns)), dict[str, object]())
        if not isinstance(first, dict):
            return name == "messages"
        keys = cast(dict[str, object], first).keys()
        sharegpt = SHAREGPT_KEYS[0] in keys and "role" not in keys
        return sharegpt == (name == "conversations")
    if name == "tfrecord":
        tokens = value[columns["tokens"]]
        return isinstance(tokens, list) and all(isinstance(i, int) for i in cast(list[object], tokens)[:4])
    return True


def _listed(value: Mapping[str, Any]) -> str:
    names = list(value)
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") or "no columns"


def _first_texts(value: Mapping[str, Any]) -> Mapping[str, str]:
    """The first two columns that hold a text, as if they were a question and its answer; none where there is one."""
    texts = [name for name, part in value.items() if isinstance(part, str)]
    return dict(zip(("instruction", "output"), texts, strict=False)) if len(texts) > 1 else {}


def _text(value: Mapping[str, Any], shape: RowShape, role: str) -> str:
    """The text in a column. Raises Fault."""
    name = shape.columns[role]
    if name not in value:
        raise Fault(_missing(name, value, shape))
    part = value[name]
    if not isinstance(part, str):
        raise Fault(f"column {name} is {kind_of(part)}, a text is wanted.")
    return part


def _missing(name: str, value: Mapping[str, Any], shape: RowShape) -> str:
    return (
        f"column {name} is missing; this row has {_listed(value)}, and the shape of most is {shape.name}. Give rows of "
        "different shapes as sources of their own."
    )


def _optional_text(value: Mapping[str, Any], shape: RowShape, role: str) -> str:
    name = shape.optional(value, role)
    if name is None or value[name] is None:
        return ""
    part = value[name]
    if not isinstance(part, str):
        raise Fault(f"column {name} is {kind_of(part)}, a text is wanted.")
    return part


def _chat_row(value: Mapping[str, Any], shape: RowShape, chat: bool) -> Conversation:
    messages = _messages(value, shape, "messages")
    system = _optional_text(value, shape, "system")
    if system.strip() and messages and messages[0].role == "system":
        column = shape.optional(value, "system") or "system"
        own = f"{shape.columns['messages']}[0]"
        if messages[0].content != system:
            raise Fault(
                f"column {column} and {own} are two system messages that say two things. Keep one: take {own} out, or "
                "the column."
            )
    elif system.strip():
        messages = (Message("system", system), *messages)
    if not messages:
        raise Fault(f"column {shape.columns['messages']} is empty: a chat needs a message.")
    return Conversation(messages, _tools(value, shape))


def _messages(value: Mapping[str, Any], shape: RowShape, role: str) -> tuple[Message, ...]:
    name = shape.columns[role]
    if name not in value:
        raise Fault(_missing(name, value, shape))
    return read_messages(value[name], name, shape.keys)


def _tools(value: Mapping[str, Any], shape: RowShape) -> tuple[dict[str, Any], ...]:
    name = shape.optional(value, "tools")
    return read_tools(value[name], name) if name is not None else ()


def _prompt_row(value: Mapping[str, Any], shape: RowShape, chat: bool) -> Conversation | Completion:
    sides = [value.get(shape.columns[role]) for role in ("prompt", "completion")]
    if not any(isinstance(side, list) for side in sides):
        if _tools(value, shape):
            raise Fault(
                f"column {shape.optional(value, 'tools')} stands beside a plain prompt and completion, which have no "
                "place for tools. Write both as lists of messages, or leave the column out."
            )
        return Completion(_text(value, shape, "prompt"), _text(value, shape, "completion"))
    halves: list[tuple[Message, ...]] = []
    for side, role, speaker in zip(sides, ("prompt", "completion"), ("user", "assistant"), strict=True):
        plain = (Message(speaker, side),) if isinstance(side, str) else None
        halves.append(plain or _messages(value, shape, role))
    if not halves[1]:
        raise Fault(f"column {shape.columns['completion']} is empty: there is nothing to train on.")
    return Conversation(halves[0] + halves[1], _tools(value, shape), len(halves[0]))


def _alpaca_row(value: Mapping[str, Any], shape: RowShape, chat: bool) -> Conversation | Completion:
    instruction, output = _text(value, shape, "instruction"), _text(value, shape, "output")
    given, system = _optional_text(value, shape, "input"), _optional_text(value, shape, "system")
    if chat:
        asked = f"{instruction}\n\n{given}" if given.strip() else instruction
        before = (Message("system", system),) if system.strip() else ()
        return Conversation((*before, Message("user", asked), Message("assistant", output)))
    prompt = _ALPACA_WITH_INPUT if given.strip() else _ALPACA_WITHOUT_INPUT
    filled = (
        prompt.replace("{instruction}", instruction, 1) if not given.strip() else _filled(prompt, instruction, given)
    )
    return Completion((system + "\n\n" if system.strip() else "") + filled, output)


def _filled(prompt: str, instruction: str, given: str) -> str:
    before, _, rest = prompt.partition("{instruction}")
    between, _, after = rest.partition("{input}")
    return before + instruction + between + given + after


def _text_row(value: Mapping[str, Any], shape: RowShape, chat: bool) -> Text:
    return Text(_text(value, shape, "text"))


def _tokens_row(value: Mapping[str, Any], shape: RowShape, chat: bool) -> Tokens:
    name = shape.columns["tokens"]
    if name not in value:
        raise Fault(_missing(name, value, shape))
    mask_name, segments_name = (shape.optional(value, role) for role in ("trained", "segments"))
    mask = None if mask_name is None else _numbers(value[mask_name], mask_name, truth=True)
    segments = None if segments_name is None else _numbers(value[segments_name], segments_name)
    trained = None if mask is None else tuple(bool(part) for part in mask)
    return Tokens(_numbers(value[name], name), trained, segments)


def _numbers(part: object, name: str, *, truth: bool = False) -> tuple[int, ...]:
    """A list of whole numbers, of which true and false are some when `truth`."""
    numbers = cast(list[object], part) if isinstance(part, list) else []
    if not isinstance(part, list) or not all(type(one) is int or (truth and type(one) is bool) for one in numbers):
        wrong = next((one for one in numbers if type(one) is not int), None)
        holds = f" that holds {kind_of(wrong)}" if numbers else ""
        raise Fault(f"column {name} is {kind_of(cast(object, part))}{holds}, a list of whole numbers is wanted.")
    return tuple(cast(list[int], numbers))


_TO_VALUE: Mapping[
    ShapeName, Callable[[Mapping[str, Any], RowShape, bool], Conversation | Completion | Text | Tokens]
] = {
    "messages": _chat_row,
    "conversations": _chat_row,
    "prompt_completion": _prompt_row,
    "alpaca": _alpaca_row,
    "text": _text_row,
    "tfrecord": _tokens_row,
}
