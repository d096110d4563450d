"""Tiny models of every family with adapters that do something, a tokenizer for them, and folders transformers loads."""

from __future__ import annotations

import json
import string
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny_models as tiny
from param_trees import map_params

from podtune.config.schema import LoRA as LoRASettings
from podtune.families.family import Model
from podtune.families.saving import hf_config, hf_tensors
from podtune.hub.tokenizer import Tokenizer
from podtune.weights.adapters import attach
from podtune.weights.leaves import LoRA, is_weight
from podtune.weights.param import Param

SPECIALS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 112
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def adapted_model(family: str, settings: LoRASettings | None = None, *, seed: int = 0) -> tuple[Model, Any]:
    """The model with random weights, and adapters that change it visibly where settings are given."""
    model = tiny.tiny_model(family, vocab_size=VOCABULARY)
    description = model.describe()
    if settings is not None:
        description = attach(description, settings, aliases=model.aliases())
    random = np.random.default_rng(seed)

    def one(name: str, param: Param) -> jax.Array:
        spread = 0.06 if name.endswith((".a", ".b")) else 0.2
        centre = 1.0 if param.kind == "vector" and param.init == "ones" else 0.0
        return jnp.asarray(random.standard_normal(param.shape, np.float32) * np.float32(spread) + np.float32(centre))

    return model, map_params(one, description)


def base_weights(weights: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.base if isinstance(leaf, LoRA) else leaf, weights, is_leaf=is_weight)


def transformers_folder(model: Model, weights: Any, folder: Path) -> Path:
    """The model without its adapters as a folder made by the safetensors library, for transformers to load."""
    from safetensors.numpy import save_file

    folder.mkdir()
    tensors = {one.name: np.ascontiguousarray(one.read()) for one in hf_tensors(model, base_weights(weights))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(model)))
    return folder


@partial(jax.jit, static_argnums=0)
def _logits(model: Model, weights: Any, tokens: jax.Array) -> jax.Array:
    return model.unembed(weights, model.hidden(weights, tokens).states)


def our_logits(model: Model, weights: Any, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_logits(model, weights, tokens))


def some_tokens(rows: int = 2, length: int = 24) -> np.ndarray:
    return np.random.default_rng(0).integers(5, VOCABULARY, (rows, length)).astype(np.int32)


def tiny_tokenizer(*, chat: bool = True) -> Tokenizer:
    """A token for each printable character, and a chat template in the style of ChatML."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *string.printable[:95], "\n"])}
    fast = Fast(models.WordLevel(vocabulary, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    inner = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=SPECIALS[3:],
    )
    if chat:
        inner.chat_template = TEMPLATE
    return Tokenizer(inner)


def model_folder(family: str, folder: Path, *, chat: bool = True, settings: LoRASettings | None = None) -> Path:
    """A whole tiny model with its tokenizer, to be named in a run file."""
    model, weights = adapted_model(family, settings)
    transformers_folder(model, weights, folder)
    tiny_tokenizer(chat=chat).save(folder)
    return folder
