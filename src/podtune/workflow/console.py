"""The console of a command: colours and live lines on a terminal, plain lines elsewhere, nothing when quiet."""

from rich.console import Console


def make_console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """stderr: where stdout holds what another program reads."""
    return Console(quiet=quiet, stderr=stderr)
