"""Mistral 7B and its kin: Llama with a sliding window over all layers, or none, and heads of any size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podtune.families import names
from podtune.families.family import Family
from podtune.families.settings import Settings
from podtune.models.decoder import DecoderConfig


def config_from_hf(content: Mapping[str, Any]) -> DecoderConfig:
    settings = Settings(content)
    embed, heads = settings.whole("hidden_size", 4096), settings.whole("num_attention_heads", 32)
    context_length = settings.whole("max_position_embeddings", 4096 * 32)
    layers = settings.whole("num_hidden_layers", 32)
    # Absent means the default of the first Mistral; null means no window.
    window = None if settings.is_null("sliding_window") else settings.whole("sliding_window", 4096)
    # transformers gives every layer the window, whatever this key says.
    settings.only("layer_types", None, ["full_attention" if window is None else "sliding_attention"] * layers)
    config = DecoderConfig(
        vocab=settings.whole("vocab_size", 32000),
        embed=embed,
        mlp=settings.whole("intermediate_size", 14336),
        heads=heads,
        kv_heads=settings.kv_heads(heads, 8),
        head_dim=settings.head_dim(embed=embed, heads=heads),
        layer_kinds=settings.layer_kinds(layers, window=window, is_sliding=lambda layer: window is not None),
        ropes=(settings.rope(context_length=context_length, default_base=10_000.0, nested="full_attention"),),
        context_length=context_length,
        tied=settings.flag("tie_word_embeddings", False),
        activation=settings.activation("hidden_act", "silu"),
        norm_epsilon=settings.number("rms_norm_eps", 1e-6) or 0.0,
    )
    settings.only("attention_bias", False, None)
    settings.finish()
    return config


MISTRAL = Family(name="mistral", architecture="MistralForCausalLM", config_from_hf=config_from_hf, rows=names.LLAMA)
