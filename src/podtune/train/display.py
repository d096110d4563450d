"""What the user sees while training: a live line on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Display:
    """One live line of progress on a rich Console, with events printed above it; None shows nothing."""

    def __init__(self, console: Any, *, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._live: Any = None

    def __enter__(self) -> Display:
        if self._console is not None and self._console.is_terminal:
            from rich.live import Live

            self._live = Live("", console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, step: int, values: Mapping[str, Any], *, logged: bool) -> None:
        """step finished steps. On a terminal the live line moves; elsewhere logged steps get a line each."""
        if self._console is None:
            return
        line = progress_line(step, self._total, values)
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif logged:
            self.say(line)


def progress_line(step: int, total_steps: int, values: Mapping[str, Any]) -> str:
    """Such as `step 40/120  loss 1.732  lr 1.9e-04  512 tok/s  CPU 93 %  data wait 0 %  ETA 3:20`."""
    parts = [f"step {step}/{total_steps}", f"loss {_number(values.get('loss'))}"]
    if "eval_loss" in values:
        parts.append(f"eval {_number(values['eval_loss'])}")
    parts += [f"lr {values['learning_rate']:.1e}", f"{values['tokens_per_second']:,.0f} tok/s"]
    if values.get("mfu") is not None:
        parts.append(f"MFU {100 * values['mfu']:.1f} %")
    elif values.get("cpu_share") is not None:
        parts.append(f"CPU {100 * values['cpu_share']:.0f} %")
    parts.append(f"data wait {100 * values['data_wait']:.0f} %")
    if values.get("skipped"):
        parts.append(f"skipped {values['skipped']}")
    parts.append(f"ETA {clock(values['seconds_left'])}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Such as 45 s, 3:20 or 2:03:20."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _number(value: float | None) -> str:
    return "none" if value is None or not math.isfinite(value) else f"{value:.4g}"
