"""The seam to sources, shapes and templates: what preparing needs of one source of rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, cast

from podtune.config.errors import UserError
from podtune.config.rows import Data, Source, TrainOn
from podtune.data.chat import Prompt, encode_rows, prompt_of
from podtune.data.open_files import DataFile, content_digest
from podtune.data.rows import Example, Record, Refused, Row, Tokens
from podtune.data.shapes import SNIFFED_RECORDS, RowShape, sniff_shape, to_row
from podtune.data.sources import list_source, read_file
from podtune.hub.tokenizer import Tokenizer

_CHUNK_ROWS = 1024
_CHUNK_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Input:
    """One source of rows and its files. left_out: what of a folder is not among them, in words."""

    source: Source
    data: Data
    files: tuple[DataFile, ...]
    left_out: str = ""

    @property
    def name(self) -> str:
        return self.source.path

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files as messages name them, in the order they are read."""
        return tuple(file.origin for file in self.files)

    @property
    def local_files(self) -> tuple[Path, ...]:
        """The files whose bytes can be had here."""
        return tuple(file.local for file in self.files if file.local is not None)

    def identity(self, digests: Mapping[Path, str]) -> list[Any]:
        """What distinguishes this source in a fingerprint: its bytes and how they are read, not where they are."""
        files = [
            [
                file.format,
                file.compression,
                digests[file.local] if file.local is not None else file.signature or content_digest(file),
            ]
            for file in self.files
        ]
        return [files, self._shape, self._columns]

    @property
    def _shape(self) -> Any:
        return self.source.shape or self.data.shape

    @property
    def _columns(self) -> dict[str, str]:
        own = self.source.columns  # {}: none, whatever data.columns says
        return cast(dict[str, str], self.data.columns if own is None else own)

    def read(self) -> tuple[RowShape | None, Iterator[Record | Refused]]:
        """The shape of the records, and the records with the lines that are none; no shape when there are none. Raises
        UserError."""
        records = chain.from_iterable(map(read_file, self.files))
        first = list(islice(records, SNIFFED_RECORDS))
        sound = [record for record in first if isinstance(record, Record)]
        broken = [str(line) for line in first if isinstance(line, Refused)]
        if broken and not sound:
            raise UserError("\n".join(broken))
        try:
            shape = sniff_shape(sound, shape=self._shape, columns=self._columns) if sound else None
        except UserError as error:
            raise UserError("\n".join([*broken, str(error)])) from error
        return shape, chain(first, records)


@dataclass(frozen=True)
class Encoder:
    """Records of one shape to examples. Goes to the workers."""

    tokenizer: Tokenizer
    train_on: TrainOn
    shape: RowShape

    def encode(self, records: Sequence[Record | Refused]) -> list[tuple[Row | None, Example | Refused]]:
        """What each record becomes, and the row on the way if it got that far. A packed record becomes several."""
        chat = self.tokenizer.chat_template is not None
        read: list[Row | Refused] = []
        for record in records:
            if isinstance(record, Refused):
                read.append(record)
                continue
            try:
                row = to_row(record, self.shape, chat=chat)
            except UserError as error:
                read.append(Refused.by(error, record.origin, record.number))
            else:
                read += _unpacked(row)
        rows = [row for row in read if isinstance(row, Row)]
        examples = iter(encode_rows(rows, self.tokenizer, self.train_on))
        return [(row, next(examples)) if isinstance(row, Row) else (None, row) for row in read]

    def prompt_of(self, row: Row) -> Prompt | None:
        """What the row asks and answers, if it does."""
        return prompt_of(row, self.tokenizer)


def _unpacked(row: Row) -> list[Row | Refused]:
    """The examples that share a packed row of tokens, each as a row; any other row as it is."""
    if not isinstance(row.value, Tokens) or row.value.segments is None:
        return [row]
    ids, mask = row.value.ids, row.value.mask
    numbers = row.value.segments
    if len(numbers) != len(ids):
        return [Refused("invalid", f"its segments do not number its {len(ids)} tokens", row.source, row.number)]
    borders = [0, *(at for at in range(1, len(ids)) if numbers[at] != numbers[at - 1]), len(ids)]
    parts = [slice(start, end) for start, end in pairwise(borders) if end > start and numbers[start] != 0]
    return [Row(row.source, row.number, Tokens(ids[part], mask and mask[part])) for part in parts]


def open_input(data: Data, source: Source) -> Input:
    """Raises UserError when there is no such source."""
    listing = list_source(source)
    return Input(source, data, listing.files, listing.left_out)


def chunked(records: Iterator[Record | Refused]) -> Iterator[list[Record | Refused]]:
    """Runs of records, neither too many nor too long together."""
    chunk: list[Record | Refused] = []
    characters = 0
    for record in records:
        chunk.append(record)
        characters += record_characters(record.value) if isinstance(record, Record) else 0
        if len(chunk) >= _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def record_characters(value: Any) -> int:
    """About how much text a record holds."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(record_characters, cast(dict[str, Any], value).values()))
    if isinstance(value, list):
        items = cast(list[Any], value)
        return 4 * len(items) if items and isinstance(items[0], int) else sum(map(record_characters, items))
    return 8
