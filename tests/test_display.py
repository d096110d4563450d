"""The live line, plain lines and silence."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from podtune.train.display import Display, clock, progress_line

VALUES = {
    "loss": 1.7321,
    "learning_rate": 1.9e-4,
    "tokens_per_second": 512.4,
    "cpu_share": 0.93,
    "data_wait": 0.004,
    "seconds_left": 200.0,
    "skipped": 0,
}


def test_the_line_holds_step_loss_rate_speed_use_data_wait_and_time_left():
    assert progress_line(40, 120, VALUES) == (
        "step 40/120  loss 1.732  lr 1.9e-04  512 tok/s  CPU 93 %  data wait 0 %  ETA 3:20"
    )
    accelerated = {**VALUES, "mfu": 0.456, "skipped": 2}
    assert "MFU 45.6 %" in progress_line(1, 2, accelerated)
    assert "skipped 2" in progress_line(1, 2, accelerated)


def test_a_step_without_a_loss_never_shows_zero():
    assert "loss none" in progress_line(1, 2, {**VALUES, "loss": math.nan})


@pytest.mark.parametrize(("seconds", "text"), [(3.2, "3 s"), (200, "3:20"), (7400, "2:03:20"), (math.inf, "?")])
def test_times_read_as_on_a_clock(seconds, text):
    assert clock(seconds) == text


def test_where_there_is_no_terminal_logged_steps_are_plain_lines():
    console = Console(file=io.StringIO(), width=40)
    with Display(console, total_steps=10) as display:
        display.progress(1, VALUES, logged=True)
        display.progress(2, VALUES, logged=False)
        display.say("something [bold]happened[/bold]")
    lines = console.file.getvalue().splitlines()
    assert lines == [progress_line(1, 10, VALUES), "something [bold]happened[/bold]"]


def test_on_a_terminal_one_line_moves():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Display(console, total_steps=10) as display:
        for step in (1, 2, 3):
            display.progress(step, VALUES, logged=False)
            display._live.refresh()
    text = console.file.getvalue()
    assert "step 3/10" in text
    assert "\x1b[2K" in text  # the line is erased and written again


def test_quiet_shows_nothing(capsys):
    with Display(None, total_steps=10) as display:
        display.progress(1, VALUES, logged=True)
        display.say("text")
    assert capsys.readouterr() == ("", "")
