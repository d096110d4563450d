"""The training step and the evaluation step: pure functions, jitted once each.

Randomness is a function of (seed, step, row of the global batch), and sums over trained tokens are divided once, at
the end: neither the mesh nor the number of micro-batches changes what a step does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from podtune.config.training import SpikeGuard
from podtune.objectives.language import LanguageModel, LanguageSettings
from podtune.parallel.sharding import batch_sharding
from podtune.train.noise import neftune_noise, row_keys
from podtune.train.optimizers import global_norm
from podtune.train.schedules import Rate
from podtune.train.state import Guard, TrainState, whole_weights
from podtune.weights.adapters import with_dropout

# What became of a step, as its `outcome` says.
TRAINED, NOT_FINITE, SPIKE, NOTHING_TRAINED = 0, 1, 2, 3
OUTCOMES = {
    TRAINED: "trained",
    NOT_FINITE: "its loss or gradient is not finite",
    SPIKE: "its gradient norm leaps above the recent ones",
    NOTHING_TRAINED: "there is nothing to train in its rows",
}
# A spread below this share of the mean says nothing: norms that hardly vary must not make a small rise a spike.
_LEAST_SPREAD = 0.01

Batch = Mapping[str, Array]
Step = Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, Array]]]


@dataclass(frozen=True)
class StepSettings:
    """What the compiled step depends on beside model, optimizer and schedule."""

    language: LanguageSettings
    seed: int = 0
    accumulate: int = 1
    clip_norm: float | None = 1.0
    neftune: float = 0.0
    dropout: bool = False
    ema: float | None = None
    spike: SpikeGuard | None = None

    @property
    def window(self) -> int:
        """Length of the ring of gradient norms."""
        return self.spike.window if self.spike else 1


def make_train_step(
    model: LanguageModel,
    objective: Callable[..., Any],
    *,
    optimizer: optax.GradientTransformation,
    schedule: Rate,
    settings: StepSettings,
    mesh: Mesh,
    shardings: TrainState,
    frozen_shardings: Any,
) -> Any:
    """The jitted step: (state, frozen, batch) -> (state, metrics). The state is donated, the frozen weights are not.

    batch: arrays (rows, seq) tokens, targets, weights, segments, positions, and `requests` (rows,), of which the
    metrics return the largest: so one host can ask all to save or stop at the same step.
    """

    def step(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        sums = _summed_gradients(
            model, objective, batch, state=state, frozen=frozen, settings=settings, mesh=mesh, shardings=shardings
        )
        tokens = jnp.maximum(sums.tokens, 1)
        loss = sums.loss / tokens
        gradients = {name: gradient / tokens for name, gradient in sums.gradients.items()}
        norm = global_norm(gradients)
        outcome = _judge(state.guard, loss, norm, sums.tokens, settings.spike)
        rate = schedule(state.step)
        new = _updated(state, gradients, norm=norm, rate=rate, optimizer=optimizer, settings=settings)
        good = outcome == TRAINED
        kept = jax.tree.map(
            lambda after, before: jnp.where(good, after, before),
            (new.trainable, new.moments, new.average),
            (state.trainable, state.moments, state.average),
        )
        guard = _remember(state.guard, norm, outcome)
        metrics = {
            "loss": jnp.where(sums.tokens > 0, loss, jnp.nan),
            "tokens": sums.tokens,
            "grad_norm": norm,
            "learning_rate": rate,
            "outcome": outcome,
            "positions": jnp.sum(batch["segments"] > 0, dtype=jnp.float32),
            "skipped": guard.skipped,
            "bad_in_a_row": guard.bad_in_a_row,
            "request": jnp.max(batch["requests"]),
        }
        return TrainState(state.step + 1, kept[0], kept[1], kept[2], guard), metrics

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        step,
        in_shardings=(shardings, frozen_shardings, batch_sharding(mesh)),
        out_shardings=(shardings, everywhere),
        donate_argnums=(0,),
    )


def make_eval_step(
    model: LanguageModel, objective: Callable[..., Any], *, settings: StepSettings
) -> Callable[[Mapping[str, Array], Any, Batch], tuple[Array, Array]]:
    """The jitted evaluation: (trainable, frozen, batch) -> (summed loss, trained tokens). No noise, no dropout, no
    smoothing."""
    language = dataclasses.replace(settings.language, label_smoothing=0.0)

    def step(trainable: Mapping[str, Array], frozen: Any, batch: Batch) -> tuple[Array, Array]:
        loss, counts = objective(model, whole_weights(trainable, frozen), batch, settings=language)
        return loss, counts["tokens"]

    mesh = settings.language.mesh
    assert mesh is not None, "a step runs on a mesh"
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(step, out_shardings=(everywhere, everywhere))


@dataclass(frozen=True)
class _Sums:
    loss: Array
    tokens: Array
    gradients: dict[str, Array]


def _summed_gradients(
    model: LanguageModel,
    objective: Callable[..., Any],
    batch: Batch,
    *,
    state: TrainState,
    frozen: Any,
    settings: StepSettings,
    mesh: Mesh,
    shardings: TrainState,
) -> _Sums:
    """Loss, trained tokens and gradients summed over all micro-batches."""
    rows = jnp.arange(batch["tokens"].shape[0])
    arrays = {name: array for name, array in batch.items() if name != "requests"} | {"row": rows}

    def one(micro: Batch) -> tuple[Array, Array, dict[str, Array]]:
        def loss_of(trainable: dict[str, Array]) -> tuple[Array, Array]:
            weights = whole_weights(trainable, frozen)
            keys = row_keys(settings.seed, state.step, micro["row"])
            if settings.dropout:
                weights = with_dropout(weights, keys)
            extra: dict[str, Any] = {}
            if settings.neftune:
                extra["embedding_noise"] = partial(neftune_noise, keys, micro["segments"], alpha=settings.neftune)
            loss, counts = objective(model, weights, micro, settings=settings.language, **extra)
            return loss, counts["tokens"]

        (loss, tokens), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.trainable)
        # Asked for in the layout of the weights: split weights then get a reduce-scatter, not a whole all-reduce.
        gradients = lax.with_sharding_constraint(gradients, shardings.trainable)
        return loss, tokens, gradients

    if settings.accumulate == 1:
        return _Sums(*one(arrays))

    def add(sums: Any, micro: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, one(micro)), None

    zeros = jax.tree.map(jnp.zeros_like, state.trainable)
    start = (jnp.float32(0), jnp.float32(0), lax.with_sharding_constraint(zeros, shardings.trainable))
    sums, _ = lax.scan(add, start, _micro_batches(arrays, settings, mesh))
    return _Sums(*sums)


def _micro_batches(batch: Batch, settings: StepSettings, mesh: Mesh) -> Batch:
    """(rows, …) as (accumulate, rows / accumulate, …), each device cutting up its own rows: nothing moves."""
    shards, ways = settings.language.row_shards, settings.accumulate
    placed = NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))

    def cut(array: Array) -> Array:
        rows, *rest = array.shape
        parts = array.reshape(shards, ways, rows // (shards * ways), *rest)
        return lax.with_sharding_constraint(jnp.swapaxes(parts, 0, 1).reshape(ways, rows // ways, *rest), placed)

    return {name: cut(array) for name, array in batch.items()}


def _judge(
    guard: Guard, loss: Float[Array, ""], norm: Float[Array, ""], tokens: Float[Array, ""], spike: SpikeGuard | None
) -> Int[Array, ""]:
    """The outcome of a step, decided on the device."""
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    outcome = jnp.where(finite, TRAINED, NOT_FINITE)
    if spike is not None:
        mean = jnp.mean(guard.norms)
        spread = jnp.maximum(jnp.std(guard.norms), _LEAST_SPREAD * mean)
        leaps = (guard.good_steps >= spike.window) & (norm > mean + spike.deviations * spread)
        outcome = jnp.where(finite & leaps, SPIKE, outcome)
    return jnp.where(tokens > 0, outcome, NOTHING_TRAINED).astype(jnp.int32)


def _remember(guard: Guard, norm: Array, outcome: Array) -> Guard:
    good, idle = outcome == TRAINED, outcome == NOTHING_TRAINED
    at = guard.good_steps % guard.norms.shape[0]
    return Guard(
        norms=jnp.where(good, guard.norms.at[at].set(norm), guard.norms),
        good_steps=guard.good_steps + good,
        skipped=guard.skipped + ~good,
        bad_in_a_row=jnp.where(idle, guard.bad_in_a_row, jnp.where(good, 0, guard.bad_in_a_row + 1)),
    )


def _updated(
    state: TrainState,
    gradients: dict[str, Array],
    *,
    norm: Array,
    rate: Array,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
) -> TrainState:
    """The state after this update, whether or not it is to be kept."""
    if settings.clip_norm is not None:
        scale = jnp.minimum(1, settings.clip_norm / jnp.maximum(norm, 1e-12))
        gradients = {name: gradient * scale for name, gradient in gradients.items()}
    updates, moments = optimizer.update(gradients, state.moments, state.trainable)
    directions = cast(dict[str, Array], updates)
    trainable = {name: weight - rate * directions[name] for name, weight in state.trainable.items()}
    average = state.average
    if average is not None and settings.ema is not None:
        # A young average forgets faster, so that a short run is not left with its starting weights.
        steps = state.guard.good_steps.astype(jnp.float32)
        decay = jnp.minimum(settings.ema, (1 + steps) / (10 + steps))
        average = {name: decay * average[name] + (1 - decay) * weight for name, weight in trainable.items()}
    return TrainState(state.step, trainable, moments, average, state.guard)
