"""The bytes of tf.train.Example, written and read with numpy: no TensorFlow, no protobuf, no Python work per value.

Example = {1: Features}, Features = {1: map entry}*, entry = {1: name, 2: Feature}, Feature = one of {1: BytesList},
{2: FloatList}, {3: Int64List}, each {1: value}*, where numbers may be packed into one field or stand alone.
Source: tensorflow/core/example/{example,feature}.proto and the protocol buffers encoding guide.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int64, Integer, UInt8, UInt64

Feature = np.ndarray | list[bytes]  # int64 values, float32 values, or byte strings

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


class ExampleError(ValueError):
    """The bytes are not a tf.train.Example."""


def encode_example(features: Mapping[str, np.ndarray | Sequence[bytes]]) -> bytes:
    """One tf.train.Example; features are written in the order of their names, so equal features give equal bytes."""
    entries: list[bytes] = []
    for name in sorted(features):
        values = features[name]
        if not isinstance(values, np.ndarray):
            feature = _field(1, b"".join(_field(1, value) for value in values))
        elif np.issubdtype(values.dtype, np.floating):
            feature = _field(2, _field(1, values.astype("<f4").tobytes()) if len(values) else b"")
        else:
            feature = _field(3, _field(1, encode_varints(values)) if len(values) else b"")
        entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
    return _field(1, b"".join(entries))


def decode_example(data: bytes) -> dict[str, Feature]:
    """The features of one serialised tf.train.Example. Raises ExampleError."""
    features: dict[str, Feature] = {}
    try:
        for number, body in _fields(data):
            if number != 1:
                continue
            for entry_number, entry in _fields(_bytes(body)):
                if entry_number == 1:
                    parts = dict(_fields(_bytes(entry)))
                    name = bytes(_bytes(parts.get(1, b""))).decode()
                    features[name] = _decode_feature(_bytes(parts.get(2, b"")))
    except (IndexError, UnicodeDecodeError, ValueError) as error:
        raise ExampleError(f"not a tf.train.Example: {error}") from error
    return features


def encode_varints(values: Integer[np.ndarray, "n"]) -> bytes:
    """Protocol-buffer varints of integers, one after another (negative ones take ten bytes, as int64 does)."""
    if not len(values):
        return b""
    if values.min() >= 0 and values.max() < 128:
        return values.astype(np.uint8).tobytes()
    rest = values.astype(np.int64).view(np.uint64)
    columns = np.empty((len(rest), _varint_length(int(rest.max()))), np.uint8)
    present = np.empty(columns.shape, np.bool_)
    for column in range(columns.shape[1]):
        present[:, column] = rest > 0 if column else True
        low = (rest & 0x7F).astype(np.uint8)
        rest = rest >> np.uint64(7)
        columns[:, column] = low | ((rest > 0).astype(np.uint8) << 7)
    return columns[present].tobytes()


def decode_varints(data: bytes | memoryview) -> Int64[np.ndarray, "n"]:
    """The integers of consecutive varints."""
    raw: UInt8[np.ndarray, "bytes"] = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(raw) and (not len(ends) or ends[-1] != len(raw) - 1):
        raise ValueError("an integer is cut off")
    if len(ends) == len(raw):
        return raw.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    widths = ends - starts + 1
    widest = int(widths.max())
    if widest > 10:
        raise ValueError("an integer is longer than ten bytes")
    values: UInt64[np.ndarray, "n"] = (raw[starts] & 0x7F).astype(np.uint64)
    for place in range(1, widest):
        reached = widths > place
        part = (raw[np.where(reached, starts + place, 0)] & 0x7F).astype(np.uint64)
        values |= np.where(reached, part << np.uint64(7 * place), np.uint64(0))
    return values.view(np.int64)


def _varint_length(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(body)) + body


def _fields(data: bytes | memoryview) -> list[tuple[int, int | memoryview]]:
    """The (number, value) fields of a message; a value is an integer for varints, bytes otherwise."""
    view = memoryview(data)
    fields: list[tuple[int, int | memoryview]] = []
    at = 0
    while at < len(view):
        key, at = _read_varint(view, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(view, at)
            fields.append((key >> 3, value))
            continue
        if kind == _BYTES:
            length, at = _read_varint(view, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"unknown wire type {kind}")
        if at + length > len(view):
            raise ValueError("a field is cut off")
        fields.append((key >> 3, view[at : at + length]))
        at += length
    return fields


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if shift > 63:
            raise ValueError("an integer is longer than ten bytes")
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _bytes(value: int | bytes | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number stands where a message is expected")
    return memoryview(value)


def _decode_feature(data: memoryview) -> Feature:
    fields = _fields(data)
    if not fields:
        return np.empty(0, np.int64)
    kind, body = fields[-1]  # the last of a oneof counts
    values = [value for number, value in _fields(_bytes(body)) if number == 1]
    if kind == 1:
        return [bytes(_bytes(value)) for value in values]
    if kind == 2:
        return np.frombuffer(b"".join(bytes(_bytes(value)) for value in values), "<f4").astype(np.float32)
    if kind == 3:
        parts = [
            decode_varints(value) if isinstance(value, memoryview) else np.array([value], np.uint64).view(np.int64)
            for value in values
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])
    raise ValueError(f"unknown kind of feature {kind}")
