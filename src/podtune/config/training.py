"""The `train` block of the run file: optimizer, schedule, guards and the loop's own settings."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from podtune.config.subject import OrNone, Subject, says_none
from podtune.config.values import Choice, CountOrFraction, Duration, Real, Switch, Whole

USUAL_STEPS = 100  # from fewer a model learns little; small data is divided to make about so many

OptimizerName = Literal["adamw", "adafactor", "lion", "sgd", "muon"]


class Optimizer(Subject):
    """The optimizer. Scalar form: its name. A setting left at none has the optimizer's own default."""

    scalar_key = "name"

    name: Annotated[OptimizerName, Choice()] = "adamw"
    """adamw, adafactor, lion, sgd or muon."""
    beta1: Annotated[float | None, Real(at_least=0, below=1)] = None
    """Decay of the first moment (adamw 0.9, lion 0.9)."""
    beta2: Annotated[float | None, Real(above=0, below=1)] = None
    """Decay of the second moment (adamw 0.999, lion 0.99)."""
    epsilon: Annotated[float | None, Real(above=0)] = None
    """Added to the denominator (adamw 1e-8, adafactor 1e-30, muon 1e-8)."""
    momentum: Annotated[float | None, Real(at_least=0, below=1)] = None
    """Momentum (sgd 0.9, muon 0.95, adafactor none)."""
    nesterov: Annotated[bool | None, Switch()] = None
    """Nesterov momentum (sgd false, muon true)."""
    decay_rate: Annotated[float | None, Real(above=0, at_most=1)] = None
    """Exponent of the second moment's decay (adafactor 0.8)."""


OPTIMIZER_SETTINGS: dict[str, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2", "epsilon"),
    "adafactor": ("epsilon", "momentum", "decay_rate"),
    "lion": ("beta1", "beta2"),
    "sgd": ("momentum", "nesterov"),
    "muon": ("epsilon", "momentum", "nesterov"),
}


LEARNING_RATE_FACTORS: dict[OptimizerName, float | None] = {
    "adamw": 1.0,
    # A matrix's update is clipped to a root mean square of 1, about that of AdamW's (Shazeer and Stern 2018, sec. 6).
    "adafactor": 1.0,
    # Every entry of its update is 1 or -1, larger than AdamW's: rates of 1/10 to 1/3 (Chen et al. 2023, sec. 5).
    "lion": 0.1,
    # As large as the gradient, which is of another size in every model: no rate suits them all.
    "sgd": None,
    # Scaled to the root mean square of AdamW's updates (Liu et al. 2025, eq. 4).
    "muon": 1.0,
}
"""What learning_rate: auto is for an optimizer, in AdamW's rates. None: it has to be given."""


class Schedule(Subject):
    """How the learning rate moves. Scalar form: its name."""

    scalar_key = "name"

    name: Annotated[Literal["cosine", "linear", "constant", "wsd"], Choice()] = "cosine"
    """cosine, linear, constant, or wsd (warm-up, stable, decay). All of them warm up."""
    warmup: Annotated[int | float, CountOrFraction("steps", zero=True)] = 0.03
    """Steps, or the fraction of all steps, over which the rate rises from 0."""
    decay_fraction: Annotated[float | None, Real(above=0, at_most=1)] = None
    """wsd only: the last fraction of the steps, over which the rate falls (default 0.2)."""
    final_fraction: Annotated[float, Real(at_least=0, at_most=1)] = 0.0
    """The fraction of the peak that the rate falls towards: the step after the last one would have it."""


class SpikeGuard(Subject):
    """Steps whose gradient norm is far above the recent ones. Scalar form: what to do with them."""

    scalar_key = "action"

    action: Annotated[Literal["skip", "rollback", "stop"], Choice()] = "skip"
    """Skip the step, go back to the last checkpoint, or stop."""
    deviations: Annotated[float, Real(above=0)] = 8.0
    """How many standard deviations above the recent mean are too many."""
    window: Annotated[int, Whole(at_least=2)] = 50
    """How many recent steps are looked at; no step is judged before there are as many."""


class EarlyStopping(Subject):
    """Stop when the validation loss has stopped falling. Scalar form: the patience."""

    scalar_key = "patience"

    patience: Annotated[int, Whole(at_least=1)] = 3
    """Evaluations in a row without improvement, after which the run stops."""
    min_improvement: Annotated[float, Real(at_least=0)] = 0.0
    """The least fall of the loss that counts as one."""


class Train(Subject):
    """The training itself."""

    epochs: Annotated[float | None, Real(above=0)] = 3.0
    """Passes over the data. None when steps is given."""
    steps: Annotated[int | None, Whole(at_least=1)] = None
    """Optimizer steps, instead of epochs."""
    batch_tokens: Annotated[int | Literal["auto"], Whole(at_least=1)] = "auto"
    """Tokens in one optimizer step, over all devices."""
    accumulate: Annotated[int | Literal["auto"], Whole(at_least=1)] = "auto"
    """Micro-steps whose gradients make one optimizer step."""
    optimizer: Optimizer = Optimizer()
    """adamw, adafactor, lion, sgd, muon, or a mapping with its settings."""
    learning_rate: Annotated[float | Literal["auto"], Real(above=0)] = "auto"
    """Peak learning rate; auto: 2e-4 for lora, 2e-5 for full, and a tenth of that with lion. With sgd it must be
    given."""
    schedule: Schedule = Schedule()
    """cosine, linear, constant, wsd, or a mapping with its settings."""
    weight_decay: Annotated[float, Real(at_least=0)] = 0.0
    """Decoupled weight decay; norms and biases are left out."""
    clip_norm: Annotated[float | None, Real(above=0)] = 1.0
    """Largest global norm of the gradient; none: no clipping."""
    label_smoothing: Annotated[float, Real(at_least=0, below=1)] = 0.0
    """Share of the target's probability spread over the vocabulary."""
    neftune: Annotated[float, Real(at_least=0)] = 0.0
    """Noise on the embeddings (Jain et al., 2023); 5 is usual, 0 is off."""
    ema: Annotated[float | None, Real(above=0, below=1)] = None
    """Decay of a moving average of the weights, which is what is evaluated and exported; none: no average."""
    scale_learning_rate_from: Annotated[int | None, Whole(at_least=1)] = None
    """Reference batch in tokens: the rate becomes learning_rate x batch_tokens / this. None: not scaled."""
    compute_dtype: Annotated[Literal["auto", "float32", "bfloat16"], Choice()] = "auto"
    """Arithmetic of the forward and backward pass; auto: bfloat16 on accelerators, float32 on a CPU. A CPU with AMX is
    faster in bfloat16."""
    remat: Annotated[Literal["auto", "none", "dots", "full"], Choice()] = "auto"
    """What is kept for the backward pass: all but attention scores (none), what a matrix product made (dots), or only
    the inputs of layers (full); auto: dots on a CPU, full on accelerators."""
    checkpoint_every: Annotated[float, Duration()] = 600.0
    """Time between checkpoints, such as 10m. One is always written at the end. (The field holds seconds.)"""
    log_every: Annotated[int, Whole(at_least=1)] = 10
    """Steps between lines of the log."""
    on_nan: Annotated[Literal["skip", "rollback", "stop"], Choice()] = "skip"
    """What becomes of a step whose loss or gradient is not finite. Every such step is counted."""
    max_bad_steps: Annotated[int, Whole(at_least=1)] = 10
    """Bad steps in a row, or rollbacks in the whole run, after which the run stops."""
    spike_guard: Annotated[SpikeGuard | None, OrNone()] = None
    """The same for steps whose gradient norm leaps: skip, rollback, stop, or a mapping; none: off."""
    early_stopping: Annotated[EarlyStopping | None, OrNone()] = None
    """Patience in evaluations, or a mapping; none: train to the end."""

    @classmethod
    def complete(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if not says_none(given.get("steps")) and "epochs" not in given:
            return {**given, "epochs": None}
        return given
