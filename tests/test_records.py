"""TFRecord files: TensorFlow reads ours, we read TensorFlow's, any record is reached at once, and damage is named."""

import contextlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from record_cases import write_tfrecord

from podtune.config.errors import RunFailure, UserError
from podtune.data.example_codec import (
    ExampleError,
    decode_example,
    decode_varints,
    encode_example,
    encode_varints,
)
from podtune.data.packing import assemble_row
from podtune.data.prepared import decode_row, encode_row
from podtune.data.record_index import index_path
from podtune.data.records import RecordFile, read_records_from, read_tfrecord

INT64 = arrays.arrays(np.int64, st.integers(0, 40), elements=st.integers(-(2**63), 2**63 - 1))


@pytest.fixture(scope="module")
def tensorflow():
    return pytest.importorskip("tensorflow")


@given(values=INT64)
@settings(max_examples=200, deadline=None)
def test_varints_come_back_whatever_the_integer(values: np.ndarray) -> None:
    assert np.array_equal(decode_varints(encode_varints(values)), values)


@pytest.mark.parametrize("width", range(1, 10))
def test_varints_change_length_at_the_right_values(width: int) -> None:
    edge = 1 << (7 * width)
    assert [len(encode_varints(np.array([value]))) for value in (edge - 1, edge) if value < 2**63] == [
        width,
        *([width + 1] if edge < 2**63 else []),
    ]


@given(data=st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_an_example_or_an_example_error(data: bytes) -> None:
    with contextlib.suppress(ExampleError):
        decode_example(data)


def test_tensorflow_reads_prepared_rows(tmp_path: Path, tensorflow) -> None:
    row = assemble_row([(np.array([0, 5, 300, 70000], np.int32), np.array([False, True, False, True]))] * 2)
    write_tfrecord(tmp_path / "a.tfrecord", [encode_row(row)] * 3)
    schema = {
        name: tensorflow.io.FixedLenSequenceFeature([], tensorflow.int64, allow_missing=True)
        for name in ("tokens", "trained", "segments")
    }
    records = list(tensorflow.data.TFRecordDataset(str(tmp_path / "a.tfrecord")))
    assert len(records) == 3
    for record in records:
        parsed = tensorflow.io.parse_single_example(record, schema)
        assert parsed["tokens"].numpy().tolist() == row.tokens.tolist()
        assert parsed["trained"].numpy().tolist() == row.trained.astype(int).tolist()
        assert parsed["segments"].numpy().tolist() == [1, 1, 1, 1, 2, 2, 2, 2]


@given(
    numbers=INT64,
    floats=st.lists(st.floats(width=32, allow_nan=False), max_size=10),
    texts=st.lists(st.binary(max_size=10), max_size=5),
)
@settings(max_examples=50, deadline=None)
def test_examples_go_to_tensorflow_and_back(tensorflow, numbers: np.ndarray, floats: list[float], texts: list[bytes]):
    features = {"numbers": numbers, "floats": np.array(floats, np.float32), "texts": texts, "": np.array([7])}
    theirs = tensorflow.train.Example.FromString(encode_example(features))
    assert list(theirs.features.feature["numbers"].int64_list.value) == numbers.tolist()
    assert list(theirs.features.feature["floats"].float_list.value) == floats
    assert list(theirs.features.feature["texts"].bytes_list.value) == texts
    ours = decode_example(theirs.SerializeToString())
    assert [list(ours[name]) for name in features] == [numbers.tolist(), floats, texts, [7]]


def test_files_that_tensorflow_wrote_are_read(tmp_path: Path, tensorflow) -> None:
    def example(index: int):
        train = tensorflow.train
        feature = {
            "tokens": train.Feature(int64_list=train.Int64List(value=[index, -1, 1 << 40])),
            "scores": train.Feature(float_list=train.FloatList(value=[0.5, -2.0])),
            "text": train.Feature(bytes_list=train.BytesList(value=["né".encode(), b""])),
            "empty": train.Feature(int64_list=train.Int64List()),
            "unset": train.Feature(),
        }
        return train.Example(features=train.Features(feature=feature))

    with tensorflow.io.TFRecordWriter(str(tmp_path / "b.tfrecord")) as writer:
        for index in range(5):
            writer.write(example(index).SerializeToString())
    rows = list(read_tfrecord(tmp_path / "b.tfrecord"))
    assert [row["tokens"] for row in rows] == [[index, -1, 1 << 40] for index in range(5)]
    assert rows[0]["scores"] == [0.5, -2.0]
    assert rows[0]["text"] == ["né".encode(), b""]
    assert rows[0]["empty"] == rows[0]["unset"] == []


def test_numbers_that_are_not_packed_into_one_field_are_read() -> None:
    """Older writers put each number of a list into a field of its own."""
    unpacked_ints = b"".join(b"\x08" + encode_varints(np.array([value])) for value in (3, 300, -1))
    unpacked_floats = b"".join(b"\x0d" + struct.pack("<f", value) for value in (1.5, -0.25))

    def message(number: int, body: bytes) -> bytes:
        return bytes([number << 3 | 2, len(body)]) + body

    entries = b"".join(
        message(1, message(1, name) + message(2, message(kind, body)))
        for name, kind, body in ((b"ints", 3, unpacked_ints), (b"floats", 2, unpacked_floats))
    )
    features = decode_example(message(1, entries))
    assert list(features["ints"]) == [3, 300, -1]
    assert list(features["floats"]) == [1.5, -0.25]


def test_any_record_is_reached_through_the_index_and_an_open_file_pickles(tmp_path: Path) -> None:
    records = [bytes([index]) * index for index in range(50)]
    write_tfrecord(tmp_path / "c.tfrecord", records)
    file = pickle.loads(pickle.dumps(RecordFile(tmp_path / "c.tfrecord")))
    assert len(file) == 50
    assert [file[index] for index in (49, 0, 7)] == [records[index] for index in (49, 0, 7)]
    with pytest.raises(IndexError):
        file[50]


def test_a_shard_is_visible_only_when_it_is_whole(tmp_path: Path) -> None:
    def records():
        yield b"one"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk"):
        write_tfrecord(tmp_path / "d.tfrecord", records())
    assert list(tmp_path.iterdir()) == []


FAULTS = {
    "cut off: the file ends in its header": lambda data: data[:-25],
    "cut off: it should hold 10 bytes": lambda data: data[:-6],
    "damaged: the checksum of its 10 bytes": lambda data: data[:-8] + b"X" + data[-7:],
    "damaged header": lambda data: data[:27] + b"\x01" + data[28:],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_record_is_named_by_file_number_and_byte(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "e.tfrecord"
    write_tfrecord(path, [b"0123456789", b"abcdefghij"])
    path.write_bytes(FAULTS[fault](path.read_bytes()))
    with pytest.raises(UserError, match=rf"e\.tfrecord: record 2 at byte 26 .*{fault}"):
        list(read_tfrecord_bytes(path))


def read_tfrecord_bytes(path: Path):
    with open(path, "rb") as file:
        yield from read_records_from(file, path.name)


def test_a_record_that_is_no_example_is_named(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "f.tfrecord", [encode_example({}), b"\xff\xff\xff"])
    with pytest.raises(UserError, match=r"f\.tfrecord: record 2 is not a tf\.train\.Example"):
        list(read_tfrecord(tmp_path / "f.tfrecord"))


def test_damage_to_a_prepared_shard_is_found_when_its_row_is_read(tmp_path: Path) -> None:
    path = tmp_path / "g.tfrecord"
    write_tfrecord(path, [b"0123456789", b"abcdefghij"])
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    file = RecordFile(path)
    assert file[0] == b"0123456789"
    with pytest.raises(RunFailure, match=r"g\.tfrecord: record 1 at byte 26 is damaged"):
        file[1]


def test_an_index_of_another_file_or_none_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.tfrecord"
    write_tfrecord(path, [b"one", b"two"])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(RunFailure, match="does not belong to"):
        RecordFile(path)
    index_path(path).unlink()
    with pytest.raises(RunFailure, match="cannot be read"):
        RecordFile(path)


def test_a_row_comes_back_as_it_was() -> None:
    row = assemble_row([(np.arange(n, dtype=np.int32) * 999, np.arange(n) % 2 > 0) for n in (5, 1, 200)])
    back = decode_row(encode_row(row), "here")
    for name in ("tokens", "trained", "segments"):
        assert np.array_equal(getattr(back, name), getattr(row, name))
        assert getattr(back, name).dtype == getattr(row, name).dtype
    with pytest.raises(RunFailure, match="here is not a prepared row"):
        decode_row(encode_example({"tokens": np.array([1])}), "here")


def test_shard_and_index_are_on_disk_before_they_have_their_names(tmp_path, monkeypatch):
    on_disk: set[int] = set()
    named: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(handle):
        fsync(handle)
        on_disk.add(os.fstat(handle).st_ino)

    def recorded_replace(source, target):
        assert os.stat(source).st_ino in on_disk, target
        named.append(os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write_tfrecord(tmp_path / "a.tfrecord", [b"one", b"two"])
    assert named == ["a.tfrecord.idx.npy", "a.tfrecord"]
