"""Llama 1 to 3 and what shares its shape, such as SmolLM2."""

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
    context_length = settings.whole("max_position_embeddings", 2048)
    layers = settings.whole("num_hidden_layers", 32)
    bias = settings.flag("attention_bias", False)
    config = DecoderConfig(
        vocab=settings.whole("vocab_size", 32000),
        embed=embed,
        mlp=settings.whole("intermediate_size", 11008),
        heads=heads,
        kv_heads=settings.kv_heads(heads),
        head_dim=settings.head_dim(embed=embed, heads=heads),
        layer_kinds=settings.layer_kinds(layers, window=None, is_sliding=lambda layer: False),
        ropes=(settings.rope(context_length=context_length, default_base=10_000.0, nested="full_attention"),),
        context_length=context_length,
        tied=settings.flag("tie_word_embeddings", False),
        activation=settings.activation("hidden_act", "silu"),
        norm_epsilon=settings.number("rms_norm_eps", 1e-6) or 0.0,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=settings.flag("mlp_bias", False),
    )
    settings.finish()
    return config


LLAMA = Family(name="llama", architecture="LlamaForCausalLM", config_from_hf=config_from_hf, rows=names.LLAMA)
