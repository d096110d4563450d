"""TFRecord files: written so that TensorFlow reads them, read whoever wrote them, any record at a time.

A record is: its length (uint64), masked crc32c of the length (uint32), the bytes, masked crc32c of the bytes (uint32),
all little-endian (tensorflow/core/lib/io/record_writer.h).
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import google_crc32c
import numpy as np

from podtune.config.errors import RunFailure, UserError
from podtune.data.example_codec import ExampleError, decode_example
from podtune.data.open_files import ByteStream
from podtune.data.record_index import read_index, write_index

_HEADER, _FOOTER = 12, 4


def masked_crc(data: bytes) -> int:
    """crc32c, rotated and shifted so that a checksum of data holding checksums is no weaker."""
    crc = cast(int, google_crc32c.value(data))  # pyright: ignore[reportUnknownMemberType]
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame_record(data: bytes) -> bytes:
    """The bytes of one record in the file."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data))))


class RecordWriter:
    """Writes one shard and its index; neither is visible under its name before close() has put both on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._file: BinaryIO = open(self._unfinished, "wb", buffering=1 << 20)  # noqa: SIM115  closed by __exit__
        self._offsets = [0]

    def write(self, data: bytes) -> None:
        framed = frame_record(data)
        self._file.write(framed)
        self._offsets.append(self._offsets[-1] + len(framed))

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_index(self.path, np.array(self._offsets, np.uint64))
        os.replace(self._unfinished, self.path)

    def abandon(self) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class RecordFile:
    """Random access to one shard through its index; every record's checksum is verified. Pickles as its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets = read_index(path)
        with open(path, "rb") as file:
            empty = len(self.offsets) < 2
            self._map = None if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        if self._map is None or not 0 <= index < len(self):
            raise IndexError(f"record {index} of {self.path}, which holds {len(self)}")
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        framed = self._map[start:end]
        data = framed[_HEADER:-_FOOTER]
        length, length_crc = struct.unpack_from("<QI", framed)
        intact = length == len(data) and length_crc == masked_crc(framed[:8])
        if not intact or struct.unpack("<I", framed[-_FOOTER:])[0] != masked_crc(data):
            raise RunFailure(
                f"{self.path}: record {index} at byte {start} is damaged. Delete the folder to prepare it anew."
            )
        return data

    def __reduce__(self) -> tuple[type["RecordFile"], tuple[Path]]:
        return (RecordFile, (self.path,))


def read_records_from(file: ByteStream, name: str) -> Iterator[bytes]:
    """The records of an open TFRecord file, in order. Raises UserError naming the file and the byte of a fault."""
    at = number = 0
    while header := file.read(_HEADER):
        number += 1
        where = f"{name}: record {number} at byte {at}"
        if len(header) < _HEADER:
            raise UserError(f"{where} is cut off: the file ends in its header. It is not a whole TFRecord file.")
        length, length_crc = struct.unpack("<QI", header)
        if length_crc != masked_crc(header[:8]):
            raise UserError(f"{where} has a damaged header (wrong checksum). It is not a TFRecord file, or compressed.")
        data, footer = file.read(length), file.read(_FOOTER)
        if len(data) < length or len(footer) < _FOOTER:
            raise UserError(f"{where} is cut off: it should hold {length} bytes and the file ends after {len(data)}.")
        if struct.unpack("<I", footer)[0] != masked_crc(data):
            raise UserError(f"{where} is damaged: the checksum of its {length} bytes does not agree.")
        yield data
        at += _HEADER + length + _FOOTER


def read_examples_from(file: ByteStream, name: str) -> Iterator[dict[str, list[int] | list[float] | list[bytes]]]:
    """The tf.train.Examples of an open TFRecord file. Raises UserError naming the file and the record."""
    for number, data in enumerate(read_records_from(file, name), 1):
        try:
            features = decode_example(data)
        except ExampleError as error:
            raise UserError(f"{name}: record {number} is {error}.") from error
        yield {key: values if isinstance(values, list) else values.tolist() for key, values in features.items()}


def read_tfrecord(path: str | Path) -> Iterator[dict[str, list[int] | list[float] | list[bytes]]]:
    """The tf.train.Examples of a TFRecord file on this machine."""
    with open(path, "rb") as file:
        yield from read_examples_from(file, str(path))
