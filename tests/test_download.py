"""Downloads from the Hub, against a real HTTP server on this machine that has bad days."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hub_server import COMMIT, FakeHub, serve
from safetensors.numpy import save

from podtune.config.errors import RunFailure, UserError
from podtune.hub import transfer
from podtune.hub.download import HubId, open_hub_dataset, parse_hub_id
from podtune.hub.sources import resolve_model

NAME = "someone/tiny-model"
CONFIG = json.dumps({"model_type": "llama", "hidden_size": 8}).encode()


def weights(seed: int, rows: int = 4000) -> bytes:
    values = np.random.default_rng(seed).normal(size=(rows, 8)).astype(np.float32)
    return save({f"layer{seed}": values}, metadata={"format": "pt"})


def single_model() -> dict[str, bytes]:
    return {
        "config.json": CONFIG,
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "model.safetensors": weights(0),
        "pytorch_model.bin": b"x" * 5000,
        "README.md": b"# read me",
        "onnx/model.onnx": b"y" * 5000,
    }


def sharded_model() -> dict[str, bytes]:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"metadata": {}, "weight_map": {"layer1": names[0], "layer2": names[1]}}
    return {
        "config.json": CONFIG,
        "model.safetensors.index.json": json.dumps(index).encode(),
        names[0]: weights(1),
        names[1]: weights(2),
        "consolidated.safetensors": weights(3),
    }


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # What arrives is kept in pieces of this size, 10 MB by default.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    fake = FakeHub(files={NAME: single_model()})
    with serve(fake):
        monkeypatch.setenv("HF_ENDPOINT", fake.endpoint)
        yield fake


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The waits asked for by podtune; none is waited."""
    asked: list[float] = []
    monkeypatch.setattr(transfer, "time", type("Clock", (), {"sleep": staticmethod(asked.append)}))
    return asked


@pytest.fixture
def told() -> list[str]:
    return []


def test_only_the_files_a_run_needs_are_downloaded_and_only_once(hub, tmp_path):
    files = resolve_model(NAME, cache=tmp_path)
    assert files.config["hidden_size"] == 8
    assert sorted(path.name for path in files.folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    first = dict(hub.sent)
    again = resolve_model(NAME, cache=tmp_path)
    assert dict(hub.sent) == first
    assert again.fingerprint == files.fingerprint
    np.testing.assert_array_equal(
        files.tensors().read("layer0"), np.random.default_rng(0).normal(size=(4000, 8)).astype(np.float32)
    )


def test_a_sharded_model_brings_its_index_and_the_shards_it_names(hub, tmp_path):
    hub.files[NAME] = sharded_model()
    files = resolve_model(f"{NAME}@v1", cache=tmp_path)
    assert sorted(files.tensors().names()) == ["layer1", "layer2"]
    assert "consolidated.safetensors" not in hub.sent


def test_planning_downloads_no_weights(hub, tmp_path):
    hub.files[NAME] = sharded_model()
    files = resolve_model(NAME, cache=tmp_path, amount="configuration")
    assert files.config["model_type"] == "llama"
    assert set(hub.sent) == {"config.json", "model.safetensors.index.json"}


def test_preparing_data_downloads_the_tokenizer_and_no_weights(hub, tmp_path):
    hub.files[NAME]["model.safetensors.index.json"] = b"{}"  # which counts for nothing beside a single file
    resolve_model(NAME, cache=tmp_path, amount="tokenizer")
    assert set(hub.sent) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert resolve_model(NAME, cache=tmp_path, offline=True, amount="tokenizer").folder


def test_a_connection_cut_half_way_is_resumed_from_there(hub, tmp_path, waits, told):
    size = len(hub.files[NAME]["model.safetensors"])
    hub.cuts["model.safetensors"] = 3
    files = resolve_model(NAME, cache=tmp_path, progress=told.append)
    assert files.tensors().read("layer0").shape == (4000, 8)
    resumed = [line for line in hub.log if line.startswith("GET /storage") and "bytes=" in line]
    assert len(resumed) == 3
    # Hardly more is sent than the file holds: the piece under way when the connection broke.
    assert size <= hub.sent["model.safetensors"] <= size + 3 * 4096


def test_a_killed_process_leaves_what_it_had_for_the_next(hub, tmp_path):
    hub.files[NAME]["model.safetensors"] = weights(0, rows=400_000)
    size = len(hub.files[NAME]["model.safetensors"])
    hub.cuts["model.safetensors"] = 1
    program = textwrap.dedent(f"""
        import os, signal
        from huggingface_hub import constants, file_download
        constants.DOWNLOAD_CHUNK_SIZE = 4096
        def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
        file_download.time.sleep = die  # where huggingface_hub waits after the broken connection
        from podtune.hub.sources import resolve_model
        resolve_model({NAME!r}, cache={str(tmp_path)!r})
    """)
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    sent_before = hub.sent["model.safetensors"]
    assert 0 < sent_before < size
    files = resolve_model(NAME, cache=tmp_path)
    assert files.tensors().read("layer0").shape == (400_000, 8)
    # What the killed process had not written out yet is sent again, not the half that it had.
    assert hub.sent["model.safetensors"] - size < 0.1 * size


def test_a_server_that_ignores_ranges_still_gives_a_whole_file(hub, tmp_path, waits):
    hub.cuts["model.safetensors"] = 1
    hub.ignores_ranges = True
    assert resolve_model(NAME, cache=tmp_path).tensors().read("layer0").shape == (4000, 8)


@pytest.mark.parametrize("where", ["/api/models", f"/{NAME}/resolve", "/storage"])
def test_two_answers_of_429_are_waited_out(hub, tmp_path, waits, told, where):
    hub.busy[where] = 2
    started = time.monotonic()
    files = resolve_model(NAME, cache=tmp_path, progress=told.append)
    assert files.tensors().read("layer0").shape == (4000, 8)
    assert hub.busy[where] == 0
    if where != "/storage":  # there huggingface_hub itself waits
        assert any("429" in line and "try 1 of" in line for line in told)
    assert time.monotonic() - started < 30


def test_the_wait_is_what_retry_after_asks_else_doubles(hub, tmp_path, waits):
    hub.busy["/api/models"] = 2
    hub.retry_after = "7"
    resolve_model(NAME, cache=tmp_path, amount="configuration")
    assert waits == [7.0, 7.0]
    waits.clear()
    hub.busy["/api/models"] = 3
    hub.retry_after = None
    resolve_model(NAME, cache=tmp_path, amount="configuration")
    assert waits == [1.0, 2.0, 4.0]


def test_a_hub_that_stays_busy_is_a_failure_of_the_run(hub, tmp_path, waits):
    hub.busy["/api/models"] = 99
    with pytest.raises(RunFailure, match="answers 429"):
        resolve_model(NAME, cache=tmp_path)
    assert len(waits) == transfer.TRIES - 1


def test_a_corrupted_file_is_downloaded_again(hub, tmp_path, waits, told):
    hub.corruptions["model.safetensors"] = 1
    files = resolve_model(NAME, cache=tmp_path, progress=told.append)
    assert files.tensors().read("layer0").shape == (4000, 8)
    assert any("hash" in line for line in told)
    assert hub.sent["model.safetensors"] == 2 * len(hub.files[NAME]["model.safetensors"])


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_stays_corrupted_is_refused_and_not_kept(hub, tmp_path, waits, name):
    hub.corruptions[name] = 99
    with pytest.raises(RunFailure, match=f"{name}: arrived twice with another hash"):
        resolve_model(NAME, cache=tmp_path)
    hub.corruptions[name] = 0
    assert resolve_model(NAME, cache=tmp_path).read_text("tokenizer.json") == '{"version": "1.0"}'


def test_without_a_network_the_cache_is_used_and_said(hub, tmp_path, waits, told, monkeypatch):
    online = resolve_model(NAME, cache=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    cached = resolve_model(NAME, cache=tmp_path, progress=told.append)
    assert cached.fingerprint == online.fingerprint
    assert any("cannot be reached; using the cached commit 0123456789ab" in line for line in told)


def test_offline_makes_no_request(hub, tmp_path, told, monkeypatch):
    resolve_model(NAME, cache=tmp_path)
    asked = len(hub.log)
    resolve_model(NAME, cache=tmp_path, offline=True, progress=told.append)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    resolve_model(f"{NAME}@{COMMIT}", cache=tmp_path, progress=told.append)
    assert len(hub.log) == asked
    assert len(told) == 2
    with pytest.raises(UserError, match="someone/other is no file or folder here, is not in the cache"):
        resolve_model("someone/other", cache=tmp_path)


def test_a_cache_with_part_of_a_model_is_not_taken_for_the_model(hub, tmp_path):
    resolve_model(NAME, cache=tmp_path, amount="configuration")
    with pytest.raises(UserError, match="only part of it is in the cache"):
        resolve_model(NAME, cache=tmp_path, offline=True)
    with pytest.raises(UserError, match="only part of it is in the cache"):
        resolve_model(NAME, cache=tmp_path, offline=True, amount="tokenizer")
    assert resolve_model(NAME, cache=tmp_path, offline=True, amount="configuration").config["hidden_size"] == 8


def test_no_network_and_no_cache_is_a_failure_of_the_run(hub, tmp_path, waits, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(RunFailure, match="not in the cache"):
        resolve_model(NAME, cache=tmp_path)


def test_a_gated_model_names_the_terms_and_the_token(hub, tmp_path):
    hub.gated.add(NAME)
    with pytest.raises(UserError, match=rf"is gated.*{hub.endpoint}/{NAME}.*HF_TOKEN"):
        resolve_model(NAME, cache=tmp_path)


def test_a_forbidden_model_names_the_token(hub, tmp_path):
    hub.forbidden.add(NAME)
    with pytest.raises(UserError, match=r"may not be read with the token in use .*403.*HF_TOKEN"):
        resolve_model(NAME, cache=tmp_path)


def test_unknown_repository_and_unknown_revision_are_told_apart(hub, tmp_path):
    with pytest.raises(UserError, match=r"someone/absent is not on the Hub, or is private.*HF_TOKEN"):
        resolve_model("someone/absent", cache=tmp_path)
    with pytest.raises(UserError, match="has no revision 'v9'"):
        resolve_model(f"{NAME}@v9", cache=tmp_path)


@pytest.mark.parametrize(
    ("file", "hint"), [("pytorch_model.bin", "a pickle"), ("m.gguf", "GGUF"), ("adapter_config.json", "PEFT adapter")]
)
def test_a_repository_without_safetensors_says_what_it_holds(hub, tmp_path, file, hint):
    hub.files[NAME] = {"config.json": CONFIG, file: b"x" * 2000}
    with pytest.raises(UserError, match=f"no model.safetensors.*{hint}"):
        resolve_model(NAME, cache=tmp_path)
    assert not hub.sent  # refused before anything is downloaded


def test_a_token_is_sent_to_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    resolve_model(NAME, cache=tmp_path)  # the token must at least do no harm on the way through the redirect


def test_dataset_files_are_listed_once_and_downloaded(hub, tmp_path):
    hub.files["someone/chats"] = {"data/train.jsonl": b'{"text": "hi"}\n' * 200, "README.md": b"# chats"}
    dataset = open_hub_dataset(HubId("someone/chats", None), cache=tmp_path)
    assert dataset.names == ("README.md", "data/train.jsonl")
    (path,) = dataset.fetch(["data/train.jsonl"])
    assert path.read_bytes() == hub.files["someone/chats"]["data/train.jsonl"]
    assert sum("/api/" in line for line in hub.log) == 1
    cached = open_hub_dataset(HubId("someone/chats", None), cache=tmp_path, offline=True)
    assert cached.names == ("data/train.jsonl",)
    assert cached.fetch(cached.names) == [path]


@pytest.mark.parametrize(
    ("source", "name", "revision"),
    [
        ("owner/name", "owner/name", None),
        ("owner/name@v1.2", "owner/name", "v1.2"),
        ("owner/name@refs/pr/3", "owner/name", "refs/pr/3"),
        ("hub://owner/name", "owner/name", None),
        ("gpt2", "gpt2", None),
    ],
)
def test_hub_ids_are_read(source, name, revision):
    assert parse_hub_id(source) == (name, revision)


@pytest.mark.parametrize("source", ["a/b/c", "owner/na me", "", "owner/", "@v1", "owner/name@"])
def test_what_is_no_hub_id_is_not_taken_for_one(source):
    assert parse_hub_id(source) is None


def test_importing_hub_loads_neither_jax_nor_transformers():
    program = (
        "import sys, podtune.hub.sources, podtune.hub.tokenizer, podtune.hub.safetensors_writer;"
        "print(sorted({'jax', 'transformers', 'torch', 'huggingface_hub', 'fsspec', 'gguf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "[]"
