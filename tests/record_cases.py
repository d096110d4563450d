"""Whole sources read and whole record files written in one call, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from podtune.config.errors import UserError
from podtune.config.rows import Source
from podtune.data.records import RecordWriter
from podtune.data.rows import Record, Refused
from podtune.data.sources import list_files, read_file


def read_records(source: Source) -> Iterator[Record]:
    """The records of all files of a source, in the order of list_files. Raises UserError at the first broken line."""
    for file in list_files(source):
        for record in read_file(file):
            if isinstance(record, Refused):
                raise UserError(str(record))
            yield record


def write_tfrecord(path: Path, records: Iterable[bytes]) -> None:
    """Writes records and their index."""
    with RecordWriter(path) as writer:
        for data in records:
            writer.write(data)
