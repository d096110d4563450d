"""Which settings may change when a run is gone on with. Used for the output folder and for the checkpoints in it."""

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
