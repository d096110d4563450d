"""Descriptions, names, and the operations in which weights meet activations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from param_trees import map_params

from podtune.weights.leaves import LoRA, as_array, beside, is_weight, linear, linear_transposed, lookup, parameter_count
from podtune.weights.param import Param, abstract, initialise, initialise_on, stack
from podtune.weights.tree import map_named, named_leaves, static, weight_dataclass

pytestmark = pytest.mark.usefixtures("quick_compiling")


@weight_dataclass
class Pair:
    left: object
    right: object = None
    scale: float = static(default=1.0)


def lora(shape, *, inputs=1, rank=3, scale=0.7, layers=(), seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    base = jax.random.normal(keys[0], (*layers, *shape))
    a = jax.random.normal(keys[1], (*layers, *shape[:inputs], rank))
    b = jax.random.normal(keys[2], (*layers, rank, *shape[inputs:]))
    return LoRA(base=base, a=a, b=b, scale=scale)


def plain_linear(x, w, inputs):
    """The definition: x W + scale (x a) b, left to jax's own derivatives."""
    return jnp.tensordot(x, w.base, inputs) + w.scale * jnp.tensordot(jnp.tensordot(x, w.a, inputs), w.b, 1)


def close(one, other):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), one, other)


@pytest.mark.parametrize(("shape", "inputs"), [((6, 5), 1), ((6, 2, 4), 1), ((2, 4, 6), 2)])
def test_linear_through_an_adapter_and_its_gradients_are_the_plain_formula(shape, inputs):
    w = lora(shape, inputs=inputs)
    x = jax.random.normal(jax.random.key(9), (2, 7, *shape[:inputs]))

    def of(function):
        return tiny.quick_jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), argnums=(0, 1)))(x, w)

    close(of(lambda x, w: linear(x, w, inputs=inputs)), of(lambda x, w: plain_linear(x, w, inputs)))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_scanned_adapters_have_the_gradients_of_unrolled_ones(checkpointed):
    w = lora((6, 6), layers=(4,))
    x = jax.random.normal(jax.random.key(9), (3, 6))

    def scanned(x, w):
        def body(x, w):
            return jnp.tanh(linear(x, w)), None

        return jax.lax.scan(jax.checkpoint(body) if checkpointed else body, x, w)[0].sum()

    def unrolled(x, w):
        for layer in range(4):
            x = jnp.tanh(plain_linear(x, jax.tree.map(lambda leaf, layer=layer: leaf[layer], w), 1))
        return x.sum()

    close(*(tiny.quick_jit(jax.value_and_grad(f, argnums=(0, 1)))(x, w) for f in (scanned, unrolled)))


def test_a_frozen_base_costs_no_gradient_of_its_size():
    w = lora((256, 256), rank=2)
    x = jax.random.normal(jax.random.key(1), (64, 256))

    def flops(argnums):
        def loss(base, a, b):
            return jnp.sum(linear(x, LoRA(base=base, a=a, b=b, scale=1.0)) ** 2)

        compiled = jax.jit(jax.grad(loss, argnums=argnums)).lower(w.base, w.a, w.b).compile()
        return compiled.cost_analysis()["flops"]

    assert flops((1, 2)) < flops((0, 1, 2)) - 1.9 * 64 * 256 * 256


def test_bfloat16_compute_adds_the_update_beside_the_base():
    """Added to a bfloat16 weight, an update of 1e-3 of its size would be rounded away."""
    base = jnp.ones((8, 8), jnp.bfloat16)
    w = LoRA(base=base, a=jnp.full((8, 1), 1e-3), b=jnp.ones((1, 8)), scale=1.0)
    x = jnp.asarray(jax.random.rademacher(jax.random.key(0), (4, 8)), jnp.bfloat16)
    change = linear(x, w).astype(jnp.float32) - linear(x, base).astype(jnp.float32)
    assert linear(x, w).dtype == jnp.bfloat16
    expected = 1e-3 * jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True) * jnp.ones((1, 8))
    np.testing.assert_allclose(change, expected, atol=0.02)


def test_transposed_linear_and_lookup_read_the_same_weight():
    w = lora((11, 6))
    x = jax.random.normal(jax.random.key(1), (2, 5, 6))
    whole = w.base + w.scale * w.a @ w.b
    close(linear_transposed(x, w), x @ whole.T)
    close(linear_transposed(x, w.base), x @ w.base.T)
    ids = jnp.asarray([[0, 10], [3, 3]])
    close(lookup(w, ids, dtype=jnp.float32), whole[ids])
    assert lookup(w.base, ids, dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_update_beside_the_base_gives_the_product_and_gradients_of_linear(transposed: bool, dropout: float):
    w = lora((6, 11))
    x = jax.random.normal(jax.random.key(1), (2, 5, 11 if transposed else 6))
    key = jax.random.split(jax.random.key(2), 2) if dropout else None
    w = dataclasses.replace(w, dropout=dropout, dropout_key=key)

    def together(x, w):
        wider, matrix = beside(x, w, transposed=transposed)
        assert wider.shape[-1] == x.shape[-1] + w.a.shape[-1]
        return wider @ (matrix.T if transposed else matrix)

    def apart(x, w):
        if not transposed:
            return linear(x, w)
        turned = LoRA(base=w.base.T, a=w.b.T, b=w.a.T, scale=w.scale, dropout=w.dropout, dropout_key=w.dropout_key)
        return linear(x, turned)

    close(together(x, w), apart(x, w))
    weights = jax.random.normal(jax.random.key(3), apart(x, w).shape)

    def gradients(product):
        def loss(x, a, b):
            return jnp.sum(weights * product(x, dataclasses.replace(w, a=a, b=b)))

        return jax.grad(loss, (0, 1, 2))(x, w.a, w.b)

    for one, other in zip(gradients(together), gradients(apart), strict=True):
        close(one, other)


def test_an_update_beside_a_bfloat16_head_is_not_rounded_away():
    base = jnp.ones((8, 8), jnp.bfloat16)
    w = LoRA(base=base, a=jnp.full((8, 1), 1e-3), b=jnp.ones((1, 8)), scale=1.0)
    x = jnp.ones((4, 8), jnp.bfloat16)
    wider, matrix = beside(x, w)
    product = jnp.dot(wider, matrix, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(product, 8.008, atol=1e-4)
    assert beside(x, base)[1] is base


@pytest.mark.parametrize("layers", [(), (3,)])
def test_an_adapter_as_one_array(layers):
    w = lora((6, 2, 4), layers=layers)
    expected = w.base + w.scale * jnp.einsum("...ir,...rhd->...ihd", w.a, w.b)
    close(as_array(w), expected)
    narrow = LoRA(base=w.base.astype(jnp.bfloat16), a=w.a, b=w.b, scale=w.scale)
    assert as_array(narrow).dtype == jnp.bfloat16
    assert as_array(narrow, dtype=jnp.float32).dtype == jnp.float32
    assert as_array(w.base, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_names_follow_the_fields_and_absent_weights_have_none():
    tree = Pair(left=Pair(left=1, right=2), right=None)
    assert named_leaves(tree) == {"left.left": 1, "left.right": 2}
    assert map_named(lambda name, leaf: f"{name}={leaf}", tree).left.right == "left.right=2"


def test_static_fields_are_part_of_the_program():
    leaves, structure = jax.tree.flatten(Pair(left=1, scale=2.0))
    assert leaves == [1]
    assert structure != jax.tree.structure(Pair(left=1, scale=3.0))


def test_starting_values_depend_on_key_and_name_alone():
    param, key = Param((8, 16), ("embed", "mlp")), jax.random.key(0)
    one = initialise(param, key, name="a")
    # Not bitwise: whether or not it is compiled, the inverse error function may differ in its last bit.
    np.testing.assert_allclose(one, initialise_on(tiny.mesh_of(1, 2, 4), param, key, name="a"), rtol=1e-6)
    assert jnp.any(one != initialise(param, key, name="b"))
    assert jnp.any(one != initialise(param, jax.random.key(1), name="a"))
    tree = {"a": param, "b": Param((4,), ("norm",), init="ones"), "c": Param((4,), ("norm",), init="zeros")}
    mesh = tiny.mesh_of(2, 2, 2)
    whole = map_params(lambda name, param: initialise_on(mesh, param, key, name=name), tree)
    np.testing.assert_allclose(whole["a"], one, rtol=1e-6)
    assert (float(whole["b"].min()), float(whole["c"].max())) == (1.0, 0.0)


def test_starting_values_have_the_spread_they_say():
    normal = initialise(Param((200, 200), ("embed", "mlp"), scale=0.05), jax.random.key(0), name="w")
    assert float(normal.std()) == pytest.approx(0.05, rel=0.03)
    uniform = Param((200, 2, 50), ("embed", "heads", "head_dim"), init="fan_in_uniform")
    values = initialise(uniform, jax.random.key(0), name="w")
    assert float(jnp.abs(values).max()) == pytest.approx(200**-0.5, rel=0.01)


def test_a_stacked_description_knows_its_inputs_and_outputs():
    param = stack(Param((2, 4, 6), ("heads", "head_dim", "embed"), inputs=2), 3)
    assert (param.shape, param.axes[0]) == ((3, 2, 4, 6), "layers")
    assert (param.input_shape, param.output_shape, param.size) == ((2, 4), (6,), 144)
    assert param.of_dtype(jnp.bfloat16).bytes == 288


def test_a_description_counts_and_traces_without_an_array():
    model = tiny.tiny_model("llama")
    description = model.describe()
    shapes = abstract(description, tiny.mesh_of(2, 2, 2))
    assert parameter_count(shapes) == parameter_count(tiny.random_weights(model)) == parameter_count(description)
    traced = jax.eval_shape(lambda w, t: model.hidden(w, t).states, shapes, jax.ShapeDtypeStruct((2, 8), jnp.int32))
    assert traced.shape == (2, 8, 32)
    assert map_params(lambda name, param: name, description).layers.mlp.gate == "layers.mlp.gate"
    assert not is_weight(description.embedding)
