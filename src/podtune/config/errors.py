"""The errors a user sees. Everything in podtune raises these; the command line prints the message and exits with the
status, without a traceback."""


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
