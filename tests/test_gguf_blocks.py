"""Quantised blocks decode to what the ggml project's own code gives, and to what its C reads, bit by bit."""

import gguf
import numpy as np
import pytest

from podtune.hub.gguf_blocks import BLOCKS, decode_blocks

QUANTISED = {number: kind for number, kind in BLOCKS.items() if kind.decode is not None}
# Where each block holds its float16 scales.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}


def random_blocks(number: int, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Every code at random, with scales that are finite."""
    kind = BLOCKS[number]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, blocks, kind.bytes), dtype=np.uint8)
    for place in HALVES.get(kind.name, [208]):
        halves = random.normal(size=(rows, blocks, 1)).astype(np.float16)
        raw[:, :, place : place + 2] = halves.view(np.uint8)
    return raw


def half(block: np.ndarray, place: int) -> np.float32:
    return np.float32(block[place : place + 2].view(np.float16)[0])


def slow_decode(name: str, block: np.ndarray) -> list[float]:
    """One block, one value at a time, in the order and arithmetic of ggml's dequantize_row functions."""
    d = half(block, 208 if name == "Q6_K" else 0)
    values: list[float] = [0.0] * QUANTISED_BY_NAME[name].values
    if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        minimum = half(block, 2) if name.endswith("1") else None
        at = 4 if minimum is not None else 2
        high = 0
        if name.startswith("Q5"):
            high, at = int.from_bytes(block[at : at + 4].tobytes(), "little"), at + 4
        for j in range(16):
            for position, code in ((j, int(block[at + j]) & 15), (j + 16, int(block[at + j]) >> 4)):
                code |= ((high >> position) & 1) << 4
                if minimum is None:
                    values[position] = np.float32(code - (16 if name == "Q5_0" else 8)) * d
                else:
                    values[position] = np.float32(code) * d + minimum
    elif name == "Q8_0":
        values = [np.float32(code) * d for code in block[2:].view(np.int8)]
    elif name in ("Q4_K", "Q5_K"):
        packed = [int(byte) for byte in block[4:16]]
        low_at = 16 if name == "Q4_K" else 48
        for run in range(8):
            if run < 4:
                scale, offset = packed[run] & 63, packed[run + 4] & 63
            else:
                scale = (packed[run + 4] & 15) | ((packed[run - 4] >> 6) << 4)
                offset = (packed[run + 4] >> 4) | ((packed[run] >> 6) << 4)
            for j in range(32):
                byte = int(block[low_at + (run // 2) * 32 + j])
                code = byte >> 4 if run % 2 else byte & 15
                if name == "Q5_K":
                    code += 16 * ((int(block[16 + j]) >> run) & 1)
                values[run * 32 + j] = (d * np.float32(scale)) * np.float32(code) - half(block, 2) * np.float32(offset)
    else:
        low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
        for part in range(2):
            for j in range(32):
                for run in range(4):
                    byte = int(low[part * 64 + j + 32 * (run % 2)])
                    code = (byte >> 4 if run >= 2 else byte & 15) | (((int(high[part * 32 + j]) >> 2 * run) & 3) << 4)
                    position = part * 128 + run * 32 + j
                    values[position] = (d * np.float32(scales[position // 16])) * np.float32(code - 32)
    return values


QUANTISED_BY_NAME = {kind.name: kind for kind in QUANTISED.values()}


@pytest.mark.parametrize("number", QUANTISED, ids=[kind.name for kind in QUANTISED.values()])
def test_blocks_decode_bit_for_bit_like_the_gguf_library(number):
    raw = random_blocks(number, rows=9, blocks=33)
    expected = gguf.dequantize(raw.reshape(9, -1), gguf.GGMLQuantizationType(number))
    np.testing.assert_array_equal(decode_blocks(BLOCKS[number], raw), expected)


@pytest.mark.parametrize("number", QUANTISED, ids=[kind.name for kind in QUANTISED.values()])
def test_blocks_decode_like_a_slow_reference(number):
    raw = random_blocks(number, rows=2, blocks=2, seed=1)
    decoded = decode_blocks(BLOCKS[number], raw).reshape(2, 2, -1)
    expected = [[slow_decode(BLOCKS[number].name, block) for block in row] for row in raw]
    np.testing.assert_array_equal(decoded, np.array(expected, np.float32))


@pytest.mark.parametrize("number", QUANTISED, ids=[kind.name for kind in QUANTISED.values()])
def test_a_part_of_a_row_and_more_than_a_chunk_decode_alike(number, monkeypatch):
    raw = random_blocks(number, rows=4, blocks=10)
    whole = decode_blocks(BLOCKS[number], raw)
    monkeypatch.setattr("podtune.hub.gguf_blocks._CHUNK_VALUES", 3 * BLOCKS[number].values)
    np.testing.assert_array_equal(decode_blocks(BLOCKS[number], raw), whole)
    values = BLOCKS[number].values
    np.testing.assert_array_equal(decode_blocks(BLOCKS[number], raw[1:3, 2:7]), whole[1:3, 2 * values : 7 * values])


@pytest.mark.parametrize("number", [0, 1, 30])
def test_plain_kinds_are_views_of_the_file(number):
    kind = BLOCKS[number]
    raw = np.arange(6 * kind.bytes, dtype=np.uint8).reshape(2, 3, kind.bytes)
    decoded = decode_blocks(kind, raw)
    assert decoded.dtype == kind.dtype
    assert np.shares_memory(decoded, raw)


def test_block_sizes_are_those_of_the_gguf_library():
    for number, kind in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.values, kind.bytes)
        assert gguf.GGMLQuantizationType(number).name == kind.name
