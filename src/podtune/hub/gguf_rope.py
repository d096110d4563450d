"""Recovers a model's rope scaling from GGUF metadata, or from the frequency factors that Llama 3 files carry instead.

Used by gguf_config.
"""

import math
from typing import Any

import numpy as np

from podtune.config.errors import UserError
from podtune.hub.gguf_blocks import BLOCKS
from podtune.hub.gguf_file import GgufFile

FREQUENCY_FACTORS = "rope_freqs.weight"


def rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json, or None. `config` gives head_dim, rope_theta and max_position_embeddings."""
    rope = f"{file.metadata['general.architecture']}.rope"
    prefix = f"{rope}.scaling"
    # Files older than the `scaling` keys hold a linear factor alone, or nothing.
    kind = file.metadata.get(f"{prefix}.type", "linear")
    if FREQUENCY_FACTORS in file.tensors:
        tensor = file.tensors[FREQUENCY_FACTORS]
        factors = file.raw(tensor).view(BLOCKS[tensor.kind].dtype).astype(np.float64)
        return _llama3_scaling(file, factors, theta=config["rope_theta"], head_dim=config["head_dim"])
    factor = _number(file, f"{prefix}.factor", file.metadata.get(f"{rope}.scale_linear", 0.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn_scaling(file, prefix, factor, config["max_position_embeddings"])
    raise UserError(
        f"{file.path}: {prefix}.type is {kind!r}; none, linear, yarn and Llama 3's factors are supported. "
        "Use the model's safetensors folder or another model."
    )


def _yarn_scaling(file: GgufFile, prefix: str, factor: float, context: int) -> dict[str, Any]:
    if factor <= 0.0:
        file.require(f"{prefix}.factor")
    original = int(file.metadata.get(f"{prefix}.original_context_length", round(context / factor)))
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    attention = _number(file, f"{prefix}.attn_factor", 1.0)
    if attention != 1.0:
        # llama.cpp multiplies its factor with YaRN's own; Hugging Face's attention_factor is the product.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    for key in ("beta_fast", "beta_slow"):
        value = file.metadata.get(f"{prefix}.yarn_{key}")
        if value is not None:
            scaling[key] = _number(file, f"{prefix}.yarn_{key}", 0.0)
    return scaling


def llama3_factors(scaling: dict[str, Any], *, theta: float, head_dim: int) -> np.ndarray:
    """What each rotary frequency is divided by (Llama 3.1), float64 (head_dim / 2)."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share_kept = np.clip((original * frequencies / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - share_kept) / scaling["factor"] + share_kept)


def _llama3_scaling(file: GgufFile, factors: np.ndarray, *, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The four numbers of `rope_type: llama3` whose factors are those of the file.

    The factors fix three of them; (low, high, original context) may all be multiplied by one number, so low is taken as
    1, as every published Llama 3 has it.
    """
    if len(factors) != head_dim // 2:
        raise UserError(
            f"{file.path}: {FREQUENCY_FACTORS} has {len(factors)} values, not head_dim / 2 = {head_dim // 2}. "
            "The file is damaged; convert the model again."
        )
    if np.all(factors == 1.0):
        return None
    factor = float(factors.max())
    share_kept = (1.0 / factors - 1.0 / factor) / (1.0 - 1.0 / factor)
    turns = theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    between = (share_kept > 1e-4) & (share_kept < 1.0 - 1e-4)
    scaling = {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(llama3_factors(scaling, theta=theta, head_dim=head_dim), factors, rtol=1e-4) and (
        between.sum() >= 2
    ):
        # share_kept = (original * turns - low) / (high - low): a line in `turns`.
        slope, intercept = np.polyfit(turns[between], share_kept[between], 1)
        span = -1.0 / intercept
        scaling["high_freq_factor"] = round(1.0 + span, 4)
        scaling["original_max_position_embeddings"] = round(slope * span)
    if not np.allclose(llama3_factors(scaling, theta=theta, head_dim=head_dim), factors, rtol=1e-3):
        raise UserError(
            f"{file.path}: the factors in {FREQUENCY_FACTORS} are not those of Llama 3's scaling, so its rotary "
            "positions cannot be told. Use the model's safetensors folder."
        )
    return scaling


def _number(file: GgufFile, key: str, default: float) -> float:
    return float(str(np.float32(file.metadata.get(key, default))))
