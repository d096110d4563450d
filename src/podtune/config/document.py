"""A YAML 1.2 document as a tree that knows where each value stands. Used by loading and overrides.

Scalars follow the core schema of YAML 1.2: `1e-4` is a number, `no` and `12:30:00` are text, `012` is twelve. Keys are
text as written. Tags and merge keys, which other readers give meanings of their own, are refused.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

MAX_BYTES = 1 << 20
MAX_DEPTH = 24
MAX_NODES = 100_000

NOT_ALLOWED = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that are not printable in the sense of YAML 1.2, section 5.1."""


class Place(NamedTuple):
    """Where something stands. Places sort as a reader meets them: the file by line, then the command line."""

    order: tuple[int, int]
    text: str

    @classmethod
    def in_file(cls, name: str, line: int) -> "Place":
        """Line `line` (from 1) of the file."""
        return cls((0, line), f"{name}:{line}")

    @classmethod
    def on_command_line(cls, position: int, override: str) -> "Place":
        """The override at that position."""
        return cls((1, position), f"command line: {override}")


class Fault(NamedTuple):
    """One thing that is wrong, and where."""

    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place.text}: {self.message}"


Scalar = str | int | float | bool | None


@dataclass
class Node:
    """A value with its place: a scalar, a list of nodes, or a mapping of entries."""

    value: "Scalar | list[Node] | dict[str, Entry]"
    place: Place
    size: int = 1
    """Values in it, those of its aliases counted each time."""

    def plain(self) -> Any:
        """The value alone."""
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        if isinstance(self.value, dict):
            return {key: entry.node.plain() for key, entry in self.value.items()}
        return self.value

    def place_of(self, path: tuple[str | int, ...]) -> Place:
        """The place of the key or item at the path, or of what stands nearest above it. A scalar form stands for what
        it expands to, so a key that it does not have is looked for in itself."""
        node, place = self, self.place
        for part in path:
            if isinstance(node.value, dict) and isinstance(part, str):
                if part not in node.value:
                    return place
                entry = node.value[part]
                node, place = entry.node, entry.place
            elif isinstance(node.value, list) and isinstance(part, int):
                if part >= len(node.value):
                    return place
                node = node.value[part]
                place = node.place
        return place


class Entry(NamedTuple):
    """A key's place, and its value."""

    place: Place
    node: Node


@dataclass
class Document:
    """What was read: the root (None when nothing was), and the faults met on the way."""

    root: Node | None = None
    faults: list[Fault] = field(default_factory=list[Fault])


def read_document(text: str, name: str) -> Document:
    """Parses YAML text. Faults of syntax end the reading; duplicate keys and the like are noted and reading goes on."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    document = Document()
    forbidden = NOT_ALLOWED.search(text)
    if forbidden is not None:
        line = text.count("\n", 0, forbidden.start()) + 1
        said = f"the character U+{ord(forbidden[0]):04X} is not allowed in YAML; remove it"
        return Document(faults=[Fault(Place.in_file(name, line), said)])
    builder = _Builder(name, document)
    try:
        builder.build(cast(Iterator[Any], YAML(typ="safe", pure=True).parse(text)))  # pyright: ignore[reportUnknownMemberType]
    except _TooLarge as error:
        document.faults.append(error.fault)
    except MarkedYAMLError as error:
        document.faults.append(_syntax_fault(error, name))
    except (YAMLError, ValueError) as error:
        document.faults.append(Fault(Place.in_file(name, 1), f"not YAML: {' '.join(str(error).split())}"))
    else:
        return document
    document.root = None
    return document


def _syntax_fault(error: Any, name: str) -> Fault:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    problem = str(error.problem or error.context)
    for token, meaning in TOKENS.items():
        problem = problem.replace(f"'{token}'", meaning).replace(token, meaning)
    if "'\\t'" in problem:
        return Fault(Place.in_file(name, line), "a tab cannot indent or separate in YAML; use blanks")
    if "mapping values are not allowed" in problem:
        problem += '; put text that holds ": " in quotes, and check the indentation'
    opened = error.context_mark
    if opened is not None and error.context and opened.line + 1 != line:
        problem += f" ({error.context} that begins on line {opened.line + 1})"
    return Fault(Place.in_file(name, line), f"not YAML: {problem}")


TOKENS = {
    "<document start>": "the end of the file",
    "<stream end>": "the end of the file",
    "<block end>": "the end of the block",
    "<block mapping start>": "a mapping",
    "<block sequence start>": "a list",
    "<scalar>": "a value",
}
"""The parser's names for what it wanted or met, in a reader's words."""


class _TooLarge(Exception):
    def __init__(self, place: Place, message: str):
        self.fault = Fault(place, message)
        super().__init__(message)


def kind(event: Any) -> str:
    """Which of the parser's events this is."""
    return type(event).__name__


class _Builder:
    """Turns the parser's events into nodes."""

    def __init__(self, name: str, document: Document):
        self.name = name
        self.document = document
        self.anchors: dict[str, Node | None] = {}

    def build(self, events: Iterator[Any]) -> None:

        for event in events:
            if kind(event) != "DocumentStartEvent":
                continue
            if self.document.root is not None:
                self.fault(event, "a second document begins here; a run file holds one")
                return
            self.document.root = self.node(next(events), events, 0)

    def fault(self, event: Any, message: str) -> None:
        self.document.faults.append(Fault(self.place(event), message))

    def place(self, event: Any) -> Place:
        return Place.in_file(self.name, event.start_mark.line + 1)

    def node(self, event: Any, events: Iterator[Any], depth: int) -> Node:

        if depth > MAX_DEPTH:
            raise _TooLarge(self.place(event), f"nested deeper than {MAX_DEPTH} levels")
        if kind(event) == "AliasEvent":
            return self.alias(event)
        if event.tag is not None:
            self.fault(event, f"the tag {event.tag} has no meaning in a run file; write the value alone")
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if kind(event) == "ScalarEvent":
            self.join_surrogates(event)
            plain = event.style is None and event.tag is None
            node = Node(resolve(event.value) if plain else event.value, self.place(event))
        elif kind(event) == "MappingStartEvent":
            entries = self.mapping(events, depth)
            node = Node(entries, self.place(event), 1 + sum(entry.node.size for entry in entries.values()))
        else:
            items = self.sequence(events, depth)
            node = Node(items, self.place(event), 1 + sum(item.size for item in items))
        if node.size > MAX_NODES:
            raise _TooLarge(node.place, f"holds more than {MAX_NODES:,} values once its aliases are written out")
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def join_surrogates(self, event: Any) -> None:
        r"""Joins a character written as JSON does, in two halves (\ud83d\ude00); half a character is refused."""
        try:
            event.value = event.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self.fault(event, "a text holds half a character (a lone \\ud800 to \\udfff); write the whole one")
            event.value = event.value.encode("utf-8", "replace").decode()

    def alias(self, event: Any) -> Node:
        if event.anchor not in self.anchors:
            self.fault(event, f"*{event.anchor} names no anchor above it")
        elif self.anchors[event.anchor] is None:
            self.fault(event, f"*{event.anchor} holds itself")
        target = self.anchors.get(event.anchor)
        return Node(None, self.place(event)) if target is None else Node(target.value, self.place(event), target.size)

    def sequence(self, events: Iterator[Any], depth: int) -> list[Node]:

        items: list[Node] = []
        while kind(event := next(events)) != "SequenceEndEvent":
            items.append(self.node(event, events, depth + 1))
        return items

    def mapping(self, events: Iterator[Any], depth: int) -> dict[str, Entry]:

        entries: dict[str, Entry] = {}
        while kind(event := next(events)) != "MappingEndEvent":
            place = self.place(event)
            if kind(event) != "ScalarEvent":
                self.fault(event, "a key must be plain text")
                self.node(event, events, depth + 1)
                self.node(next(events), events, depth + 1)
                continue
            self.join_surrogates(event)
            key = str(event.value)
            value = self.node(next(events), events, depth + 1)
            if key == "<<" and event.style is None:
                self.fault(event, "merge keys (<<) are not part of YAML 1.2; write the keys out")
            elif key in entries:
                self.fault(event, f'duplicate key "{key}", first on line {entries[key].place.order[1]}')
            else:
                entries[key] = Entry(place, value)
        return entries


def resolve(text: str) -> Scalar:
    """The value of a plain scalar by the core schema of YAML 1.2."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text[0] in "tT"
    if len(text) > 400:
        return text
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return int(text)
    if re.fullmatch(r"0o[0-7]+", text):
        return int(text[2:], 8)
    if re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return int(text[2:], 16)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", text):
        return float(text)
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)", text):
        return -math.inf if text[0] == "-" else math.inf
    return math.nan if text in (".nan", ".NaN", ".NAN") else text
