"""Learning-rate schedules against formulas written out by hand."""

from __future__ import annotations

import math

import pytest

from podtune.config.training import Schedule
from podtune.train.schedules import make_schedule, scaled_peak, warmup_steps


def rates(total, peak=1.0, **settings):
    schedule = make_schedule(Schedule(**settings), peak=peak, total_steps=total)
    return [float(schedule(step)) for step in range(total)]


def test_warm_up_rises_in_equal_parts_to_the_peak():
    assert rates(10, name="constant", warmup=4, peak=2.0) == pytest.approx([0.5, 1.0, 1.5, 2.0] + [2.0] * 6)


def test_cosine_falls_along_half_a_wave_to_the_final_fraction():
    got = rates(12, name="cosine", warmup=2, final_fraction=0.1)
    wanted = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 10)) for step in range(2, 12)]
    assert got == pytest.approx([0.5, 1.0, *wanted])


def test_linear_falls_in_equal_parts():
    assert rates(5, name="linear", warmup=0) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(5, name="linear", warmup=0, final_fraction=0.5) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])


def test_wsd_is_level_and_then_falls_over_the_decay_fraction():
    got = rates(10, name="wsd", warmup=2, decay_fraction=0.4)
    assert got == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_warm_up_is_in_steps_or_a_fraction_of_all_steps_and_never_longer_than_the_run():
    assert warmup_steps(Schedule(warmup=7), 100) == 7
    assert warmup_steps(Schedule(warmup=0.03), 100) == 3
    assert warmup_steps(Schedule(warmup=50), 20) == 20


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_no_step_of_a_short_run_is_spent_at_a_rate_of_zero(name, total):
    assert all(rate > 0 for rate in rates(total, name=name))


def test_the_rate_grows_with_the_batch_only_when_a_reference_is_given():
    assert scaled_peak(1e-4, batch_tokens=65_536, reference_batch_tokens=None) == 1e-4
    assert scaled_peak(1e-4, batch_tokens=65_536, reference_batch_tokens=16_384) == pytest.approx(4e-4)
    assert scaled_peak(1e-4, batch_tokens=8_192, reference_batch_tokens=16_384) == pytest.approx(5e-5)
