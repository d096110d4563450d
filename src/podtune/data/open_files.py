"""Data files wherever they lie: found, opened, decompressed; every fault of a file names it. Used by the readers."""

import codecs
import gzip
import hashlib
import re
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast, runtime_checkable

from podtune.config.errors import UserError
from podtune.hub.addresses import file_system

MAX_RECORD_BYTES = 256 << 20
_BLOCK = 8 << 20
COMPRESSIONS = (".gz", ".zst")
# How files begin that are no text, whatever their name says, and what is to be done about it.
_BEGINNINGS = {
    rb"\xff\xfe|\xfe\xff": "UTF-16 or UTF-32. Save it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
    rb"\x1f\x8b": "compressed by gzip. Give its name the ending .gz",
    rb"\x28\xb5\x2f\xfd": "compressed by zstandard. Give its name the ending .zst",
    rb"PAR1\x15": "Parquet. Give its name the ending .parquet",
    rb"PK\x03\x04": "a zip archive. Unpack it",
    rb"BZh[1-9]1AY&SY": "compressed by bzip2. Unpack it, or compress it by gzip or zstandard",
    rb"\xfd7zXZ": "compressed by xz. Unpack it, or compress it by gzip or zstandard",
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a": "an image. Name the file of the rows",
    rb"%PDF-\d": "a PDF. Take the text out of it first",
}


_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_LOOKED_AT = 4096  # bytes, to tell whether a file is text


class NoTextFile(UserError):
    """A file that is to be text and is something else, in every line."""


@dataclass(frozen=True)
class DataFile:
    """One file of rows. origin: its name in messages; format: its row in sources.FORMATS; local: where it lies on this
    machine, None for a file that is read over the network; signature: what changes with its bytes, for the latter, or
    nothing when its store tells nothing of it."""

    origin: str
    format: str
    compression: str = ""
    local: Path | None = None
    signature: str = ""


@runtime_checkable
class ByteStream(Protocol):
    """What is read from: a file, or what decompresses one."""

    def read(self, size: int = -1, /) -> bytes: ...

    def readline(self, size: int = -1, /) -> bytes: ...


@contextmanager
def open_data(file: DataFile) -> Generator[ByteStream]:
    """The decompressed bytes of a file, as a stream. What goes wrong while they are read is said as a UserError."""
    try:
        with _open_raw(file) as raw, _decompressed(raw, file.compression) as stream:
            yield stream
    except UserError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(_damaged(file, error)) from error
    except OSError as error:
        raise UserError(f"{file.origin}: cannot be read: {error.strerror or error}.") from error
    except Exception as error:
        if type(error).__name__ == "ZstdError":
            raise UserError(_damaged(file, error)) from error
        raise


def content_digest(file: DataFile) -> str:
    """SHA-256 of the bytes of a file as it lies there: for one that nothing else tells apart from another."""
    digest = hashlib.sha256()
    with open_data(replace(file, compression="")) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def split_compression(name: str) -> tuple[str, str]:
    """A file name without its compression, and the compression."""
    for ending in COMPRESSIONS:
        if name.lower().endswith(ending):
            return name[: -len(ending)], ending
    return name, ""


def lines_of(stream: ByteStream, origin: str) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers from 1, without what ends them."""
    for number, line in byte_lines_of(stream, origin):
        yield number, decoded(line, origin, number)


def byte_lines_of(stream: ByteStream, origin: str) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers from 1, as they lie in the file. Only a line feed ends a line: U+2028 and the like
    are part of a text."""
    number = 0
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            raise UserError(
                f"{origin}:{number}: this line is longer than {MAX_RECORD_BYTES >> 20} MiB. Is it one row? "
                "A list of rows belongs in a .json file."
            )
        if number == 1:
            line = without_byte_order_mark(line, origin)
        yield number, line


def without_byte_order_mark(start: bytes, origin: str) -> bytes:
    """The start of a file without a UTF-8 mark. Raises NoTextFile for one that begins as what is no UTF-8 text does."""
    what = next((what for begins, what in _BEGINNINGS.items() if re.match(begins, start)), None)
    if what is not None:
        raise NoTextFile(f"{origin}: the file is {what}.")
    if _CONTROL.search(start, 0, _LOOKED_AT) and not _is_utf8(start[:_LOOKED_AT]):
        raise NoTextFile(
            f"{origin}: the file is no text: it begins with bytes that no text has. Name the file of the rows."
        )
    return start.removeprefix(b"\xef\xbb\xbf")


def _is_utf8(start: bytes) -> bool:
    """Whether bytes are UTF-8, but for a character that is cut off at their end."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return True


def decoded(line: bytes, origin: str, number: int) -> str:
    """A line as text, without the line feed, or carriage return and line feed, at its end. Raises UserError naming the
    line and the column of bytes that are not UTF-8, or of a NUL."""
    if b"\0" in line:
        many = line.count(b"\0") > len(line) // 3
        about = "The file looks like UTF-16: save it as UTF-8." if many else "The file is damaged, or is not text."
        kind = NoTextFile if many else UserError
        raise kind(f"{origin}:{number}: a NUL byte in column {line.index(0) + 1}. {about}")
    try:
        return line.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{origin}:{number}: not UTF-8: byte 0x{line[error.start]:02x} in column {error.start + 1}. "
            "Save the file as UTF-8 (iconv -f LATIN1 -t UTF-8, if it is Latin-1)."
        ) from error


@contextmanager
def _open_raw(file: DataFile) -> Generator[ByteStream]:
    if file.local is not None:
        with open(file.local, "rb") as raw:
            yield raw
        return
    system, path = file_system(file.origin)
    try:
        raw = system.open(path, "rb")
    except FileNotFoundError as error:
        raise UserError(f"{file.origin}: there is no such file.") from error
    with raw:
        yield raw


@contextmanager
def _decompressed(raw: ByteStream, compression: str) -> Generator[ByteStream]:
    if compression == ".gz":
        with gzip.open(cast(BinaryIO, raw), "rb") as stream:
            yield stream
    elif compression == ".zst":
        with BufferedReader(_ZstdBytes(raw), 1 << 20) as stream:
            yield stream
    else:
        yield raw


class _ZstdBytes(RawIOBase):
    """The decompressed bytes of a zstandard file, frame by frame. Unlike the library's own stream it raises EOFError
    when the file ends in the middle of a frame, where that one ends as if nothing were missing."""

    def __init__(self, raw: ByteStream) -> None:
        import zstandard

        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._raw.read(1 << 17)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("the file ends in the middle of a frame")
                    return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._output = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


def _damaged(file: DataFile, error: Exception) -> str:
    return f"{file.origin}: the {file.compression or 'file'} is damaged or cut off: {error}. Fetch it again."
