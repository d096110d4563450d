"""Rows out of tables: CSV and TSV line by line, Parquet by row group. A column that holds JSON is left as text here;
shapes reads it where a list is wanted."""

import csv
import json
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

from podtune.config.errors import UserError
from podtune.config.wording import counted
from podtune.data.open_files import MAX_RECORD_BYTES, ByteStream, DataFile, lines_of, open_data
from podtune.data.rows import Record, Refused

_PARQUET_ROWS = 256  # rows taken at once out of a row group: rows may be long


def read_csv(file: DataFile) -> Iterator[Record | Refused]:
    """Rows of comma-separated values under a header; numbers are lines. Every field is text. A row with
    too few or too many fields does not hide those behind it."""
    yield from _read_separated(file, ",")


def read_tsv(file: DataFile) -> Iterator[Record | Refused]:
    """Rows of tab-separated values under a header."""
    yield from _read_separated(file, "\t")


def _read_separated(file: DataFile, separator: str) -> Iterator[Record | Refused]:
    csv.field_size_limit(MAX_RECORD_BYTES)
    with open_data(file) as stream:
        reader = csv.reader(_terminated(stream, file.origin), delimiter=separator, strict=True)
        header: list[str] | None = None
        begun = 1
        while True:
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise UserError(f"{file.origin}:{begun}: {_csv_fault(str(error))}.") from error
            if fields is None:
                return
            line, begun = begun, reader.line_num + 1
            if not fields or (len(fields) == 1 and not fields[0].strip()):
                continue
            if header is None:
                header = _checked_header(fields, file.origin, separator)
                continue
            if len(fields) != len(header):
                reason = (
                    f"{counted(len(fields), 'field')}, but the header names {len(header)} ({', '.join(header)}). "
                    "Put fields that hold a separator or a line break in double quotes."
                )
                yield Refused("invalid", reason, file.origin, line)
                continue
            yield Record(file.origin, line, dict(zip(header, fields, strict=True)))


def _terminated(stream: ByteStream, origin: str) -> Iterator[str]:
    for _, line in lines_of(stream, origin):
        yield line + "\n"


def _checked_header(fields: list[str], origin: str, separator: str) -> list[str]:
    names = [field.strip() for field in fields]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{origin}:1: the header names {', '.join(sorted(repeated)) or 'an empty column'} twice.")
    if "" in names:
        raise UserError(f"{origin}:1: column {names.index('') + 1} has no name in the header.")
    if len(names) == 1:
        for other, word in ((";", "semicolons"), ("\t", "tabs"), (",", "commas"), ("|", "bars")):
            if other != separator and other in names[0]:
                way_out = (
                    "name the file .tsv" if other == "\t" else "name the file .csv" if other == "," else "use commas"
                )
                raise UserError(f"{origin}:1: the columns seem to be separated by {word}; {way_out}.")
    return names


def _csv_fault(message: str) -> str:
    if "unexpected end of data" in message:
        return "a double quote is opened in this row and never closed, so the rest of the file is one field"
    if "expected after" in message:
        return 'text follows a closing double quote; write a double quote within a field as ""'
    if "new-line character" in message:
        return "a lone carriage return outside quotes; save the file with line feeds"
    return message


def read_parquet(file: DataFile) -> Iterator[Record]:
    """The rows of a Parquet file, some at a time."""
    from pyarrow import ArrowException  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
    from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingTypeStubs]

    unreadable = cast(tuple[type[Exception], ...], (ArrowException, OSError))
    number = 0
    with open_data(file) as stream, _seekable(stream, compressed=bool(file.compression)) as seekable:
        try:
            table: Any = ParquetFile(cast(Any, seekable))
            kinds = {field.name: field.type for field in table.schema_arrow}
            _refuse_twice(table.schema_arrow.names, file.origin)
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
                columns = {
                    name: _values(batch.column(at), name, file.origin) for at, name in enumerate(batch.schema.names)
                }
                for name in kinds:
                    if _has_nested_struct(kinds[name]):
                        columns[name] = [_without_nulls(value) for value in columns[name]]
                for at in range(batch.num_rows):
                    number += 1
                    yield Record(file.origin, number, {name: values[at] for name, values in columns.items()})
        except unreadable as error:
            where = f"after record {number}" if number else "it"
            raise UserError(
                f"{file.origin}: {where} cannot be read as Parquet: {str(error).splitlines()[0]}."
            ) from error


class Unreadable:
    """Stands where Python has no value for what a column holds, which no shape reads: a moment in the year 100,000."""


def _refuse_twice(names: list[str], origin: str) -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"{origin}: two columns are named {', '.join(map(json.dumps, repeated))}. Write the file anew with one of "
            "them."
        )


def _values(column: Any, name: str, origin: str) -> list[Any]:
    """The values of a column, some rows of it. Raises UserError naming it where one cannot be had."""
    try:
        return column.to_pylist()
    except Exception as error:  # Arrow, Python and the time zone library each have exceptions of their own
        if str(column.type).startswith(("timestamp", "date", "time", "duration", "decimal")):
            return [Unreadable()] * len(column)  # no shape reads these
        raise UserError(
            f"{origin}: column {json.dumps(name, ensure_ascii=False)} cannot be read "
            f"({_why_unreadable(error)}). Write the file anew with it mended, or without it."
        ) from error


def _why_unreadable(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"a text in it is not UTF-8: byte 0x{error.object[error.start]:02x}"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@contextmanager
def _seekable(stream: ByteStream, *, compressed: bool) -> Generator[ByteStream]:
    """The stream, or a copy of it on disk where it cannot be read from its end, as Parquet must be."""
    if not compressed:
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
        yield copy


def _has_nested_struct(kind: Any, depth: int = 0) -> bool:
    if str(kind).startswith("struct<"):
        return depth > 0 or any(_has_nested_struct(field.type, depth + 1) for field in kind)
    return hasattr(kind, "value_type") and _has_nested_struct(kind.value_type, depth)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct of a column all fields that any of them has: those that are null were never there."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in cast(dict[str, Any], value).items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in cast(list[Any], value)]
    return value
