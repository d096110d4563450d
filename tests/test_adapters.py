"""LoRA: targets by any of their names, PEFT's forward pass and gradients, dropout as PEFT's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from podtune.config.errors import UserError
from podtune.config.schema import LoRA as LoRASettings
from podtune.families.loading import load_weights
from podtune.weights.adapters import adapter_mask, attach, join, merge, split, target_names, with_dropout
from podtune.weights.leaves import LoRA, is_weight, linear
from podtune.weights.param import is_param
from podtune.weights.tree import map_named, named_leaves

pytestmark = pytest.mark.usefixtures("quick_compiling")

LINEAR = [
    *(f"layers.attention.{part}" for part in "qkvo"),
    *(f"layers.mlp.{part}" for part in ("gate", "up", "down")),
]


def targets(*patterns, name="llama"):
    model = tiny.tiny_model(name)
    settings = LoRASettings(targets=patterns or "all-linear")
    return target_names(model.describe(), settings, aliases=model.aliases())


@pytest.mark.parametrize("name", tiny.FAMILY_CONFIGS)
def test_all_linear_weights_but_embedding_and_head_are_the_default(name):
    assert sorted(targets(name=name)) == sorted(LINEAR)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("layers.attention.q",), ["layers.attention.q"]),
        (("q_proj", "v_proj"), ["layers.attention.q", "layers.attention.v"]),
        (("self_attn.o_proj",), ["layers.attention.o"]),
        (("attention.*",), [f"layers.attention.{part}" for part in "qkvo"]),
        (("*_proj",), LINEAR),
        (("mlp.gate", "mlp.gate_proj"), ["layers.mlp.gate"]),
        (("lm_head",), ["head"]),
        (("embed_tokens",), ["embedding"]),
        (("embedding", "head"), ["embedding", "head"]),
        (("all-linear", "embedding"), ["embedding", *LINEAR]),
        (("q_proj", "all-linear"), LINEAR),
    ],
)
def test_a_pattern_may_use_either_name(patterns, expected):
    assert targets(*patterns) == [name for name in ["embedding", *LINEAR, "head"] if name in expected]


@pytest.mark.parametrize("pattern", ["qproj", "input_layernorm", "layers.attention.q_bias", "norm"])
def test_a_pattern_that_matches_nothing_is_refused_with_what_there_is(pattern):
    with pytest.raises(UserError, match=rf"targets: '{pattern}' matches no weight.*self_attn\.q_proj"):
        targets("q_proj", pattern, name="qwen2")


def test_shapes_axes_and_scale_of_adapters():
    model = tiny.tiny_model("llama")
    plain = attach(model.describe(), LoRASettings(rank=4, alpha=32.0), aliases=model.aliases())
    o = plain.layers.attention.o
    assert (o.a.shape, o.a.axes) == ((3, 4, 8, 4), ("layers", "heads", "head_dim", "rank"))
    assert (o.b.shape, o.b.axes) == ((3, 4, 32), ("layers", "rank", "embed"))
    assert o.scale == 8.0
    root = attach(model.describe(), LoRASettings(rank=4, alpha=32.0, rslora=True), aliases=model.aliases())
    assert root.layers.attention.o.scale == 16.0


def with_adapters(model, settings):
    description = attach(model.describe(), settings, aliases=model.aliases())
    return description, tiny.random_weights(model, description=description)


def test_a_split_tree_joins_to_what_it_was():
    model = tiny.tiny_model("llama")
    _, weights = with_adapters(model, LoRASettings(rank=4))
    trained, frozen = split(weights, adapter_mask(weights))
    names = set(named_leaves(trained))
    assert names == {f"{name}.{part}" for name in LINEAR for part in "ab"}
    assert names | set(named_leaves(frozen)) == set(named_leaves(weights))
    whole = join(trained, frozen)
    assert jax.tree.structure(whole) == jax.tree.structure(weights)
    jax.tree.map(np.testing.assert_array_equal, whole, weights)


def test_a_new_adapter_changes_nothing_and_a_merged_one_computes_the_same():
    model = tiny.tiny_model("gemma3_text")
    _, weights = with_adapters(model, LoRASettings(rank=4))
    logits = tiny.quick_jit(lambda w, t: model.unembed(w, model.hidden(w, t).states))
    tokens = tiny.random_tokens(1, 20)
    np.testing.assert_allclose(logits(weights, tokens), logits(merge(weights), tokens), atol=1e-4)
    new = map_named(lambda name, x: x * 0 if name.endswith(".b") else x, weights)
    base = jax.tree.map(lambda leaf: leaf.base if is_weight(leaf) else leaf, weights, is_leaf=is_weight)
    np.testing.assert_allclose(logits(new, tokens), logits(base, tokens), atol=1e-5)


# PEFT 0.21 asks transformers 5.24 for a property under its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("rslora", [False, True])
def test_logits_and_adapter_gradients_equal_those_of_peft(rslora):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    model, rank = tiny.tiny_model("llama"), 4
    reference = tiny.torch_model(tiny.config("llama"))
    tensors = tiny.tensors_of(reference)
    settings = LoRASettings(rank=rank, alpha=8.0, rslora=rslora)
    description = attach(model.describe(), settings, aliases=model.aliases())
    store = tiny.MemoryStore(tensors)
    weights = load_weights(model, description, store, tiny.mesh_of(), key=jax.random.key(0))
    weights = map_named(lambda name, x: x + 0.1 if name.endswith(".b") else x, weights)

    config = peft.LoraConfig(r=rank, lora_alpha=8.0, use_rslora=rslora, target_modules="all-linear")
    adapted = peft.get_peft_model(reference, config)
    rows = {row.ours: row.theirs for row in model.rows()}
    of_torch = dict(adapted.named_parameters())

    def torch_name(name, layer, part):
        module = rows[name].replace("{layer}", str(layer)).removesuffix(".weight")
        return f"base_model.model.{module}.lora_{part.upper()}.default.weight"

    leaves = named_leaves(weights, is_leaf=is_weight)
    with torch.no_grad():
        for name in LINEAR:
            for layer in range(3):
                for part in "ab":
                    value = np.asarray(getattr(leaves[name], part)[layer])
                    theirs = value.reshape(-1, rank).T if part == "a" else value.reshape(rank, -1).T
                    of_torch[torch_name(name, layer, part)].copy_(torch.from_numpy(theirs.copy()))

    tokens = tiny.random_tokens(2, 24)

    def loss(trained, frozen):
        weights = join(trained, frozen)
        logits = model.unembed(weights, model.hidden(weights, tokens, remat="dots").states)
        return jnp.mean(jnp.sin(logits)), logits

    parts = split(weights, adapter_mask(weights))
    gradients, logits = tiny.quick_jit(jax.grad(loss, has_aux=True))(*parts)
    out = adapted(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits
    out.sin().mean().backward()
    np.testing.assert_allclose(logits, out.detach().numpy(), atol=1e-4)
    own = named_leaves(gradients)
    for name in LINEAR:
        for layer in range(3):
            for part in "ab":
                expected = of_torch[torch_name(name, layer, part)].grad.numpy()
                found = np.asarray(own[f"{name}.{part}"][layer])
                found = found.reshape(-1, rank).T if part == "a" else found.reshape(rank, -1).T
                np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=1e-4)


def row_keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def test_dropout_has_its_own_key_for_each_row_layer_and_weight():
    model = tiny.tiny_model("llama")
    _, weights = with_adapters(model, LoRASettings(rank=4, dropout=0.25))
    dropping = with_dropout(weights, row_keys(2))
    keys = [
        jax.random.key_data(leaf.dropout_key).reshape(-1, 2)
        for leaf in named_leaves(dropping, is_leaf=is_weight).values()
        if is_weight(leaf)
    ]
    every = np.concatenate(keys)
    assert len(every) == len(LINEAR) * 3 * 2
    assert len(np.unique(every, axis=0)) == len(every)
    _, without = with_adapters(model, LoRASettings(rank=4))
    assert jax.tree.structure(with_dropout(without, row_keys(2))) == jax.tree.structure(without)


def test_dropout_drops_inputs_of_the_update_alone_and_keeps_their_mean():
    x = jnp.ones((16, 64, 32))
    w = LoRA(base=jnp.eye(32), a=jnp.eye(32), b=jnp.eye(32), scale=1.0, dropout=0.25, dropout_key=row_keys(16))
    update = linear(x, w) - x
    kept = update > 0
    assert float(kept.mean()) == pytest.approx(0.75, abs=0.01)
    np.testing.assert_allclose(update[kept], 1 / 0.75, rtol=1e-5)
    assert float(update.mean()) == pytest.approx(1.0, abs=0.02)
    np.testing.assert_array_equal(linear(x, w), linear(x, w))
    assert jnp.any(update[0] != update[1])


def test_dropout_of_a_row_does_not_depend_on_the_rows_beside_it():
    model = tiny.tiny_model("llama")
    _, weights = with_adapters(model, LoRASettings(rank=4, dropout=0.5))
    tokens, keys = tiny.random_tokens(4, 12), row_keys(4)
    run = tiny.quick_jit(lambda w, t, keys: model.hidden(with_dropout(w, keys), t).states)
    whole = run(weights, tokens, keys)
    half = run(weights, tokens[2:], keys[2:])
    np.testing.assert_allclose(whole[2:], half, atol=1e-5)
    plain = tiny.quick_jit(lambda w, t: model.hidden(w, t).states)(weights, tokens)
    assert float(jnp.abs(whole - plain).max()) > 0.01


def test_descriptions_of_adapters_describe_both_arrays():
    model = tiny.tiny_model("llama")
    description, weights = with_adapters(model, LoRASettings(rank=4))
    described = named_leaves(description, is_leaf=is_param)
    assert {name: param.shape for name, param in described.items()} == {
        name: array.shape for name, array in named_leaves(weights).items()
    }
