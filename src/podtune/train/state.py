"""What a training run carries from step to step, and where on the mesh each part of it lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from podtune.parallel.sharding import sharding_for
from podtune.train.optimizers import moment_shardings
from podtune.weights.adapters import adapter_mask, join, split
from podtune.weights.param import Param, is_param
from podtune.weights.tree import map_named, named_leaves, weight_dataclass


@weight_dataclass
class Guard:
    """What the step remembers to judge a step by. norms: the gradient norms of the last good steps, as a ring."""

    norms: Any
    good_steps: Any
    skipped: Any
    bad_in_a_row: Any


@weight_dataclass
class TrainState:
    """step counts batches, so it is also the place in the data. trainable and average (None when none is kept) are
    flat dicts by weight name; guard is a Guard.

    Holds arrays to train with, and shapes or shardings to plan and restore with: jax puts yet other things in.
    """

    step: Any
    trainable: Any
    moments: Any
    average: Any
    guard: Any


def divide_weights(weights: Any, method: str) -> tuple[dict[str, Any], Any]:
    """(trained leaves by name, the tree with None in their place): adapters for lora, everything for full.

    Works on arrays and on a description alike.
    """
    mask = adapter_mask(weights) if method == "lora" else jax.tree.map(lambda _: True, weights, is_leaf=is_param)
    trained, frozen = split(weights, mask)
    return named_leaves(trained, is_leaf=is_param), frozen


def whole_weights(trainable: Mapping[str, Any], frozen: Any) -> Any:
    """The tree of weights again from the two of `divide_weights`."""
    named = map_named(lambda name, _: trainable.get(name), frozen, is_leaf=lambda leaf: leaf is None)
    return join(named, frozen)


def make_state(
    trainable: Mapping[str, Array], optimizer: optax.GradientTransformation, shardings: TrainState, *, window: int
) -> TrainState:
    """The state before the first step. Takes over the arrays of `trainable`: they are donated to the first step."""

    def start(trainable: dict[str, Array]) -> tuple[Any, ...]:
        weights = {name: weight.astype(jnp.float32) for name, weight in trainable.items()}
        average = None if shardings.average is None else {name: jnp.copy(weight) for name, weight in weights.items()}
        return jnp.int32(0), optimizer.init(weights), average, _new_guard(window)

    rest = (shardings.step, shardings.moments, shardings.average, shardings.guard)
    step, moments, average, guard = jax.jit(start, out_shardings=rest)(dict(trainable))
    return TrainState(step, _as_float32(trainable, shardings.trainable), moments, average, guard)


def _as_float32(trainable: Mapping[str, Array], shardings: Mapping[str, NamedSharding]) -> dict[str, Array]:
    return {
        name: jax.device_put(weight if weight.dtype == jnp.float32 else weight.astype(jnp.float32), shardings[name])
        for name, weight in trainable.items()
    }


def _new_guard(window: int) -> Guard:
    return Guard(jnp.zeros((window,), jnp.float32), jnp.int32(0), jnp.int32(0), jnp.int32(0))


def abstract_state(
    params: Mapping[str, Param], optimizer: optax.GradientTransformation, *, averaged: bool, window: int
) -> TrainState:
    """The state as shapes and dtypes, without a single array: for shardings, restoring and planning."""

    def start() -> TrainState:
        weights = {name: jnp.zeros(param.shape, jnp.float32) for name, param in params.items()}
        average = weights if averaged else None
        return TrainState(jnp.int32(0), weights, optimizer.init(weights), average, _new_guard(window))

    return jax.eval_shape(start)


def state_shardings(mesh: Mesh, abstract: TrainState, params: Mapping[str, Param]) -> TrainState:
    """Weights and averages by the axes of their Params, moments with their weights, the rest on every device."""
    weights = {name: sharding_for(mesh, param.axes, param.shape) for name, param in params.items()}
    everywhere = NamedSharding(mesh, PartitionSpec())
    return TrainState(
        step=everywhere,
        trainable=weights,
        moments=moment_shardings(mesh, abstract.moments, params),
        average=None if abstract.average is None else weights,
        guard=jax.tree.map(lambda _: everywhere, abstract.guard),
    )


def discard(state: TrainState) -> None:
    """Gives the memory of a state back now; it cannot be used again."""
    for leaf in jax.tree.leaves(state):
        leaf.delete()


def with_shardings(abstract: TrainState, shardings: TrainState) -> TrainState:
    """Shapes with the sharding of each: what a checkpoint is restored into and a step is lowered with."""

    def place(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, abstract, shardings)
