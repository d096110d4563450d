"""SHA-256 of local files, remembered so that a file that has not changed is read once. Used by data and hub, whose
fingerprints tell content."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, cast

from podtune.config.errors import UserError

_BLOCK = 8 << 20
_SETTLED_NS = 1_000_000_000  # a younger file could be written again without a new time of change


class FileHashes:
    """SHA-256 of local files; remembered by path, size, times of change and inode: a known file is not read again."""

    def __init__(self, memory: Path | None) -> None:
        self._memory = memory
        self._known: dict[str, list[Any]] = _read_memory(memory)
        self._learnt: dict[str, list[Any]] = {}
        self._stamps: dict[Path, list[int]] = {}
        self._lock = threading.Lock()

    def of(self, paths: Sequence[Path], advance: Callable[[int], None] = lambda count: None) -> list[str]:
        """The digests, in order; `advance` is told bytes as they are read. Raises UserError for an unreadable file."""
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashlib lets go of the interpreter lock
            digests = list(pool.map(self._digest, paths, repeat(advance)))
        self._remember()
        return digests

    def changed(self, paths: Sequence[Path]) -> list[Path]:
        """Those of the paths, all given to of() before, that have been written to since."""
        return [path for path in paths if _stamp(path) != self._stamps[path]]

    def _digest(self, path: Path, advance: Callable[[int], None]) -> str:
        name = str(path.resolve())
        try:
            stamp = self._stamps[path] = _stamp(path)
            known = self._known.get(name)
            if known is not None and known[:-1] == stamp:
                advance(stamp[0])
                return known[-1]
            digest = hashlib.sha256()
            with open(name, "rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
                    advance(len(block))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
        if time.time_ns() - max(stamp[1:3]) > _SETTLED_NS:
            with self._lock:
                self._learnt[name] = [*stamp, digest.hexdigest()]
        return digest.hexdigest()

    def _remember(self) -> None:
        if self._memory is None or not self._learnt:
            return
        known = {**_read_memory(self._memory), **self._learnt}  # another process may have added some meanwhile
        self._known, self._learnt = known, {}
        unfinished = self._memory.with_name(f"{self._memory.name}.{os.getpid()}.tmp")
        try:
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(known))
            unfinished.replace(self._memory)
        except OSError:
            unfinished.unlink(missing_ok=True)  # only a shortcut: without it the file is read again next time


def _stamp(path: Path) -> list[int]:
    """What a file cannot be written to without changing: a program may set the time of its contents back (rsync, tar,
    touch), but not the time of the change itself."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_memory(memory: Path | None) -> dict[str, list[Any]]:
    """What is remembered; nothing when that cannot be read, for it can be found out again."""
    try:
        known: Any = json.loads(memory.read_text()) if memory is not None and memory.is_file() else {}
    except (OSError, ValueError):
        return {}
    sound = isinstance(known, dict) and all(isinstance(v, list) for v in cast(dict[str, Any], known).values())
    return cast(dict[str, list[Any]], known) if sound else {}
