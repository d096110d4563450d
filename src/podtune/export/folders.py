"""Small files and folders that are there whole or not at all. Used by every export and by the workflow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podtune.hub.atomic import atomic_file, new_scratch_folder, replace_folder


def write_text(path: Path, text: str) -> None:
    """Writes a file that readers see as it was or as it is now, also when the process is killed in between."""
    with atomic_file(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes its place at `path` only when the block has ended well."""
    scratch = new_scratch_folder(path)
    try:
        yield scratch
        replace_folder(path, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
