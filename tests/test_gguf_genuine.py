"""The genuine weights say what they should, through a plain numpy forward pass of the tests' own."""

import numpy as np
import pytest
from gguf_files import interleave

from podtune.hub.sources import resolve_model
from podtune.hub.tokenizer import load_tokenizer


class PlainModel:
    """A decoder as the papers write it, float32, one sequence, no cache. Covers Llama and Gemma 3."""

    def __init__(self, files):
        self.config = files.config
        store = files.tensors()
        self.weights = {name: np.asarray(store.read(name), np.float32) for name in store.names()}
        self.is_gemma = self.config["model_type"].startswith("gemma")

    def norm(self, x, name):
        weight = self.weights[f"{name}.weight"] + (1.0 if self.is_gemma else 0.0)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def rotate(self, x, theta):
        """x: (tokens, heads, head_dim), the two halves of a head rotated against each other."""
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None] * theta ** -(np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def attention(self, x, prefix, layer):
        config = self.config
        heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        q = self.linear(x, f"{prefix}.q_proj").reshape(len(x), heads, head_dim)
        k = self.linear(x, f"{prefix}.k_proj").reshape(len(x), kv_heads, head_dim)
        v = self.linear(x, f"{prefix}.v_proj").reshape(len(x), kv_heads, head_dim)
        theta = config["rope_theta"]
        if self.is_gemma:
            q, k = self.norm(q, f"{prefix}.q_norm"), self.norm(k, f"{prefix}.k_norm")
            if config["layer_types"][layer] == "sliding_attention":
                theta = config["rope_local_base_freq"]
        q, k = self.rotate(q, theta), self.rotate(k, theta)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * config.get("query_pre_attn_scalar", head_dim) ** -0.5
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        return self.linear(mixed.reshape(len(x), -1), f"{prefix}.o_proj")

    def feedforward(self, x, prefix):
        gate, up = self.linear(x, f"{prefix}.gate_proj"), self.linear(x, f"{prefix}.up_proj")
        if self.is_gemma:
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        return self.linear(gate * up, f"{prefix}.down_proj")

    def logits(self, ids):
        """(tokens, vocabulary)."""
        embedding = self.weights["model.embed_tokens.weight"]
        x = embedding[ids] * (np.sqrt(self.config["hidden_size"]) if self.is_gemma else 1.0)
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            mixed = self.attention(self.norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attn", layer)
            if self.is_gemma:
                x = x + self.norm(mixed, f"{prefix}.post_attention_layernorm")
                grown = self.feedforward(self.norm(x, f"{prefix}.pre_feedforward_layernorm"), f"{prefix}.mlp")
                x = x + self.norm(grown, f"{prefix}.post_feedforward_layernorm")
            else:
                x = x + mixed
                x = x + self.feedforward(self.norm(x, f"{prefix}.post_attention_layernorm"), f"{prefix}.mlp")
        return self.norm(x, "model.norm") @ embedding.T


def nats(logits, ids):
    """Mean loss of predicting ids[1:], in nats per token."""
    logits = logits[:-1] - logits[:-1].max(-1, keepdims=True)
    return float((np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(ids) - 1), ids[1:]]).mean())


ENGLISH = (
    "The sun rises in the east and sets in the west. Every morning the birds sing in the trees, and the children walk "
    "to school with their friends. In the evening, families sit down together for dinner and talk about their day."
)


def test_smollm2_answers_that_the_capital_of_france_is_paris(real_input):
    files = resolve_model(str(real_input("smollm2")))
    tokenizer = load_tokenizer(files)
    model = PlainModel(files)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.inner.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>", special=False)
    logits = model.logits(prompt + answer)
    # Each token of the answer is the likeliest after those before it: greedy decoding gives this answer.
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    for name in [name for name in model.weights if ".q_proj." in name]:
        model.weights[name] = interleave(model.weights[name], model.config["num_attention_heads"])
    shuffled = nats(model.logits(prompt + answer), prompt + answer)
    assert shuffled > nats(logits, prompt + answer) + 0.5, "q rows left as the file has them make a worse model"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most_nats"), [("smollm2", 2.7), ("gemma3", 2.2)])
def test_transformers_computes_the_same_from_our_configuration_and_tensors(real_input, name, most_nats):
    """transformers builds the model from `config` and takes every tensor by its name; none is left or missing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    files = resolve_model(str(real_input(name)))
    ids = load_tokenizer(files).encode(ENGLISH)
    config = AutoConfig.for_model(**files.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    store = files.tensors()
    state = {key: torch.from_numpy(np.array(store.read(key), np.float32)) for key in store.names()}
    left = model.load_state_dict(state, strict=False)
    assert left.unexpected_keys == []
    assert set(left.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    ours = PlainModel(files).logits(ids)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    # Just above what was measured here (2.612 and 2.120): decoded weights that got worse would show.
    assert nats(ours, ids) < most_nats
