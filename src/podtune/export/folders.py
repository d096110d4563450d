"""Files and folders that are there whole or not at all. Used by every export and by the workflow."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from podtune.config.errors import RunFailure


def write_text(path: Path, text: str) -> None:
    """Writes a file that readers see as it was or as it is now, also when the process is killed in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunFailure(f"{path}: cannot be written ({error.strerror}).") from error


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes its place at `path` only when the block has ended well.

    An older folder at `path` stays until then. What a killed run left half-filled is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_over in path.parent.glob(f".{path.name}.*.part"):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.mkdir()
        yield temporary
        _put_in_place(temporary, path)
    except OSError as error:
        raise RunFailure(f"{path}: cannot be written ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: Path, path: Path) -> None:
    if not path.exists():
        temporary.rename(path)
        return
    if _exchange(temporary, path):  # the old one now has the temporary name, and goes with it
        return
    aside = path.with_name(f".{path.name}.old.part")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    try:
        temporary.rename(path)
    except OSError:
        aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two paths in one step, where the system can (Linux's renameat2 with RENAME_EXCHANGE)."""
    with suppress(OSError, AttributeError):
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return ctypes.CDLL(None).renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
    return False


def folder_bytes(path: Path) -> int:
    """Bytes of every file below a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
