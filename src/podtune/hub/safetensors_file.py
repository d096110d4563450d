"""Reads the header of a safetensors file and checks that it describes all of it. Used by safetensors_store and remote.

The safetensors library reads the same files, but its numpy side copies what it reads and has no bfloat16; a view of the
mapped file costs nothing. Format: 8 bytes of header length, a JSON header, then the tensors' bytes without gaps.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from podtune.config.errors import UserError
from podtune.hub.tensors import TensorInfo

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The library's own bound on a header.
MOST_HEADER_BYTES = 100_000_000


class Placed(NamedTuple):
    """One tensor of a file: what it is, and the byte its values begin at."""

    info: TensorInfo
    offset: int


def header_length(first_bytes: bytes, file_bytes: int, where: str | Path) -> int:
    """Length of the JSON header from the file's first 8 bytes. Raises UserError when it cannot be one."""
    length = int.from_bytes(first_bytes[:8], "little")
    if len(first_bytes) < 8 or length > MOST_HEADER_BYTES or 8 + length > file_bytes:
        raise UserError(
            f"{where}: is not a safetensors file, or is truncated: it has {file_bytes:,} bytes and claims a header of "
            f"{length:,}. Download it again."
        )
    return length


def read_header(header: bytes, file_bytes: int, where: str | Path) -> dict[str, Placed]:
    """The tensors that a JSON header lists, in the order of their bytes.

    Raises UserError when the header is damaged, or when its tensors do not fill the file exactly.
    """
    try:
        content = json.loads(header, object_pairs_hook=_without_duplicates)
        content.pop("__metadata__", None)
        entries = [(name, *_entry(name, value)) for name, value in content.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: the safetensors header is damaged ({error}). Download the file again.") from None
    entries.sort(key=lambda entry: entry[2])
    start = 8 + len(header)
    position = 0
    placed: dict[str, Placed] = {}
    for name, info, begin, end in entries:
        if begin != position or end - begin != info.bytes:
            raise UserError(
                f"{where}: tensor {name} claims bytes {begin:,} to {end:,}; it should begin at {position:,} and take "
                f"{info.bytes:,}. The file is damaged; download it again."
            )
        placed[name] = Placed(info, start + begin)
        position = end
    if start + position != file_bytes:
        found = "is truncated" if start + position > file_bytes else "has bytes that belong to no tensor"
        raise UserError(
            f"{where}: {found}: its header describes {start + position:,} bytes, the file has {file_bytes:,}. "
            "Download it again."
        )
    return placed


def _entry(name: str, value: dict[str, Any]) -> tuple[TensorInfo, int, int]:
    if value["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name} has the unknown dtype {value['dtype']}")
    shape = tuple(int(length) for length in value["shape"])
    if any(length < 0 for length in shape) or math.prod(shape) > 1 << 60:
        raise ValueError(f"tensor {name} has the shape {shape}")
    begin, end = value["data_offsets"]
    return TensorInfo(shape, DTYPES[value["dtype"]]), int(begin), int(end)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content
