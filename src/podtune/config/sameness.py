"""Which settings of two runs differ, and which of them may when a run is gone on with. Used for the output folder and
for the checkpoints in it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from podtune.config.writing import scalar_as_yaml

# Where results go, what is shown and exported, and the devices: the weights do not depend on them, but for rounding
# and for how often early stopping looks.
_AROUND = ("output", "export", "eval", "mesh", "model.cache", "data.workers", "data.cache")
# How a step is computed or logged, what becomes of bad steps, and when to stop. Some of these do change what comes of
# the rest of a run. They are free because the steps already done stay good, and a run in trouble must find a way on.
_IN_TRAIN = ("log_every", "checkpoint_every", "on_nan", "max_bad_steps", "early_stopping", "accumulate", "remat")
_FREE = (*_AROUND, *(f"train.{name}" for name in _IN_TRAIN))


def may_change(key: str) -> bool:
    """Whether the run is still the same when this setting, such as `train.remat`, has another value."""
    return any(key == free or key.startswith(f"{free}.") for free in _FREE)


class Change(NamedTuple):
    """A setting that differs, by its key in full."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.now)}"


def _shown(value: Any) -> str:
    """A setting as a run file writes it."""
    return json.dumps(value) if isinstance(value, dict | list) else "none" if value is None else scalar_as_yaml(value)


def changes(before: Mapping[str, Any], now: Mapping[str, Any], under: str = "") -> Iterator[Change]:
    """What differs between the settings of two runs, given as plain mappings."""
    for name in {**before, **now}:
        key = f"{under}.{name}" if under else name
        old, new = before.get(name), now.get(name)
        if _are_alike(old, new):
            yield from changes(_by_key(old), _by_key(new), key)
        elif old != new:
            yield Change(key, old, new)


def _are_alike(one: Any, other: Any) -> bool:
    """Whether these are mappings, or lists of as many mappings, and so told apart by what is in them."""
    if isinstance(one, list) and isinstance(other, list):
        ones, others = cast(list[Any], one), cast(list[Any], other)
        return len(ones) == len(others) and all(isinstance(item, dict) for item in ones + others)
    return isinstance(one, dict) and isinstance(other, dict)


def _by_key(value: Any) -> Mapping[str, Any]:
    if isinstance(value, list):
        return {str(index): item for index, item in enumerate(cast(list[Any], value))}
    return cast(dict[str, Any], value)
