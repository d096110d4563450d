"""How things are said: what a long fetch does, sizes, and numbers of things. Used by hub and all above it."""

import logging
from collections.abc import Callable

# Told in one line what is being done.
Progress = Callable[[str], None]

_log = logging.getLogger("podtune.hub")


def teller(progress: Progress | None) -> Progress:
    """`progress` itself, or the log when nobody listens: a fallback is never silent."""
    return progress if progress is not None else _log.warning


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
