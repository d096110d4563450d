"""Attention sees what it must and nothing else, and its frugal path equals the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from podtune.layers.attention import attend
from podtune.layers.places import Places, places, segment_lengths, visible

METHODS = ("plain", "blocked")
ROWS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 24, 4, 2, 8
# A row of two samples and padding, and a row of three samples.
SEGMENTS = jnp.asarray([[1] * 10 + [2] * 11 + [0] * 3, [1] * 5 + [2] * 12 + [3] * 7], jnp.int32)
POSITIONS = jnp.asarray([[*range(10), *range(11), 0, 0, 0], [*range(5), *range(12), *range(7)]], jnp.int32)


def inputs(seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(ROWS, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def reference(q, k, v, *, window, softcap, scale):
    """One score at a time, as the definition says."""
    q, k, v = (np.asarray(x) for x in (q, k, v))
    positions, segments = np.asarray(POSITIONS), np.asarray(SEGMENTS)
    out = np.zeros(q.shape)
    for row in range(ROWS):
        for head in range(HEADS):
            for here in range(LENGTH):
                scores = {}
                for there in range(here + 1):
                    distance = positions[row, here] - positions[row, there]
                    if segments[row, here] != segments[row, there] or (window is not None and distance >= window):
                        continue
                    score = float(np.dot(q[row, here, head], k[row, there, head // (HEADS // KV_HEADS)])) * scale
                    scores[there] = score if softcap is None else softcap * np.tanh(score / softcap)
                total = sum(np.exp(score) for score in scores.values())
                for there, score in scores.items():
                    out[row, here, head] += np.exp(score) / total * v[row, there, head // (HEADS // KV_HEADS)]
    return out


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 1.5), (7, 0.8)])
@pytest.mark.parametrize("method", METHODS)
def test_attention_is_what_its_definition_says(method, window, softcap):
    q, k, v = inputs()
    at = places(POSITIONS, SEGMENTS)
    settings = {"window": window, "softcap": softcap, "scale": 0.4, "method": method, "block": 7}
    out = tiny.quick_jit(lambda q, k, v: attend(q, k, v, queries=at, keys=at, **settings))(q, k, v)
    np.testing.assert_allclose(out, reference(q, k, v, window=window, softcap=softcap, scale=0.4), atol=1e-5)


@pytest.mark.parametrize("window", [None, 5, "traced"])
def test_both_ways_agree_in_value_and_gradient(window):
    q, k, v = inputs()

    def loss(q, k, v, window, method):
        at = places(POSITIONS, SEGMENTS)
        out = attend(q, k, v, queries=at, keys=at, window=window, softcap=1.5, scale=0.4, method=method, block=8)
        return jnp.sum(jnp.sin(out)), out

    if window == "traced":
        grads = tiny.quick_jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), static_argnums=4)
        window = jnp.int32(5)
    else:
        grads = tiny.quick_jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), static_argnums=(3, 4))
    (plain, plain_out), (blocked, blocked_out) = (grads(q, k, v, window, m) for m in ("plain", "blocked"))
    np.testing.assert_allclose(plain_out, blocked_out, atol=1e-5)
    for one, other in zip(plain, blocked, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_blocked_attention_multiplies_only_what_can_be_seen():
    def flops(method, window):
        def run(q, k, v):
            at = places(jnp.zeros((1, 1024), jnp.int32), jnp.ones((1, 1024), jnp.int32))
            return attend(
                q, k, v, queries=at, keys=at, window=window, softcap=None, scale=1.0, method=method, block=128
            )

        shapes = [jax.ShapeDtypeStruct((1, 1024, heads, 32), jnp.float32) for heads in (4, 2, 2)]
        return jax.jit(run).lower(*shapes).compile().cost_analysis()["flops"]

    plain = flops("plain", None)
    assert flops("blocked", None) < 0.62 * plain  # (1 + 1 / 8) / 2 of the scores
    assert flops("blocked", 64) < 0.25 * plain


def test_blocked_attention_holds_less_than_half_of_what_plain_attention_does():
    def temporary_bytes(method):
        def loss(q, k, v):
            at = places(jnp.zeros((1, 2048), jnp.int32), jnp.ones((1, 2048), jnp.int32))
            return attend(q, k, v, queries=at, keys=at, window=None, softcap=None, scale=1.0, method=method).sum()

        shapes = [jax.ShapeDtypeStruct((1, 2048, heads, 32), jnp.float32) for heads in (4, 2, 2)]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes("blocked") < 0.5 * temporary_bytes("plain")


def test_a_query_that_sees_no_key_passes_no_gradient():
    q, k, v = inputs()
    queries = places(POSITIONS, SEGMENTS.at[0, 4:6].set(9))  # a segment that no key is of
    keys = places(POSITIONS, SEGMENTS)
    blind = jnp.zeros((ROWS, LENGTH, 1, 1), bool).at[0, 4:6].set(True)

    def loss(q, k, v, method):
        out = attend(q, k, v, queries=queries, keys=keys, window=None, softcap=None, scale=0.4, method=method, block=8)
        return jnp.sum(jnp.where(blind & (method == "plain"), 0, out) ** 2)

    plain, blocked = (jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)(q, k, v, m) for m in METHODS)
    for one, other in zip(plain, blocked, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_blocked_attention_in_bfloat16_is_close_to_float32_in_value_and_gradient():
    at = places(POSITIONS, SEGMENTS)

    def loss(q, k, v):
        out = attend(q, k, v, queries=at, keys=at, window=None, softcap=1.5, scale=0.4, method="blocked", block=8)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    narrow = inputs(dtype=jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in narrow]
    exact, rounded = (tiny.quick_jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*x) for x in (wide, narrow))
    for one, other in zip(jax.tree.leaves(rounded), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), other, atol=2e-2 * float(jnp.abs(other).max()))


def test_scores_are_float32_in_bfloat16_compute():
    q, k, v = inputs(dtype=jnp.bfloat16)
    at = places(POSITIONS, SEGMENTS)
    settings = {"queries": at, "keys": at, "window": None, "softcap": None, "scale": 0.4}
    program = str(jax.make_jaxpr(lambda: attend(q, k, v, **settings))())
    assert "exp" in program
    assert all("bf16" not in line.split("=")[0] for line in program.splitlines() if "= exp" in line)
    run = tiny.quick_jit(lambda q, k, v: attend(q, k, v, **settings))
    wide = run(*(x.astype(jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(run(q, k, v).astype(jnp.float32), wide, atol=0.03)


def test_a_window_is_measured_in_positions():
    at = places(jnp.asarray([[0, 1, 2, 10, 11]], jnp.int32), jnp.ones((1, 5), jnp.int32))
    seen = visible(at, at, window=3)[0]
    np.testing.assert_array_equal(seen[4], [False, False, False, True, True])
    np.testing.assert_array_equal(seen[2], [True, True, True, False, False])


def test_empty_slots_are_not_seen():
    keys = places(jnp.zeros((1, 4), jnp.int32), jnp.asarray([[1, 0, 0, 0]], jnp.int32))
    query = Places(jnp.asarray([3]), jnp.asarray([[3]], jnp.int32), jnp.asarray([[1]], jnp.int32))
    np.testing.assert_array_equal(visible(query, keys, window=None), [[[True, False, False, False]]])


def test_segment_lengths_count_each_sample_by_itself():
    at = places(POSITIONS, SEGMENTS)
    lengths = segment_lengths(at, at)
    np.testing.assert_array_equal(lengths[1], [5] * 5 + [12] * 12 + [7] * 7)
