"""How a long fetch tells what it does. Used by hub and all above it."""

import logging
from collections.abc import Callable

# Told in one line what is being done.
Progress = Callable[[str], None]

_log = logging.getLogger("podtune.hub")


def teller(progress: Progress | None) -> Progress:
    """`progress` itself, or the log when nobody listens: a fallback is never silent."""
    return progress if progress is not None else _log.warning
