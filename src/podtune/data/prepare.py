"""prepare: any data of the run file -> sharded TFRecord files of packed rows, kept by fingerprint.

The story: name the result by its fingerprint; if it is there, open it. Otherwise, alone in the folder: encode records
into chunks of examples, choose what is held out and how often each example is seen, pack, write shards, and only then
put the folder in its place. A killed preparation leaves `<name>.partial`, from which the next one goes on.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from podtune.config.errors import RunFailure, UserError
from podtune.config.rows import Data, Source
from podtune.data.fingerprint import FileHashes, fingerprint_of
from podtune.data.packing import Packing, one_example_a_row, pack_examples
from podtune.data.prepare_encode import Chunk, ChunkSummary, EncodeSettings, encode_chunk, read_chunk
from podtune.data.prepare_held_out import held_out_prompts
from podtune.data.prepare_inputs import Encoder, Input, chunked, open_input
from podtune.data.prepare_lock import preparation_lock
from podtune.data.prepare_progress import PrepareProgress
from podtune.data.prepare_report import REASON_EQUAL, PrepareReport, SourceReport, SplitReport
from podtune.data.prepare_select import Examples, first_of_equals, held_out_rows, join_chunks, passes
from podtune.data.prepare_workers import Workers
from podtune.data.prepare_write import WriteSettings, forget_chunks, shard_rows, write_plan, write_shard
from podtune.data.prepared import HELD_OUT, HeldOut, Prepared, PreparedSplit, open_prepared, write_manifest
from podtune.data.rows import Record, place
from podtune.hub.tokenizer import Tokenizer

__all__ = ["HeldOut", "PrepareReport", "Prepared", "PreparedSplit", "default_cache", "prepare"]

_WORTH_PROCESSES = 8 << 20  # bytes of data
_READ_ON_SECONDS = 20.0  # after a first fault: to name more of them, not to tokenise the rest in vain
_ROUND_TO = 64  # rows of small data sets are no longer than they need be, but for this


def prepare(
    data: Data,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    cache: Path | None = None,
    seed: int = 0,
    progress: Console | None = None,
) -> Prepared:
    """The prepared data set, from the cache if it is there. seed chooses the held-out rows.

    progress: where to show what is done; None for silence. Raises UserError for faults in the data or an unusable
    cache folder, RunFailure when the disk fills or a process dies.
    """
    cache = cache or (Path(data.cache) if data.cache else default_cache())
    show = PrepareProgress(progress)
    with show, _disk_faults(cache):
        train = [open_input(data, source) for source in data.train]
        validation = (
            [open_input(data, source) for source in data.validation] if isinstance(data.validation, tuple) else []
        )
        settings = _settings(
            data, tokenizer, max_length, seed, [train, validation], FileHashes(cache / "hashes.json"), show
        )
        fingerprint = fingerprint_of(settings)
        folder = cache / f"{_label(data.train[0])}-{fingerprint[:16]}"
        found = open_prepared(folder)
        if found is not None:
            show.say(f"prepared data found in {folder}: nothing to do")
            return found
        cache.mkdir(parents=True, exist_ok=True)
        with preparation_lock(folder.with_name(folder.name + ".lock"), waiting=show.say):
            found = open_prepared(folder)  # another process may have made it while we waited
            if found is not None:
                show.say(f"prepared data found in {folder}: nothing to do")
                return found
            job = _Job(
                data, tokenizer, max_length, seed, folder, fingerprint, settings, [*train, *validation], len(train)
            )
            return _prepare_anew(job, show)


def default_cache() -> Path:
    """Where prepared data is kept when the run file does not say."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podtune" / "prepared"


@dataclass(frozen=True)
class _Job:
    """Everything one preparation works from. The first train_inputs of inputs are trained on, the others held out."""

    data: Data
    tokenizer: Tokenizer
    max_length: int
    seed: int
    folder: Path
    fingerprint: str
    settings: dict[str, Any]
    inputs: list[Input]
    train_inputs: int

    @property
    def staging(self) -> Path:
        return self.folder.with_name(self.folder.name + ".partial")

    @property
    def chunks(self) -> Path:
        return self.staging / "examples"


def _prepare_anew(job: _Job, show: PrepareProgress) -> Prepared:
    started = time.monotonic()
    if job.folder.exists():  # without a manifest: not ours to trust
        shutil.rmtree(job.folder)
    if job.staging.exists():
        show.say(f"going on with what an earlier, unfinished preparation left in {job.staging}")
    job.chunks.mkdir(parents=True, exist_ok=True)
    chunks, notes = _encode(job, show)
    reports = _source_reports(job, chunks)
    _refuse_faults(job, chunks)
    train, validation = _select(job, chunks, reports, notes)
    _refuse_nothing(job, train, reports)
    splits = _write(job, train, validation, show)
    held_out = held_out_prompts(validation, job.chunks, chunks, job.tokenizer) if len(validation) else []
    (job.staging / HELD_OUT).write_text(json.dumps(held_out))
    longest = int(train.length.max(initial=0))
    report = PrepareReport(
        sources=tuple(reports),
        splits=tuple(_split_report(split) for split in splits),
        longest=longest,
        notes=tuple(notes),
        seconds=time.monotonic() - started,
    )
    by_name = {split.name: split for split in splits}
    prepared = Prepared(job.staging, job.fingerprint, by_name["train"], by_name.get("validation"), report)
    forget_chunks()
    shutil.rmtree(job.chunks)
    write_manifest(prepared, job.staging, job.settings)
    os.rename(job.staging, job.folder)
    finished = open_prepared(job.folder, reused=False)
    assert finished is not None, "the folder was renamed just now"
    show.say(f"prepared {report.splits[0].rows:,} rows in {report.seconds:.1f} s into {job.folder}")
    return finished


def _encode(job: _Job, show: PrepareProgress) -> tuple[list[Chunk], list[str]]:
    """All chunks, in the order of the data, and what each source was read as. Chunks that are there are kept."""
    count = 0
    fault_seen: float | None = None

    def tasks() -> Iterator[tuple[int, int, Sequence[Record]]]:
        nonlocal count
        for source, (_, records) in enumerate(opened):
            for chunk in chunked(records):
                if fault_seen is not None and time.monotonic() - fault_seen > _READ_ON_SECONDS:
                    return
                number, count = count, count + 1
                done = read_chunk(job.chunks, number)
                if done is None or done.summary.source != source:
                    yield number, source, chunk
                else:
                    show.advance(done.summary.read)

    opened = [entry.read() for entry in job.inputs]
    encoders = [shape and Encoder(job.tokenizer, job.data.train_on, shape) for shape, _ in opened]
    settings = EncodeSettings(job.chunks, job.max_length, job.data.too_long, job.seed, tuple(encoders))
    show.stage("tokenising", "rows")
    with Workers(_workers(job), settings) as workers:
        for summary in workers.run(encode_chunk, tasks()):
            show.advance(summary.read)
            if summary.refused.total and fault_seen is None:
                fault_seen = time.monotonic()
    chunks = [read_chunk(job.chunks, number) for number in range(count)]
    whole = [chunk for chunk in chunks if chunk is not None]
    if len(whole) < count:
        raise RunFailure(f"{job.chunks}: chunk {chunks.index(None)} went missing while preparing. Run again.")
    shapes = [
        f"{entry.name}: {shape.describe()}" for entry, (shape, _) in zip(job.inputs, opened, strict=True) if shape
    ]
    return whole, shapes


def _select(
    job: _Job, chunks: Sequence[Chunk], reports: list[SourceReport], notes: list[str]
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
            gone = ~kept & (train.source == source) & (train.piece == 0)
            for at in np.flatnonzero(gone).tolist():
                reports[source].dropped.add(REASON_EQUAL, where(at))
            reports[source].kept -= int(np.count_nonzero(gone))
        train = train.where(kept)
    elif repeated:
        notes.append(f"{repeated:,} rows are equal to an earlier one; data.deduplicate: true drops them")
    if isinstance(job.data.validation, tuple):
        shared = int(np.isin(validation.digest[validation.piece == 0, 0], train.digest[:, 0]).sum())
        if shared:
            notes.append(f"{shared:,} validation rows are also trained on")
    else:
        held_out, note = held_out_rows(train, job.data.validation)
        notes += [note] if note else []
        validation, train = train.where(held_out), train.where(~held_out)
    weights = [source.weight for source in job.data.train]
    return train.where(passes(train, weights)), validation


def _write(job: _Job, train: Examples, validation: Examples, show: PrepareProgress) -> list[PreparedSplit]:
    """Packs both splits and writes their shards."""
    row_tokens = _row_tokens(job, train, validation)
    plans: list[tuple[str, Examples, Packing]] = []
    show.stage("packing", "examples", len(train) + len(validation))
    for name, examples in (("train", train), ("validation", validation)):
        if len(examples):
            packing = (
                pack_examples(examples.length, row_tokens) if job.data.packing else one_example_a_row(len(examples))
            )
            write_plan(job.chunks, name, examples, packing)
            plans.append((name, examples, packing))
            show.advance(len(examples))
    splits = [
        PreparedSplit(
            folder=job.staging,
            name=name,
            fingerprint=job.fingerprint,
            rows=len(packing),
            row_tokens=row_tokens,
            examples=len(examples),
            tokens=int(examples.length.sum(dtype=np.int64)),
            trained_tokens=int(examples.trained.sum(dtype=np.int64)),
            shard_rows=shard_rows(len(packing), row_tokens),
        )
        for name, examples, packing in plans
    ]
    show.stage("writing", "rows", sum(split.rows for split in splits))
    tasks = [(split.name, shard, split.shard_rows) for split in splits for shard in range(len(split.shard_rows))]
    with Workers(min(_workers(job), len(tasks)), WriteSettings(job.staging, job.chunks)) as workers:
        for rows in workers.run(write_shard, tasks):
            show.advance(rows)
    return splits


def _row_tokens(job: _Job, train: Examples, validation: Examples) -> int:
    """max_length, or less where nothing needs a row as long as that."""
    longest = max(int(train.length.max(initial=1)), int(validation.length.max(initial=1)))
    needed = max(longest, int(train.length.sum(dtype=np.int64))) if job.data.packing else longest
    return min(job.max_length, -(-needed // _ROUND_TO) * _ROUND_TO)


def _settings(
    data: Data,
    tokenizer: Tokenizer,
    max_length: int,
    seed: int,
    inputs: Sequence[Sequence[Input]],
    hashes: FileHashes,
    show: PrepareProgress,
) -> dict[str, Any]:
    """Everything that changes a prepared byte."""
    files = [path for group in inputs for entry in group for path in entry.local_files]
    show.stage("reading", "bytes", sum(path.stat().st_size for path in files))
    digests = dict(zip(files, hashes.of(files, show.advance), strict=True))
    return {
        "train": [entry.identity(digests) for entry in inputs[0]],
        "weights": [source.weight for source in data.train],
        "validation": [entry.identity(digests) for entry in inputs[1]] or data.validation,
        "tokenizer": tokenizer.fingerprint,
        "template": tokenizer.chat_template,
        "max_length": max_length,
        "seed": seed,
        **{name: getattr(data, name) for name in ("train_on", "too_long", "packing", "deduplicate")},
    }


def _source_reports(job: _Job, chunks: Sequence[Chunk]) -> list[SourceReport]:
    reports = [SourceReport(entry.name, entry.weight) for entry in job.inputs]
    for chunk in chunks:
        summary = chunk.summary
        report = reports[summary.source]
        report.read += summary.read
        report.kept += summary.kept
        report.dropped.merge(summary.dropped)
        report.changed.merge(summary.changed)
        report.noted.merge(summary.notes)
    return reports


def _refuse_faults(job: _Job, chunks: Sequence[Chunk]) -> None:
    """Raises UserError naming the first refused rows of each kind and how many there are."""
    total = ChunkSummary(source=0)
    for chunk in chunks:
        total.refused.merge(chunk.summary.refused)
    if not total.refused.counts:
        return
    lines: list[str] = []
    for kind, count in total.refused.counts.items():
        named = total.refused.places[kind]
        lines.append(f"{count:,} {'row' if count == 1 else 'rows'} {REFUSALS.get(kind, kind)}:")
        lines += [f"  {place}" for place in named]
        lines += [f"  and {count - len(named):,} more"] if count > len(named) else []
    shutil.rmtree(job.staging)  # the data has to change, and with it the fingerprint
    raise UserError("\n".join(lines))


REFUSALS = {
    "nothing_to_train": "with nothing to train on",
    "too_long": "longer than max_length (data.too_long: refuse; drop and truncate go on without)",
    "template": "that the chat template refuses",
    "not_rendered": "that the chat template leaves out",
    "invalid": "of the wrong shape",
}


def _refuse_nothing(job: _Job, train: Examples, reports: Sequence[SourceReport]) -> None:
    if len(train):
        return
    read = sum(report.read for report in reports[: job.train_inputs])
    reasons = {reason: count for report in reports for reason, count in report.dropped.counts.items()}
    why = "; ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    where = ", ".join(entry.name for entry in job.inputs[: job.train_inputs])
    if not read:
        raise UserError(f"{where}: no rows. There is nothing to train on.")
    raise UserError(
        f"{where}: none of {read:,} rows is left to train on ({why or 'the weights leave none'}). max_length is "
        f"{job.max_length}: raise data.max_length, or set data.too_long: truncate."
    )


def _split_report(split: PreparedSplit) -> SplitReport:
    return SplitReport(split.name, split.examples, split.rows, split.row_tokens, split.tokens, split.trained_tokens)


def _workers(job: _Job) -> int:
    """Processes to use: none for data that is prepared sooner than they start."""
    if job.data.workers is not None:
        return job.data.workers
    if all(file.local is not None for entry in job.inputs for file in entry.files):
        size = sum(path.stat().st_size for entry in job.inputs for path in entry.local_files)
        if size < _WORTH_PROCESSES:
            return 0
    return len(os.sched_getaffinity(0))


def _label(source: Source) -> str:
    """A word of the folder's name, for people."""
    stem = source.path.rstrip("/").rsplit("/", 1)[-1].split(".", 1)[0]
    return "".join(letter for letter in stem if letter.isalnum() or letter in "-_")[:40] or "data"


@contextmanager
def _disk_faults(cache: Path) -> Generator[None]:
    """Turns what a disk may answer into what a user can do about it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailure(
                f"the disk of {cache} is full. What is finished is kept: free some space and run again, "
                "or point data.cache at another disk."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise UserError(
                f"prepared data cannot be written to {cache}: {error.strerror}. "
                "Point data.cache at a folder you can write to."
            ) from error
        raise RunFailure(f"preparing failed: {error}") from error
