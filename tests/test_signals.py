"""A signal ends a command also when it comes where Python drops exceptions."""

import signal
import subprocess
import sys

import pytest

LOST = """
import gc, os, time
from podtune.cli.signals import heed_signals

class Dying:
    def __del__(self):
        os.kill(os.getpid(), {number})
        time.sleep(0)  # the handler runs here

def collecting(phase, info):
    gc.callbacks.remove(collecting)
    os.kill(os.getpid(), {number})
    time.sleep(0)

heed_signals()
try:
    {begin}
    print("dropped", flush=True)
    time.sleep(30)
except BaseException as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("begin", ["gc.callbacks.append(collecting); gc.collect()", "Dying()"])
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")])
def test_a_signal_that_comes_where_exceptions_are_dropped_is_given_again(
    begin: str, number: signal.Signals, raised: str
) -> None:
    # SIGINT is ignored where the tests run in the background of a shell, and would be in their processes too.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = heard + LOST.format(number=int(number), begin=begin)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["dropped", raised], "")


def test_what_else_is_dropped_is_shown() -> None:
    script = """
from podtune.cli.signals import heed_signals
class Dying:
    def __del__(self):
        raise ValueError("told")
heed_signals()
Dying()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert "ValueError: told" in done.stderr
