"""Reads the header of a GGUF file: its metadata and where each tensor's bytes lie. Used by gguf_store and tokenizer.

The format is that of the ggml project's docs/gguf.md, versions 2 and 3. The `gguf` package reads it too, but takes
every string of the vocabulary through numpy (4 s for 49,152 tokens, 0.1 s here): it is a reference in tests only.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podtune.config.errors import UserError
from podtune.hub.gguf_blocks import BLOCKS, UNSUPPORTED_BLOCKS

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# A count beyond this is a damaged header, not a model; reading on would ask for all the memory there is.
_MOST_ENTRIES = 1 << 24


class GgufTensor(NamedTuple):
    """One entry of the tensor directory. `shape` is in numpy's order (rows first)."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class GgufFile:
    """An opened GGUF file: metadata by key, tensors by their GGUF name, and the file's bytes, memory-mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: np.ndarray

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's bytes as stored, a view of the file."""
        return self.data[tensor.offset : tensor.offset + tensor.bytes]

    def require(self, key: str) -> Any:
        """A metadata value that the model cannot do without. Raises UserError naming file and key."""
        if key not in self.metadata:
            raise UserError(
                f"{self.path}: the metadata has no `{key}`, which describes the model. "
                "The file was written by an old or incomplete converter; convert the model again or use its "
                "safetensors folder."
            )
        return self.metadata[key]


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file and checks that every tensor it lists lies inside it.

    Raises UserError for a file that is not GGUF, is truncated, or holds a kind of tensor that cannot be decoded.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise UserError(f"{path}: {size} bytes is too short for a GGUF file. Download it again.")
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    if view[:4] != MAGIC:
        raise UserError(
            f"{path}: is not a GGUF file: it begins with {view[:4]!r}, a GGUF file with {MAGIC!r}. "
            "Name a .gguf file, or a folder that holds config.json and safetensors."
        )
    cursor = _Cursor(view, path)
    version = cursor.scalar("<I")
    if version not in (2, 3):
        swapped = version.to_bytes(4, "big") in (b"\x02\0\0\0", b"\x03\0\0\0")
        found = "big-endian" if swapped else f"version {version}"
        raise UserError(
            f"{path}: is {found} GGUF; little-endian versions 2 and 3 can be read. Convert the model again."
        )
    tensor_count = cursor.count("tensors")
    entry_count = cursor.count("metadata entries")
    metadata = dict(cursor.entry() for _ in range(entry_count))
    parts = int(metadata.get("split.count", 1))
    if parts > 1:
        raise UserError(
            f"{path}: is one of {parts} parts of a model, and files in parts are not read. "
            "Join them with `llama-gguf-split --merge`, or use the model's safetensors folder."
        )
    directory = [cursor.tensor() for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in directory:
        tensors[name] = _placed(path, GgufTensor(name, shape, kind, data_start + offset, 0), size)
    if len(tensors) != tensor_count:
        raise UserError(f"{path}: lists a tensor twice. The file is damaged; download or convert it again.")
    return GgufFile(path, metadata, tensors, np.frombuffer(view, dtype=np.uint8))


def _placed(path: Path, tensor: GgufTensor, file_bytes: int) -> GgufTensor:
    """`tensor` with its size in bytes, once it is known to be decodable and inside the file."""
    if tensor.kind not in BLOCKS:
        kind = UNSUPPORTED_BLOCKS.get(tensor.kind, f"number {tensor.kind}")
        known = ", ".join(block.name for block in BLOCKS.values())
        raise UserError(
            f"{path}: tensor {tensor.name} is stored as {kind}, which cannot be decoded. "
            f"Known kinds: {known}. Use a Q8_0, Q6_K, Q4_K or F16 file of the same model."
        )
    block = BLOCKS[tensor.kind]
    row = tensor.shape[-1] if tensor.shape else 1
    if row % block.values:
        raise UserError(
            f"{path}: rows of {tensor.name} have {row} values, not a multiple of the {block.values} in a "
            f"{block.name} block. The file is damaged; download or convert it again."
        )
    placed = tensor._replace(bytes=math.prod(tensor.shape) // block.values * block.bytes)
    if placed.offset + placed.bytes > file_bytes:
        raise UserError(
            f"{path}: is truncated: tensor {tensor.name} ends at byte {placed.offset + placed.bytes:,}, "
            f"the file at {file_bytes:,}. Download it again."
        )
    return placed


class _Cursor:
    """Reads values one after the other; running past the end is a truncated file."""

    def __init__(self, view: mmap.mmap, path: Path):
        self.view, self.path, self.position = view, path, 4

    def scalar(self, form: str) -> Any:
        try:
            (value,) = struct.unpack_from(form, self.view, self.position)
        except struct.error:
            raise self._truncated() from None
        self.position += struct.calcsize(form)
        return value

    def count(self, what: str) -> int:
        value = self.scalar("<Q")
        if value > _MOST_ENTRIES:
            raise UserError(f"{self.path}: claims {value:,} {what}. The header is damaged; download the file again.")
        return value

    def string(self) -> str:
        return self.raw_string().decode("utf-8", errors="replace")

    def raw_string(self) -> bytes:
        length = self.scalar("<Q")
        end = self.position + length
        if end > len(self.view):
            raise self._truncated()
        value = self.view[self.position : end]
        self.position = end
        return value

    def entry(self) -> tuple[str, Any]:
        key = self.string()
        return key, self._value(self.scalar("<I"), key)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise UserError(f"{self.path}: metadata {key} has the unknown type {kind}. Convert the model again.")
        return self.scalar(_SCALARS[kind])

    def _array(self, key: str) -> Any:
        kind = self.scalar("<I")
        length = self.count(f"values in {key}")
        if kind in (_STRING, _ARRAY):
            read = self.string if kind == _STRING else partial(self._array, key)
            return [read() for _ in range(length)]
        if kind not in _SCALARS:
            raise UserError(f"{self.path}: metadata {key} has the unknown type {kind}. Convert the model again.")
        dtype = np.dtype(_SCALARS[kind])
        end = self.position + length * dtype.itemsize
        if end > len(self.view):
            raise self._truncated()
        values = np.frombuffer(self.view, dtype, count=length, offset=self.position).copy()
        self.position = end
        return values

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        axes = self.scalar("<I")
        if axes > 4:
            raise UserError(f"{self.path}: tensor {name!r} claims {axes} axes. The file is damaged; download it again.")
        shape = tuple(self.scalar("<Q") for _ in range(axes))[::-1]
        return name, shape, self.scalar("<I"), self.scalar("<Q")

    def _truncated(self) -> UserError:
        return UserError(
            f"{self.path}: is truncated: the header runs past the end of the file at {len(self.view):,} bytes. "
            "Download it again."
        )
