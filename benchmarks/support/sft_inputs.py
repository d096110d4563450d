"""What both sides of the training benchmarks start from: the same weights, the same adapters, the same batch.

The weights are the genuine SmolLM2-135M-Instruct, taken out of its GGUF file by the `gguf` package and kept as a
Hugging Face folder in float32; nothing here uses podtune, so that neither side is measured with the other's reading.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BENCHMARKS = Path(__file__).resolve().parent.parent
ROOT = BENCHMARKS.parent
RANK = 16
ALPHA = 32.0
LEARNING_RATE = 2e-4

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.041666666666666664,
    "torch_dtype": "float32",
}
# For the smoke test: the same shape, small enough to train in seconds.
TINY: dict[str, Any] = SMOLLM2 | {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
}

_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def cache_folder() -> Path:
    """Where converted weights are kept between runs."""
    return Path(os.environ.get("PODTUNE_BENCHMARK_CACHE") or "~/.cache/podtune/benchmarks").expanduser()


def smollm2_gguf() -> Path:
    """The genuine model as it was published, fetched once."""
    sys.path.insert(0, str(ROOT / "tools"))
    import real_inputs

    return real_inputs.fetch("smollm2")


def smollm2_folder() -> Path:
    """The genuine weights as a float32 Hugging Face folder, converted once."""
    folder = cache_folder() / "SmolLM2-135M-Instruct-float32"
    if not (folder / "config.json").is_file():
        _convert(smollm2_gguf(), folder)
    return folder


def tokenizer_folder() -> Path:
    """The genuine tokenizer as transformers reads it from the GGUF file, saved once."""
    folder = cache_folder() / "SmolLM2-135M-Instruct-tokenizer"
    if not (folder / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        gguf = smollm2_gguf()
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def tiny_folder(folder: Path, config: dict[str, Any] = TINY) -> Path:
    """Random weights of a small shape, for the smoke test."""
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(shape, np.float32) if "norm" in name else rng.normal(0, 0.05, shape).astype(np.float32)
        for name, shape in _shapes(config).items()
    }
    _write(folder, config, tensors)
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], embed),
        "model.norm.weight": (embed,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (embed,),
            f"{at}.post_attention_layernorm.weight": (embed,),
            f"{at}.self_attn.q_proj.weight": (heads, embed),
            f"{at}.self_attn.k_proj.weight": (kv_heads, embed),
            f"{at}.self_attn.v_proj.weight": (kv_heads, embed),
            f"{at}.self_attn.o_proj.weight": (embed, heads),
            f"{at}.mlp.gate_proj.weight": (mlp, embed),
            f"{at}.mlp.up_proj.weight": (mlp, embed),
            f"{at}.mlp.down_proj.weight": (embed, mlp),
        }
    return shapes


def _convert(gguf_path: Path, folder: Path) -> None:
    import gguf
    from gguf.quants import dequantize

    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(SMOLLM2["num_hidden_layers"]):
        names |= {f"blk.{layer}.{part}.weight": f"model.layers.{layer}.{name}.weight" for part, name in parts.items()}
    heads = {"q_proj": SMOLLM2["num_attention_heads"], "k_proj": SMOLLM2["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    for tensor in gguf.GGUFReader(str(gguf_path)).tensors:
        array = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        name = names[tensor.name]
        for projection, count in heads.items():
            if projection in name:
                # llama.cpp interleaves the two halves of every head's rows; put them one after the other again.
                rows, columns = array.shape
                array = array.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        tensors[name] = np.ascontiguousarray(array)
    wanted = _shapes(SMOLLM2)
    assert {name: array.shape for name, array in tensors.items()} == wanted
    _write(folder, SMOLLM2, tensors)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Last, because its presence says that the folder is whole.
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def adapter_start(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Both halves of every adapter by PEFT name; up-projections off zero, so that both halves have gradients."""
    rng = np.random.default_rng(1)
    shapes = _shapes(config)
    adapters: dict[str, np.ndarray] = {}
    for layer in range(config["num_hidden_layers"]):
        for module in _MODULES.values():
            outputs, inputs = shapes[f"model.layers.{layer}.{module}.weight"]
            at = f"layers.{layer}.{module}"
            adapters[f"{at}.a"] = rng.uniform(-1, 1, (RANK, inputs)).astype(np.float32) / np.float32(inputs**0.5)
            adapters[f"{at}.b"] = rng.normal(0, 0.01, (outputs, RANK)).astype(np.float32)
    return adapters


def stacked_adapters(adapters: dict[str, np.ndarray], name: str, half: str) -> np.ndarray:
    """One of podtune's stacked halves, (layers, inputs, rank) or (layers, rank, outputs), from the PEFT orientation."""
    module = _MODULES[name]
    layers = sum(key.endswith(f"{module}.{half}") for key in adapters)
    return np.stack([adapters[f"layers.{layer}.{module}.{half}"].T for layer in range(layers)])


def unstacked_gradients(name: str, half: str, stacked: np.ndarray) -> dict[str, np.ndarray]:
    """The reverse of `stacked_adapters`: podtune's gradient by PEFT name and orientation."""
    return {f"layers.{layer}.{_MODULES[name]}.{half}": array.T for layer, array in enumerate(stacked)}


def fixed_batch(config: dict[str, Any], rows: int, row_tokens: int) -> np.ndarray:
    """Token ids (rows, row_tokens), all targets but the first of a row: the text of the quickstart's chats, repeated.

    Real text, since gradients of random ids are ill-conditioned in this model: in float32 torch's were 1e-3 off those
    in float64, and podtune's 1e-4. The tiny model knows too few tokens for text and gets random ones.
    """
    if config["vocab_size"] < SMOLLM2["vocab_size"]:
        return np.random.default_rng(2).integers(3, config["vocab_size"], (rows, row_tokens)).astype(np.int32)
    from tokenizers import Tokenizer

    chats = (ROOT / "recipes" / "quickstart" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n".join(turn["content"] for chat in chats for turn in json.loads(chat)["messages"])
    ids = Tokenizer.from_file(str(tokenizer_folder() / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return np.resize(np.array(ids, np.int32), (rows, row_tokens))


@dataclass(frozen=True)
class GradientDifference:
    """Relative differences in the Euclidean norm: of all gradients together, and of the adapter that differs most."""

    whole: float
    worst: float
    where: str


def gradient_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> GradientDifference:
    """How far two sides' gradients, by adapter, are apart."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())[:4]
    where = max(theirs, key=lambda name: _relative(ours[name], theirs[name]))
    flat_ours, flat_theirs = (np.concatenate([side[name].ravel() for name in theirs]) for side in (ours, theirs))
    return GradientDifference(_relative(flat_ours, flat_theirs), _relative(ours[where], theirs[where]), where)


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
