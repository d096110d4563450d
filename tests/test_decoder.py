"""The decoder: samples in one row do not see each other, both attentions agree, caches and meshes change nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from param_trees import map_params

from podtune.config.schema import LoRA
from podtune.layers import attention
from podtune.models.decoder import REMAT_POLICIES
from podtune.parallel.sharding import batch_sharding, sharding_for
from podtune.weights.adapters import attach
from podtune.weights.leaves import is_weight
from podtune.weights.param import is_param
from podtune.weights.tree import map_named

pytestmark = pytest.mark.usefixtures("quick_compiling")

FAMILIES = list(tiny.FAMILY_CONFIGS)
# Two samples longer than the windows (8), and padding.
SEGMENTS = jnp.asarray([[1] * 17 + [2] * 20 + [0] * 3], jnp.int32)
POSITIONS = jnp.asarray([[*range(17), *range(20), 0, 1, 2]], jnp.int32)


@functools.cache
def weights_of(name):
    return tiny.random_weights(tiny.tiny_model(name))


@functools.cache
def packed_logits(name, method):
    """(weights, tokens, segments, positions) -> (sum of squares of what the two samples' logits are, logits)."""
    model = tiny.tiny_model(name)

    def run(weights, tokens, segments, positions):
        states = model.hidden(weights, tokens, segments=segments, positions=positions, attention=method).states
        logits = model.unembed(weights, states)
        return jnp.mean(jnp.square(logits) * (segments > 0)[..., None]), logits

    return tiny.quick_jit(jax.value_and_grad(run, has_aux=True))


@pytest.fixture(autouse=True)
def _blocks_shorter_than_the_rows(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)


@pytest.mark.parametrize("name", FAMILIES)
def test_both_attentions_agree_in_logits_and_gradients(name):
    tokens = tiny.random_tokens(1, 40)
    results = [packed_logits(name, m)(weights_of(name), tokens, SEGMENTS, POSITIONS) for m in ("plain", "blocked")]
    ((_, plain), plain_gradients), ((_, blocked), blocked_gradients) = results
    np.testing.assert_allclose(plain, blocked, atol=1e-3)
    for one, other in zip(jax.tree.leaves(plain_gradients), jax.tree.leaves(blocked_gradients), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3 * float(jnp.abs(one).max()))


@pytest.mark.parametrize("method", ["plain", "blocked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_samples_of_a_pack_do_not_see_each_other(name, method):
    tokens = tiny.random_tokens(1, 40)
    changed = tokens.at[0, 3:17].set((tokens[0, 3:17] + 1) % 96)
    run = packed_logits(name, method)
    (_, before), _ = run(weights_of(name), tokens, SEGMENTS, POSITIONS)
    (_, after), _ = run(weights_of(name), changed, SEGMENTS, POSITIONS)
    assert float(jnp.abs(after[0, 3:17] - before[0, 3:17]).max()) > 0.01
    assert float(jnp.abs(after[0, 17:37] - before[0, 17:37]).max()) == 0.0


@pytest.mark.parametrize("name", [*FAMILIES, "llama-dynamic"])
def test_a_packed_sample_has_the_logits_it_has_alone(name):
    run, tokens = packed_logits(name, "plain"), tiny.random_tokens(1, 40)
    (_, packed), _ = run(weights_of(name), tokens, SEGMENTS, POSITIONS)
    places = jnp.arange(40)[None]
    (_, alone), _ = run(weights_of(name), jnp.roll(tokens, -17, axis=1), (places < 20).astype(jnp.int32), places)
    np.testing.assert_allclose(packed[:, 17:37], alone[:, :20], atol=2e-5)


def test_explicit_positions_move_a_sample_along():
    """Rotary embeddings see distances only: a shift of all positions changes nothing, a gap does."""
    model, weights = tiny.tiny_model("llama"), weights_of("llama")
    tokens = tiny.random_tokens(1, 12)
    run = tiny.quick_jit(lambda positions: model.hidden(weights, tokens, positions=positions).states)
    plain, positions = run(jnp.arange(12)[None]), jnp.arange(12)[None]
    np.testing.assert_allclose(run(positions + 100), plain, atol=1e-4)
    assert float(jnp.abs(run(positions + 50 * (positions > 5)) - plain).max()) > 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_greedy_answers_equal_those_of_the_whole_forward_pass(name):
    """Two prompts of unequal length, padded at their end; more new tokens than the window is wide."""
    model, weights = tiny.tiny_model(name), weights_of(name)
    lengths, new = np.array([5, 9]), 10
    prompts, places = np.asarray(tiny.random_tokens(2, 9, seed=3)), np.arange(40, dtype=np.int32)

    @tiny.quick_jit
    def step(cache, tokens, positions, segments):
        out = model.hidden(weights, tokens, positions=positions, segments=segments, cache=cache)
        return model.unembed(weights, out.states), out.cache

    def whole(sequence, length):
        inside = (places < length).astype(np.int32)[None]
        (_, logits), _ = packed_logits(name, "plain")(weights, sequence[None], inside, places[None])
        return np.asarray(logits)[0, length - 1]

    cache = model.cache(batch=2, length=9 + new, dtype=jnp.float32)
    inside = (places[:9] < lengths[:, None]).astype(np.int32)
    logits, cache = step(cache, prompts, np.broadcast_to(places[:9], (2, 9)), inside)
    latest = np.asarray(logits)[np.arange(2), lengths - 1]
    sequences = np.zeros((2, 40), np.int32)
    sequences[:, :9] = prompts * inside
    for _ in range(new):
        expected = np.stack([whole(row, length) for row, length in zip(sequences, lengths, strict=True)])
        np.testing.assert_allclose(latest, expected, atol=1e-4)
        chosen = expected.argmax(-1).astype(np.int32)
        sequences[np.arange(2), lengths] = chosen
        logits, cache = step(cache, chosen[:, None], lengths[:, None].astype(np.int32), np.ones((2, 1), np.int32))
        latest, lengths = np.asarray(logits)[:, -1], lengths + 1


def test_a_dynamic_rope_is_cached_as_for_a_sequence_that_fills_the_cache():
    model, weights = tiny.tiny_model("llama-dynamic"), weights_of("llama-dynamic")
    tokens = tiny.random_tokens(1, 40)
    step = tiny.quick_jit(lambda cache, tokens: model.hidden(weights, tokens, cache=cache))
    first = step(model.cache(batch=1, length=40, dtype=jnp.float32), tokens[:, :20])
    second = step(first.cache, tokens[:, 20:])
    whole = tiny.quick_jit(lambda tokens: model.hidden(weights, tokens).states)(tokens)
    np.testing.assert_allclose(jnp.concatenate([first.states, second.states], axis=1), whole, atol=1e-4)


def placed(tree, description, mesh):
    """The tree with every array laid on the mesh as its description says."""
    axes = {name: (p.axes, p.shape) for name, p in params_of(description).items()}
    return map_named(lambda name, x: jax.device_put(x, sharding_for(mesh, *axes[name])), tree)


def params_of(description):
    from podtune.weights.tree import named_leaves

    return named_leaves(description, is_leaf=is_param)


ALL_MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)]


@pytest.mark.parametrize(("name", "meshes"), [("llama", ALL_MESHES), ("gemma3_text", [(2, 2, 2)])])
def test_every_mesh_gives_the_logits_and_gradients_of_one_device(name, meshes):
    model = tiny.tiny_model(name, num_key_value_heads=2)
    settings = LoRA(rank=4, alpha=8.0, targets="all-linear")
    description = attach(model.describe(), settings, aliases=model.aliases())
    weights = tiny.random_weights(model, description=description)
    tokens = tiny.random_tokens(8, 40)
    segments = jnp.broadcast_to(SEGMENTS, (8, 40))

    def run(weights, tokens, segments, *, mesh):
        states = model.hidden(weights, tokens, segments=segments, remat="dots", mesh=mesh).states
        logits = model.unembed(weights, states)
        return jnp.mean(jnp.square(logits)), logits

    def on(mesh, constrained):
        step = tiny.quick_jit(
            jax.value_and_grad(functools.partial(run, mesh=mesh if constrained else None), has_aux=True)
        )
        rows = [jax.device_put(x, batch_sharding(mesh)) for x in (tokens, segments)]
        return step(placed(weights, description, mesh), *rows)

    (_, expected), gradients = on(tiny.mesh_of(), False)
    for shape in meshes:
        (_, logits), own = on(tiny.mesh_of(*shape), True)
        np.testing.assert_allclose(logits, expected, atol=1e-4, err_msg=str(shape))
        for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4 * float(jnp.abs(other).max()), err_msg=str(shape))


def test_kv_heads_that_do_not_divide_are_whole_on_every_device():
    model = tiny.tiny_model("llama", num_attention_heads=8, num_key_value_heads=2)
    weights, tokens = tiny.random_weights(model), tiny.random_tokens(2, 40)
    run = tiny.quick_jit(lambda w, t: model.unembed(w, model.hidden(w, t).states))
    mesh = tiny.mesh_of(1, 1, 8)
    split = placed(weights, model.describe(), mesh)
    assert split.layers.attention.k.sharding.is_fully_replicated
    assert not split.layers.attention.q.sharding.is_fully_replicated
    np.testing.assert_allclose(run(split, tokens), run(weights, tokens), atol=1e-4)


def test_a_cache_on_a_mesh_is_split_over_its_kv_heads():
    model, weights = tiny.tiny_model("llama"), weights_of("llama")
    mesh = tiny.mesh_of(2, 1, 2)
    cache = model.cache(batch=2, length=16, dtype=jnp.float32, mesh=mesh)
    assert cache.k.sharding.spec[:4] == (None, ("data", "fsdp"), None, "tensor")
    tokens = tiny.random_tokens(2, 9)
    step = tiny.quick_jit(lambda w, t, c: model.hidden(w, t, cache=c, mesh=mesh))
    out = step(placed(weights, model.describe(), mesh), tokens, cache)
    np.testing.assert_allclose(out.states, tiny.quick_jit(model.hidden)(weights, tokens).states, atol=1e-4)


def test_no_remat_policy_changes_a_gradient():
    model, weights, tokens = tiny.tiny_model("llama"), weights_of("llama"), tiny.random_tokens(2, 24)
    gradients = {
        remat: tiny.quick_jit(
            jax.grad(lambda w, remat=remat: jnp.mean(model.hidden(w, tokens, remat=remat).states ** 3))
        )(weights)
        for remat in REMAT_POLICIES
    }
    assert {"none", "dots", "full"} <= set(gradients)
    for own in gradients.values():
        for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(gradients["none"]), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6 * max(1.0, float(jnp.abs(other).max())))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16_compute_is_close_to_float32(name):
    model, weights, tokens = tiny.tiny_model(name), weights_of(name), tiny.random_tokens(2, 40)

    def logits(dtype, weights):
        states = model.hidden(weights, tokens, compute_dtype=dtype).states
        assert states.dtype == dtype
        return model.unembed(weights, states)

    wide = tiny.quick_jit(functools.partial(logits, jnp.float32))(weights)
    narrow = tiny.quick_jit(functools.partial(logits, jnp.bfloat16))(
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    )
    assert narrow.dtype == jnp.float32
    assert float(jnp.abs(narrow - wide).mean() / wide.std()) < 0.05


def test_embeddings_may_be_given_instead_of_tokens():
    model, weights, tokens = tiny.tiny_model("gemma2"), weights_of("gemma2"), tiny.random_tokens(1, 12)
    embedded = model.embed(weights, tokens)
    run = tiny.quick_jit(lambda e: model.hidden(weights, tokens, embedded=e).states)
    np.testing.assert_allclose(run(embedded), tiny.quick_jit(lambda: model.hidden(weights, tokens).states)(), atol=1e-6)
    assert float(jnp.abs(run(embedded + 0.1) - run(embedded)).max()) > 0.01


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_unembedding_rows_is_unembedding_all(name):
    model, weights = tiny.tiny_model(name), weights_of(name)
    states = jax.random.normal(jax.random.key(0), (2, 6, 32))
    rows = model.unembedding(weights)
    assert rows.tied == model.config.tied
    np.testing.assert_allclose(rows.logits(states[:, 2:4]), model.unembed(weights, states)[:, 2:4], atol=1e-5)


def test_every_weight_is_described_with_its_own_axes_and_name_row():
    for name in tiny.CONFIGS:
        model = tiny.tiny_model(name)
        rows = {row.ours for row in model.rows()}
        assert rows == set(params_of(model.describe())), name
        map_params(lambda key, param: sharding_for(tiny.mesh_of(2, 2, 2), param.axes, param.shape), model.describe())


def test_models_are_hashable_and_equal_by_what_they_compute():
    one, other = tiny.tiny_model("llama"), tiny.tiny_model("llama", bos_token_id=7)
    assert one == other
    assert hash(one) == hash(other)
    assert one != tiny.tiny_model("llama", rope_theta=7.0)
    assert not is_weight(one)
