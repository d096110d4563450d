"""Makes small GGUF files for tests with the ggml project's own writer, as its converter lays them out."""

from pathlib import Path

import gguf
import numpy as np

TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghijklm"]


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter stores q and k rows of the llama architecture."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def llama_metadata(**changes) -> dict:
    """Metadata of a tiny Llama by key after `llama.`; None leaves a key out."""
    metadata = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 8,
    }
    return {key: value for key, value in {**metadata, **changes}.items() if value is not None}


def hugging_face_weights(
    *, layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=64, vocab=16, tied=False, seed=0
) -> dict[str, np.ndarray]:
    """Random float32 weights of a Llama under their Hugging Face names."""
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (vocab, embed), "model.norm.weight": (embed,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, embed)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (embed,),
            f"{prefix}post_attention_layernorm.weight": (embed,),
            f"{prefix}self_attn.q_proj.weight": (heads * head_dim, embed),
            f"{prefix}self_attn.k_proj.weight": (kv_heads * head_dim, embed),
            f"{prefix}self_attn.v_proj.weight": (kv_heads * head_dim, embed),
            f"{prefix}self_attn.o_proj.weight": (embed, heads * head_dim),
            f"{prefix}mlp.gate_proj.weight": (mlp, embed),
            f"{prefix}mlp.up_proj.weight": (mlp, embed),
            f"{prefix}mlp.down_proj.weight": (embed, mlp),
        }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOPS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def llama_tensors(weights: dict[str, np.ndarray], *, heads=4, kv_heads=2) -> dict[str, np.ndarray]:
    """Weights under GGUF's names and in its row order."""
    tensors = {}
    for name, values in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem in _TOPS:
            tensors[f"{_TOPS[stem]}.{kind}"] = values
            continue
        _, _, layer, part = stem.split(".", 3)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            values = interleave(values, heads if "q_proj" in part else kv_heads)
        tensors[f"blk.{layer}.{_PARTS[part]}.{kind}"] = values
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    metadata: dict | None = None,
    extra: dict | None = None,
    quantisation: dict[str, int] | None = None,
) -> Path:
    """Writes a file. `metadata` keys are put after the architecture's name, `extra` ones stand as they are;
    `quantisation` gives the ggml kind of single tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {f"{architecture}.{key}": value for key, value in (metadata or llama_metadata()).items()} | (extra or {})
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    for name, array in tensors.items():
        kind = (quantisation or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            packed = gguf.quantize(array, gguf.GGMLQuantizationType(kind))
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
