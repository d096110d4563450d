"""What a row of data is once its shape is known, and what it becomes: an example of tokens. Every part of `data` meets
here: sources give records, shapes make rows of them, chat makes examples of rows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from podtune.config.errors import UserError

# A line number is a place one can jump to in these; elsewhere records are counted.
_LINE_FORMATS = re.compile(r"\.(jsonl|ndjson|csv|tsv|txt|text|md)(\.gz|\.zst)?$", re.IGNORECASE)


class Record(NamedTuple):
    """One record as its file has it. number: the line it begins on in text formats, else its place, from 1."""

    origin: str
    number: int
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. content is None where the data has none, as beside tool calls. train overrides train_on for this turn.
    extra holds keys that only some chat templates know."""

    role: str
    content: str | None
    train: bool | None = None
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates want it. Beside tool calls, no content is an empty one: templates of real
        models fail on a content that is absent, and none writes anything for an empty one."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.extra:
            message.update(self.extra)
        return message


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat. Messages before `prompt_messages` are given, never trained on by themselves (prompt/completion rows)."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    prompt_messages: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what follows it, as plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """A document."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids that someone else made, which of them bear loss (None: all), and which belong together (None: all; 0 is
    padding)."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...] | None = None
    segments: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A record whose shape is known. source: the file; number: as in Record."""

    source: str
    number: int
    value: Conversation | Completion | Text | Tokens


@dataclass(frozen=True, slots=True)
class Example:
    """A row as tokens. trained[i]: token i is a target. trained[0] is never set, for nothing comes before it.
    notes: codes of what the user should know about this row (chat.NOTES says them in words)."""

    tokens: Int32[np.ndarray, "n"]
    trained: Bool[np.ndarray, "n"]
    origin: str
    number: int
    notes: tuple[str, ...] = ()


RefusedKind = Literal["nothing_to_train", "template", "not_rendered", "invalid"]


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that cannot be trained on, and why. kind groups refusals that are counted together."""

    kind: RefusedKind
    reason: str
    origin: str
    number: int

    @classmethod
    def by(cls, error: UserError, origin: str, number: int) -> "Refused":
        """Of a record or line that this error speaks of."""
        return cls("invalid", str(error).removeprefix(f"{place(origin, number)}: "), origin, number)

    def __str__(self) -> str:
        return f"{place(self.origin, self.number)}: {self.reason}"


def place(origin: str, number: int) -> str:
    """Where a record is, as an editor can open it: data.jsonl:17, or data.parquet: record 17."""
    return f"{origin}:{number}" if _LINE_FORMATS.search(origin) else f"{origin}: record {number}"
