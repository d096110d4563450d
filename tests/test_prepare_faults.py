"""prepare when things go wrong: killed, it goes on; two at once make it once; and disks have limits."""

import errno
import io
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from prepare_cases import all_rows, chats, prepare_chats, write_rows
from rich.console import Console

from podtune.config.errors import RunFailure, UserError
from podtune.data import prepare as module
from podtune.data import prepare_lock
from podtune.data.prepare_encode import ChunkSummary
from podtune.data.prepare_lock import preparation_lock
from podtune.data.prepare_workers import Workers
from podtune.hub.file_hashes import FileHashes

TESTS = str(Path(__file__).parent)

# Prepares argv[2] into argv[1] and dies at the argv[4]-th call of the function named argv[3].
KILLED = f"""
import os, signal, sys
sys.path.insert(0, {TESTS!r})
from prepare_cases import prepare_chats
from pathlib import Path
import podtune.data.prepare as module
import podtune.data.prepare_inputs as inputs
import podtune.data.prepare_write as write
inputs._CHUNK_ROWS = 20
write._SHARD_TOKENS = 512
folder, path, name, calls = sys.argv[1:]
left = int(calls)
def dying(*arguments, call=getattr(module, name), **named):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*arguments, **named)
setattr(module, name, dying)
prepare_chats(Path(folder), {{"train": path, "workers": 0}})
"""


@pytest.mark.parametrize(
    ("name", "calls"), [("encode_chunk", 3), ("write_shard", 3), ("write_manifest", 1), ("open_prepared", 3)]
)
def test_a_killed_preparation_is_not_visible_and_goes_on_from_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, calls: int
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(100))
    died = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(path), name, str(calls)], check=False)
    assert died.returncode == -signal.SIGKILL
    finished = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.tfrecord")}
    encoded = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("chunk-*.npz")}
    whole = [folder for folder in (tmp_path / "cache").iterdir() if (folder / "manifest.json").exists()]
    assert bool(whole) == (name == "open_prepared")  # the one call that comes after everything
    assert len(encoded) == {"encode_chunk": 2, "open_prepared": 0}.get(name, 5)
    assert len(finished) == {"encode_chunk": 0, "write_shard": 2}.get(name, len(finished))

    monkeypatch.setattr("podtune.data.prepare_inputs._CHUNK_ROWS", 20)
    monkeypatch.setattr("podtune.data.prepare_write._SHARD_TOKENS", 512)
    again: list[int] = []
    for function in ("encode_chunk", "write_shard"):
        real = getattr(module, function)

        def counted(*arguments, real=real):
            again.append(1)
            return real(*arguments)

        monkeypatch.setattr(module, function, counted)
    prepared = prepare_chats(tmp_path, {"train": str(path), "workers": 0})
    kept = [prepared.folder / file.name for file in finished]
    assert [file.stat().st_mtime_ns for file in kept] == list(finished.values())
    if name == "encode_chunk":
        assert len(again) == 3 + len(prepared.train.shard_rows) + 1  # three chunks, and all shards
    fresh = prepare_chats(tmp_path / "fresh", {"train": str(path), "workers": 0})
    assert all_rows(prepared) == all_rows(fresh)
    assert not list((tmp_path / "cache").rglob("*.tmp*"))
    assert {entry.name for entry in (tmp_path / "cache").iterdir() if entry.is_dir()} == {prepared.folder.name}


TOGETHER = f"""
import sys
sys.path.insert(0, {TESTS!r})
from pathlib import Path
from prepare_cases import prepare_chats
from rich.console import Console
prepared = prepare_chats(Path(sys.argv[1]), sys.argv[2], progress=Console(width=300))
print("rows", prepared.train.rows, prepared.reused)
"""


def test_two_processes_at_once_make_it_once_and_both_have_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(400))
    command = [sys.executable, "-c", TOGETHER, str(tmp_path), str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    last = sorted(text.splitlines()[-1] for text in said)
    rows = prepare_chats(tmp_path, path).train.rows
    assert last == [f"rows {rows} False", f"rows {rows} True"]


def test_a_waiting_process_says_for_whom_and_goes_on_when_the_lock_is_let_go(tmp_path: Path) -> None:
    path, said, order = tmp_path / "x.lock", [], []
    inside = threading.Event()

    def first() -> None:
        with preparation_lock(path, waiting=said.append, poll_seconds=0.01):
            inside.set()
            time.sleep(0.3)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    with preparation_lock(path, waiting=said.append, poll_seconds=0.01):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert len(said) == 1
    assert f"process {os.getpid()} on " in said[0]
    assert not path.exists()


def held_lock(path: Path, host: str, process: int, age_seconds: float) -> None:
    path.write_text(json.dumps({"host": host, "pid": process, "token": "t"}))
    os.utime(path, (time.time() - age_seconds, time.time() - age_seconds))


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("stale", ["its process has died", "nobody touched it", "it is half written"])
def test_a_stale_lock_is_taken_over(tmp_path: Path, stale: str) -> None:
    path = tmp_path / "x.lock"
    if stale == "its process has died":
        held_lock(path, socket.gethostname(), dead_process(), 0)
    elif stale == "nobody touched it":
        held_lock(path, "another-machine", 1, prepare_lock.STALE_SECONDS + 1)
    else:
        path.write_text("")
        os.utime(path, (1, 1))
    with preparation_lock(path, waiting=pytest.fail, poll_seconds=0.01):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lock_that_is_held_is_respected(tmp_path: Path) -> None:
    """Another machine's is as fresh as its last touch; one of this machine's as alive as its process."""
    path = tmp_path / "x.lock"
    held_lock(path, "another-machine", 1, prepare_lock.STALE_SECONDS - 60)
    with pytest.raises(KeyboardInterrupt):
        wait_impatiently(path)
    assert json.loads(path.read_text())["host"] == "another-machine"


def wait_impatiently(path: Path) -> None:
    def leave(sentence: str) -> None:
        raise KeyboardInterrupt(sentence)

    with preparation_lock(path, waiting=leave, poll_seconds=0.01):
        pytest.fail("the lock was held")


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, RunFailure, "the disk of .* is full. What is finished is kept"),
        (errno.EROFS, UserError, "cannot be written to .*Point data.cache at a folder you can write to"),
        (errno.EIO, RunFailure, "preparing failed"),
    ],
)
def test_what_a_disk_refuses_is_said_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], words: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(20))
    with monkeypatch.context() as patched:

        def refuse(*arguments: object) -> None:
            raise OSError(number, os.strerror(number))

        patched.setattr("podtune.data.records.RecordWriter.write", refuse)
        with pytest.raises(kind, match=words):
            prepare_chats(tmp_path, path)
    assert not prepare_chats(tmp_path, path).reused


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(20))
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"Point data\.cache at a folder"):
        prepare_chats(tmp_path, path)


def test_a_cache_without_write_permission_still_serves_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(20))
    prepare_chats(tmp_path, path)

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert prepare_chats(tmp_path, path).reused


def test_a_worker_that_is_killed_is_reported_and_what_is_finished_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(60))
    monkeypatch.setattr("podtune.data.prepare_inputs._CHUNK_ROWS", 20)
    monkeypatch.setattr("podtune.data.prepare.encode_chunk", kill_this_worker)
    with pytest.raises(RunFailure, match=r"a preparing process was killed.*data\.workers: 1"):
        prepare_chats(tmp_path, {"train": str(path), "workers": 2})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_preparation_with_its_workers_and_leaves_nothing_that_counts(
    tmp_path: Path, number: signal.Signals
) -> None:
    from workflow_cases import chats as rows_of_chats
    from workflow_cases import run_file

    write_rows(tmp_path / "many.jsonl", rows_of_chats(60_000))
    data = {"train": str(tmp_path / "many.jsonl"), "validation": 4, "max_length": 64, "workers": 2}
    file = run_file(tmp_path, data={**data, "cache": str(tmp_path / "cache")})
    command = [sys.executable, "-m", "podtune.cli.main", "prepare", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        until = time.monotonic() + 120
        while not list((tmp_path / "cache").glob("*.examples/chunk-*.npz")) and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(number)
        said = process.stderr.read()
    assert (process.returncode, said.splitlines()[-1]) == (130, "interrupted"), said
    until = time.monotonic() + 10
    while is_there(process.pid) and time.monotonic() < until:  # multiprocessing's own tracker goes last
        time.sleep(0.05)
    assert not is_there(process.pid), "a worker is left of its group"
    assert not list((tmp_path / "cache").rglob("manifest.json"))


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def kill_this_worker(*arguments: object) -> ChunkSummary:
    if "PYTEST_CURRENT_TEST" in os.environ and multiprocessing.parent_process() is None:
        time.sleep(0.1)
        return ChunkSummary(0)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def test_what_fails_while_a_worker_begins_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="invalid literal"), Workers(2, Unreadable(), tmp_path) as workers:
        list(workers.run(number_alone, ((number,) for number in range(8))))


class Unreadable:
    """Can be written for another process, and not be read there."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return (int, ("no number",))


def number_alone(shared: object, number: int) -> int:
    return number


@pytest.mark.parametrize("suffix", [".npz", ".tokens"])
@pytest.mark.parametrize("damage", ["empty", "cut", "zeros"])
def test_a_chunk_that_a_crash_left_empty_cut_or_full_of_zeros_is_encoded_again(
    suffix: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podtune.data.prepare_inputs._CHUNK_ROWS", 8)
    data = {"train": str(write_rows(tmp_path / "a.jsonl", chats(24))), "workers": 0}

    def full(*arguments):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_shard", full)
        with pytest.raises(RunFailure, match="is full"):
            prepare_chats(tmp_path, data)
    (damaged,) = (tmp_path / "cache").rglob(f"chunk-000001{suffix}")
    size = damaged.stat().st_size
    damaged.write_bytes({"empty": b"", "cut": damaged.read_bytes()[: size // 2], "zeros": bytes(size)}[damage])
    encode, encoded = module.encode_chunk, []
    monkeypatch.setattr(module, "encode_chunk", lambda *given: (encoded.append(given[1]), encode(*given))[1])
    again = prepare_chats(tmp_path, data)
    assert encoded == [1]
    assert all_rows(again) == all_rows(prepare_chats(tmp_path / "fresh", data))


def test_data_that_changes_while_it_is_read_is_not_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(20))

    def appending(*arguments):
        with open(path, "a") as file:
            file.write(json.dumps(chats(21)[-1]) + "\n")
        return encode(*arguments)

    encode = module.encode_chunk
    with monkeypatch.context() as patched:
        patched.setattr(module, "encode_chunk", appending)
        with pytest.raises(RunFailure, match=r"a\.jsonl changed while it was read"):
            prepare_chats(tmp_path, path)
    assert prepare_chats(tmp_path, path).report.sources[0].read == 21


def test_a_file_that_is_settled_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit on 100 GB must not read 100 GB."""
    path = write_rows(tmp_path / "a.jsonl", chats(20))
    monkeypatch.setattr("podtune.hub.file_hashes._SETTLED_NS", -1)
    prepare_chats(tmp_path, path)
    monkeypatch.setattr("podtune.hub.file_hashes.hashlib.sha256", pytest.fail, raising=False)
    assert len(FileHashes(tmp_path / "cache" / "hashes.json").of([path])[0]) == 64


def test_a_file_written_anew_with_its_old_size_time_and_inode_is_read_anew(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("podtune.hub.file_hashes._SETTLED_NS", -1)
    path, memory = tmp_path / "a.jsonl", tmp_path / "hashes.json"
    path.write_text("old")
    before = path.stat()
    (old,) = FileHashes(memory).of([path])
    time.sleep(0.05)  # the clock of file systems ticks every few milliseconds
    with open(path, "r+") as file:
        file.write("new")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert FileHashes(memory).of([path]) != [old]


@pytest.mark.parametrize("ending", ["", ".guard"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_in_the_place_of_the_lock_is_named_and_not_waited_for(tmp_path: Path, make, ending) -> None:
    make(tmp_path / f"x.lock{ending}")
    lock = preparation_lock(tmp_path / "x.lock", waiting=pytest.fail)
    with pytest.raises(UserError, match=r"x\.lock.*: this is .* where a lock of podtune is wanted"), lock:
        pytest.fail("the lock was taken")


def test_progress_is_a_bar_on_a_terminal_and_plain_sentences_elsewhere(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chats(60))
    terminal, pipe = io.StringIO(), io.StringIO()
    prepare_chats(tmp_path / "one", path, progress=Console(file=terminal, force_terminal=True, width=120))
    prepare_chats(tmp_path / "two", path, progress=Console(file=pipe, width=300))
    assert "tokenising" in terminal.getvalue()
    assert "\x1b" not in pipe.getvalue()
    assert pipe.getvalue().startswith("prepared ")
    assert len(pipe.getvalue().splitlines()) == 1
