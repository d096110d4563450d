"""What a remat policy keeps of a layer: with dots no matrix product is made twice, and less is held than with none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from jax.ad_checkpoint import checkpoint_policies
from param_trees import map_params

from podtune.config.schema import LoRA
from podtune.weights.adapters import adapter_mask, attach, join, split
from podtune.weights.keeping import PRODUCT, keepable
from podtune.weights.param import initialise

ROWS, LENGTH = 2, 128


def compiled_step(remat, dtype="float32"):
    """The gradient of the adapters of a tiny llama, compiled."""
    model = tiny.tiny_model("llama")
    description = attach(model.describe(dtype=jnp.dtype(dtype)), LoRA())
    weights = map_params(lambda name, param: initialise(param, jax.random.key(0), name=name), description)
    trained, frozen = split(weights, adapter_mask(weights))
    tokens = tiny.random_tokens(ROWS, LENGTH)

    def loss(trained, frozen, tokens):
        states = model.hidden(join(trained, frozen), tokens, remat=remat, compute_dtype=dtype).states
        return jnp.sum(states.astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss)).lower(trained, frozen, tokens).compile()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dots_makes_no_matrix_product_twice_and_full_does(dtype):
    products = {remat: compiled_step(remat, dtype).as_text().count(" dot(") for remat in ("none", "dots", "full")}
    assert products["dots"] == products["none"]
    assert products["full"] > products["none"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_policy_holds_less_than_the_one_before(dtype):
    none, dots, full = (
        compiled_step(remat, dtype).memory_analysis().temp_size_in_bytes for remat in ("none", "dots", "full")
    )
    assert full < dots < none


def test_stacks_of_bfloat16_are_written_a_layer_at_a_time():
    """XLA on a CPU would convert the whole stack, at each layer, to write one."""
    layers = tiny.FAMILY_CONFIGS["llama"]["num_hidden_layers"]
    stack = f"[{layers},{ROWS},{LENGTH},"
    program = compiled_step("dots", "bfloat16").as_text()
    written = [line for line in program.splitlines() if "dynamic-update-slice(" in line and stack in line]
    assert written
    assert not [line for line in written if "bf16[" in line.split("=")[1] or f"f32{stack}" in line.split("=")[1]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_kept_value_and_its_gradient_are_untouched(dtype):
    x = jnp.asarray([0.0, -0.0, 1.5, -3.25, jnp.inf, jnp.nan], dtype)
    assert np.asarray(keepable(x, PRODUCT)).tobytes() == np.asarray(x).tobytes()
    policy = checkpoint_policies.save_only_these_names(PRODUCT)
    through = jax.checkpoint(lambda x: jnp.sin(keepable(jnp.cos(x), PRODUCT)), policy=policy)
    gradient = jax.grad(lambda x: jnp.sum(through(x)))(x[:4])
    np.testing.assert_array_equal(gradient, jax.grad(lambda x: jnp.sum(jnp.sin(jnp.cos(x))))(x[:4]))
