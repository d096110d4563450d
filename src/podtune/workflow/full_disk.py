"""A disk that fills while a run is at work, told once. Used round everything that writes into an output folder."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podtune.config.errors import RunFailure


@contextmanager
def full_disk_told(folder: Path) -> Iterator[None]:
    """Turns the system's word that there is no space left into what can be done about it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunFailure(
            f"output: {folder}: the disk is full ({error.filename or error.strerror}). What was saved before is kept: "
            "free some space, and run the same command again to go on."
        ) from error
