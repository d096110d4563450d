"""Model families: how each one names and shapes its tensors, and their loading and saving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podtune.config.errors import UserError
from podtune.families.family import Family, Model, NameRow
from podtune.families.gemma2 import GEMMA2
from podtune.families.gemma3 import GEMMA3, GEMMA3_TEXT
from podtune.families.llama import LLAMA
from podtune.families.mistral import MISTRAL
from podtune.families.qwen2 import QWEN2
from podtune.families.qwen3 import QWEN3

if TYPE_CHECKING:
    from podtune.hub.sources import ModelFiles

__all__ = ["FAMILIES", "Family", "Model", "NameRow", "model_from_config", "model_from_files"]

# By `model_type` of config.json.
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
    "gemma3": GEMMA3,
}


def model_from_files(files: ModelFiles) -> Model:
    """The model that a downloaded folder or a GGUF file holds. Raises UserError for what is not supported."""
    return model_from_config(files.config)


def model_from_config(content: Mapping[str, Any]) -> Model:
    """The model that a config.json describes. Raises UserError naming a key and its value for what is not supported."""
    model_type = content.get("model_type")
    if model_type is None:
        architectures = content.get("architectures")
        listed = architectures if isinstance(architectures, list) else []
        model_type = next((name for name, one in FAMILIES.items() if one.architecture in listed), None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        found = f"model_type={content.get('model_type')!r} architectures={content.get('architectures')!r}"
        raise UserError(f"config.json: {found} is not supported. Known model types: {', '.join(FAMILIES)}.")
    return Model(family=family, config=family.config_from_hf(content), hf_config=dict(content))
