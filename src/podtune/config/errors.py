"""The errors a user sees. Everything in podtune raises these; the command line prints the message and exits with the
status, without a traceback."""

from collections.abc import Sequence


class PodtuneError(Exception):
    """A failure that its message fully explains. Raise one of the kinds below."""

    exit_status: int = 3


class UserError(PodtuneError):
    """Something the user gave is wrong: the configuration, the data, a file, an argument. Status 2."""

    exit_status = 2


class RunFailure(PodtuneError):
    """The input was right and the work failed while it ran. Status 3."""

    exit_status = 3


class Interrupted(PodtuneError):
    """Stopped on request (Ctrl-C, a signal) after what there was to save had been saved. Status 130."""

    exit_status = 130


class ConfigError(UserError):
    """A run file (or the overrides of it) with faults, each of them one line: `file:line: what is wrong`."""

    def __init__(self, name: str, faults: Sequence[str]):
        self.faults = tuple(faults)
        self.summary = f"{name} has {len(self.faults)} fault{'s' if len(self.faults) != 1 else ''}"
        super().__init__("\n".join(self.faults))

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.summary.rpartition(" has ")[0], self.faults)
