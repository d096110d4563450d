"""Documents out of plain text, and rows out of TFRecord files that others made."""

from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

from podtune.config.errors import UserError
from podtune.data.open_files import MAX_RECORD_BYTES, DataFile, decoded, lines_of, open_data, without_byte_order_mark
from podtune.data.rows import Record


def read_text(file: DataFile) -> Iterator[Record]:
    """A text file as one document, under `text`; none when it is blank."""
    with open_data(file) as stream:
        data = without_byte_order_mark(stream.read(MAX_RECORD_BYTES + 1), file.origin)
    if len(data) > MAX_RECORD_BYTES:
        raise UserError(
            f"{file.origin}: a document of more than {MAX_RECORD_BYTES >> 20} MiB. "
            "Split it, or say that each line or paragraph is a document (documents: line)."
        )
    lines = data.split(b"\n")
    text = "\n".join(decoded(line, file.origin, number).removesuffix("\r") for number, line in enumerate(lines, 1))
    if text.strip():
        yield Record(file.origin, 1, {"text": text})


def read_text_lines(file: DataFile) -> Iterator[Record]:
    """Each line of a text file as a document; blank ones are passed over."""
    with open_data(file) as stream:
        for number, line in lines_of(stream, file.origin):
            if line.strip():
                yield Record(file.origin, number, {"text": line})


def read_text_paragraphs(file: DataFile) -> Iterator[Record]:
    """Each paragraph of a text file, between blank lines, as a document; numbers are those of its first line."""
    with open_data(file) as stream:
        begun, paragraph = 1, list[str]()
        for number, line in chain(lines_of(stream, file.origin), [(0, "")]):
            if line.strip():
                begun = begun if paragraph else number
                paragraph.append(line)
            elif paragraph:
                yield Record(file.origin, begun, {"text": "\n".join(paragraph)})
                paragraph = []


def read_tfrecord(file: DataFile) -> Iterator[Record]:
    """The features of each tf.train.Example: a list of numbers as it is, bytes as text (one: the text alone)."""
    from podtune.data.records import read_examples_from

    with open_data(file) as stream:
        for number, features in enumerate(read_examples_from(stream, file.origin), 1):
            values = {name: _plain(feature, name, file.origin, number) for name, feature in features.items()}
            yield Record(file.origin, number, values)


def _plain(feature: list[int] | list[float] | list[bytes], name: str, origin: str, number: int) -> Any:
    if not feature or not isinstance(feature[0], bytes):
        return feature
    try:
        texts = [text.decode() for text in cast(list[bytes], feature)]
    except UnicodeDecodeError as error:
        raise UserError(
            f"{origin}: record {number}: feature {name} is not UTF-8 text (byte 0x{error.object[error.start]:02x}). "
            "Features of bytes must hold text."
        ) from error
    return texts[0] if len(texts) == 1 else texts
