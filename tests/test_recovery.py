"""What follows a bad step, and what signals do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from podtune.config.errors import RunFailure
from podtune.config.training import Train
from podtune.train.recovery import BadSteps, StopSignals, device_failure
from podtune.train.step import NOT_FINITE, NOTHING_TRAINED, SPIKE, TRAINED


def decide(outcome, *, step=4, bad_in_a_row=1, rows=(3, 1), **settings):
    return BadSteps(Train(**settings)).decide(step, outcome, bad_in_a_row=bad_in_a_row, rows=list(rows))


def test_good_and_empty_steps_ask_for_nothing():
    assert decide(TRAINED, on_nan="stop") == "none"
    assert decide(NOTHING_TRAINED, on_nan="stop") == "none"


def test_skip_goes_on_until_there_are_too_many_in_a_row():
    assert decide(NOT_FINITE, bad_in_a_row=9) == "none"
    with pytest.raises(
        RunFailure, match=r"step 5 is bad.*\(rows 3, 1 of .*10 bad steps in a row.*max_bad_steps=10"
    ) as error:
        decide(NOT_FINITE, bad_in_a_row=10)
    assert error.value.exit_status == 3


def test_stop_stops_at_once_and_names_the_setting():
    with pytest.raises(RunFailure, match=r"train\.on_nan is stop"):
        decide(NOT_FINITE, on_nan="stop")
    with pytest.raises(RunFailure, match=r"train\.spike_guard is stop"):
        decide(SPIKE, spike_guard="stop")


def test_rollback_remembers_the_step_it_passes_over_and_gives_up_after_so_many():
    bad = BadSteps(Train(on_nan="rollback", max_bad_steps=2))
    assert bad.decide(7, NOT_FINITE, bad_in_a_row=1, rows=[0]) == "rollback"
    assert bad.decide(9, NOT_FINITE, bad_in_a_row=1, rows=[0]) == "rollback"
    assert bad.passed_over == {7, 9}
    with pytest.raises(RunFailure, match=r"step 12 is bad.*2 rollbacks"):
        bad.decide(11, NOT_FINITE, bad_in_a_row=1, rows=[0])


def test_spikes_and_not_finite_steps_have_settings_of_their_own():
    assert decide(SPIKE, on_nan="stop", spike_guard="rollback") == "rollback"
    assert decide(SPIKE, on_nan="stop", spike_guard="skip") == "none"


def test_many_rows_are_not_all_printed():
    with pytest.raises(RunFailure, match=r"rows 0, 1, 2, 3, 4, 5, 6, 7, … 92 more"):
        decide(NOT_FINITE, on_nan="stop", rows=range(100))


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_the_first_signal_is_remembered_and_the_handlers_before_come_back(number, name, capfd):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received == name
    assert signal.getsignal(number) is before
    assert "saving a checkpoint, then leaving" in capfd.readouterr().err


def test_the_second_signal_leaves_at_once():
    code = (
        "import os, signal, time\nfrom podtune.train.recovery import StopSignals\n"
        "with StopSignals():\n    for _ in range(2): os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 130
    assert "leaving at once" in ended.stderr


def test_device_failures_are_told_apart():
    assert "ran out of memory" in str(device_failure(Exception("RESOURCE_EXHAUSTED: out of memory"), processes=1))
    assert "another process ended" in str(device_failure(Exception("Gloo: connection closed"), processes=2))
    assert "broke off: INTERNAL" in str(device_failure(Exception("INTERNAL: x"), processes=1))
