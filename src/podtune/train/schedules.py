"""The learning rate of every step, as a function that the jitted step calls. Steps count from 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from podtune.config.training import Schedule as ScheduleSettings

Rate = Callable[[Any], Any]
DEFAULT_DECAY_FRACTION = 0.2


def make_schedule(settings: ScheduleSettings, *, peak: float, total_steps: int) -> Rate:
    """step -> learning rate, float32.

    Warm-up rises in equal parts to the peak, which step `warmup - 1` has. After it the rate follows the schedule down
    to final_fraction x peak, which the step after the last one would have: no step is spent at a rate of 0.
    """
    warmup = warmup_steps(settings, total_steps)
    shape = SCHEDULES[settings.name](settings, warmup, total_steps)

    def rate(step: Any) -> Any:
        step = jnp.asarray(step, jnp.float32)
        rising = (step + 1) / max(1, warmup)
        return (peak * jnp.where(step < warmup, rising, shape(step))).astype(jnp.float32)

    return rate


def warmup_steps(settings: ScheduleSettings, total_steps: int) -> int:
    """Steps of warm-up; a fraction is of all steps, rounded. Never more than there are steps."""
    asked = settings.warmup
    return min(total_steps, asked if isinstance(asked, int) else round(asked * total_steps))


def scaled_peak(learning_rate: float, *, batch_tokens: int, reference_batch_tokens: int | None) -> float:
    """The rate grown in proportion to the batch (Goyal et al. 2017); as it is when there is no reference."""
    return learning_rate if reference_batch_tokens is None else learning_rate * batch_tokens / reference_batch_tokens


def _progress(step: Any, start: int, end: int) -> Any:
    return jnp.clip((step - start) / max(1, end - start), 0, 1)


def _cosine(settings: ScheduleSettings, warmup: int, total: int) -> Rate:
    final = settings.final_fraction
    return lambda step: final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * _progress(step, warmup, total)))


def _linear(settings: ScheduleSettings, warmup: int, total: int) -> Rate:
    return lambda step: 1 - (1 - settings.final_fraction) * _progress(step, warmup, total)


def _constant(settings: ScheduleSettings, warmup: int, total: int) -> Rate:
    return lambda step: jnp.float32(1)


def _wsd(settings: ScheduleSettings, warmup: int, total: int) -> Rate:
    """Warm-up, stable, decay (Hu et al. 2024): level, then a straight line down over the last decay_fraction."""
    fraction = settings.decay_fraction or DEFAULT_DECAY_FRACTION
    start = max(warmup, total - max(1, round(fraction * total)))
    return lambda step: 1 - (1 - settings.final_fraction) * _progress(step, start, total)


SCHEDULES: dict[str, Callable[[ScheduleSettings, int, int], Rate]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
}
