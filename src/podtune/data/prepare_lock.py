"""One process prepares a folder at a time; the others wait for it and then find its result.

The lock is a file that its owner touches every few seconds. It is stale, and taken over, when its owner is a process of
this machine that no longer runs, or when nobody touched it for two minutes (another machine went away).
"""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podtune.config.errors import UserError

STALE_SECONDS = 120.0
_TOUCH_SECONDS = 5.0


@contextmanager
def preparation_lock(path: Path, *, waiting: Callable[[str], None], poll_seconds: float = 0.2) -> Generator[None]:
    """Holds the lock file at `path`. `waiting` is told once who holds it, if anyone does. Raises OSError, and UserError
    where something else lies there."""
    for file in (path, _guard_of(path)):
        _refuse_no_file(file)
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": uuid.uuid4().hex}
    told = False
    while not _create(path, owner):
        holder = _stale_or_holder(path)
        if holder is not None:
            if not told:
                waiting(
                    f"process {holder.get('pid', '?')} on {holder.get('host', '?')} is preparing this data: waiting"
                )
                told = True
            time.sleep(poll_seconds)
    released = threading.Event()
    toucher = threading.Thread(target=_keep_fresh, args=(path, owner, released), daemon=True)
    toucher.start()
    try:
        yield
    finally:
        released.set()
        toucher.join()
        if _read(path) == owner:
            path.unlink(missing_ok=True)


def _guard_of(path: Path) -> Path:
    return path.with_name(path.name + ".guard")


def _refuse_no_file(path: Path) -> None:
    """A pipe would be waited for without end, and a folder is no lock."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file (a pipe or a device)"
        raise UserError(f"{path}: this is {what}, where a lock of podtune is wanted. Remove it, or set data.cache.")


def _create(path: Path, owner: dict[str, Any]) -> bool:
    """Puts the lock file there, unless there is one."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with open(descriptor, "w") as file:
        json.dump(owner, file)
    return True


def _stale_or_holder(path: Path) -> dict[str, Any] | None:
    """Who holds the lock; None when it is free now, because it was stale and is removed, or was let go."""
    with open(_guard_of(path), "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # so that a lock made after the stale one is not removed in its place
        holder = _read(path)
        if holder is None:
            return None
        if _is_stale(path, holder):
            path.unlink(missing_ok=True)
            return None
        return holder


def _is_stale(path: Path, holder: dict[str, Any]) -> bool:
    try:
        untouched = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    if holder.get("host") == socket.gethostname() and not _runs(int(holder.get("pid", 0))):
        return True
    return untouched > STALE_SECONDS


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process > 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def _keep_fresh(path: Path, owner: dict[str, Any], released: threading.Event) -> None:
    while not released.wait(_TOUCH_SECONDS):
        if _read(path) == owner:
            os.utime(path)
