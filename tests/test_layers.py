"""Norms, rotations and the feed-forward block, each against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from param_trees import map_params

from podtune.layers.feedforward import ACTIVATIONS, describe_feedforward, feedforward
from podtune.layers.norms import rms_norm
from podtune.layers.positions import ROPES, Rope, attention_factor, positions_in_segments, rotate, rotation
from podtune.weights.param import initialise

pytestmark = pytest.mark.usefixtures("quick_compiling")


def test_rms_norm_scales_rows_to_unit_mean_square():
    x = jax.random.normal(jax.random.key(0), (3, 5, 16)) * 7
    out = rms_norm(x, jnp.ones(16), epsilon=0.0)
    np.testing.assert_allclose(jnp.mean(out**2, axis=-1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(rms_norm(x, jnp.full(16, 0.5), epsilon=0.0, offset=1.0), 1.5 * out, rtol=1e-5)


def test_rms_norm_of_bfloat16_squares_in_float32():
    x = jnp.full((1, 4096), 0.1, jnp.bfloat16)  # a bfloat16 sum of 4096 squares would stop growing at 4
    np.testing.assert_allclose(rms_norm(x, jnp.ones(4096), epsilon=0.0).astype(jnp.float32), 1.0, rtol=0.01)


@pytest.mark.parametrize("kind", ROPES)
def test_rotated_products_depend_on_distance_alone(kind):
    rope = Rope(base=100.0, kind=kind, factor=4.0, original_length=16)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def product(query_at, key_at):
        def turned(x, at):
            return rotate(x, rotation(rope, jnp.asarray([[at]], jnp.int32), head_dim=8))

        return float(jnp.sum(turned(q, query_at) * turned(k, key_at))) / attention_factor(rope) ** 2

    assert product(7, 3) == pytest.approx(product(107, 103), abs=1e-4)
    assert product(3, 3) == pytest.approx(float(jnp.sum(q * k)), abs=1e-5)


def test_neighbouring_positions_differ_in_bfloat16_compute():
    turns = rotation(Rope(base=1e4), jnp.asarray([[256, 257]], jnp.int32), head_dim=8)
    assert turns.cos.dtype == jnp.float32
    assert abs(float(turns.cos[0, 0, 0] - turns.cos[0, 1, 0])) > 0.1
    assert rotate(jnp.ones((1, 2, 1, 8), jnp.bfloat16), turns).dtype == jnp.bfloat16


def test_a_dynamic_rope_grows_only_beyond_its_original_length():
    rope, positions = Rope(base=100.0, kind="dynamic", factor=2.0, original_length=16), jnp.arange(20)[None]
    plain = rotation(Rope(base=100.0), positions, head_dim=8)
    within = rotation(rope, positions, head_dim=8, lengths=jnp.full((1, 20), 16))
    beyond = rotation(rope, positions, head_dim=8, lengths=jnp.full((1, 20), 20))
    np.testing.assert_allclose(within.cos, plain.cos, atol=1e-5)
    assert float(jnp.abs(beyond.cos - plain.cos).max()) > 0.1


def test_positions_start_anew_in_each_segment():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0, 0], [3, 1, 1, 1, 1, 1, 2]], jnp.int32)
    expected = [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 0]]
    np.testing.assert_array_equal(positions_in_segments(segments), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feedforward_is_its_formula(activation, bias):
    description = describe_feedforward(embed=6, mlp=10, bias=bias, init_scale=0.5)
    w = map_params(lambda name, param: initialise(param, jax.random.key(0), name=name) + 0.01, description)
    x = jax.random.normal(jax.random.key(1), (2, 3, 6))
    gate, up = x @ w.gate, x @ w.up
    if bias:
        gate, up = gate + w.gate_bias, up + w.up_bias
    expected = (ACTIVATIONS[activation](gate) * up) @ w.down + (w.down_bias if bias else 0)
    np.testing.assert_allclose(feedforward(x, w, activation=activation), expected, atol=1e-5)
