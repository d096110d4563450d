"""Rows out of JSON: one object per line (JSONL), or a document with one list of objects, read piece by piece so that
no file is ever whole in memory. Every fault names the file, the line and the column."""

import codecs
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

from podtune.config.errors import UserError
from podtune.data.open_files import (
    MAX_RECORD_BYTES,
    ByteStream,
    DataFile,
    NoTextFile,
    byte_lines_of,
    decoded,
    open_data,
    without_byte_order_mark,
)
from podtune.data.rows import Record, Refused

_CHUNK_BYTES = 1 << 20
_WHOLE_BYTES = 16 << 20  # a JSON document no larger than this may be looked at as a whole
_MANY_DIGITS = f"a whole number has more than {sys.get_int_max_str_digits():,} digits; put it in quotes, as a text"
_MARKUP = "the file is a web page (HTML) or XML, as a server sends in place of a file. Fetch the file of the rows."
_SPACE = re.compile(r"[ \t\r\n]*")


class _KeyTwice(ValueError):
    """An object has one key twice: the parser would keep the last and drop the other unsaid."""


def _twice(key: str) -> str:
    return f"the key {json.dumps(key, ensure_ascii=False)} stands twice in one object; keep one"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _KeyTwice(_twice(twice))
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse_json(text: str) -> Any:
    """The value of JSON within a row. Raises ValueError, also for a key that stands twice in one object."""
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


_KINDS: dict[type, str] = {
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    type(None): "null",
}


def read_jsonl(file: DataFile) -> Iterator[Record | Refused]:
    """One object per line; blank lines are passed over. A broken line does not hide those behind it, unless the first
    shows that the file is one document over many lines, or no text: then every line is broken, and one fault says it
    all."""
    first = True
    with open_data(file) as stream:
        for number, line in byte_lines_of(stream, file.origin):
            if not line.isspace():
                try:
                    text = decoded(line, file.origin, number)
                    yield Record(file.origin, number, _parse_line(text, file.origin, number))
                except UserError as error:
                    if first and line.lstrip().startswith(b"<"):
                        raise NoTextFile(f"{file.origin}: {_MARKUP}") from error
                    if first and (isinstance(error, NoTextFile) or line.strip() in (b"[", b"{", b"[{")):
                        raise
                    yield Refused.by(error, file.origin, number)
                first = False


def read_json(file: DataFile) -> Iterator[Record]:
    """A list of objects; an object that holds one list of them; one object; or objects one after another."""
    with open_data(file) as stream:
        text = _Text(stream, file.origin)
        first = text.peek()
        if first == "[":
            text.skip(1)
            yield from _elements(text)
            text.expect_end()
        elif first == "{":
            yield from _objects(text)
        elif first:
            raise (
                NoTextFile(f"{file.origin}: {_MARKUP}")
                if first == "<"
                else text.fault("a list of rows, [{...}, ...], is wanted")
            )


def kind_of(value: object) -> str:
    """What a JSON value is, in words."""
    return _KINDS.get(type(value), "an object")


def _parse_line(line: str, origin: str, number: int) -> dict[str, Any]:
    try:
        value = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{origin}:{number}: not valid JSON in column {error.pos + 1}: {_line_fault(error)}."
        ) from error
    except RecursionError as error:
        raise UserError(f"{origin}:{number}: the JSON is nested too deeply.") from error
    except _KeyTwice as error:
        raise UserError(f"{origin}:{number}: {error}.") from error
    except ValueError as error:  # the one left: Python refuses to read such an integer
        raise UserError(f"{origin}:{number}: {_MANY_DIGITS}.") from error
    if not isinstance(value, dict):
        whole = number == 1 and isinstance(value, list)
        way_out = "This is a whole JSON list: name the file .json." if whole else "One object per line is wanted."
        raise UserError(f"{origin}:{number}: the line is {kind_of(cast(object, value))}, not an object. {way_out}")
    row = cast(dict[str, Any], value)
    if "\\u" in line and (half := lone_surrogate(row)):
        raise UserError(f"{origin}:{number}: {half}. Remove it, or write the character whole.")
    return row


def lone_surrogate(value: object) -> str | None:
    """Names half of a surrogate pair anywhere in a JSON value: it is no character, and cannot be tokenised."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            try:
                part.encode()
            except UnicodeEncodeError as error:
                return f"\\u{ord(part[error.start]):04x} is half of a surrogate pair (an emoji cut in two)"
        elif isinstance(part, dict):
            for pair in cast(dict[object, object], part).items():
                parts.extend(pair)
        elif isinstance(part, list):
            parts.extend(cast(list[object], part))
    return None


def _line_fault(error: json.JSONDecodeError) -> str:
    text, at = error.doc, error.pos
    if text.lstrip().startswith("[") or text.strip() == "{":
        return "one object per line is wanted. If this is a JSON document over many lines, name the file .json"
    if error.msg.startswith("Extra data") and text[:at].endswith("\r"):
        return "lines end in a carriage return alone. Save the file with line feeds (tr '\\r' '\\n')"
    if error.msg.startswith("Extra data") and text[at:].strip() == ",":
        return "a comma after the object. One object per line is wanted, without commas between them"
    return _fault(error.msg, text, at)


def _fault(message: str, text: str, at: int) -> str:
    """What is wrong at this place, in words that say what to do."""
    here = text[at : at + 1]
    if (re.search(r",\s*$", text[:at]) and here in ("}", "]")) or re.match(r",\s*[}\]]", text[at:]):
        return "a trailing comma; take it out"
    if message.startswith("Unterminated string") or at >= len(text.rstrip()):
        return "it is cut off here, as if the file were not whole"
    if here == "'":
        return "single quotes are not JSON (this looks like Python's print); write the rows with json.dumps"
    if message.startswith("Invalid control"):
        return f"a raw control character (0x{ord(here):02x}) in a string; write \\n, \\t or \\u{ord(here):04x}"
    if message.startswith("Extra data"):
        return "something follows the object. One object per line is wanted"
    return f"{message[:1].lower()}{message[1:]}"


class _Text:
    """The text of a stream, as much of it as is needed, and where in the file we are."""

    def __init__(self, stream: ByteStream, origin: str) -> None:
        self.origin = origin
        self.buffer = ""
        self.at = 0
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("strict").decode
        self._line = 1  # of the start of the buffer
        self._column = 1
        self._bytes = 0
        self._ended = False

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            match = _SPACE.match(self.buffer, self.at)
            assert match is not None, "an empty match is a match"
            self.at = match.end()
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.read(_CHUNK_BYTES):
                return ""

    def after_bracket(self) -> str:
        """The first character within the list that begins here, which is not passed."""
        while True:
            match = _SPACE.match(self.buffer, self.at + 1)
            assert match is not None, "an empty match is a match"
            if match.end() < len(self.buffer):
                return self.buffer[match.end()]
            if not self.read(_CHUNK_BYTES):
                return ""

    def skip(self, characters: int) -> None:
        self.at += characters

    def read(self, size: int) -> bool:
        """Takes in more of the file; False at its end."""
        if self._ended:
            return False
        data = self._stream.read(size)
        if not self._bytes:
            data = without_byte_order_mark(data, self.origin)
        if b"\0" in data:
            raise UserError(f"{self.origin}: a NUL byte near byte {self._bytes + data.index(0)}. Is it UTF-8 text?")
        try:
            text = self._decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.origin}: not UTF-8 near byte {self._bytes + error.start}. Save the file as UTF-8."
            ) from error
        self._bytes += len(data)
        self._ended = not data
        if data:
            passed = self.buffer[: self.at]
            self._line += passed.count("\n")
            self._column = len(passed) - passed.rfind("\n") if "\n" in passed else self._column + len(passed)
            self.buffer, self.at = self.buffer[self.at :] + text, 0
        return bool(data)

    def value(self, what: str) -> Any:
        """The next JSON value, `what` naming it in messages."""
        size = _CHUNK_BYTES
        while True:
            try:
                value, self.at = _DECODER.raw_decode(self.buffer, self.at)
                return value
            except json.JSONDecodeError as error:
                near_end = error.pos >= len(self.buffer) - 12 or error.msg.startswith("Unterminated string")
                if near_end and len(self.buffer) - self.at > MAX_RECORD_BYTES:
                    raise self.fault(f"{what} is longer than {MAX_RECORD_BYTES >> 20} MiB") from error
                if near_end and self.read(size):
                    size *= 2
                    continue
                raise self.fault(f"{what}: {_fault(error.msg, self.buffer, error.pos)}", error.pos) from error
            except RecursionError as error:
                raise self.fault(f"{what} is nested too deeply") from error
            except _KeyTwice as error:
                raise self.fault(f"{what}: {error}") from error
            except ValueError as error:
                raise self.fault(f"{what}: {_MANY_DIGITS}") from error

    def expect_end(self) -> None:
        if self.peek():
            raise self.fault("something follows the end of the document")

    def fault(self, what: str, at: int | None = None) -> UserError:
        before = self.buffer[: self.at if at is None else at]
        line = self._line + before.count("\n")
        column = len(before) - before.rfind("\n") if "\n" in before else self._column + len(before)
        return UserError(f"{self.origin}: line {line}, column {column}: {what}.")


def _elements(text: _Text) -> Iterator[Record]:
    """The elements of a list whose bracket has been read, as far as its end."""
    number = 0
    while (start := text.peek()) != "]":
        number += 1
        if start != "{":
            raise text.fault(
                f"record {number}: a trailing comma; take it out" if start == "]"
                else f"record {number} is cut off here, as if the file were not whole" if not start
                else f'record {number} is not an object; wanted are objects such as {{"text": ...}}'
            )  # fmt: skip
        row = cast(dict[str, Any], text.value(f"record {number}"))
        if half := lone_surrogate(row):
            raise UserError(f"{text.origin}: record {number}: {half}. Remove it, or write the character whole.")
        yield Record(text.origin, number, row)
        after = text.peek()
        if after == ",":
            text.skip(1)
            if text.peek() == "]":
                raise text.fault(f"after record {number}: a trailing comma; take it out")
        elif after != "]":
            raise text.fault(
                f"after record {number}: a comma is missing" if after else
                f"after record {number} the file ends without ]: it is cut off, as if the file were not whole"
            )  # fmt: skip
    text.skip(1)


def _objects(text: _Text) -> Iterator[Record]:
    """A document that begins with an object: one that holds the rows in a list, or rows one after another."""
    while len(text.buffer) < _WHOLE_BYTES and text.read(_CHUNK_BYTES):
        pass
    try:
        first, end = _DECODER.raw_decode(text.buffer, text.at)
    except _KeyTwice as error:
        raise text.fault(str(error)) from error
    except (ValueError, RecursionError):
        if len(text.buffer) < _WHOLE_BYTES:
            text.value("the document")
        yield from _list_within(text)
        return
    if text.buffer[end:].strip(" \t\r\n") or len(text.buffer) >= _WHOLE_BYTES:
        number = 0
        while text.peek():
            number += 1
            value = text.value(f"record {number}")
            if not isinstance(value, dict):
                raise text.fault(f"record {number} is {kind_of(value)}, not an object")
            yield Record(text.origin, number, cast(dict[str, Any], value))
        return
    lists = {
        key: cast(list[Any], value)
        for key, value in cast(dict[str, object], first).items()
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in cast(list[object], value))
    }
    turns = any("role" in row or "from" in row for rows in lists.values() for row in rows[:1])
    if len(lists) == 1 and not turns:
        for number, row in enumerate(next(iter(lists.values())), 1):
            yield Record(text.origin, number, row)
    elif len(lists) > 1 and not turns:
        raise UserError(f"{text.origin}: the document holds several lists ({', '.join(lists)}). Keep the one of rows.")
    else:
        yield Record(text.origin, 1, cast(dict[str, Any], first))


def _list_within(text: _Text) -> Iterator[Record]:
    """The rows of a large object with one list of objects: what stands before and after the list is passed over."""
    text.skip(1)
    seen: set[str] = set()
    rows_key: str | None = None
    while text.peek() == '"':
        key = cast(str, text.value("a key"))
        if key in seen:
            raise text.fault(_twice(key))
        seen.add(key)
        if text.peek() != ":":
            raise text.fault("a colon is missing")
        text.skip(1)
        if text.peek() == "[" and text.after_bracket() == "{":
            if rows_key is not None:
                raise UserError(
                    f"{text.origin}: the document holds several lists ({rows_key}, {key}). Keep the one of rows."
                )
            rows_key = key
            text.skip(1)
            yield from _elements(text)
        else:
            text.value(json.dumps(key))
        if text.peek() == "}":
            break
        if text.peek() != ",":
            raise text.fault(f"after {json.dumps(key)}: a comma is missing, or the document is cut off here")
        text.skip(1)
        if text.peek() == "}":
            raise text.fault("a trailing comma; take it out")
    if text.peek() != "}":
        raise text.fault("the document is cut off here, as if the file were not whole")
    text.skip(1)
    text.expect_end()
