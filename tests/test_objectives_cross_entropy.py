"""The chunked cross-entropy against one that builds all logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from podtune.config.schema import Mesh
from podtune.objectives.cross_entropy import chunked_cross_entropy
from podtune.objectives.language import LanguageSettings, chunk_positions
from podtune.parallel.mesh import build_mesh


def plain(states, matrix, targets, weights, *, vocab_first=True, label_smoothing=0.0, soft_cap=None):
    """The definition, with every logit in memory."""
    logits = (states.astype(jnp.float32) @ (matrix.T if vocab_first else matrix).astype(jnp.float32)).astype(
        jnp.float32
    )
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    of_target = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return -jnp.sum(weights * ((1 - label_smoothing) * of_target + label_smoothing * jnp.mean(log_p, -1)))


def inputs(rows=3, seq=13, embed=8, vocab=37, dtype=jnp.float32):
    random = np.random.default_rng(0)
    states = jnp.asarray(random.normal(size=(rows, seq, embed)), dtype)
    matrix = jnp.asarray(random.normal(size=(vocab, embed)), jnp.float32)
    targets = jnp.asarray(random.integers(0, vocab, (rows, seq)), jnp.int32)
    weights = jnp.asarray(random.random((rows, seq)) < 0.6, jnp.float32)
    return states, matrix, targets, weights


@pytest.mark.parametrize(
    ("chunk_positions", "label_smoothing", "soft_cap"),
    [(1, 0.0, None), (4, 0.1, None), (13, 0.0, 3.0), (5, 0.1, 3.0), (64, 0.0, None)],
)
def test_loss_and_gradients_equal_those_of_full_logits(chunk_positions, label_smoothing, soft_cap):
    states, matrix, targets, weights = inputs()
    settings = {"label_smoothing": label_smoothing, "soft_cap": soft_cap}
    wanted, wanted_gradients = jax.value_and_grad(plain, (0, 1))(states, matrix, targets, weights, **settings)
    loss, gradients = jax.jit(
        jax.value_and_grad(
            lambda s, m: chunked_cross_entropy(s, m, targets, weights, chunk_positions=chunk_positions, **settings),
            (0, 1),
        )
    )(states, matrix)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for got, want in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_an_untied_head_is_used_as_it_lies():
    states, matrix, targets, weights = inputs()
    head = matrix.T

    def ours(s, m):
        return chunked_cross_entropy(s, m, targets, weights, vocab_first=False, chunk_positions=4)

    wanted = jax.grad(lambda s, m: plain(s, m, targets, weights, vocab_first=False), (0, 1))(states, head)
    for got, want in zip(jax.grad(ours, (0, 1))(states, head), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_bfloat16_states_lose_no_more_than_their_own_rounding():
    states, matrix, targets, weights = inputs(dtype=jnp.bfloat16)
    matrix = matrix.astype(jnp.bfloat16).astype(jnp.float32)  # so that casting it for the product rounds nothing more
    wanted, (of_states, of_matrix) = jax.value_and_grad(plain, (0, 1))(states, matrix, targets, weights)
    loss, (got_states, got_matrix) = jax.value_and_grad(
        lambda s, m: chunked_cross_entropy(s, m, targets, weights, chunk_positions=5), (0, 1)
    )(states, matrix)
    assert got_states.dtype == jnp.bfloat16
    assert got_matrix.dtype == jnp.float32
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    # bfloat16 has 8 bits of mantissa: gradients of single logits are rounded to 1 in 256 before they are summed.
    np.testing.assert_allclose(got_states.astype(jnp.float32), of_states.astype(jnp.float32), rtol=0.05, atol=0.02)
    np.testing.assert_allclose(got_matrix, of_matrix, rtol=0.05, atol=0.02)


def test_positions_that_are_not_trained_count_for_nothing():
    states, matrix, targets, weights = inputs()
    changed = states.at[weights == 0].set(100.0)
    ours = jax.value_and_grad(lambda s: chunked_cross_entropy(s, matrix, targets, weights, chunk_positions=4))
    loss, gradient = ours(states)
    loss_changed, gradient_changed = ours(changed)
    assert loss == loss_changed
    np.testing.assert_array_equal(gradient, gradient_changed)
    assert not np.any(np.asarray(gradient)[np.asarray(weights) == 0])


def test_a_split_unembedding_is_gathered_once_and_not_for_each_chunk():
    mesh = build_mesh(Mesh(data=1, fsdp=8))
    rows, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    embed = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    states, matrix, targets, weights = inputs(rows=8, seq=16, vocab=40, embed=16)

    def ours(s, m, t, w):
        return chunked_cross_entropy(s, m, t, w, chunk_positions=4)

    compiled = jax.jit(jax.value_and_grad(ours), in_shardings=(rows, embed, rows, rows), out_shardings=(whole, rows))
    text = compiled.lower(states, matrix, targets, weights).compile().as_text()
    computations = text.split("\n\n")
    gathering = [each.lstrip() for each in computations if " all-gather(" in each]
    assert gathering
    assert all(each.startswith("ENTRY") for each in gathering)


@pytest.mark.parametrize("differentiated", [True, False])
def test_chunks_without_a_trained_position_are_not_computed(differentiated):
    """Trained positions come first in their row, wherever they stand: with six of them in chunks of four, what the
    other chunks hold is never multiplied, or NaN would come of it."""
    states, matrix, targets, _ = inputs(rows=2, seq=16)
    trained = np.zeros((2, 16), np.float32)
    trained[0, [1, 4, 5, 9, 14, 15]] = trained[1, [0, 15]] = 1
    weights = jnp.asarray(trained)
    passed_over = np.argsort(trained == 0, axis=1, kind="stable")[:, 8:]
    poisoned = states.at[np.arange(2)[:, None], passed_over].set(jnp.nan)

    def ours(s):
        return chunked_cross_entropy(s, matrix, targets, weights, chunk_positions=4)

    wanted, gradient = jax.value_and_grad(ours)(states)
    np.testing.assert_allclose(wanted, plain(states, matrix, targets, weights), rtol=1e-6)
    got, got_gradient = jax.value_and_grad(ours)(poisoned) if differentiated else (ours(poisoned), gradient)
    assert np.isfinite(got)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(got_gradient, gradient, rtol=1e-6)


def test_nothing_trained_gives_zero_and_no_nan():
    states, matrix, targets, weights = inputs()
    loss, gradient = jax.value_and_grad(lambda s: chunked_cross_entropy(s, matrix, targets, 0 * weights))(states)
    assert loss == 0
    assert not np.any(gradient)


def test_a_frozen_unembedding_costs_no_gradient_of_its_size():
    states, matrix, targets, weights = inputs(vocab=1031)

    def loss(s, m):
        return chunked_cross_entropy(s, m, targets, weights, chunk_positions=4)

    frozen = str(jax.make_jaxpr(jax.grad(loss, 0))(states, matrix))
    trained = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(states, matrix))
    made = "f32[1031,8] = dot_general"
    assert made not in frozen
    assert made in trained


@pytest.mark.parametrize("vocab", [150_000])
def test_peak_memory_does_not_hold_the_logits_of_a_batch_in_training_or_evaluation(vocab):
    """Pitfall: evaluation kept logits. At this vocabulary the logits of the batch would be 77 MB."""
    states, matrix, targets, weights = inputs(rows=1, seq=128, vocab=vocab)

    def loss(s):
        return chunked_cross_entropy(s, matrix, targets, weights, chunk_positions=16)

    whole = 4 * 128 * vocab
    training = jax.jit(jax.value_and_grad(loss)).lower(states).compile().memory_analysis().temp_size_in_bytes
    evaluation = jax.jit(loss).lower(states).compile().memory_analysis().temp_size_in_bytes
    assert training < whole / 2
    assert evaluation <= training


@pytest.mark.parametrize("vocab", [40, 37])
def test_a_vocabulary_split_over_devices_gives_the_same_loss_and_gradients(vocab):
    mesh = build_mesh(Mesh(data=2, fsdp=1, tensor=4))
    arrays = inputs(rows=4, vocab=vocab)
    states, matrix, targets, weights = arrays
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    # 37 rows do not divide over 4 devices; such a matrix is split by embed instead.
    by_vocab = NamedSharding(mesh, PartitionSpec("tensor") if vocab % 4 == 0 else PartitionSpec(None, "tensor"))

    def loss(s, m, t, w):
        return chunked_cross_entropy(s, m, t, w, chunk_positions=4, soft_cap=5.0)

    placed = [jax.device_put(a, s) for a, s in zip(arrays, (by_row, by_vocab, by_row, by_row), strict=True)]
    got, got_gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*placed)
    wanted, wanted_gradients = jax.value_and_grad(loss, (0, 1))(states, matrix, targets, weights)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    for one, other in zip(got_gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "seq", "wanted"), [(1, 2048, 512), (4, 512, 128), (2, 256, 64), (1, 256, 64), (1024, 64, 1), (1, 3, 1)]
)
def test_a_chunk_is_of_512_tokens_at_most_and_of_a_quarter_of_the_row_at_most(rows, seq, wanted):
    assert chunk_positions(LanguageSettings(), rows, seq) == wanted


def test_chunks_are_of_the_rows_that_a_device_holds():
    mesh = build_mesh(Mesh(data=2, fsdp=4, tensor=1))
    assert chunk_positions(LanguageSettings(mesh=mesh), 32, 2048) == 128
