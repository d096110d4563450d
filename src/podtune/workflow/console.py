"""The console of a command: colours and live lines on a terminal, plain lines elsewhere, nothing when quiet."""

from rich.console import Console


def make_console(*, quiet: bool = False) -> Console:
    return Console(quiet=quiet)
