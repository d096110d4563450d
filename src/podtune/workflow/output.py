"""The output folder: whose it is, what is in it, and how far its run has come. Used by every stage and by train, eval,
export and chat, which take the folder in place of asking anything again."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from podtune.config.errors import ConfigError, RunFailure, UserError
from podtune.config.loading import dump_run, load_run
from podtune.config.schema import Run
from podtune.export.folders import write_json, write_text
from podtune.hub.addresses import check_address, is_address
from podtune.train.output import local_folder
from podtune.workflow.full_disk import full_disk_told
from podtune.workflow.other_run import refuse_other_settings
from podtune.workflow.places import with_full_paths
from podtune.workflow.remote_output import fetch, forget, listed, publish

STATES = ("started", "trained", "exported", "finished")
"""How far a run has come, in order."""

_STORES = ("gs", "s3")  # of the addresses that files can be copied to, those that orbax writes to
_LOCK_TRIES = 5  # each fails only when another run has removed the folder since it was made
_WITHOUT_RECORD = (
    "What the run has exported beside it is not touched by that, and `podtune chat` takes it. Name another output, or "
    "start anew with --fresh."
)
_OF_ONE_RUN = (
    "checkpoints", "model", "adapter", "tensorboard", "metrics.jsonl", "samples.jsonl", "report.html", "README.md",
)  # fmt: skip


@dataclass
class OutputFolder:
    """One run's folder. `record` is run.json. address: where it is published, when that is an object store.

    writes: False in every process but the first of several. anew: no earlier run is gone on with. Until `take` nothing
    is written or removed: a run that is refused at its beginning leaves the folder as it was.
    """

    path: Path
    record: dict[str, Any] = field(default_factory=dict)
    address: str | None = None
    writes: bool = True
    anew: bool = False

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def state(self) -> str | None:
        return self.record.get("state")

    def has_reached(self, state: str) -> bool:
        return self.state in STATES and STATES.index(self.state) >= STATES.index(state)

    def update(self, **facts: Any) -> None:
        """Adds to run.json."""
        self.record.update(facts)
        if self.writes:
            write_json(self.path / "run.json", self.record)

    def reach(self, state: str, **facts: Any) -> None:
        """Says in run.json how far the run is; never back."""
        self.update(**facts, **({} if self.has_reached(state) else {"state": state}))

    def take(self, run: Run) -> None:
        """The folder is this run's from here on, whose model and data have been opened: run.yaml says so."""
        if self.anew:
            self._start_anew(run)
        elif self.writes:
            self._keep(run)

    def _keep(self, run: Run) -> None:
        write_text(self.path / "run.yaml", dump_run(with_full_paths(run)))

    def _start_anew(self, run: Run) -> None:
        """Removes all that an earlier run has made, and starts the record. Killed in between, it is done again by the
        next run, for run.json says what is under way."""
        self.anew, self.record = False, {}
        if is_output_folder(self.path):
            self.update(removing=True)  # first: without a state, no run.yaml beside it counts
            self.publish(whole=False)
        self._keep(run)
        for name in _OF_ONE_RUN:
            path = self.path / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        if self.address is not None:
            forget(self.address, _OF_ONE_RUN)
        self.record = {}
        self.update(state="started")

    def publish(self, *, whole: bool) -> None:
        """Copies what is new to the address, if there is one: everything, or the small files alone."""
        if self.address is not None and self.writes and not self.anew:
            publish(self.path, self.address, whole=whole)

    def load_run(self, overrides: Sequence[str] = ()) -> Run:
        """The run as it was resolved, with settings from the command line laid over it."""
        return _load_run(self.path, self.path, overrides=overrides)


def is_output_folder(path: Path) -> bool:
    return (path / "run.json").is_file() and (path / "run.yaml").is_file()


def refuse_remote(address: str, *, command: str) -> None:
    """Raises UserError for a run in an object store, whose checkpoints `podtune eval` and `export` do not fetch."""
    if is_address(address):
        copy = "aws s3 cp --recursive" if address.startswith("s3") else "gcloud storage cp -r"
        raise UserError(
            f"{address}: `podtune {command}` does not read runs from an object store. Copy the folder to this machine "
            f"(`{copy} {address} COPY`) and give the copy: podtune {command} COPY"
        )


def open_output(path: Path) -> OutputFolder:
    """A folder that a run has written. Raises UserError when it is something else."""
    if not path.exists():
        raise UserError(f"{path}: there is no such folder. Give the output folder of a run.")
    if not is_output_folder(path):
        raise UserError(f"{path} is not the output folder of a run: it has no run.json and run.yaml.")
    return OutputFolder(path, _read_record(path, path))


def check_usable(run: Run, *, fresh: bool = False) -> None:
    """Refuses, before anything is done, an output folder that holds something else or another run, or is read-only."""
    if is_address(run.output.path):
        _check_remote(run, fresh=fresh)
        return
    try:
        _check_local(Path(run.output.path), run, fresh=fresh)
    except OSError as error:
        raise UserError(
            f"output: {error.filename or run.output.path} cannot be used ({error.strerror}). Name another folder."
        ) from error


def _check_local(path: Path, run: Run, *, fresh: bool) -> None:
    if path.is_symlink() and not path.exists():
        raise UserError(f"output: {path} is a link to {path.readlink()}, which is not there. Make that folder first.")
    if path.exists() and not path.is_dir():
        raise UserError(f"output: {path} is a file. Name a folder that does not exist yet, or an empty one.")
    if is_output_folder(path):
        if not fresh:
            _refuse_another_run(path, run, path)
    elif path.is_dir():
        names = [one.name for one in path.iterdir() if not one.name.startswith(".")]
        _refuse_foreign(str(path), names, is_ours=_is_dumped(path / "run.yaml"))
    _refuse_inside(path, run)
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    try:  # os.access says yes to root for /proc and for what is mounted read-only
        os.rmdir(tempfile.mkdtemp(prefix=".podtune-", dir=existing))
    except OSError as error:
        raise UserError(f"output: {existing} cannot be written to ({error.strerror}). Name another folder.") from error


@contextmanager
def claimed(run: Run, *, fresh: bool = False, first: bool = True) -> Iterator[OutputFolder]:
    """The run's folder, made if it is not there, and kept from every other run until the block ends.

    What is in it stays as it is until `OutputFolder.take`; folders made for a block that ends before are removed (the
    local copy of what an object store holds is not).
    fresh: what an earlier run has made there is to go. first: False in the other processes of one run, which write
    nothing.
    """
    if not first:
        yield OutputFolder(local_folder(run.output.path), writes=False)
        return
    check_usable(run, fresh=fresh)
    path = local_folder(run.output.path)
    address = run.output.path if is_address(run.output.path) else None
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    with _locked(path), full_disk_told(path):
        if address is not None:
            fetch(address, path)
        if not fresh:  # another may have run there since
            _refuse_another_run(path, run, address or path)
        folder = OutputFolder(path, address=address, anew=fresh or not has_begun(path, address))
        if not folder.anew:
            folder.record = _read_record(path, address or path)
        try:
            yield folder
        finally:
            if folder.anew:
                _remove_empty(made)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The folder, made if it is not there, with its lock held."""
    for _ in range(_LOCK_TRIES):
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _open_if_there(path)
        except OSError as error:
            raise UserError(f"output: {path} cannot be made ({error.strerror}). Name another folder.") from error
        if lock is None:
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(
                    f"output: another podtune is running in {path}. Wait for it to end, or name another folder."
                ) from error
            if _is_in_place(lock, path / ".lock"):
                yield
                return
    raise UserError(f"output: {path} is made and removed by other runs all the while. Name another folder.")


def _open_if_there(folder: Path) -> TextIO | None:
    """The folder's lock, not yet held; None when another run has just removed the folder."""
    try:
        return (folder / ".lock").open("a")
    except FileNotFoundError:
        return None


def _is_in_place(lock: TextIO, path: Path) -> bool:
    """Whether the open lock is still the file of that name. One that was removed with its folder before it was ours
    keeps nobody out."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_empty(made: Sequence[Path]) -> None:
    """Takes folders away again that were made for a run which then did nothing; made[0] holds the lock."""
    with suppress(OSError):  # what ended the run is told, and not that its folder is gone already
        if made and [one.name for one in made[0].iterdir()] == [".lock"]:
            (made[0] / ".lock").unlink()
            for folder in made:
                folder.rmdir()


def _check_remote(run: Run, *, fresh: bool) -> None:
    """As `check_usable`, for an object store: what it holds is listed, and its run.yaml read."""
    address = run.output.path
    check_store(address)
    names = listed(address)
    if {"run.json", "run.yaml"} <= names:
        if not fresh:
            with tempfile.TemporaryDirectory() as scratch:
                fetch(address, Path(scratch))
                _refuse_another_run(Path(scratch), run, address)
    else:
        _refuse_foreign(address, sorted(names), is_ours=True)


def check_store(address: str) -> None:
    """Raises UserError for an address that checkpoints cannot be written to from here. Asks no network."""
    scheme = address.partition("://")[0]
    if scheme not in _STORES:
        known = ", ".join(f"{name}://" for name in _STORES)
        raise UserError(f"output: {address}: a run is not kept in {scheme}://. Name a folder, or use {known}.")
    try:
        check_address(address)
    except UserError as error:
        raise UserError(f"output: {error}") from error


def _refuse_foreign(path: str, names: Sequence[str], *, is_ours: bool) -> None:
    """A run that was killed at its very start leaves its run.yaml alone; anything else is not ours."""
    if set(names) - ({"run.yaml"} if is_ours else set()):
        raise UserError(
            f"output: {path} already holds something else ({', '.join(sorted(names)[:3])}, …), which podtune does not "
            "touch. Name a folder that does not exist yet, or an empty one."
        )


def _is_dumped(file: Path) -> bool:
    """Whether a run file is as podtune writes it, and not one that a person has written."""
    try:
        return file.read_text(encoding="utf-8") == dump_run(load_run(file))
    except (OSError, ValueError, ConfigError):
        return False


def _refuse_inside(path: Path, run: Run) -> None:
    """What is read must not lie in what is written: starting anew removes it, and preparing would fill the folder."""
    rows = run.data.validation if isinstance(run.data.validation, tuple) else ()
    read = {
        "model": run.model.source,
        "model.chat_template": run.model.chat_template,
        "data.cache": run.data.cache,
        **{f"data ({source.path})": source.path for source in (*run.data.train, *rows)},
    }
    for key, source in read.items():
        if source is not None and not is_address(source) and (key == "data.cache" or os.path.exists(source)):
            inside = Path(os.path.realpath(source))
            if path.resolve() in (inside, *inside.parents):
                raise UserError(
                    f"output: {path} holds what the run reads, {key}: {source}. Name another output, or move that out "
                    "of it first."
                )


def has_begun(path: Path, address: str | None = None) -> bool:
    """Whether a folder holds a run with something to lose. One that was refused or killed before its first checkpoint
    has nothing, and whatever run comes next may have the folder. address: where its checkpoints are, if elsewhere."""
    if not is_output_folder(path):
        return False
    state = _read_record(path, address or path).get("state")
    if state in STATES[1:]:
        return True
    # Without a state, what is there was being removed.
    return state is not None and has_checkpoint(path, address)


def has_checkpoint(path: Path, address: str | None = None) -> bool:
    """Whether a run has saved what it trained. One that was broken off while being written has no number for a name."""
    if address is not None:
        return any(name.isdigit() for name in listed(f"{address.rstrip('/')}/checkpoints"))
    folder = path / "checkpoints"
    return folder.is_dir() and any(one.name.isdigit() for one in folder.iterdir())


def _refuse_another_run(path: Path, run: Run, name: Path | str) -> None:
    """name: what the folder is known by, of which `path` may be a copy."""
    address = name if isinstance(name, str) else None
    if not has_begun(path, address):
        return
    has_model = address is not None or (path / "model").is_dir()
    refuse_other_settings(_load_run(path, name), run, name, has_model=has_model)


def _load_run(path: Path, name: Path | str, *, overrides: Sequence[str] = ()) -> Run:
    try:
        return load_run(path / "run.yaml", overrides)
    except ConfigError as error:
        if any(fault.startswith("command line") for fault in error.faults):
            raise
        faults = "\n".join(fault.replace(str(path), str(name)) for fault in error.faults)
        raise RunFailure(f"{faults}\nThis is how {name} remembers its run. {_WITHOUT_RECORD}") from error


def _read_record(path: Path, name: Path | str) -> dict[str, Any]:
    try:
        record = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFailure(f"{name}/run.json: cannot be read ({error}). {_WITHOUT_RECORD}") from error
    parts = (record.get(name, {}) for name in ("model", "data", "results")) if isinstance(record, dict) else (None,)
    if not all(isinstance(part, dict) for part in parts):
        raise RunFailure(f"{name}/run.json: not a record of a run. {_WITHOUT_RECORD}")
    return record
