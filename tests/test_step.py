"""The step: what it does must depend on neither mesh nor micro-batches, and a bad batch must not harm the weights."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import LORA, as_numpy, make_run, make_steps, poisoned, tiny_model

from podtune.config.schema import Mesh
from podtune.parallel.mesh import build_mesh
from podtune.train.step import NOT_FINITE, NOTHING_TRAINED, SPIKE, TRAINED
from podtune.weights.tree import named_leaves

pytestmark = pytest.mark.usefixtures("quick_compiling")

NO_NOISE = {"steps": 6, "schedule": "constant", "optimizer": "sgd", "learning_rate": 2e-4, "clip_norm": None}


@functools.cache
def after_steps(method="lora", mesh=(1, 1, 1), steps=3, model=(), dropout=0.0, targets=None, **train):
    """(losses, trained weights) after a few steps on a mesh (data, fsdp, tensor)."""
    data, fsdp, tensor = mesh
    devices = jax.devices()[: data * fsdp * tensor]
    settings = (
        method if method == "full" else {"lora": {**LORA, "dropout": dropout, "targets": targets or LORA["targets"]}}
    )
    case = make_steps(
        make_run(method=settings, train={**NO_NOISE, **train}),
        mesh=build_mesh(Mesh(data=data, fsdp=fsdp, tensor=tensor), devices),
        model=tiny_model(**dict(model)),
    )
    return case.losses(steps), as_numpy(case.state.trainable)


def assert_same(one, other, *, within):
    np.testing.assert_allclose(one[0], other[0], rtol=within)
    for name, array in one[1].items():
        np.testing.assert_allclose(array, other[1][name], rtol=within, atol=within * np.abs(array).max(), err_msg=name)


# Pitfall 15.
@pytest.mark.parametrize("accumulate", [2, 8])
def test_gradients_of_8x1_4x2_and_1x8_accumulation_are_equal_with_unequal_row_lengths(accumulate):
    # One step of plain gradient descent: the weights move by the gradient alone.
    whole = after_steps("full", steps=1, accumulate=1, learning_rate=1.0)
    parts = after_steps("full", steps=1, accumulate=accumulate, learning_rate=1.0)
    assert_same(whole, parts, within=1e-6)


# Pitfall 15.
@pytest.mark.parametrize("mesh", [(1, 8, 1), (2, 2, 2)])
def test_full_fine_tuning_on_one_and_eight_devices_gives_equal_losses_and_weights(mesh):
    assert_same(after_steps("full"), after_steps("full", mesh=mesh), within=1e-5)


# Pitfalls 31 and 32. Two kv heads and a rank of 2 do not divide over 4 or 8 devices: they are kept whole on each.
@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 1, 4), (1, 1, 8)])
def test_lora_on_8x1_2x4_and_1x8_meshes_gives_the_losses_of_one_device(mesh):
    assert_same(after_steps("lora"), after_steps("lora", mesh=mesh), within=1e-5)


@pytest.mark.parametrize(("tied", "target"), [(True, "embedding"), (False, "head")])
def test_an_adapter_on_the_head_learns_alike_on_every_mesh_and_has_dropout(tied, target):
    settings = {"model": (("tied", tied),), "targets": (target,)}
    one = after_steps("lora", **settings)
    assert_same(one, after_steps("lora", mesh=(2, 2, 2), **settings), within=1e-5)
    dropped = after_steps("lora", dropout=0.5, **settings)
    assert dropped[0][1:] != one[0][1:]
    assert_same(dropped, after_steps("lora", mesh=(2, 1, 1), accumulate=2, dropout=0.5, **settings), within=1e-5)


def test_noise_and_dropout_are_functions_of_seed_step_and_row_alone():
    noise = {"dropout": 0.5, "neftune": 5.0}
    one = after_steps("lora", steps=2, **noise)
    assert one[0] != after_steps("lora")[0][:2]
    assert_same(one, after_steps("lora", steps=2, mesh=(2, 1, 1), accumulate=2, **noise), within=1e-5)


# Pitfall 29.
def test_bfloat16_arithmetic_keeps_float32_adapters_and_moments_that_small_updates_reach():
    case = make_steps(make_run(train={"steps": 50, "compute_dtype": "bfloat16", "learning_rate": 1e-5}))
    before = as_numpy(case.state.trainable)
    losses = case.losses(50)
    assert all(
        leaf.dtype == jnp.float32
        for leaf in named_leaves((case.state.trainable, case.state.moments)).values()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    )
    exact = make_steps(make_run(train={"steps": 50, "compute_dtype": "float32", "learning_rate": 1e-5})).losses(50)
    np.testing.assert_allclose(losses, exact, rtol=0.01)
    moved = {name: np.abs(array - before[name]).max() for name, array in as_numpy(case.state.trainable).items()}
    # AdamW moves each weight by about the rate at every step: 50 of them at a cosine of 1e-5.
    assert all(5e-5 < distance < 6e-4 for distance in moved.values())


@functools.cache
def guarded():
    """A case whose compiled step the tests of the guard share; each takes its own copy of the state."""
    return make_steps(
        make_run(train={"steps": 40, "spike_guard": {"action": "skip", "window": 3, "deviations": 2}, "ema": 0.9})
    )


def fresh_guarded():
    case = guarded()
    if not hasattr(case, "start"):
        case.start = jax.tree.map(jnp.copy, case.state)
    case.state = jax.tree.map(jnp.copy, case.start)
    return case


def weights_and_moments(case):
    return as_numpy((case.state.trainable, case.state.moments, case.state.average))


def assert_untouched(before, case):
    for name, array in weights_and_moments(case).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_a_step_whose_loss_is_not_finite_leaves_weights_and_moments_alone_and_is_counted():
    case = fresh_guarded()
    case.take(case.batch(0))
    before = weights_and_moments(case)
    for count in (1, 2):
        measured = case.take(poisoned(case.batch(1)))
        assert (measured["outcome"], measured["skipped"], measured["bad_in_a_row"]) == (NOT_FINITE, count, count)
    assert_untouched(before, case)
    assert int(case.state.step) == 3  # batches still go on
    measured = case.take(case.batch(3))
    assert (measured["outcome"], measured["skipped"], measured["bad_in_a_row"]) == (TRAINED, 2, 0)


# Pitfall 3.
def test_a_step_with_nothing_to_train_is_skipped_and_counted_and_never_has_loss_zero():
    case = fresh_guarded()
    before = weights_and_moments(case)
    batch = case.batch(0)
    measured = case.take(batch | {"weights": jnp.zeros_like(batch["weights"])})
    assert measured["outcome"] == NOTHING_TRAINED
    assert np.isnan(measured["loss"])
    assert (measured["skipped"], measured["bad_in_a_row"]) == (1, 0)
    assert_untouched(before, case)


def test_a_gradient_norm_that_leaps_above_the_recent_ones_is_skipped():
    case = fresh_guarded()
    for step in range(3):
        assert case.take(case.batch(step))["outcome"] == TRAINED
    before = weights_and_moments(case)
    batch = case.batch(3)
    leap = batch | {"targets": jnp.full_like(batch["targets"], 5)}  # all gradients pull the same way
    assert case.take(leap)["outcome"] == SPIKE
    assert_untouched(before, case)


def test_the_average_follows_the_weights_and_forgets_faster_while_young():
    case = fresh_guarded()
    average = as_numpy(case.state.average)
    for step in range(3):
        case.take(case.batch(step))
        decay = min(0.9, (1 + step) / (10 + step))
        trained = as_numpy(case.state.trainable)
        average = {name: decay * average[name] + (1 - decay) * trained[name] for name in average}
    for name, array in as_numpy(case.state.average).items():
        np.testing.assert_allclose(array, average[name], rtol=1e-5, atol=1e-8)


def test_the_step_is_compiled_once():
    case = fresh_guarded()
    for step in range(4):
        case.take(case.batch(step))
    assert case.program.step._cache_size() == 1


# Pitfall 35. With a vocabulary of 150,000: test_objectives_cross_entropy.
def test_evaluation_needs_no_more_memory_than_training():
    case = fresh_guarded()
    batch = case.batch(0)
    training = case.program.step.lower(case.state, case.program.frozen, batch).compile().memory_analysis()
    del batch["requests"]
    evaluation = case.program.eval_step.lower(case.state.trainable, case.program.frozen, batch).compile()
    assert evaluation.memory_analysis().temp_size_in_bytes <= training.temp_size_in_bytes


def test_frozen_weights_are_not_donated_and_the_state_is():
    case = fresh_guarded()
    old = case.state
    case.take(case.batch(0))
    assert all(leaf.is_deleted() for leaf in named_leaves(old.trainable).values())
    assert not any(leaf.is_deleted() for leaf in named_leaves(case.program.frozen).values())


def test_clipping_bounds_the_global_norm_of_what_is_subtracted():
    plain, clipped = (
        after_steps("full", steps=1, learning_rate=1.0, **({"clip_norm": limit} if limit else {}))
        for limit in (None, 0.01)
    )
    start = as_numpy(make_steps(make_run(method="full")).state.trainable)
    moved = np.sqrt(sum(np.sum((clipped[1][name] - start[name]) ** 2) for name in start))
    assert moved == pytest.approx(0.01, rel=1e-3)
    assert clipped[0] == plain[0]


def test_evaluation_has_no_noise_no_dropout_and_no_smoothing():
    noisy = make_steps(
        make_run(method={"lora": {**LORA, "dropout": 0.5}}, train={"steps": 5, "neftune": 5.0, "label_smoothing": 0.1})
    )
    plain = make_steps(make_run(train={"steps": 5}))
    batch = {name: array for name, array in plain.batch(0).items() if name != "requests"}
    losses = [case.program.eval_step(case.state.trainable, case.program.frozen, batch) for case in (noisy, plain)]
    assert losses[0][0] == losses[1][0]


def test_neftune_noise_is_bounded_by_the_length_of_the_tokens_own_segment():
    from podtune.train.noise import neftune_noise, row_keys

    segments = jnp.array([[1, 1, 1, 1, 2, 2, 0, 0]])
    noise = neftune_noise(row_keys(0, jnp.int32(0), jnp.arange(1)), segments, alpha=5.0, embed=400)
    largest = np.abs(np.asarray(noise))[0].max(axis=-1)
    for at, length in enumerate([4, 4, 4, 4, 2, 2]):
        bound = 5.0 / np.sqrt(length * 400)
        assert 0.95 * bound < largest[at] <= bound
    assert not largest[6:].any()
