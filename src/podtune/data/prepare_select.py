"""Between the halves of preparing: which examples are duplicates, which are held out, how often an epoch sees each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt64

from podtune.config.errors import UserError
from podtune.config.wording import counted
from podtune.data.prepare_encode import Chunk
from podtune.data.prepare_job import PrepareJob
from podtune.data.prepare_report import PLACES, REASON_EQUAL, SourceReport
from podtune.data.rows import place

AUTO_FRACTION, AUTO_ROWS = 0.05, 500


@dataclass(frozen=True)
class Examples:
    """All examples of some chunks, one entry each, in the order of the data. start counts tokens within the chunk."""

    chunk: Int32[np.ndarray, "examples"]
    start: Int64[np.ndarray, "examples"]
    length: Int32[np.ndarray, "examples"]
    trained: Int32[np.ndarray, "examples"]
    digest: UInt64[np.ndarray, "examples 2"]
    piece: Int32[np.ndarray, "examples"]
    source: Int32[np.ndarray, "examples"]
    number: Int64[np.ndarray, "examples"]
    origin: Int32[np.ndarray, "examples"]

    def __len__(self) -> int:
        return len(self.length)

    def where(self, chosen: Bool[np.ndarray, "examples"] | Int64[np.ndarray, "chosen"]) -> "Examples":
        """The chosen entries."""
        return Examples(**{name: column[chosen] for name, column in vars(self).items()})


def join_chunks(chunks: Sequence[Chunk]) -> Examples:
    """The examples of all chunks."""

    def join(parts: list[np.ndarray], like: np.ndarray) -> np.ndarray:
        return np.concatenate([like, *parts])

    counts = [len(chunk.lengths) for chunk in chunks]
    starts = [np.cumsum(chunk.lengths, dtype=np.int64) - chunk.lengths for chunk in chunks]
    none, wide = np.empty(0, np.int32), np.empty(0, np.int64)
    return Examples(
        chunk=np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
        start=join(starts, wide),
        length=join([chunk.lengths for chunk in chunks], none),
        trained=join([chunk.trained for chunk in chunks], none),
        digest=join([chunk.digests for chunk in chunks], np.empty((0, 2), np.uint64)),
        piece=join([chunk.pieces for chunk in chunks], none),
        source=np.repeat(np.array([chunk.summary.source for chunk in chunks], np.int32), counts),
        number=join([chunk.numbers for chunk in chunks], wide),
        origin=join([chunk.origins for chunk in chunks], none),
    )


def select(
    job: PrepareJob, chunks: Sequence[Chunk], reports: list[SourceReport], notes: list[str]
) -> tuple[Examples, Examples]:
    """Examples as one epoch of training sees them, and the held-out ones. Completes the reports and the notes."""

    def where(at: int) -> str:
        chunk = chunks[int(train.chunk[at])]
        return place(chunk.origin_names[int(train.origin[at])], int(train.number[at]))

    examples = join_chunks(chunks)
    train = examples.where(examples.source < job.train_inputs)
    validation = examples.where(examples.source >= job.train_inputs)
    kept = first_of_equals(train)
    repeated = int(np.count_nonzero(~kept & (train.piece == 0)))
    if job.data.deduplicate:
        for source in range(job.train_inputs):
            gone = np.flatnonzero(~kept & (train.source == source) & (train.piece == 0))
            if len(gone):
                reports[source].dropped.add(REASON_EQUAL, *map(where, gone[:PLACES].tolist()), count=len(gone))
                reports[source].kept -= len(gone)
        train = train.where(kept)
    elif repeated:
        notes.append(f"equal to an earlier row: {counted(repeated, 'row')}; data.deduplicate: true drops such rows")
    if isinstance(job.data.validation, tuple):
        shared = int(np.isin(validation.digest[validation.piece == 0, 0], train.digest[:, 0]).sum())
        if shared:
            notes.append(f"{shared:,} validation rows are also trained on")
    else:
        held_out, note = held_out_rows(train, job.data.validation)
        notes += [note] if note else []
        validation, train = train.where(held_out), train.where(~held_out)
    weights = [source.weight for source in job.data.train]
    seen = passes(train, weights)
    notes += _left_out_by_weight(train, seen, weights, reports)
    return train.where(seen), validation


def _left_out_by_weight(
    train: Examples, seen: Int64[np.ndarray, "seen"], weights: Sequence[float], reports: Sequence[SourceReport]
) -> Iterator[str]:
    """What is to be said of the sources whose weight leaves rows out."""
    first = train.piece == 0
    for source, weight in enumerate(weights):
        rows = int(np.count_nonzero(first & (train.source == source)))
        if weight < 1 and rows:
            left = int(np.count_nonzero(first[seen] & (train.source[seen] == source)))
            yield f"{reports[source].name}: weight {weight:g} trains on {left:,} of {counted(rows, 'row')}"


def first_of_equals(examples: Examples) -> Bool[np.ndarray, "examples"]:
    """Marks the first of each set of equal examples."""
    # 64 bits of the digest tell rows apart; among ten million, the odds of one mistake are about one in a million.
    _, first = np.unique(examples.digest[:, 1] + examples.piece.astype(np.uint64), return_index=True)
    marked = np.zeros(len(examples), np.bool_)
    marked[first] = True
    return marked


def held_out_rows(
    examples: Examples, wanted: Literal["auto", "none"] | int | float
) -> tuple[Bool[np.ndarray, "examples"], str | None]:
    """Marks the examples to hold out, and a sentence for the user where it is not what one would expect.

    Rows are taken by the order of their digests, which the seed enters, so that equal rows stay on one side and adding
    a row moves no other. Raises UserError when nothing would be left to train on.
    """
    rows = examples.piece == 0
    total = int(rows.sum())
    count = _count_to_hold_out(wanted, total)
    marked = np.zeros(len(examples), np.bool_)
    if count == 0:
        if wanted == "auto":
            return marked, f"no validation split: {AUTO_FRACTION:.0%} of {counted(total, 'row')} is less than one row"
        return marked, None
    if count >= total:
        raise UserError(
            f"data.validation={wanted} holds out {count} of {total} rows, which leaves nothing to train on. "
            f"Hold out fewer, or write validation: none."
        )
    digests, sizes = np.unique(examples.digest[rows, 0], return_counts=True)
    fits = np.cumsum(sizes) <= count
    chosen = digests[fits]
    missing = count - int(sizes[fits].sum())
    if missing:  # a set of equal rows did not fit: fill up with single ones behind it
        singles = digests[~fits][sizes[~fits] == 1][:missing]
        missing -= len(singles)
        chosen = np.concatenate([chosen, singles])
    note = (
        f"{counted(count - missing, 'row')} held out rather than {count}: equal rows stay together" if missing else None
    )
    return np.isin(examples.digest[:, 0], chosen), note


def _count_to_hold_out(wanted: Literal["auto", "none"] | int | float, total: int) -> int:
    if wanted == "none":
        return 0
    if wanted == "auto":
        return min(AUTO_ROWS, int(AUTO_FRACTION * total))
    if isinstance(wanted, int):
        return wanted
    return max(1, round(wanted * total)) if total else 0


def passes(examples: Examples, weights: Sequence[float]) -> Int64[np.ndarray, "seen"]:
    """Indices of examples as an epoch sees them: a source of weight 2.5 twice, and half of its rows once more. At least
    one row of each source, however small its weight: a source that is named is trained on."""
    times = np.zeros(len(examples), np.int64)
    for source, weight in enumerate(weights):
        members = np.flatnonzero(examples.source == source)
        times[members] = int(weight)
        fraction = weight - int(weight)
        if fraction and len(members):
            digests = examples.digest[members, 1]
            rows, inverse = np.unique(digests, return_inverse=True)
            extra = np.arange(len(rows)) < max(round(fraction * len(rows)), int(weight < 1))
            times[members] += extra[inverse]
    return np.repeat(np.arange(len(examples), dtype=np.int64), times)
