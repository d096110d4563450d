"""The errors a user sees. The command line prints the message alone and exits with `exit_status`; every layer raises these."""


class PodtuneError(Exception):
    """A fault that is told to the user in words, without a traceback."""

    exit_status: int = 1


class UserError(PodtuneError):
    """The user's input is at fault: configuration, data or files. Says what was found, the rule and a way out."""

    exit_status = 2


class RunFailure(PodtuneError):  # noqa: N818 - it names what happened, and the contract's other layers raise it by this name
    """The run failed while running, though its input was sound."""

    exit_status = 3


class Interrupted(PodtuneError):  # noqa: N818
    """The user stopped the run (Ctrl-C); what was done so far is saved."""

    exit_status = 130
