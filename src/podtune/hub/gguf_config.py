"""Turns a GGUF file's metadata into the Hugging Face configuration of the same model. Used by gguf_store and sources.

To add an architecture, add a row to ARCHITECTURES (how its tensors are named and stored, how its configuration reads).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from podtune.config.errors import UserError
from podtune.hub.gguf_file import GgufFile
from podtune.hub.gguf_rope import rope_scaling

# GGUF's name after `blk.N.`, and the Hugging Face checkpoint's after `model.layers.N.`
_LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NAMES = _LLAMA_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """How the models of one GGUF `general.architecture` are stored and configured."""

    hugging_face_class: str
    block_names: Mapping[str, str]
    family_config: Callable[[GgufFile], dict[str, Any]]
    # llama.cpp's converter interleaves the two rotary halves of q and k rows for this architecture alone.
    interleaved_rotary: bool = False
    # Its converter adds 1 to Gemma's norm weights, whose model computes (1 + w) * x.
    norms_plus_one: bool = False


def hugging_face_config(file: GgufFile) -> dict[str, Any]:
    """The content of the `config.json` that this model has on the Hub (in the keys transformers 4 and 5 both read).

    Raises UserError for an unknown architecture or for metadata that is missing or describes another kind of model.
    """
    architecture = architecture_of(file)
    name = file.metadata["general.architecture"]
    if int(file.metadata.get(f"{name}.expert_count", 0)) > 0:
        raise UserError(
            f"{file.path}: is a mixture of experts ({file.metadata[f'{name}.expert_count']} experts), which cannot be "
            "read from GGUF. Use the model's safetensors folder."
        )
    heads = _integer(file, "attention.head_count")
    embed = _integer(file, "embedding_length")
    head_dim = int(file.metadata.get(f"{name}.attention.key_length", embed // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        found = int(file.metadata.get(f"{name}.{key}", head_dim))
        if found != head_dim:
            raise UserError(
                f"{file.path}: {name}.{key} is {found} but a head has {head_dim} dimensions; models whose values or "
                "rotary part differ in size from the keys are not supported. Choose a model with equal sizes."
            )
    config: dict[str, Any] = {
        "architectures": [architecture.hugging_face_class],
        "vocab_size": vocabulary_rows(file),
        "hidden_size": embed,
        "intermediate_size": _integer(file, "feed_forward_length"),
        "num_hidden_layers": _integer(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _integer(file, "context_length"),
        "rms_norm_eps": short_float(file.require(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_theta": short_float(file.metadata.get(f"{name}.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
    }
    scaling = rope_scaling(file, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    config |= architecture.family_config(file)
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = token_id(file, key)
    if token_id(file, "padding") is not None:
        config["pad_token_id"] = token_id(file, "padding")
    return config


def hugging_face_generation_config(file: GgufFile) -> dict[str, Any]:
    """The special ids of `generation_config.json`; every id that ends an answer counts as an eos."""
    ends = [token_id(file, key) for key in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    content: dict[str, Any] = {"bos_token_id": token_id(file, "bos"), "eos_token_id": unique}
    return {key: value for key, value in content.items() if value not in (None, [])}


def architecture_of(file: GgufFile) -> Architecture:
    """The row of ARCHITECTURES for this file; UserError when there is none."""
    name = file.require("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: general.architecture is {name!r}, which cannot be read from GGUF. "
            f"Known: {', '.join(sorted(ARCHITECTURES))}. Use one of these, or the model's safetensors folder."
        )
    return ARCHITECTURES[name]


def vocabulary_rows(file: GgufFile) -> int:
    """Rows of the embedding, which may be more than the tokenizer has tokens."""
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path}: holds no token_embd.weight. The file is incomplete; convert the model again.")
    return file.tensors["token_embd.weight"].shape[0]


def token_id(file: GgufFile, which: str) -> int | None:
    """A special token's id: `which` is bos, eos, eot, eom, unknown or padding."""
    value = file.metadata.get(f"tokenizer.ggml.{which}_token_id")
    return None if value is None else int(value)


def short_float(value: float) -> float:
    """The shortest decimal that is the same float32: the file holds 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    """A size of the model. Where the file lists one for each layer, all must be equal."""
    full_key = f"{file.metadata['general.architecture']}.{key}"
    value = file.require(full_key) if default is None else file.metadata.get(full_key, default)
    if isinstance(value, np.ndarray | list):
        if len(set(map(int, value))) != 1:
            raise UserError(
                f"{file.path}: {full_key} differs between layers ({', '.join(str(int(v)) for v in value[:4])}, …); "
                "models whose layers differ in size are not supported. Choose a model with equal layers."
            )
        value = value[0]
    return int(value)


def _llama_config(file: GgufFile) -> dict[str, Any]:
    window = file.metadata.get("llama.attention.sliding_window")
    if window:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": int(window)}
    return {
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def _qwen2_config(file: GgufFile) -> dict[str, Any]:
    return {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3_config(file: GgufFile) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "use_sliding_window": False,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _gemma_config(file: GgufFile, *, largest_layers: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share.

    Queries are scaled by head_dim, in the 27B models (known by their depth) by embed / heads; the file does not say.
    """
    embed, heads = _integer(file, "embedding_length"), _integer(file, "attention.head_count")
    head_dim = _integer(file, "attention.key_length", embed // heads)
    largest = _integer(file, "block_count") == largest_layers
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": embed // heads if largest else head_dim,
        "attention_bias": False,
    }


def _gemma2_config(file: GgufFile) -> dict[str, Any]:
    layers = _integer(file, "block_count")
    return _gemma_config(file, largest_layers=46) | {
        "model_type": "gemma2",
        "sliding_window": _integer(file, "attention.sliding_window", 4096),
        "layer_types": _layer_types(layers, every=2),
        "attn_logit_softcapping": short_float(file.metadata.get("gemma2.attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": short_float(file.metadata.get("gemma2.final_logit_softcapping", 30.0)),
    }


def _gemma3_config(file: GgufFile) -> dict[str, Any]:
    layers = _integer(file, "block_count")
    every = _integer(file, "attention.sliding_window_pattern", 6)
    soft_cap = file.metadata.get("gemma3.final_logit_softcapping")
    return _gemma_config(file, largest_layers=62) | {
        "model_type": "gemma3_text",
        "sliding_window": _integer(file, "attention.sliding_window"),
        "layer_types": _layer_types(layers, every=every),
        # Not in older files; every Gemma 3 uses this base in its sliding layers.
        "rope_local_base_freq": short_float(file.metadata.get("gemma3.rope.freq_base_swa", 10_000.0)),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None if soft_cap is None else short_float(soft_cap),
    }


def _layer_types(layers: int, *, every: int) -> list[str]:
    return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", _LLAMA_NAMES, _llama_config, interleaved_rotary=True),
    "qwen2": Architecture("Qwen2ForCausalLM", _LLAMA_NAMES, _qwen2_config),
    "qwen3": Architecture("Qwen3ForCausalLM", _LLAMA_NAMES | _QK_NORM_NAMES, _qwen3_config),
    "gemma2": Architecture("Gemma2ForCausalLM", _GEMMA_NAMES, _gemma2_config, norms_plus_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _GEMMA_NAMES | _QK_NORM_NAMES, _gemma3_config, norms_plus_one=True),
}
