"""prepare: any data of the run file -> sharded TFRecord files of packed rows, kept by fingerprint.

The story: name the result by its fingerprint; if it is there, open it. Otherwise, alone in the folder: encode records
into chunks of examples, choose what is held out and how often each example is seen, pack, write shards, and only then
put the folder in its place. A killed preparation leaves `<fingerprint>.partial` and `.examples`, from which the next
one goes on.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from podtune.config.errors import RunFailure, UserError
from podtune.config.rows import Data
from podtune.config.training import USUAL_STEPS
from podtune.config.wording import counted
from podtune.data.packing import Packing, one_example_a_row, pack_examples
from podtune.data.prepare_encode import Chunk, WorkSettings, encode_chunk, read_chunk
from podtune.data.prepare_held_out import held_out_prompts
from podtune.data.prepare_inputs import Encoder, chunked
from podtune.data.prepare_job import PrepareJob, open_prepare_job
from podtune.data.prepare_lock import preparation_lock
from podtune.data.prepare_outcome import paragraphs_hint, refuse_faults, refuse_nothing, source_reports
from podtune.data.prepare_progress import PrepareProgress
from podtune.data.prepare_report import PrepareReport, SplitReport
from podtune.data.prepare_select import Examples, select
from podtune.data.prepare_workers import Workers
from podtune.data.prepare_write import forget_chunks, shard_rows, write_plan, write_shard
from podtune.data.prepared import HELD_OUT, HeldOut, Prepared, PreparedSplit, open_prepared, write_manifest
from podtune.data.rows import Record, Refused
from podtune.hub.addresses import is_address
from podtune.hub.tokenizer import Tokenizer

__all__ = ["HeldOut", "PrepareReport", "Prepared", "PreparedSplit", "default_cache", "prepare"]

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
    if data.cache is not None and is_address(data.cache):
        raise UserError(f"data.cache: {data.cache} is not a folder of this machine, which prepared data needs.")
    show = PrepareProgress(progress)
    with show, _disk_faults(cache):
        job = open_prepare_job(data, tokenizer, show, max_length=max_length, seed=seed, cache=cache)
        found = open_prepared(job.folder)
        if found is None:
            cache.mkdir(parents=True, exist_ok=True)
            with preparation_lock(job.folder.with_name(job.folder.name + ".lock"), waiting=show.say):
                found = open_prepared(job.folder)  # another process may have made it while we waited
                if found is None:
                    return _told(job, _prepare_anew(job, show))
        shutil.rmtree(job.chunks, ignore_errors=True)  # left when the last step was killed
        show.say(f"prepared data found in {found.folder}: nothing to do")
        return _told(job, found)


def default_cache() -> Path:
    """Where prepared data is kept when the run file does not say."""
    return Path(os.environ.get("PODTUNE_CACHE", "~/.cache/podtune")).expanduser() / "prepared"


def _told(job: PrepareJob, prepared: Prepared) -> Prepared:
    """With a report that speaks of the files of this run: those it was prepared from may have had other names."""
    sources = [(entry.name, entry.file_names) for entry in job.inputs]
    notes = [f"{entry.name}: {entry.left_out}" for entry in job.inputs if entry.left_out]
    return replace(prepared, report=prepared.report.told_of(sources, notes))


def _prepare_anew(job: PrepareJob, show: PrepareProgress) -> Prepared:
    started = time.monotonic()
    if job.folder.exists():  # without a manifest: not ours to trust
        shutil.rmtree(job.folder)
    if job.staging.exists() or job.chunks.exists():
        show.say("going on with what an earlier, unfinished preparation left")
    for folder in (job.staging, job.chunks):
        folder.mkdir(exist_ok=True)
    try:
        return _prepare_in(job, show, started)
    except UserError:  # something has to change, and with it the fingerprint
        for folder in (job.staging, job.chunks):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _prepare_in(job: PrepareJob, show: PrepareProgress, started: float) -> Prepared:
    opened = [entry.read() for entry in job.inputs]
    encoders = tuple(shape and Encoder(job.tokenizer, job.data.train_on, shape) for shape, _ in opened)
    settings = WorkSettings(job.chunks, job.staging, job.max_length, job.data.too_long, job.seed, encoders)
    with Workers(job.workers(), settings, job.chunks) as workers:
        chunks = _encode(job, [records for _, records in opened], workers, show)
        reports = source_reports(job, chunks)
        notes = [
            f"{entry.name}: {shape.describe()}" for entry, (shape, _) in zip(job.inputs, opened, strict=True) if shape
        ]
        train, validation = select(job, chunks, reports, notes)
        if not len(validation) and job.data.validation == "auto":
            notes[-1] += paragraphs_hint(job, reports[: job.train_inputs])
        refuse_nothing(job, train, reports[: job.train_inputs], "train")
        if len(reports) > job.train_inputs:
            refuse_nothing(job, validation, reports[job.train_inputs :], "validation")
        splits = _write(job, {"train": train, "validation": validation}, workers, show)
    held_out = held_out_prompts(validation, job.chunks, chunks, job.tokenizer)
    (job.staging / HELD_OUT).write_text(json.dumps(held_out))
    forget_chunks()
    report = PrepareReport(
        sources=tuple(reports),
        splits=tuple(_split_report(split) for split in splits),
        longest=max(int(examples.length.max(initial=0)) for examples in (train, validation)),
        notes=tuple(notes),
        seconds=time.monotonic() - started,
    )
    by_name = {split.name: split for split in splits}
    prepared = Prepared(job.staging, job.fingerprint, by_name["train"], by_name.get("validation"), report)
    for left in job.staging.glob("*.tmp*"):  # of processes that were killed
        left.unlink()
    write_manifest(prepared, job.staging, job.settings)
    os.rename(job.staging, job.folder)
    shutil.rmtree(job.chunks, ignore_errors=True)
    finished = open_prepared(job.folder, reused=False)
    assert finished is not None, "the folder was renamed just now"
    show.say(f"prepared {counted(finished.train.rows, 'row')} in {report.seconds:.1f} s into {job.folder}")
    return finished


def _encode(
    job: PrepareJob,
    sources: Sequence[Iterator[Record | Refused]],
    workers: Workers[WorkSettings],
    show: PrepareProgress,
) -> list[Chunk]:
    """All chunks, in the order of the data. Those that are there are kept.

    Raises UserError for refused rows, RunFailure when a file changed meanwhile.
    """
    count = 0
    fault_seen: float | None = None
    read_all = True

    def tasks() -> Iterator[tuple[int, int, Sequence[Record | Refused]]]:
        nonlocal count, read_all
        for source, records in enumerate(sources):
            for chunk in chunked(records):
                if fault_seen is not None and time.monotonic() - fault_seen > _READ_ON_SECONDS:
                    read_all = False
                    return
                number, count = count, count + 1
                done = read_chunk(job.chunks, number)
                if done is None or done.summary.source != source:
                    yield number, source, chunk
                else:
                    show.advance(done.summary.read)

    show.stage("tokenising", "rows")
    for summary in workers.run(encode_chunk, tasks()):
        show.advance(summary.read)
        if summary.refused.total and fault_seen is None:
            fault_seen = time.monotonic()
    found = [read_chunk(job.chunks, number) for number in range(count)]
    chunks = [chunk for chunk in found if chunk is not None]
    if len(chunks) < count:
        raise RunFailure(f"{job.chunks}: chunk {found.index(None)} went missing while preparing. Run again.")
    changed = job.hashes.changed(job.local_files)
    if changed:
        shutil.rmtree(job.chunks)
        raise RunFailure(f"{changed[0]} changed while it was read. Run again when it is whole.")
    refuse_faults(chunks, read_all=read_all)
    return chunks


def _write(
    job: PrepareJob, examples_of: dict[str, Examples], workers: Workers[WorkSettings], show: PrepareProgress
) -> list[PreparedSplit]:
    """Packs the splits that have examples and writes their shards."""
    row_tokens = _row_tokens(job, examples_of["train"], examples_of["validation"])
    plans: list[tuple[str, Examples, Packing]] = []
    show.stage("packing", "examples", sum(map(len, examples_of.values())))
    for name, examples in examples_of.items():
        if len(examples):
            packed = job.data.packing
            packing = pack_examples(examples.length, row_tokens) if packed else one_example_a_row(len(examples))
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
    for rows in workers.run(write_shard, tasks):
        show.advance(rows)
    return splits


def _row_tokens(job: PrepareJob, train: Examples, validation: Examples) -> int:
    """max_length, or less where nothing needs a row as long as that, or where it was not asked for and would put a
    small data set into a handful of rows, which make the steps."""
    longest = max(int(train.length.max(initial=1)), int(validation.length.max(initial=1)))
    tokens = int(train.length.sum(dtype=np.int64)) if job.data.packing else 0
    needed = max(longest, tokens if job.data.max_length is not None else -(-tokens // USUAL_STEPS))
    return min(job.max_length, -(-needed // _ROUND_TO) * _ROUND_TO)


def _split_report(split: PreparedSplit) -> SplitReport:
    return SplitReport(split.name, split.examples, split.rows, split.row_tokens, split.tokens, split.trained_tokens)


@contextmanager
def _disk_faults(cache: Path) -> Generator[None]:
    """Turns what a disk may answer into what a user can do about it."""
    try:
        yield
    except OSError as error:
        named = str(error.filename) if isinstance(error.filename, str | Path) else ""
        if named and not Path(named).is_relative_to(cache) and error.errno in (errno.EACCES, errno.EPERM, errno.EIO):
            raise UserError(f"data: {named} cannot be read: {error.strerror}.") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailure(
                f"the disk of {cache} is full. What is finished is kept: free some space and run again, "
                "or point data.cache at another disk."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(
                f"prepared data cannot be written to {cache}: {error.strerror}. "
                "Point data.cache at a folder you can write to."
            ) from error
        raise RunFailure(f"preparing failed: {error}") from error
