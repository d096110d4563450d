"""The optimizers, each built from optax and free of any learning rate: the step multiplies by the rate itself.

Everything here works on the trained weights as a flat dict by name, beside the Params that describe them. Weights of
stacked layers are treated layer by layer: no statistic is ever taken over several layers' matrices together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from podtune.config.training import OPTIMIZER_SETTINGS
from podtune.config.training import Optimizer as OptimizerSettings
from podtune.parallel.sharding import sharding_for
from podtune.weights.param import Param

Params = Mapping[str, Param]
# How large a step Muon takes per weight, so that rates that suit AdamW suit it too (Liu et al. 2025, eq. 4).
_MUON_RMS = 0.2


def make_optimizer(
    settings: OptimizerSettings, params: Params, *, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """The transformation that turns gradients into the direction to subtract, times the learning rate.

    Weight decay is decoupled and leaves norms and biases out.
    """
    given = settings.model_dump(exclude={"name"}, exclude_none=True)
    assert set(given) <= set(OPTIMIZER_SETTINGS[settings.name]), "as config/rules.py sees to, with file and line"
    direction = OPTIMIZERS[settings.name](params, **given)
    if not weight_decay:
        return direction
    decayed = {name: param.kind != "vector" for name, param in params.items()}
    return optax.chain(direction, optax.add_decayed_weights(weight_decay, mask=decayed))


def _adamw(
    params: Params, *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    return optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon)


def _lion(params: Params, *, beta1: float = 0.9, beta2: float = 0.99) -> optax.GradientTransformation:
    """Sign of an interpolated momentum (Chen et al. 2023)."""
    return optax.scale_by_lion(b1=beta1, b2=beta2)


def _sgd(params: Params, *, momentum: float = 0.9, nesterov: bool = False) -> optax.GradientTransformation:
    """Gradient descent with heavy-ball or Nesterov momentum."""
    return optax.trace(decay=momentum, nesterov=nesterov)


def _adafactor(
    params: Params, *, epsilon: float = 1e-30, momentum: float | None = None, decay_rate: float = 0.8
) -> optax.GradientTransformation:
    """Second moments factored into rows and columns of each matrix (Shazeer and Stern 2018), with the learning rate
    relative to each weight's own size left out: the rate is the one in the run file."""
    parts = [
        optax.scale_by_factored_rms(decay_rate=decay_rate, epsilon=epsilon, min_dim_size_to_factor=32),
        optax.clip_by_block_rms(1.0),
    ]
    if momentum is not None:
        parts.append(optax.ema(momentum, debias=False))
    return _by_matrix(optax.chain(*parts), params)


def _muon(
    params: Params, *, momentum: float = 0.95, nesterov: bool = True, epsilon: float = 1e-8
) -> optax.GradientTransformation:
    """Orthogonalised momentum for the matrices between embedding and head, AdamW for everything else."""
    dimensions = {name: _matrix_dimensions(param) for name, param in params.items() if param.kind == "linear"}
    direction = optax.chain(
        optax.contrib.scale_by_muon(
            beta=momentum, eps=epsilon, nesterov=nesterov, weight_dimension_numbers=lambda _: dimensions
        ),
        optax.stateless(lambda updates, _: _scaled(updates, params)),
    )
    return _by_name(
        {"muon": direction, "adamw": _adamw(params)}, lambda name: "muon" if name in dimensions else "adamw"
    )


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "lion": _lion,
    "sgd": _sgd,
    "muon": _muon,
}


def moment_shardings(mesh: jax.sharding.Mesh, moments: Any, params: Params) -> Any:
    """Where each array of an optimizer's state lies: with the weight it belongs to, factored ones along the dimensions
    they keep, counters on every device. moments: arrays or their shapes."""

    def one(path: Any, leaf: Any) -> jax.sharding.NamedSharding:
        where = f".{jax.tree_util.keystr(path, simple=True, separator='.')}."
        owners = [name for name in params if f".{name}." in where]
        axes = _axes_of(params[max(owners, key=len)], leaf.shape) if owners else None
        if axes is None:
            return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return sharding_for(mesh, axes, leaf.shape)

    return jax.tree_util.tree_map_with_path(one, moments)


def _axes_of(param: Param, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """The logical axes of a moment of that shape, None when it is no part of the weight's shape."""
    if shape == param.shape:
        return param.axes
    layers = param.axes[: int(param.is_stacked)]
    inputs, outputs = param.axes[len(layers)], param.axes[min(len(layers) + param.inputs, len(param.axes) - 1)]
    matrix = _matrix_shape(param)
    for axes, its_shape in (
        ((*layers, inputs, outputs), matrix),
        ((*layers, inputs), matrix[:-1]),
        ((*layers, outputs), (*matrix[:-2], matrix[-1])),
    ):
        if shape == its_shape:
            return axes
    return None


def _matrix_shape(param: Param) -> tuple[int, ...]:
    """([layers,] inputs, outputs), each of its several dimensions as one."""
    layers = param.shape[: int(param.is_stacked)]
    return (*layers, math.prod(param.input_shape), math.prod(param.output_shape))


def _matrix_dimensions(param: Param) -> optax.contrib.MuonDimensionNumbers:
    first = int(param.is_stacked)
    middle = first + param.inputs
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=tuple(range(first, middle)), output_axis=tuple(range(middle, len(param.shape)))
    )


def _scaled(updates: Any, params: Params) -> Any:
    return {name: _muon_scale(params[name]) * update for name, update in updates.items()}


def _muon_scale(param: Param) -> float:
    return _MUON_RMS * math.sqrt(max(math.prod(param.input_shape), math.prod(param.output_shape)))


def _by_matrix(transform: optax.GradientTransformation, params: Params) -> optax.GradientTransformation:
    """The transformation applied to each weight by itself: as a matrix, and layer by layer where layers are stacked."""

    def as_matrix(name: str, array: jax.Array) -> jax.Array:
        return array if params[name].kind == "vector" else array.reshape(_matrix_shape(params[name]))

    def over_layers(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(function) if params[name].is_stacked else function

    def init(weights: Any) -> Any:
        return {name: over_layers(name, transform.init)(as_matrix(name, weight)) for name, weight in weights.items()}

    def update(gradients: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        directions: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for name, gradient in gradients.items():
            direction, states[name] = over_layers(name, transform.update)(
                as_matrix(name, gradient), state[name], as_matrix(name, weights[name])
            )
            directions[name] = direction.reshape(gradient.shape)
        return directions, states

    return _transformation(init, update)


def _by_name(
    transforms: Mapping[str, optax.GradientTransformation], choose: Callable[[str], str]
) -> optax.GradientTransformation:
    """Each weight by the transformation that `choose` names for it."""

    def part(of: Any, which: str) -> dict[str, Any]:
        return {name: value for name, value in of.items() if choose(name) == which}

    def init(weights: Any) -> Any:
        return {which: transform.init(part(weights, which)) for which, transform in transforms.items()}

    def update(gradients: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        directions: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for which, transform in transforms.items():
            done, states[which] = transform.update(part(gradients, which), state[which], part(weights, which))
            directions.update(cast(dict[str, Any], done))
        return {name: directions[name] for name in gradients}, states

    return _transformation(init, update)


def _transformation(init: Any, update: Any) -> optax.GradientTransformation:
    """optax's pair; its own types ask for other names of the arguments."""
    return optax.GradientTransformation(init, update)


def global_norm(gradients: Mapping[str, jax.Array]) -> jax.Array:
    """The Euclidean norm over all arrays together, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(gradient.astype(jnp.float32))) for gradient in gradients.values()))
