"""Decodes the quantised blocks of GGUF files into float32. Used by gguf_file (sizes) and gguf_store (values).

A row of a quantised tensor is a run of blocks; each holds `values` numbers in `bytes` bytes: small integer codes with a
scale and sometimes an offset, stored as float16. Layouts: ggml-quants.h of the ggml project. Every value is computed as
there, code times scale (minus offset) in float32, so results are bit-equal to that project's own.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

# Output values decoded at a time: the codes and the part of the output they fill stay in the processor's cache.
_CHUNK_VALUES = 1 << 19


class BlockKind(NamedTuple):
    """How one kind of tensor is stored. `dtype` is what a read gives; plain kinds have no `decode` and are viewed."""

    name: str
    values: int
    bytes: int
    dtype: np.dtype
    decode: Callable[[np.ndarray, np.ndarray], None] | None = None


def decode_blocks(kind: BlockKind, blocks: np.ndarray) -> np.ndarray:
    """Values of `blocks`, (rows, blocks, kind.bytes) uint8, as (rows, blocks * kind.values) of kind.dtype.

    Plain kinds come back as a view where the bytes lie together; quantised ones fill one new array, with a temporary
    memory of about a megabyte whatever the tensor's size.
    """
    rows, blocks_in_row = blocks.shape[:2]
    if kind.decode is None:
        return np.ascontiguousarray(blocks).reshape(rows, blocks_in_row * kind.bytes).view(kind.dtype)
    out = np.empty((rows, blocks_in_row, kind.values), np.float32)
    if blocks.flags.c_contiguous:
        source, target = blocks.reshape(1, -1, kind.bytes), out.reshape(1, -1, kind.values)
    else:
        source, target = blocks, out
    step = max(1, _CHUNK_VALUES // kind.values)
    for row, row_out in zip(source, target, strict=True):
        for start in range(0, len(row), step):
            kind.decode(row[start : start + step], row_out[start : start + step])
    return out.reshape(rows, blocks_in_row * kind.values)


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, as float32 (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(…, n) bytes to (…, 2, n) codes: the low halves of all bytes, then the high halves."""
    codes = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 0x0F, out=codes[..., 0, :])
    np.right_shift(packed, 4, out=codes[..., 1, :])
    return codes


def _decode_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    codes = _nibbles(blocks[:, 2:]).reshape(-1, 32).view(np.int8)
    codes -= 8
    np.multiply(codes, _half(blocks, 0), out=out)


def _decode_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_nibbles(blocks[:, 4:]).reshape(-1, 32), _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _five_bit_codes(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """32 codes a block from 16 bytes of low halves and 4 bytes of fifth bits."""
    codes = _nibbles(low).reshape(-1, 32)
    codes |= np.unpackbits(high, axis=1, bitorder="little") << 4
    return codes


def _decode_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    codes = _five_bit_codes(blocks[:, 2:6], blocks[:, 6:]).view(np.int8)
    codes -= 16
    np.multiply(codes, _half(blocks, 0), out=out)


def _decode_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_five_bit_codes(blocks[:, 4:8], blocks[:, 8:]), _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _decode_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _six_bit_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight offsets of six bits each from the 12 bytes of a K block, as (blocks, 8) float32."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    offsets = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _decode_scaled_and_offset(blocks: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    """Q4_K and Q5_K: eight runs of 32 codes, each with a scale and an offset of its own."""
    scales, offsets = _six_bit_scales(blocks[:, 4:16])
    scales *= _half(blocks, 0)
    offsets *= _half(blocks, 2)
    runs = out.reshape(-1, 8, 32)
    np.multiply(codes.reshape(-1, 8, 32), scales[:, :, None], out=runs)
    runs -= offsets[:, :, None]


def _decode_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _decode_scaled_and_offset(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), out)


def _decode_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    run = np.arange(8, dtype=np.uint8)[:, None]
    codes |= ((blocks[:, None, 16:48] >> run) & 1) << 4
    _decode_scaled_and_offset(blocks, codes, out)


def _decode_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    # Two halves of 128 values; in each, 64 bytes of low halves and 32 bytes that hold the top two bits of four runs.
    codes = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes |= ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift) & 3) << 4
    signed = codes.view(np.int8)
    signed -= 32
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    np.multiply(signed.reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


_FLOAT32 = np.dtype(np.float32)

# By ggml's number for the kind.
BLOCKS = {
    0: BlockKind("F32", 1, 4, _FLOAT32),
    1: BlockKind("F16", 1, 2, np.dtype(np.float16)),
    30: BlockKind("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    2: BlockKind("Q4_0", 32, 18, _FLOAT32, _decode_q4_0),
    3: BlockKind("Q4_1", 32, 20, _FLOAT32, _decode_q4_1),
    6: BlockKind("Q5_0", 32, 22, _FLOAT32, _decode_q5_0),
    7: BlockKind("Q5_1", 32, 24, _FLOAT32, _decode_q5_1),
    8: BlockKind("Q8_0", 32, 34, _FLOAT32, _decode_q8_0),
    12: BlockKind("Q4_K", 256, 144, _FLOAT32, _decode_q4_k),
    13: BlockKind("Q5_K", 256, 176, _FLOAT32, _decode_q5_k),
    14: BlockKind("Q6_K", 256, 210, _FLOAT32, _decode_q6_k),
}

# Kinds met in the wild that are not decoded, so that the message can name them.
UNSUPPORTED_BLOCKS = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
