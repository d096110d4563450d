"""The optimizers against updates written out by hand, and one matrix at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podtune.config.schema import Mesh
from podtune.config.training import OPTIMIZER_SETTINGS, Optimizer
from podtune.parallel.mesh import build_mesh
from podtune.train.optimizers import OPTIMIZERS, make_optimizer, moment_shardings
from podtune.weights.param import Param

PARAMS = {
    "layers.q": Param((2, 6, 4, 3), ("layers", "embed", "heads", "head_dim")),
    "layers.o": Param((2, 4, 3, 6), ("layers", "heads", "head_dim", "embed"), inputs=2),
    "layers.norm": Param((2, 6), ("layers", "norm"), kind="vector"),
    "embedding": Param((10, 6), ("vocab", "embed"), kind="lookup"),
    "head": Param((6, 10), ("embed", "vocab"), kind="head"),
}


def arrays(seed):
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.normal(size=param.shape), jnp.float32) for name, param in PARAMS.items()}


@functools.cache
def directions(name, steps=3, weight_decay=0.0, **settings):
    """The direction of each of `steps` steps with fixed weights and fresh gradients."""
    optimizer = make_optimizer(Optimizer(name=name, **settings), PARAMS, weight_decay=weight_decay)
    weights = arrays(0)
    state, found, update = jax.jit(optimizer.init)(weights), [], jax.jit(optimizer.update)
    for step in range(steps):
        direction, state = update(arrays(step + 1), state, weights)
        found.append(direction)
    return found


def test_adamw_is_bias_corrected_moments():
    found = directions("adamw", beta1=0.8, beta2=0.9, epsilon=1e-3)
    for name in PARAMS:
        mean = square = 0.0
        for step in range(3):
            gradient = np.asarray(arrays(step + 1)[name])
            mean, square = 0.8 * mean + 0.2 * gradient, 0.9 * square + 0.1 * gradient**2
        wanted = (mean / (1 - 0.8**3)) / (np.sqrt(square / (1 - 0.9**3)) + 1e-3)
        np.testing.assert_allclose(found[2][name], wanted, rtol=1e-5)


def test_lion_is_the_sign_of_an_interpolation():
    found = directions("lion", beta1=0.7, beta2=0.9)
    for name in PARAMS:
        first, second = (np.asarray(arrays(step)[name]) for step in (1, 2))
        np.testing.assert_array_equal(found[1][name], np.sign(0.7 * 0.1 * first + 0.3 * second))


def test_sgd_adds_up_momentum():
    found = directions("sgd", momentum=0.5)
    for name in PARAMS:
        first, second = (np.asarray(arrays(step)[name]) for step in (1, 2))
        np.testing.assert_allclose(found[1][name], 0.5 * first + second, rtol=1e-6)


def newton_schulz(matrix):
    """Five steps of the quintic iteration on one matrix, as Muon's author gives it."""
    turned = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if turned else matrix
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if turned else x


def test_muon_treats_every_layer_of_a_stacked_weight_as_a_matrix_of_its_own():
    found = directions("muon", momentum=0.9, nesterov=False)
    for name, rows, columns in (("layers.q", 6, 12), ("layers.o", 12, 6)):
        first, second = (np.asarray(arrays(step)[name]).reshape(2, rows, columns) for step in (1, 2))
        momentum = (0.9 * 0.1 * first + 0.1 * second) / (1 - 0.9**2)
        wanted = np.stack([newton_schulz(layer) for layer in momentum]) * 0.2 * np.sqrt(max(rows, columns))
        np.testing.assert_allclose(np.asarray(found[1][name]).reshape(2, rows, columns), wanted, rtol=2e-4, atol=1e-5)


def test_muon_leaves_embedding_head_and_norms_to_adamw():
    muon, adamw = directions("muon"), directions("adamw")
    for name in ("layers.norm", "embedding", "head"):
        np.testing.assert_array_equal(muon[-1][name], adamw[-1][name])


def test_muon_steps_are_as_large_as_those_of_adamw_whatever_the_shape():
    # Newton-Schulz leaves singular values between about 0.7 and 1.2, so the size is 0.2 to within that.
    for name in ("layers.q", "layers.o"):
        size = float(jnp.sqrt(jnp.mean(jnp.square(directions("muon")[-1][name]))))
        assert 0.1 < size < 0.26


def test_adafactor_factors_each_layer_by_itself():
    params = {"w": Param((2, 40, 8, 6), ("layers", "embed", "heads", "head_dim"))}
    one = {"w": Param((40, 48), ("embed", "mlp"))}
    gradient = jax.random.normal(jax.random.key(0), (2, 40, 8, 6)) * jnp.array([1.0, 100.0]).reshape(2, 1, 1, 1)
    weights = jnp.ones_like(gradient)
    optimizer = make_optimizer(Optimizer(name="adafactor"), params)
    update = jax.jit(optimizer.update)
    state = jax.jit(optimizer.init)({"w": weights})
    stacked, state = update({"w": gradient}, state, {"w": weights})
    stacked, state = update({"w": gradient[::-1]}, state, {"w": weights})
    alone = make_optimizer(Optimizer(name="adafactor"), one)
    update_alone, init_alone = jax.jit(alone.update), jax.jit(alone.init)
    for layer in range(2):
        weight = {"w": weights[layer].reshape(40, 48)}
        its = init_alone(weight)
        _, its = update_alone({"w": gradient[layer].reshape(40, 48)}, its, weight)
        wanted, _ = update_alone({"w": gradient[::-1][layer].reshape(40, 48)}, its, weight)
        np.testing.assert_allclose(stacked["w"][layer].reshape(40, 48), wanted["w"], rtol=1e-5)
    kept = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert kept < gradient.size / 10


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_leaves_norms_and_biases_out(name):
    weights = arrays(0)
    for plain, decayed in zip(directions(name), directions(name, weight_decay=0.1), strict=True):
        for weight, param in PARAMS.items():
            added = np.asarray(decayed[weight]) - np.asarray(plain[weight])
            wanted = 0 if param.kind == "vector" else 0.1 * np.asarray(weights[weight])
            np.testing.assert_allclose(added, wanted + np.zeros_like(added), atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_setting_in_the_table_is_taken(name):
    values = {"nesterov": True, "epsilon": 1e-6}
    settings = {setting: values.get(setting, 0.5) for setting in OPTIMIZER_SETTINGS[name]}
    make_optimizer(Optimizer(name=name, **settings), PARAMS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_lie_with_their_weights(name):
    mesh = build_mesh(Mesh(fsdp=2, tensor=2, data=2))
    params = {"w": Param((2, 64, 4, 16), ("layers", "embed", "heads", "head_dim"))}
    optimizer = make_optimizer(Optimizer(name=name), params)
    state = jax.eval_shape(optimizer.init, {"w": jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.float32)})
    for leaf, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(moment_shardings(mesh, state, params)), strict=True
    ):
        wanted = {
            (2, 64, 4, 16): (None, "fsdp", "tensor", None),
            (2, 64): (None, "fsdp"),  # the factored moments of Adafactor, by row and by column
        }.get(leaf.shape, ())
        assert tuple(sharding.spec) == wanted
