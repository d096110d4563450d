"""Qwen 3 (dense): query and key are normalised in each head, and no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podtune.families import names
from podtune.families.family import Family
from podtune.families.qwen2 import window_from_hf
from podtune.families.settings import Settings
from podtune.models.decoder import DecoderConfig


def config_from_hf(content: Mapping[str, Any]) -> DecoderConfig:
    settings = Settings(content)
    embed, heads = settings.whole("hidden_size", 4096), settings.whole("num_attention_heads", 32)
    context_length = settings.whole("max_position_embeddings", 32768)
    layers = settings.whole("num_hidden_layers", 32)
    window = window_from_hf(settings)
    first_sliding = settings.whole("max_window_layers", 28, at_least=0)
    bias = settings.flag("attention_bias", False)
    config = DecoderConfig(
        vocab=settings.whole("vocab_size", 151936),
        embed=embed,
        mlp=settings.whole("intermediate_size", 22016),
        heads=heads,
        kv_heads=settings.kv_heads(heads, 32),
        head_dim=settings.head_dim(embed=embed, heads=heads, default=128),
        layer_kinds=settings.layer_kinds(
            layers, window=window, is_sliding=lambda layer: window is not None and layer >= first_sliding
        ),
        ropes=(settings.rope(context_length=context_length, default_base=10_000.0, nested="full_attention"),),
        context_length=context_length,
        tied=settings.flag("tie_word_embeddings", False),
        activation=settings.activation("hidden_act", "silu"),
        norm_epsilon=settings.number("rms_norm_eps", 1e-6) or 0.0,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )
    settings.finish()
    return config


QWEN3 = Family(name="qwen3", architecture="Qwen3ForCausalLM", config_from_hf=config_from_hf, rows=names.LLAMA)
