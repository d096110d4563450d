"""What a model source may be, and how a wrong one is told."""

import hashlib
import json
import os

import numpy as np
import pytest
from gguf_files import hugging_face_weights, llama_tensors, write_gguf
from safetensors.numpy import save

from podtune.config.errors import UserError
from podtune.hub.atomic import atomic_file
from podtune.hub.sources import content_fingerprint, resolve_model
from podtune.hub.tensors import resolved_index


def model_folder(path, seed=0):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    values = np.random.default_rng(seed).normal(size=(50, 50)).astype(np.float32)
    (path / "model.safetensors").write_bytes(save({"a": values}))
    return path


def test_a_folder_is_opened(tmp_path):
    files = resolve_model(str(model_folder(tmp_path / "model")))
    assert files.config == {"model_type": "llama"}
    assert files.generation_config == {}
    assert list(files.tensors().names()) == ["a"]
    assert files.read_text("absent.txt") is None


def test_an_existing_folder_comes_before_a_hub_id_of_the_same_spelling(tmp_path, monkeypatch):
    (tmp_path / "owner").mkdir()
    model_folder(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name").folder is not None


@pytest.mark.parametrize("source", ["./owner/name", "../x", "/nowhere/model", "~/no-such-model", "models/", "."])
def test_a_missing_path_is_never_looked_for_on_the_hub(source, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"no such directory|has no config\.json"):
        resolve_model(source)


@pytest.mark.parametrize(("source", "says"), [
    ("runs/support", r'the folder runs here holds no support\. Did you mean "runs/support-bot"\?'),
    ("runs/zzz", r"the folder runs here holds no zzz\."),
])  # fmt: skip
def test_a_hub_id_that_begins_like_a_folder_here_is_perhaps_a_path(source, says, tmp_path, monkeypatch):
    (tmp_path / "runs" / "support-bot").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=says):
        resolve_model(source, offline=True)
    with pytest.raises(UserError, match=r"name what is here\.$"):
        resolve_model("owner/name", offline=True)


def test_a_missing_gguf_is_a_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"absent\.gguf: no such file"):
        resolve_model(str(tmp_path / "absent.gguf"))


def test_what_is_no_source_at_all_is_told_the_forms(tmp_path):
    with pytest.raises(UserError, match=r"'a b/c/d' is not a Hub id .*a folder, a \.gguf file"):
        resolve_model("a b/c/d")


def test_a_single_safetensors_file_is_told_to_be_a_folder(tmp_path):
    path = model_folder(tmp_path / "model") / "model.safetensors"
    with pytest.raises(UserError, match=r"is a file but not a \.gguf.*the folder that also holds config\.json"):
        resolve_model(str(path))


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_config_is_named(tmp_path, content):
    folder = model_folder(tmp_path / "model")
    (folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json: (is not JSON|holds a list)"):
        resolve_model(str(folder))


def test_the_fingerprint_follows_the_content_and_not_the_place(tmp_path):
    first = resolve_model(str(model_folder(tmp_path / "a")))
    same = resolve_model(str(model_folder(tmp_path / "b")))
    other = resolve_model(str(model_folder(tmp_path / "c", seed=1)))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    one = resolve_model(str(write_gguf(tmp_path / "m.gguf", llama_tensors(hugging_face_weights())))).fingerprint
    two = resolve_model(str(write_gguf(tmp_path / "m.gguf", llama_tensors(hugging_face_weights(seed=1))))).fingerprint
    assert one != two


def test_the_fingerprint_of_a_large_file_sees_every_byte_and_its_size(tmp_path, monkeypatch):
    monkeypatch.setenv("PODTUNE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "large"
    content = bytearray(5_000_000)
    path.write_bytes(content)
    seen = {content_fingerprint([path])}
    for place in (0, len(content) - 1, 1_234_567):
        content[place] ^= 1
        path.write_bytes(content)
        seen.add(content_fingerprint([path]))
    path.write_bytes(bytes(5_000_001))
    seen.add(content_fingerprint([path]))
    assert len(seen) == 5


def test_a_weight_file_is_read_once_for_its_fingerprint_and_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("PODTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("podtune.hub.file_hashes._SETTLED_NS", 0)
    path = tmp_path / "large"
    path.write_bytes(bytes(1000))
    first = content_fingerprint([path])
    stamp = path.stat()
    with monkeypatch.context() as patched:
        patched.setattr("podtune.hub.file_hashes.open", pytest.fail, raising=False)
        assert content_fingerprint([path]) == first
    path.write_bytes(bytes(500) + b"\1" + bytes(499))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as rsync --times and a careless restore leave it
    assert content_fingerprint([path]) != first


def test_a_file_in_the_hubs_cache_is_known_by_its_name_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PODTUNE_CACHE", str(tmp_path / "cache"))
    content = bytes(1000)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    (tmp_path / "snapshot" / "large").symlink_to(blob)
    (tmp_path / "large").write_bytes(content)
    with monkeypatch.context() as patched:
        patched.setattr("podtune.hub.file_hashes.open", pytest.fail, raising=False)
        named = content_fingerprint([tmp_path / "snapshot" / "large"])
    assert named == content_fingerprint([tmp_path / "large"])


def test_an_index_is_completed_and_checked():
    assert resolved_index((4, 6), (slice(1, None),)) == (slice(1, 4), slice(0, 6))
    assert resolved_index((4,), (slice(3, 1),)) == (slice(3, 3),)
    with pytest.raises(ValueError, match="has a step"):
        resolved_index((4,), (slice(None, None, 2),))
    with pytest.raises(ValueError, match="more axes"):
        resolved_index((4,), (slice(1), slice(1)))


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_whole_or_absent_and_forced_to_disk_only_where_that_is_asked(durable, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", synced.append)
    with atomic_file(tmp_path / "a", durable=durable) as file:
        file.write(b"whole")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert bool(synced) is durable
    with pytest.raises(TypeError), atomic_file(tmp_path / "a", durable=durable) as file:
        file.write(None)
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_output_of_a_run_given_as_a_model_is_told_where_its_model_is(tmp_path):
    (tmp_path / "run").mkdir()
    model_folder(tmp_path / "run" / "model")
    with pytest.raises(UserError, match=r"is the output of a run\. Its model is .*run/model"):
        resolve_model(str(tmp_path / "run"))


def test_a_model_that_may_not_be_read_is_told_as_a_fault_of_the_model(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "model")

    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(UserError, match=r"model: .*model cannot be read: .*config\.json: Permission denied"):
        resolve_model(str(folder))
