"""How things are said everywhere: numbers of things, sizes, and what a missing path may have meant."""

import difflib
import os
from pathlib import Path


def counted(count: int, noun: str) -> str:
    """A number of things: 1 row, 2,000 rows."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def readable_bytes(count: int | float) -> str:
    """A size as people say it: 98.4 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def nearest_to(path: Path) -> str:
    """The end of a sentence that says a path does not exist: the one beside it that is most like it, if any is."""
    try:
        beside = os.listdir(path.parent)
    except OSError:  # not there, or not to be looked into
        beside = []
    near = difflib.get_close_matches(path.name, beside, n=1)
    if near:
        return f'. Did you mean "{path.parent / near[0]}"?'
    return "." if path.parent.is_dir() else f" (nor a folder {path.parent})."
