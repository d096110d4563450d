"""The genuine weights, through our decoder and its cache."""

import jax
import jax.numpy as jnp
import pytest
import tiny_models as tiny

from podtune.families import model_from_files
from podtune.families.loading import load_weights
from podtune.hub.sources import resolve_model
from podtune.hub.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compiling")

ENGLISH = (
    "The sun rises in the east and sets in the west. Every morning the birds sing in the trees, and the children walk "
    "to school with their friends. In the evening, families sit down together for dinner and talk about their day."
)


def loaded(path):
    files = resolve_model(str(path))
    model = model_from_files(files)
    return model, load_weights(model, model.describe(), files.tensors(), tiny.mesh_of()), load_tokenizer(files)


def test_smollm2_answers_from_its_cache_that_the_capital_of_france_is_paris(real_input):
    model, weights, tokenizer = loaded(real_input("smollm2"))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.inner.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    @tiny.quick_jit
    def step(weights, tokens, cache):
        out = model.hidden(weights, tokens, cache=cache)
        return model.unembed(weights, out.states[:, -1]).argmax(-1), out.cache

    cache = model.cache(batch=1, length=len(tokens) + 16, dtype=jnp.float32)
    answer = []
    while len(answer) < 16 and (not answer or answer[-1] not in tokenizer.turn_end_ids):
        chosen, cache = step(weights, jnp.asarray([tokens if not answer else answer[-1:]], jnp.int32), cache)
        answer.append(int(chosen[0]))
    assert tokenizer.decode(answer).startswith("The capital of France is Paris.")
    assert answer[-1] in tokenizer.turn_end_ids


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most_nats"), [("smollm2", 2.7), ("gemma3", 2.2)])
@pytest.mark.parametrize("compute_dtype", [jnp.float32, jnp.bfloat16])
def test_genuine_models_predict_english(real_input, name, most_nats, compute_dtype):
    model, weights, tokenizer = loaded(real_input(name))
    ids = tokenizer.encode(ENGLISH, special=True)

    @jax.jit
    def logits(weights, tokens):
        return model.unembed(weights, model.hidden(weights, tokens, compute_dtype=compute_dtype).states)

    scores = jax.nn.log_softmax(logits(weights, jnp.asarray([ids], jnp.int32))[0])
    assert -float(scores[jnp.arange(len(ids) - 1), jnp.asarray(ids[1:])].mean()) < most_nats
