"""Generation: the cache changes nothing but time, text comes in whole characters, nothing is compiled per token."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from param_trees import map_params

from podtune.config.errors import UserError
from podtune.config.schema import LoRA as LoRASettings
from podtune.layers.positions import Rope
from podtune.models.decoder import DecoderConfig, LayerKind, describe, hidden, unembed
from podtune.serve import generate
from podtune.serve.generate import Generator, bucket
from podtune.serve.sampling import Sampling, next_token
from podtune.serve.text_stream import TextStream
from podtune.weights.adapters import attach

CONFIG = DecoderConfig(
    vocab=97,
    embed=32,
    mlp=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    layer_kinds=(LayerKind(), LayerKind(window=8)),
    ropes=(Rope(10000.0),),
    context_length=512,
    tied=True,
    init_scale=0.3,
)


def a_tokenizer(*stop_ids):
    return SimpleNamespace(
        turn_end_ids=frozenset(stop_ids), eos_id=None, decode=lambda ids: " ".join(map(str, ids)), chat_template=None
    )


def some_weights(seed=0, adapters=False):
    description = describe(CONFIG)
    if adapters:
        description = attach(description, LoRASettings(rank=2))
    random = np.random.default_rng(seed)
    return map_params(
        lambda name, param: jnp.asarray(random.standard_normal(param.shape, np.float32) * 0.3), description
    )


@pytest.fixture(scope="module")
def generator():
    return Generator(SimpleNamespace(config=CONFIG), some_weights(), a_tokenizer())


@jax.jit
def logits_of(weights, ids):
    return unembed(CONFIG, weights, hidden(CONFIG, weights, ids[None]).states[0])


def greedy_without_cache(weights, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros(128, np.int32)  # one length, so one compilation; nothing sees what comes after it
        padded[: len(ids)] = ids
        ids.append(int(jnp.argmax(logits_of(weights, padded)[len(ids) - 1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("adapters", [False, True])
def test_the_cache_gives_the_tokens_of_a_whole_pass(adapters):
    weights = some_weights(adapters=adapters)
    generator = Generator(SimpleNamespace(config=CONFIG), weights, a_tokenizer())
    prompt = [5, 17, 3, 88, 41, 9, 60]
    assert list(generator.stream(prompt, max_new_tokens=12)) == greedy_without_cache(weights, prompt, 12)


def test_a_stop_id_ends_the_answer_and_is_not_said(generator):
    prompt = [1, 2, 3]
    said = list(generator.stream(prompt, max_new_tokens=10))
    stopping = Generator(SimpleNamespace(config=CONFIG), generator.weights, a_tokenizer(said[4]))
    assert list(stopping.stream(prompt, max_new_tokens=10)) == said[: said.index(said[4])]


def test_nothing_is_compiled_per_token_prompt_or_sampling(generator):
    list(generator.stream([1, 2, 3], max_new_tokens=4))
    before = generate._prefill._cache_size(), generate._decode._cache_size()
    for length in (2, 9, 40):
        list(generator.stream(range(length), max_new_tokens=20))
    list(generator.stream([1, 2], max_new_tokens=20, sampling=Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=3)))
    generator.weights = jax.tree.map(lambda x: x * 1.5, generator.weights)
    list(generator.stream([1, 2], max_new_tokens=20))
    assert (generate._prefill._cache_size(), generate._decode._cache_size()) == before


def test_an_answer_longer_than_a_bucket_grows_with_the_cache(generator):
    prompt = list(range(60))
    assert list(generator.stream(prompt, max_new_tokens=30)) == greedy_without_cache(generator.weights, prompt, 30)


def test_sampling_depends_on_its_seed_alone(generator):
    def draw(seed):
        return list(generator.stream([4, 4], max_new_tokens=16, sampling=Sampling(temperature=1.5, seed=seed)))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_top_k_and_top_p_leave_out_what_they_should():
    logits = jnp.log(jnp.asarray([0.5, 0.2, 0.15, 0.1, 0.05]))
    keys = jax.random.split(jax.random.key(0), 200)

    @jax.jit
    def draw(temperature, top_k, top_p):
        return jax.vmap(lambda key: next_token(logits, key, temperature=temperature, top_k=top_k, top_p=top_p))(keys)

    def drawn(temperature=1.0, top_k=0, top_p=1.0):
        return set(np.asarray(draw(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p))).tolist())

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.6) == {0, 1}  # 0.5 does not reach 0.6, so the second stays
    assert drawn(top_p=1e-6) == {0}
    assert drawn(temperature=0.0) == {0}
    assert drawn(top_p=0.87) == {0, 1, 2, 3}
    assert drawn(top_k=4, top_p=0.87) == {0, 1, 2}  # top_p counts among the four that top_k left


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [(500, 13, "at most 12 new tokens"), (600, 1, "at most 0 new"), (0, 5, "no tokens"), (3, 0, "at least 1")],
)
def test_what_cannot_fit_is_refused_in_words(generator, prompt, new, words):
    with pytest.raises(UserError, match=words):
        list(generator.stream([1] * prompt, max_new_tokens=new))


def test_the_whole_context_can_be_used(generator):
    assert len(list(generator.stream([1] * 500, max_new_tokens=12))) == 12


def test_answers_side_by_side_are_those_of_each_prompt_alone(generator):
    prompts = [[5, 17, 3], list(range(70)), [9]]
    together = [list(column) for column in zip(*generator.stream_many(prompts, max_new_tokens=9), strict=True)]
    assert together == [list(generator.stream(prompt, max_new_tokens=9)) for prompt in prompts]


def test_an_answer_that_ends_leaves_the_others_going(generator):
    prompts = [[5, 17, 3], [9]]
    one, other = (list(generator.stream(prompt, max_new_tokens=9)) for prompt in prompts)
    end = next(token for token in one[1:] if token not in other)
    stopping = Generator(SimpleNamespace(config=CONFIG), generator.weights, a_tokenizer(end))
    assert stopping.texts(prompts, max_new_tokens=9) == [
        " ".join(map(str, one[: one.index(end)])),
        " ".join(map(str, other)),
    ]


def test_buckets_are_few():
    assert [bucket(length) for length in (1, 64, 65, 300)] == [64, 64, 128, 512]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.data())
def test_streamed_text_is_the_whole_text_and_never_half_a_character(text, data):
    raw = text.encode()
    tokens, start = [], 0
    while start < len(raw):
        size = data.draw(st.integers(1, 3))
        tokens.append(raw[start : start + size])
        start += size

    def decode(ids):
        return b"".join(tokens[i] for i in ids).decode(errors="replace")

    stream = TextStream(decode)
    pieces = [stream.add(i) for i in range(len(tokens))]
    assert "".join(pieces) + stream.end() == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


def test_text_cut_off_in_a_character_is_still_given_at_the_end():
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    assert [stream.add(byte) for byte in "aé".encode()[:2]] == ["a", ""]
    assert stream.end() == "�"
