"""Safetensors in and out: agreement with the library, parts, sharding, faults, and writers killed at any moment."""

import json
import subprocess
import sys
import textwrap
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from podtune.config.errors import UserError
from podtune.hub.safetensors_store import SafetensorsStore
from podtune.hub.safetensors_writer import StreamedWriter
from podtune.hub.tensors import TensorInfo

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TENSORS = {
    "embed": np.arange(40, dtype=np.float32).reshape(10, 4),
    "half": np.arange(12, dtype=np.float16).reshape(3, 4),
    "brain": np.arange(6, dtype=np.float32).astype(BFLOAT16).reshape(2, 3),
    "count": np.array([7], np.int64),
    "scalar": np.array(3.5, np.float32),
    "none": np.zeros((0, 5), np.float32),
    "flag": np.array([True, False]),
}


def plan_of(tensors):
    return {name: TensorInfo(array.shape, array.dtype) for name, array in tensors.items()}


def write(folder, tensors=TENSORS, **options):
    with StreamedWriter(folder, plan_of(tensors), **options) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])


def as_float(array):
    return np.asarray(array, np.float64)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 60])
def test_what_is_written_is_read_back(tmp_path, max_shard_bytes):
    write(tmp_path / "model", max_shard_bytes=max_shard_bytes)
    store = SafetensorsStore(tmp_path / "model")
    assert dict(store.names()) == plan_of(TENSORS)
    for name, array in TENSORS.items():
        read = store.read(name)
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(as_float(read), as_float(array))


def test_the_library_reads_what_we_write(tmp_path):
    write(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(TENSORS)
        for name, array in TENSORS.items():
            np.testing.assert_array_equal(file.get_tensor(name).double().numpy(), as_float(array))


def test_we_read_what_the_library_writes(tmp_path):
    plain = {name: np.ascontiguousarray(array) for name, array in TENSORS.items() if array.dtype != BFLOAT16}
    save_file(plain, tmp_path / "model.safetensors")
    store = SafetensorsStore(tmp_path)
    assert set(store.names()) == set(plain)
    for name, array in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(store.read(name), array)


def test_transformers_loads_a_sharded_folder_of_ours(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    tensors = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    config.save_pretrained(tmp_path / "model")
    write(tmp_path / "model", tensors, max_shard_bytes=8000)
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, value in loaded.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), tensors[name])


@given(
    start=st.integers(-12, 12),
    stop=st.integers(-12, 12),
    second=st.slices(4).filter(lambda part: part.step in (None, 1)),
)
@settings(max_examples=60, deadline=None)
def test_a_part_is_the_part_of_the_whole(tmp_path_factory, start, stop, second):
    folder = tmp_path_factory.getbasetemp() / "parts"
    if not folder.exists():
        write(folder)
    store = SafetensorsStore(folder)
    for index in [(slice(start, stop),), (slice(start, stop), second), (slice(None), second)]:
        np.testing.assert_array_equal(store.read("embed", index), TENSORS["embed"][index])


def test_reading_is_a_view_of_the_file(tmp_path):
    big = {"big": np.zeros((1000, 1000), np.float32)}
    write(tmp_path / "model", big)
    store = SafetensorsStore(tmp_path / "model")
    tracemalloc.start()
    part = store.read("big", (slice(10, 20),))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert part.shape == (10, 1000)
    assert peak < 20_000
    assert not part.flags.writeable


def test_writing_holds_no_copy_even_of_a_transposed_array(tmp_path):
    array = np.arange(4_000_000, dtype=np.float32).reshape(1000, 4000).T
    with StreamedWriter(tmp_path / "model", {"a": TensorInfo(array.shape, array.dtype)}) as writer:
        tracemalloc.start()
        writer.write("a", array[:, :])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 17 << 20
    np.testing.assert_array_equal(SafetensorsStore(tmp_path / "model").read("a"), array)


def sharded(folder, weight_map=None, shards=None):
    folder.mkdir(exist_ok=True)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards = {first: {"a": np.ones(2, np.float32)}, second: {"b": np.ones(3, np.float32)}} if shards is None else shards
    for name, tensors in shards.items():
        (folder / name).write_bytes(save(tensors))
    index = {"weight_map": {"a": first, "b": second} if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, first, second


def test_a_shard_that_is_absent_is_named(tmp_path):
    folder, _, second = sharded(tmp_path)
    (folder / second).unlink()
    with pytest.raises(UserError, match=f"names 1 files that are not there: {second}"):
        SafetensorsStore(folder)


def test_shards_without_their_index_are_refused(tmp_path):
    folder, _, _ = sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"has 2 shards .* but no model\.safetensors\.index\.json"):
        SafetensorsStore(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    one = {"a": np.ones(2, np.float32)}
    folder, first, second = sharded(tmp_path)
    sharded(folder, {"a": first, "b": second}, {first: one, second: one | {"b": np.ones(3, np.float32)}})
    with pytest.raises(UserError, match="tensor a is in both"):
        SafetensorsStore(folder)


@pytest.mark.parametrize("change", ["listed elsewhere", "not listed"])
def test_an_index_of_another_save_is_refused(tmp_path, change):
    folder, first, second = sharded(tmp_path)
    weight_map = {"a": second, "b": second} if change == "listed elsewhere" else {"a": first}
    if change == "not listed":
        weight_map["c"] = second
    sharded(folder, weight_map)
    with pytest.raises(UserError, match="does not agree with the files beside it"):
        SafetensorsStore(folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": {"a": "../x"}}', '{"weight_map": {}}', '{"weight_map": 3}']
)
def test_a_damaged_index_is_refused(tmp_path, text):
    folder, _, _ = sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"index\.json"):
        SafetensorsStore(folder)


def test_single_file_and_index_together_are_refused(tmp_path):
    folder, _, _ = sharded(tmp_path)
    (folder / "model.safetensors").write_bytes(save({"a": np.ones(2, np.float32)}))
    with pytest.raises(UserError, match="holds both"):
        SafetensorsStore(folder)


def test_pickles_are_refused_with_a_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"a pickle, which can run any code.*save_pretrained"):
        SafetensorsStore(tmp_path)


def test_a_folder_without_weights_says_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"has neither .* It holds notes\.txt"):
        SafetensorsStore(tmp_path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    content = save({"a": np.ones((5, 5), np.float32), "b": np.ones(3, np.float32)})
    path = tmp_path / "model.safetensors"
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"model\.safetensors: .*again"):
            SafetensorsStore(tmp_path)
    path.write_bytes(content + b"\0")
    with pytest.raises(UserError, match="bytes that belong to no tensor"):
        SafetensorsStore(tmp_path)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_header_is_refused_or_read_as_the_library_reads_it(tmp_path_factory, data):
    content = bytearray(save({"a": np.ones((2, 2), np.float32), "b": np.ones(3, np.float16)}))
    header = 8 + int.from_bytes(content[:8], "little")
    position = data.draw(st.integers(0, header - 1))
    content[position] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "model.safetensors").write_bytes(bytes(content))
    try:
        names = SafetensorsStore(folder).names()
    except UserError:
        return
    # Not refused: then the library must find the same tensors (a changed letter of a name is a name).
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert set(file.keys()) == set(names)
        for name, info in names.items():
            assert tuple(file.get_slice(name).get_shape()) == info.shape


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("x", np.ones(2, np.float32), "not planned"),
        ("a", np.ones(3, np.float32), "planned"),
        ("a", np.ones(2, np.float64), "planned"),
    ],
)
def test_what_was_not_planned_is_not_written(tmp_path, name, array, message):
    with (
        pytest.raises(ValueError, match=message),
        StreamedWriter(tmp_path / "model", {"a": TensorInfo((2,), np.dtype(np.float32))}) as writer,
    ):
        writer.write(name, array)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_fails_at_the_close_and_leaves_the_old_folder(tmp_path):
    old = {"a": np.zeros(2, np.float32)}
    write(tmp_path / "model", old)
    writer = StreamedWriter(tmp_path / "model", plan_of({"a": old["a"], "b": old["a"]}))
    writer.write("a", old["a"] + 1)
    with pytest.raises(ValueError, match="1 planned tensors were not written: b"):
        writer.close()
    np.testing.assert_array_equal(SafetensorsStore(tmp_path / "model").read("a"), old["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_files_stay_and_old_weights_do_not(tmp_path):
    write(tmp_path / "model", max_shard_bytes=60)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "extra").mkdir()
    (tmp_path / "model" / "extra" / "notes").write_text("x")
    with StreamedWriter(tmp_path / "model", {"a": TensorInfo((1,), np.dtype(np.float32))}) as writer:
        (writer.scratch / "tokenizer.json").write_text("{}")
        writer.write("a", np.ones(1, np.float32))
    found = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert found == ["config.json", "extra", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "model" / "extra" / "notes").read_text() == "x"


KILLED_AT_EVERY_LINE = """
    import os, signal, sys
    from pathlib import Path
    import numpy as np
    from podtune.hub.safetensors_store import SafetensorsStore
    from podtune.hub.safetensors_writer import StreamedWriter
    from podtune.hub.tensors import TensorInfo

    folder, info = Path(sys.argv[1]), TensorInfo((100,), np.dtype(np.float32))

    def save(value):
        with StreamedWriter(folder, {"a": info, "b": info}, 500) as writer:
            for name in "ab":
                writer.write(name, np.full(100, value, np.float32))

    def save_and_die(value, lines):
        def trace(frame, event, _):
            nonlocal lines
            if not frame.f_code.co_filename.endswith(("safetensors_writer.py", "atomic.py")):
                return None
            lines -= event == "line"
            if lines <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        save(value)
        os._exit(0)

    lines, killed, seen = 0, True, set()
    save(1)
    while killed:
        lines += 1
        child = os.fork() or save_and_die(2, lines)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        store = SafetensorsStore(folder)
        values = {float(store.read(name)[place]) for name in "ab" for place in (0, 99)}
        assert len(values) == 1, f"mixed when killed at line {lines}: {values}"
        seen |= {(killed, *values)}
        if killed:
            save(1)
    print(lines, sorted(seen))
"""


def test_a_writer_killed_at_any_line_leaves_the_old_or_the_new(tmp_path):
    program = [sys.executable, "-c", textwrap.dedent(KILLED_AT_EVERY_LINE), str(tmp_path / "model")]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines, outcomes = done.stdout.strip().split(" ", 1)
    assert int(lines) > 100
    # Killed early the old stays, killed in the last lines or not at all the new is there.
    assert outcomes == "[(False, 2.0), (True, 1.0), (True, 2.0)]"
    # What killed writers left is cleared away by the next.
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
