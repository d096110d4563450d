"""Ctrl-C and SIGTERM end a command wherever they come: nothing that is written stays half, workers are ended."""

import contextlib
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

_AGAIN_SECONDS = 0.02


class Terminated(BaseException):
    """SIGTERM, outside training (which saves first). No KeyboardInterrupt, for `podtune chat` asks again after one."""


def heed_signals() -> None:
    """For a process that is this command and nothing else."""
    signal.signal(signal.SIGTERM, _end_as_by_ctrl_c)
    sys.unraisablehook = _raise_again


def _end_as_by_ctrl_c(number: int, frame: FrameType | None) -> NoReturn:
    """Takes SIGTERM: what is being written is cleared away and workers are ended, as on the way out of any error."""
    raise Terminated


def _raise_again(lost: "sys.UnraisableHookArgs") -> None:
    """Python drops what is raised while an object is taken down or garbage is collected, where jax has a callback: a
    signal that comes just then would be lost. It is given again a moment later, until it comes at a better time."""
    number = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}.get(lost.exc_type)
    if number is None:
        sys.__unraisablehook__(lost)
        return
    waits = threading.main_thread().ident  # in a call of the system, perhaps, which only a signal to it ends
    again = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (waits, number))
    again.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread begins any more: the process is ending as it is
        again.start()
