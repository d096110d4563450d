"""The name rows that families share: tensors of a Hugging Face checkpoint and our weights."""

from __future__ import annotations

from podtune.families.family import LAYER, NameRow

_LAYER = f"model.layers.{LAYER}"

EMBEDDING = (NameRow("embedding", "model.embed_tokens.weight"),)
ATTENTION = tuple(NameRow(f"layers.attention.{part}", f"{_LAYER}.self_attn.{part}_proj.weight") for part in "qkvo")
ATTENTION_BIASES = tuple(
    NameRow(f"layers.attention.{part}_bias", f"{_LAYER}.self_attn.{part}_proj.bias") for part in "qkvo"
)
QK_NORMS = tuple(NameRow(f"layers.attention.{part}_norm", f"{_LAYER}.self_attn.{part}_norm.weight") for part in "qk")
MLP = tuple(NameRow(f"layers.mlp.{part}", f"{_LAYER}.mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
MLP_BIASES = tuple(
    NameRow(f"layers.mlp.{part}_bias", f"{_LAYER}.mlp.{part}_proj.bias") for part in ("gate", "up", "down")
)
NORMS = (
    NameRow("layers.attention_norm", f"{_LAYER}.input_layernorm.weight"),
    NameRow("layers.mlp_norm", f"{_LAYER}.post_attention_layernorm.weight"),
)
# Gemma normalises after attention and feed-forward as well, and names its norms so.
GEMMA_NORMS = (
    NameRow("layers.attention_norm", f"{_LAYER}.input_layernorm.weight"),
    NameRow("layers.attention_post_norm", f"{_LAYER}.post_attention_layernorm.weight"),
    NameRow("layers.mlp_norm", f"{_LAYER}.pre_feedforward_layernorm.weight"),
    NameRow("layers.mlp_post_norm", f"{_LAYER}.post_feedforward_layernorm.weight"),
)
LAST = (NameRow("norm", "model.norm.weight"), NameRow("head", "lm_head.weight"))

LLAMA = (*EMBEDDING, *ATTENTION, *ATTENTION_BIASES, *QK_NORMS, *MLP, *MLP_BIASES, *NORMS, *LAST)
GEMMA = (*EMBEDDING, *ATTENTION, *ATTENTION_BIASES, *QK_NORMS, *MLP, *GEMMA_NORMS, *LAST)
