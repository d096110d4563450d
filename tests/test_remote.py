"""Models in object stores: fsspec's memory file system, and S3 as a real HTTP server on this machine."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save

from podtune.config.errors import RunFailure, UserError
from podtune.hub import remote
from podtune.hub.addresses import is_remote
from podtune.hub.remote import fetch_remote_file, fetch_remote_model, remote_files, upload_folder
from podtune.hub.sources import resolve_model

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)
MODEL = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": save({"a": VALUES}, metadata={"format": "pt"}),
    "training_state.pt": b"z" * 100,
    "logs/events": b"z" * 100,
}


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    yield filesystem
    filesystem.store.clear()


def put(filesystem, folder: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        filesystem.pipe_file(f"{folder}/{name}", content)


def test_a_model_folder_is_copied_file_by_file_and_read(memory, tmp_path):
    put(memory, "/bucket/model", MODEL)
    files = resolve_model("memory://bucket/model", cache=tmp_path)
    assert sorted(path.name for path in files.folder.iterdir() if not path.name.startswith(".")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    np.testing.assert_array_equal(files.tensors().read("a", (slice(1, 3),)), VALUES[1:3])


@pytest.mark.parametrize(
    ("amount", "copied"),
    [("configuration", ["config.json"]), ("tokenizer", ["config.json", "tokenizer.json"])],
)
def test_no_more_is_copied_than_was_asked_for(memory, tmp_path, amount, copied):
    put(memory, "/bucket/model", MODEL)
    folder = fetch_remote_model("memory://bucket/model", cache=tmp_path, amount=amount)
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == copied


def test_a_file_is_copied_once_and_again_when_it_changes(memory, tmp_path, monkeypatch):
    put(memory, "/bucket/model", MODEL)
    resolve_model("memory://bucket/model", cache=tmp_path)
    read: list[str] = []
    cat_file = type(memory).cat_file
    monkeypatch.setattr(
        type(memory), "cat_file", lambda self, path, **k: read.append(path) or cat_file(self, path, **k)
    )
    resolve_model("memory://bucket/model", cache=tmp_path)
    assert read == []
    changed = save({"a": VALUES + 1}, metadata={"format": "pt"})
    memory.pipe_file("/bucket/model/model.safetensors", changed)
    files = resolve_model("memory://bucket/model", cache=tmp_path)
    assert read == ["/bucket/model/model.safetensors"]
    np.testing.assert_array_equal(files.tensors().read("a"), VALUES + 1)


def test_a_broken_copy_is_resumed_where_it_broke(memory, tmp_path, monkeypatch):
    content = bytes(range(256)) * 40
    memory.pipe_file("/bucket/big.gguf", content)
    monkeypatch.setattr(remote, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(remote.time, "sleep", lambda _: None)
    starts: list[int] = []
    cat_file = type(memory).cat_file

    def breaking(self, path, start=None, end=None, **kwargs):
        if start >= 5000 and breaking.broken:
            raise ConnectionResetError("reset by peer")
        starts.append(start)
        return cat_file(self, path, start=start, end=end, **kwargs)

    breaking.broken = True
    monkeypatch.setattr(type(memory), "cat_file", breaking)
    told: list[str] = []
    with pytest.raises(RunFailure, match="reset by peer"):
        fetch_remote_file("memory://bucket/big.gguf", cache=tmp_path, progress=told.append)
    assert starts == [0, 1000, 2000, 3000, 4000]
    assert sum("Trying again" in line for line in told) == 4
    breaking.broken = False
    path = fetch_remote_file("memory://bucket/big.gguf", cache=tmp_path)
    assert path.read_bytes() == content
    assert starts[5:] == list(range(5000, len(content), 1000))


def test_a_partial_copy_of_an_older_content_is_not_continued(memory, tmp_path, monkeypatch):
    memory.pipe_file("/bucket/x.gguf", b"a" * 3000)
    monkeypatch.setattr(remote, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(remote.time, "sleep", lambda _: None)
    cat_file = type(memory).cat_file

    def breaking(self, path, start=None, end=None, **kwargs):
        if start >= 1000:
            raise ConnectionResetError("reset by peer")
        return cat_file(self, path, start=start, end=end, **kwargs)

    monkeypatch.setattr(type(memory), "cat_file", breaking)
    with pytest.raises(RunFailure):
        fetch_remote_file("memory://bucket/x.gguf", cache=tmp_path)
    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    memory.pipe_file("/bucket/x.gguf", b"b" * 3000)
    assert fetch_remote_file("memory://bucket/x.gguf", cache=tmp_path).read_bytes() == b"b" * 3000


def test_of_two_that_copy_one_file_at_once_the_second_waits_and_takes_the_copy(memory, tmp_path, monkeypatch):
    content = bytes(range(256)) * 40
    memory.pipe_file("/bucket/big.gguf", content)
    monkeypatch.setattr(remote, "_PIECE_BYTES", 1000)
    begun, told, starts = threading.Event(), [], []
    read_piece = remote._read_piece

    def slow(source, filesystem, file, start, tell):
        starts.append(start)
        begun.set()
        time.sleep(0.02)
        return read_piece(source, filesystem, file, start, tell)

    monkeypatch.setattr(remote, "_read_piece", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fetch_remote_file, "memory://bucket/big.gguf", cache=tmp_path)
        begun.wait(10)
        second = pool.submit(fetch_remote_file, "memory://bucket/big.gguf", cache=tmp_path, progress=told.append)
        assert first.result(30).read_bytes() == second.result(30).read_bytes() == content
    assert starts == list(range(0, len(content), 1000))
    assert told == ["big.gguf: another process is copying it; waiting for that"]


def test_offline_uses_the_copy_and_says_so(memory, tmp_path):
    put(memory, "/bucket/model", MODEL)
    resolve_model("memory://bucket/model", cache=tmp_path)
    memory.store.clear()
    told: list[str] = []
    assert resolve_model("memory://bucket/model", cache=tmp_path, offline=True, progress=told.append).folder
    assert "offline was asked for" in told[0]
    with pytest.raises(UserError, match="not in the cache"):
        resolve_model("memory://bucket/other", cache=tmp_path, offline=True)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no such directory"),
        ({"README.md": b"x"}, "has no config.json"),
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, r"has no model\.safetensors.*pickle"),
        (
            {"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": "m-1.safetensors"}}'},
            r"names m-1\.safetensors, which is not there",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused(memory, tmp_path, files, message):
    put(memory, "/bucket/model", files)
    with pytest.raises(UserError, match=message):
        resolve_model("memory://bucket/model", cache=tmp_path)


def test_missing_file_and_unknown_scheme_are_named(memory, tmp_path):
    with pytest.raises(UserError, match=r"memory://bucket/none\.gguf: no such file"):
        resolve_model("memory://bucket/none.gguf", cache=tmp_path)
    with pytest.raises(UserError, match="wat:// is not a kind of address known here"):
        resolve_model("wat://bucket/model", cache=tmp_path)
    with pytest.raises(UserError, match=r"model: https://a\.b/c/d is a web address\. Name a Hub id"):
        resolve_model("https://a.b/c/d", cache=tmp_path)


@pytest.mark.parametrize(("address", "package", "extra"), [("gs://b/m", "gcsfs", "gcs"), ("s3://b/m", "s3fs", "s3")])
def test_a_missing_package_names_the_extra_to_install(address, package, extra):
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from podtune.hub.remote import remote_files\n"
        "from podtune.config.errors import UserError\n"
        f"try:\n    remote_files({address!r})\nexcept UserError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f'pip install "podtune[{extra}]"' in done.stdout


def test_which_sources_are_remote():
    assert all(map(is_remote, ["gs://b/m", "s3://b/m", "memory://x"]))
    assert not any(map(is_remote, ["hub://owner/name", "owner/name", "./gs", "C:\\x", "model.gguf"]))


@pytest.fixture(scope="module")
def s3():
    """An S3 server (moto) on this machine, with one bucket."""
    from moto.server import ThreadedMotoServer

    saved = {name: os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL")}
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    filesystem.mkdir("bucket")
    yield filesystem
    server.stop()
    for name, value in saved.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_model_on_s3_is_copied_checked_and_read(s3, tmp_path):
    put(s3, "bucket/model", MODEL)
    files = resolve_model("s3://bucket/model", cache=tmp_path)
    np.testing.assert_array_equal(files.tensors().read("a"), VALUES)
    listed = {file.name: file for file in remote_files("s3://bucket/model")}
    assert set(listed) == set(MODEL)
    assert re.fullmatch("[0-9a-f]{32}", listed["model.safetensors"].md5)
    changed = MODEL["model.safetensors"][:-1] + b"\x01"
    s3.pipe_file("bucket/model/model.safetensors", changed)
    assert (resolve_model("s3://bucket/model", cache=tmp_path).folder / "model.safetensors").read_bytes() == changed
    with pytest.raises(UserError, match="no such directory"):
        resolve_model("s3://bucket/none", cache=tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_damage_on_the_way_is_found_by_the_checksum(s3, tmp_path, monkeypatch):
    put(s3, "bucket/damaged", MODEL)
    read_piece = remote._read_piece
    monkeypatch.setattr(remote, "_read_piece", lambda *given: b"!" + read_piece(*given)[1:])
    with pytest.raises(RunFailure, match="another size or checksum"):
        resolve_model("s3://bucket/damaged", cache=tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_folder_is_uploaded_with_what_makes_it_a_model_last(s3, tmp_path):
    for name, content in MODEL.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    told: list[str] = []
    upload_folder(tmp_path, "s3://bucket/uploaded", progress=told.append)
    assert "config.json" in told[-1]
    assert {file.name for file in remote_files("s3://bucket/uploaded")} == set(MODEL)
