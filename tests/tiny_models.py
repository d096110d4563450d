"""Tiny models of every family for tests: configurations as on the Hub, random weights, a store in memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from param_trees import map_params

from podtune.families import Model, model_from_config
from podtune.hub.tensors import TensorInfo
from podtune.weights.param import Param

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_GEMMA = _SIZES | {
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# One for each family, in the style of transformers 4; windows are shorter than the sequences of the tests.
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"model_type": "llama", "rope_theta": 500.0, "hidden_act": "silu"},
    "mistral": _SIZES | {"model_type": "mistral", "sliding_window": 8, "num_key_value_heads": 1, "head_dim": 16},
    "qwen2": _SIZES
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    | {"tie_word_embeddings": True},
    "qwen3": _SIZES | {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": False},
    "gemma2": _GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": _GEMMA
    | {"model_type": "gemma3_text", "sliding_window_pattern": 2, "rope_theta": 1e4, "rope_local_base_freq": 100.0}
    | {"num_key_value_heads": 1, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}
# Settings that change the program and are not in a family's own row.
VARIANT_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-tied": FAMILY_CONFIGS["llama"] | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama-one-kv-head": FAMILY_CONFIGS["llama"] | {"num_key_value_heads": 1, "head_dim": 12},
    "llama-biases": FAMILY_CONFIGS["llama"] | {"attention_bias": True, "mlp_bias": True},
    "llama-llama3": FAMILY_CONFIGS["llama"] | {"rope_scaling": _LLAMA3},
    "llama-linear": FAMILY_CONFIGS["llama"]
    | {"max_position_embeddings": 16, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-dynamic": FAMILY_CONFIGS["llama"]
    | {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama-yarn": FAMILY_CONFIGS["llama"]
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "llama-yarn-tuned": FAMILY_CONFIGS["llama"]
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
            "truncate": False,
        }
    },
    "mistral-no-window": FAMILY_CONFIGS["mistral"] | {"sliding_window": None},
    "qwen2-no-window": FAMILY_CONFIGS["qwen2"] | {"use_sliding_window": False, "tie_word_embeddings": False},
    "qwen3-window-and-biases": FAMILY_CONFIGS["qwen3"]
    | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "attention_bias": True},
    "gemma2-no-caps": FAMILY_CONFIGS["gemma2"] | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text-layer-types": FAMILY_CONFIGS["gemma3_text"]
    | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "tie_word_embeddings": False},
}
CONFIGS = FAMILY_CONFIGS | VARIANT_CONFIGS


# What tests of these models would otherwise spend most of their time on is XLA's optimiser.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
)


def config(name: str, **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(CONFIGS[name]) | changes


def tiny_model(name: str, **changes: Any) -> Model:
    return model_from_config(config(name, **changes))


def random_weights(model: Model, *, seed: int = 0, description: Any = None) -> Any:
    """Every weight random, norms and biases too, so that none may be forgotten unseen."""

    random = np.random.default_rng(seed)  # not jax's: that would compile a program for every shape

    def one(name: str, param: Param) -> jax.Array:
        centre = 1.0 if param.kind == "vector" and param.init == "ones" else 0.0
        return jnp.asarray(random.normal(centre, 0.2, param.shape), param.dtype)

    return map_params(one, model.describe() if description is None else description)


def random_tokens(rows: int, length: int, *, seed: int = 0, vocab: int = 96) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (rows, length)), jnp.int32)


def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
    return Mesh(devices, ("data", "fsdp", "tensor"))


class MemoryStore:
    """A TensorStore over arrays; counts what it read."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self.tensors = dict(tensors)
        self.bytes_read: dict[str, int] = {}

    def names(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        part = self.tensors[name] if index is None else self.tensors[name][index]
        self.bytes_read[name] = self.bytes_read.get(name, 0) + part.nbytes
        return part


def torch_model(content: Mapping[str, Any], *, seed: int = 0, scale: float = 0.2) -> Any:
    """The same model in transformers (eager attention), every weight random."""
    import torch
    import transformers

    own = transformers.AutoConfig.for_model(**copy.deepcopy(dict(content)))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(own, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and "gemma" not in own.model_type else 0.0
            parameter.copy_(torch.randn_like(parameter) * scale + centre)
    return model


def tensors_of(torch_model: Any) -> dict[str, np.ndarray]:
    """What its checkpoint would hold: a tied head is not there."""
    state = {name: tensor.detach().numpy() for name, tensor in torch_model.state_dict().items()}
    if torch_model.config.get_text_config().tie_word_embeddings:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("lm_head")}
    return state
