"""First half of preparing: records become examples, chunk by chunk, in worker processes when there is enough to do.

A chunk of examples is two files in the staging folder: `chunk-000012.tokens` (uint32 per token, the highest bit says
that the token is trained) and `chunk-000012.npz` (one entry per example, and a checksum of the tokens), written last.
What is in them depends on the data alone, never on the number of processes, so a killed preparation goes on from the
chunks that are there and whole.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Int32, Int64, UInt64

from podtune.data.chat import Prompt
from podtune.data.prepare_inputs import Encoder
from podtune.data.prepare_report import REASON_ANSWER, REASON_LONG, Tally
from podtune.data.rows import Example, Record, Refused, Row, Text, Tokens, place
from podtune.hub.atomic import atomic_file

TRAINED_BIT = np.uint32(1 << 31)
CANDIDATES = 32  # rows a chunk keeps the prompts of, in case they are held out; also the most prompts there can be
TEXT_PROMPT = 32  # tokens of a document that are its prompt

CHANGED_TRUNCATED = "cut to max_length"
CHANGED_SPLIT = "split into pieces of max_length"


@dataclass(frozen=True)
class WorkSettings:
    """What a worker needs: where its files go, and an encoder for each source (None for one without rows)."""

    chunks: Path
    shards: Path
    max_length: int
    too_long: Literal["drop", "truncate", "refuse"]
    seed: int
    encoders: tuple[Encoder | None, ...]


@dataclass
class ChunkSummary:
    """What became of a chunk's rows. kept counts rows with an example; refused rows are faults of the user's data."""

    source: int
    read: int = 0
    kept: int = 0
    dropped: Tally = field(default_factory=Tally)
    changed: Tally = field(default_factory=Tally)
    notes: Tally = field(default_factory=Tally)
    refused: Tally = field(default_factory=Tally)  # by kind; the places carry the whole message

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "ChunkSummary":
        tallies = {name: Tally(**entry[name]) for name in ("dropped", "changed", "notes", "refused")}
        return cls(entry["source"], entry["read"], entry["kept"], **tallies)


@dataclass(frozen=True)
class Chunk:
    """The examples of a chunk, one entry each. digest is of the whole row before cutting; piece numbers its pieces."""

    path: Path
    summary: ChunkSummary
    lengths: Int32[np.ndarray, "examples"]
    trained: Int32[np.ndarray, "examples"]
    digests: UInt64[np.ndarray, "examples 2"]
    pieces: Int32[np.ndarray, "examples"]
    numbers: Int64[np.ndarray, "examples"]
    origins: Int32[np.ndarray, "examples"]  # which of origin_names each is from
    origin_names: list[str]

    def prompts(self) -> dict[str, dict[str, Any]]:
        """For some rows: digest in hexadecimal digits -> fields of a Prompt. Read when asked for: there may be many."""
        with np.load(self.path.with_suffix(".npz")) as arrays:
            return json.loads(arrays["json"].tobytes())["prompts"]


def chunk_path(chunks: Path, number: int) -> Path:
    return chunks / f"chunk-{number:06d}.tokens"


def encode_chunk(settings: WorkSettings, number: int, source: int, records: Sequence[Record | Refused]) -> ChunkSummary:
    """Encodes records and writes the chunk; its summary says what became of them."""
    summary = ChunkSummary(source)
    gathered = _Gathered()
    encoder = settings.encoders[source]
    assert encoder is not None, "a source with records has a shape"
    for row, example in encoder.encode(records):
        summary.read += 1
        if row is None or isinstance(example, Refused):
            assert isinstance(example, Refused), "what became an example was a row"
            summary.refused.add(example.kind, str(example))
            continue
        where = place(example.origin, example.number)
        for note in example.notes:
            summary.notes.add(note, where)
        pieces = _fit(example, _splittable(row), settings, summary, where)
        if pieces:
            summary.kept += 1
            gathered.add(row, example, pieces, settings.seed)
    gathered.write(chunk_path(settings.chunks, number), summary, encoder.prompt_of)
    return summary


def read_chunk(chunks: Path, number: int) -> Chunk | None:
    """The chunk of this number if it is finished and undamaged."""
    path = chunk_path(chunks, number)
    try:
        # Opened here: np.load leaves the file open when it is no archive.
        with open(path.with_suffix(".npz"), "rb") as file, np.load(file) as arrays:
            text = json.loads(arrays["json"].tobytes())
            names = ("lengths", "trained", "digests", "pieces", "numbers", "origins")
            entries: dict[str, Any] = {name: arrays[name] for name in names}
            whole = int(arrays["checksum"]) == zlib.crc32(path.read_bytes())
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, RuntimeError, struct.error, zlib.error):
        return None
    if not whole:
        return None
    return Chunk(path, ChunkSummary.from_json(text["summary"]), origin_names=text["origins"], **entries)


def _splittable(row: Row) -> bool:
    """Whether pieces of a row are worth as much as the row: documents, and foreign tokens that all bear loss."""
    return isinstance(row.value, Text) or (isinstance(row.value, Tokens) and row.value.mask is None)


def _fit(example: Example, splittable: bool, settings: WorkSettings, summary: ChunkSummary, where: str) -> list[slice]:
    """The parts of an example that become examples: the whole, one that fits, several, or none."""
    length, limit = len(example.tokens), settings.max_length
    if length <= limit:
        return [slice(0, length)]
    if settings.too_long == "refuse":
        summary.refused.add("too_long", f"{where}: {length} tokens, max_length is {limit}")
        return []
    if settings.too_long == "drop":
        summary.dropped.add(REASON_LONG, where)
        return []
    if splittable:
        summary.changed.add(CHANGED_SPLIT, where)
        # Pieces share a token: the first of a piece has nothing before it, so it is a target in the piece before.
        return [slice(start, min(start + limit, length)) for start in range(0, length - 1, limit - 1)]
    if not example.trained[1:limit].any():
        summary.dropped.add(REASON_ANSWER, where)
        return []
    summary.changed.add(CHANGED_TRUNCATED, where)
    return [slice(0, limit)]


class _Gathered:
    """The examples of one chunk on their way to its files."""

    def __init__(self) -> None:
        self.flat: list[np.ndarray] = []
        self.entries: list[tuple[int, int, int, int, int, int, int]] = []
        self.origins: dict[str, int] = {}
        self.candidates: list[tuple[int, Row, Example]] = []

    def add(self, row: Row, example: Example, pieces: Sequence[slice], seed: int) -> None:
        marked = example.tokens.astype(np.uint32) | example.trained.astype(np.uint32) << np.uint32(31)
        marked[0] &= ~TRAINED_BIT
        digest = hashlib.blake2b(marked.tobytes(), digest_size=16, key=seed.to_bytes(8, "little")).digest()
        high, low = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        origin = self.origins.setdefault(example.origin, len(self.origins))
        for number, piece in enumerate(pieces):
            part = marked[piece]
            if number:
                part = part.copy()
                part[0] &= ~TRAINED_BIT
            trained = int(np.count_nonzero(part & TRAINED_BIT))
            self.flat.append(part)
            self.entries.append((len(part), trained, high, low, number, example.number, origin))
        self.candidates.append((high, row, example))
        if len(self.candidates) > 4 * CANDIDATES:
            self._trim()

    def _trim(self) -> None:
        self.candidates.sort(key=lambda entry: entry[0])
        del self.candidates[CANDIDATES:]

    def write(self, path: Path, summary: ChunkSummary, prompt_of: Callable[[Row], Prompt | None]) -> None:
        self._trim()
        columns = list(zip(*self.entries, strict=True)) if self.entries else [()] * 7
        prompts = {f"{high:x}": prompt_of(row) or _begin_of(example) for high, row, example in self.candidates}
        text = {
            "summary": summary.to_json(),
            "origins": list(self.origins),
            "prompts": {digest: vars(prompt) for digest, prompt in prompts.items()},
        }
        checksum = 0
        with atomic_file(path, durable=False) as file:
            for part in self.flat:
                file.write(part.data)
                checksum = zlib.crc32(part.data, checksum)
        with atomic_file(path.with_suffix(".npz"), durable=False) as file:
            np.savez(
                file,
                lengths=np.array(columns[0], np.int32),
                trained=np.array(columns[1], np.int32),
                digests=np.stack([np.array(columns[2], np.uint64), np.array(columns[3], np.uint64)], axis=1),
                pieces=np.array(columns[4], np.int32),
                numbers=np.array(columns[5], np.int64),
                origins=np.array(columns[6], np.int32),
                json=np.frombuffer(json.dumps(text).encode(), np.uint8),
                checksum=np.uint32(checksum),
            )


def _begin_of(example: Example) -> Prompt:
    """The beginning of a document as a prompt; its words are filled in when it is chosen."""
    ids = example.tokens[: min(TEXT_PROMPT, max(1, len(example.tokens) // 2))].tolist()
    return Prompt(ids, "", "", [])
