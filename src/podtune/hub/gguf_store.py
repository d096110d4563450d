"""Reads a GGUF file's tensors as those of a Hugging Face checkpoint of the same model. Used by sources."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from podtune.config.errors import UserError
from podtune.hub.gguf_blocks import BLOCKS, decode_blocks
from podtune.hub.gguf_config import Architecture, architecture_of, hugging_face_config
from podtune.hub.gguf_file import GgufFile, GgufTensor
from podtune.hub.gguf_rope import FREQUENCY_FACTORS
from podtune.hub.tensors import TensorIndex, TensorInfo, resolved_index

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class _Source(NamedTuple):
    """Where a tensor comes from. `heads` > 0: its rows are rotary halves interleaved within so many heads."""

    tensor: GgufTensor
    info: TensorInfo
    heads: int
    plus_one: bool


class GgufStore:
    """A TensorStore over a GGUF file with Hugging Face names, orientation and row order.

    Quantised tensors come as float32. Only the rows (and, along a row, the blocks) that a read asks for are decoded.
    """

    def __init__(self, file: GgufFile):
        self._file = file
        architecture = architecture_of(file)
        config = hugging_face_config(file)
        self._sources: dict[str, _Source] = {}
        unknown: list[str] = []
        for tensor in file.tensors.values():
            name = hugging_face_name(tensor.name, architecture)
            if name is not None:
                self._sources[name] = _source(tensor, name, architecture, config)
            elif tensor.name != FREQUENCY_FACTORS:
                unknown.append(tensor.name)
        if unknown:
            raise UserError(
                f"{file.path}: {len(unknown)} tensors have no place in a {config['model_type']} model: "
                f"{', '.join(unknown[:8])}{', …' if len(unknown) > 8 else ''}. "
                "Leaving them out would change the model; use its safetensors folder."
            )

    def names(self) -> Mapping[str, TensorInfo]:
        return {name: source.info for name, source in self._sources.items()}

    def read(self, name: str, index: TensorIndex | None = None) -> np.ndarray:
        if name not in self._sources:
            raise UserError(f"{self._file.path}: holds no tensor for {name}.")
        source = self._sources[name]
        parts = resolved_index(source.info.shape, index)
        values = self._decode(source, parts)
        return values - values.dtype.type(1) if source.plus_one else values

    def _decode(self, source: _Source, parts: tuple[slice, ...]) -> np.ndarray:
        shape = source.info.shape
        kind = BLOCKS[source.tensor.kind]
        raw = self._file.raw(source.tensor)
        if len(shape) == 1:
            # One value is one row, so that interleaved biases are picked like interleaved rows.
            if kind.decode is not None:
                return decode_blocks(kind, raw.reshape(1, -1, kind.bytes))[0][_rows(source, parts[0])]
            return raw.view(kind.dtype)[_rows(source, parts[0])]
        rows = raw.reshape(shape[0], -1, kind.bytes)
        first_block = parts[1].start // kind.values
        last_block = -(-parts[1].stop // kind.values)
        if len(shape) > 2:
            first_block, last_block = 0, rows.shape[1]
        values = decode_blocks(kind, rows[:, first_block:last_block][_rows(source, parts[0])])
        if len(shape) > 2:
            return values.reshape(-1, *shape[1:])[(slice(None), *parts[1:])]
        start = parts[1].start - first_block * kind.values
        return values[:, start : start + parts[1].stop - parts[1].start]


def hugging_face_name(gguf_name: str, architecture: Architecture) -> str | None:
    """The name in a Hugging Face checkpoint, or None when the architecture has no such tensor."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    match = _BLOCK_TENSOR.fullmatch(gguf_name)
    if match is None or match[2] not in architecture.block_names:
        return None
    return f"model.layers.{match[1]}.{architecture.block_names[match[2]]}.{match[3]}"


def _source(tensor: GgufTensor, name: str, architecture: Architecture, config: dict) -> _Source:
    heads = 0
    if architecture.interleaved_rotary and ".q_proj." in name:
        heads = config["num_attention_heads"]
    elif architecture.interleaved_rotary and ".k_proj." in name:
        heads = config["num_key_value_heads"]
    info = TensorInfo(tensor.shape, BLOCKS[tensor.kind].dtype)
    plus_one = architecture.norms_plus_one and name.endswith("norm.weight")
    return _Source(tensor, info, heads, plus_one)


def _rows(source: _Source, wanted: slice) -> slice | np.ndarray:
    """The file's rows that hold the wanted rows of the checkpoint.

    Row (head, half, pair) of the checkpoint lies at (head, pair, half) in the file.
    """
    if not source.heads:
        return wanted
    rows = np.arange(wanted.start, wanted.stop)
    head_rows = source.info.shape[0] // source.heads
    head, within = np.divmod(rows, head_rows)
    half, pair = np.divmod(within, head_rows // 2)
    return head * head_rows + pair * 2 + half
