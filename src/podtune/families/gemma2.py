"""Gemma 2: soft-caps, every other layer with a window, norms before and after each block, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podtune.families import names
from podtune.families.family import Family
from podtune.families.settings import Settings
from podtune.models.decoder import DecoderConfig


def config_from_hf(content: Mapping[str, Any]) -> DecoderConfig:
    settings = Settings(content)
    embed, heads = settings.whole("hidden_size", 2304), settings.whole("num_attention_heads", 8)
    context_length = settings.whole("max_position_embeddings", 8192)
    layers = settings.whole("num_hidden_layers", 26)
    window = None if settings.is_null("sliding_window") else settings.whole("sliding_window", 4096)
    bias = settings.flag("attention_bias", False)
    config = DecoderConfig(
        vocab=settings.whole("vocab_size", 256000),
        embed=embed,
        mlp=settings.whole("intermediate_size", 9216),
        heads=heads,
        kv_heads=settings.kv_heads(heads, 4),
        head_dim=settings.head_dim(embed=embed, heads=heads, default=256),
        layer_kinds=settings.layer_kinds(layers, window=window, is_sliding=lambda layer: layer % 2 == 0),
        ropes=(settings.rope(context_length=context_length, default_base=10_000.0, nested="full_attention"),),
        context_length=context_length,
        tied=settings.flag("tie_word_embeddings", True),
        # hidden_act stands in some files too, with what the first Gemma used; transformers goes by hidden_activation.
        activation=settings.activation("hidden_activation", "gelu_pytorch_tanh", also="hidden_act"),
        norm_epsilon=settings.number("rms_norm_eps", 1e-6) or 0.0,
        norm_offset=1.0,
        attention_scale=settings.whole("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=soft_cap_from_hf(settings, "attn_logit_softcapping", default=50.0),
        final_softcap=soft_cap_from_hf(settings, "final_logit_softcapping", default=30.0),
        embed_scale=embed**0.5,
        qkv_bias=bias,
        output_bias=bias,
        post_norms=True,
    )
    settings.only("use_bidirectional_attention", False, None)
    settings.finish()
    return config


def soft_cap_from_hf(settings: Settings, key: str, *, default: float | None) -> float | None:
    """Absent means the default; null means no cap."""
    return None if settings.is_null(key) else settings.number(key, default)


GEMMA2 = Family(name="gemma2", architecture="Gemma2ForCausalLM", config_from_hf=config_from_hf, rows=names.GEMMA)
