"""Gemma 3: query and key norms, five windowed layers to one that sees all, each sort with a rope of its own.

`gemma3_text` is the text model; `gemma3` holds it beside a vision tower, of which only the text model is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podtune.config.errors import UserError
from podtune.families import names
from podtune.families.family import Family
from podtune.families.gemma2 import soft_cap_from_hf
from podtune.families.settings import Settings
from podtune.layers.positions import Rope
from podtune.models.decoder import DecoderConfig

_EVERY = 6  # one layer in so many sees all
_TEXT_CONFIG = "text_config"
# What the multimodal configuration says about images; none of it reaches the text model.
_VISION_KEYS = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
)


def config_from_hf(content: Mapping[str, Any]) -> DecoderConfig:
    settings = Settings(content)
    embed, heads = settings.whole("hidden_size", 2304), settings.whole("num_attention_heads", 8)
    context_length = settings.whole("max_position_embeddings", 131_072)
    layers = settings.whole("num_hidden_layers", 26)
    window = None if settings.is_null("sliding_window") else settings.whole("sliding_window", 4096)
    every = settings.whole("sliding_window_pattern", settings.whole("_sliding_window_pattern", _EVERY))
    bias = settings.flag("attention_bias", False)
    # transformers reads this key and then leaves scores as they are: which of the two was meant cannot be known.
    settings.only("attn_logit_softcapping", None)
    config = DecoderConfig(
        vocab=settings.whole("vocab_size", 262_208),
        embed=embed,
        mlp=settings.whole("intermediate_size", 9216),
        heads=heads,
        kv_heads=settings.kv_heads(heads, 4),
        head_dim=settings.head_dim(embed=embed, heads=heads, default=256),
        layer_kinds=settings.layer_kinds(
            layers, window=window, is_sliding=lambda layer: (layer + 1) % every != 0, sliding_rope=1
        ),
        ropes=_ropes(settings, context_length),
        context_length=context_length,
        tied=settings.flag("tie_word_embeddings", True),
        activation=settings.activation("hidden_activation", "gelu_pytorch_tanh", also="hidden_act"),
        norm_epsilon=settings.number("rms_norm_eps", 1e-6) or 0.0,
        norm_offset=1.0,
        attention_scale=settings.whole("query_pre_attn_scalar", 256) ** -0.5,
        final_softcap=soft_cap_from_hf(settings, "final_logit_softcapping", default=None),
        embed_scale=embed**0.5,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        post_norms=True,
    )
    settings.only("use_bidirectional_attention", False, None)
    settings.finish()
    return config


def _ropes(settings: Settings, context_length: int) -> tuple[Rope, Rope]:
    """(of layers that see all, of windowed layers). Scaling in the old style, rope_scaling, is of the first alone."""
    base = settings.number("rope_theta", 1_000_000.0)
    local_base = settings.number("rope_local_base_freq", 10_000.0)
    parameters = settings.mapping("rope_parameters") or {}
    if not set(parameters) <= {"full_attention", "sliding_attention"}:
        raise settings.refused("rope_parameters", "must hold full_attention and sliding_attention")
    for kind, content in parameters.items():
        if content is not None and not isinstance(content, Mapping):
            raise settings.refused("rope_parameters", f"must hold a mapping as {kind}")
    full = dict(parameters.get("full_attention") or {}) | dict(settings.mapping("rope_scaling") or {})
    sliding = parameters.get("sliding_attention") or {}
    name = "rope_parameters" if parameters else "rope_scaling"
    return (
        settings.rope_from(name, full, base=base, context_length=context_length),
        settings.rope_from(name, sliding, base=local_base, context_length=context_length),
    )


def multimodal_config_from_hf(content: Mapping[str, Any]) -> DecoderConfig:
    """The text model inside. Its head is tied unless the inner configuration, or else the outer one, says otherwise."""
    text = content.get(_TEXT_CONFIG)
    if not isinstance(text, Mapping):
        raise UserError(f"config.json: {_TEXT_CONFIG}={text!r} must be the configuration of the text model.")
    outer = {key: value for key, value in content.items() if key not in (_TEXT_CONFIG, *_VISION_KEYS)}
    settings = Settings(outer)
    tied = settings.flag("tie_word_embeddings", True)
    settings.finish()
    return config_from_hf({"tie_word_embeddings": tied, **text})


GEMMA3_TEXT = Family(
    name="gemma3_text", architecture="Gemma3ForCausalLM", config_from_hf=config_from_hf, rows=names.GEMMA
)
GEMMA3 = Family(
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    config_from_hf=multimodal_config_from_hf,
    rows=names.GEMMA,
    prefixes=("model.language_model.", "language_model.model.", "model."),
    heads=("lm_head.", "language_model.lm_head."),
    ignored=(
        ("*vision_tower.*", "the vision tower; only the text model is read, and saved as gemma3_text"),
        ("*multi_modal_projector.*", "the projector of images; only the text model is read"),
    ),
    text_config=_TEXT_CONFIG,
    saved_as=("gemma3_text", "Gemma3ForCausalLM"),
)
