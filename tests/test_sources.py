"""Files of every kind give the same records, streamed."""

import csv
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hub_server import COMMIT, FakeHub, serve
from record_cases import read_records

from podtune.config.errors import UserError
from podtune.config.rows import Source
from podtune.data.example_codec import encode_example
from podtune.data.records import frame_record
from podtune.data.sources import FORMATS, list_files, list_source
from podtune.data.survey import survey_source

ROWS = [
    {"text": 'Hello, "you"\nthere', "note": "a"},
    {"text": "U+2028 \u2028 and U+2029 \u2029, \x85 and \x0c are text", "note": "naïve 東京 🙂"},
    {"text": "trailing space ", "note": ""},
]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8", newline="")


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS, ensure_ascii=False, indent=2), encoding="utf-8")


def write_separated(path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["text", "note"], delimiter="\t" if ".tsv" in path.name else ",")
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)


def write_tfrecords(path: Path) -> None:
    examples = (encode_example({key: [value.encode()] for key, value in row.items()}) for row in ROWS)
    path.write_bytes(b"".join(map(frame_record, examples)))


def write_text(path: Path) -> None:
    path.write_text(ROWS[0]["text"], encoding="utf-8")


WRITERS: dict[str, Callable[[Path], None]] = {
    "jsonl": write_jsonl,
    "json": write_json,
    "csv": write_separated,
    "tsv": write_separated,
    "parquet": write_parquet,
    "tfrecord": write_tfrecords,
    "text": write_text,
}
ENDINGS = {"text": "txt"}


def compress(path: Path, ending: str) -> Path:
    if not ending:
        return path
    data = path.read_bytes()
    packed = gzip.compress(data) if ending == ".gz" else zstandard.ZstdCompressor().compress(data)
    path.with_name(path.name + ending).write_bytes(packed)
    path.unlink()
    return path.with_name(path.name + ending)


def read(path: Path | str) -> list[dict]:
    return [record.value for record in read_records(Source(path=str(path)))]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_rows_that_were_written(tmp_path: Path, kind: str, compression: str):
    path = tmp_path / f"rows.{ENDINGS.get(kind, kind)}"
    WRITERS[kind](path)
    rows = [{"text": ROWS[0]["text"]}] if kind == "text" else ROWS
    assert read(compress(path, compression)) == rows


@pytest.mark.parametrize(
    "text", ["{}\n{}\n", json.dumps(ROWS[:2]), json.dumps({"version": 1, "data": ROWS[:2], "by": {"name": "x"}})]
)
def test_a_json_file_may_be_a_list_an_object_with_one_list_or_objects(tmp_path: Path, text: str):
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert len(read(path)) == 2


def test_one_conversation_is_one_row_and_not_a_list_of_its_turns(tmp_path: Path):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(chat))
    assert read(path) == [chat]
    path.write_text(json.dumps(chat, indent=1) + "\n" + json.dumps(chat))
    assert read(path) == [chat, chat]


def test_crlf_blank_lines_and_a_byte_order_mark_are_no_part_of_rows(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"text": "b\\r\\n"}')
    records = list(read_records(Source(path=str(path))))
    assert [(record.number, record.value["text"]) for record in records] == [(1, "a"), (4, "b\r\n")]
    for name, text in {
        "r.csv": "\ufefftext,n\r\na,1\r\n\r\nb,2\r\n",
        "r.json": '\ufeff[{"text": "a"}, {"text": "b"}]',
    }.items():
        (tmp_path / name).write_bytes(text.encode())
        assert [row["text"] for row in read(tmp_path / name)] == ["a", "b"]


def test_numbers_of_records_are_lines_in_text_formats_and_places_elsewhere(tmp_path: Path):
    (tmp_path / "r.csv").write_text('text,note\n"two\nlines",x\nb,y\n')
    assert [record.number for record in read_records(Source(path=str(tmp_path / "r.csv")))] == [2, 4]
    write_json(tmp_path / "r.json")
    assert [record.number for record in read_records(Source(path=str(tmp_path / "r.json")))] == [1, 2, 3]


def test_text_files_give_a_document_each_or_one_per_paragraph_or_line(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\ntwo\n\n \nthree\u2028still three\n".encode())

    def seen(documents):
        records = read_records(Source(path=str(path), documents=documents))
        return [(record.number, record.value["text"]) for record in records]

    assert seen("file") == [(1, "one\ntwo\n\n \nthree\u2028still three\n")]
    assert seen("paragraph") == [(1, "one\ntwo"), (5, "three\u2028still three")]
    assert seen("line") == [(1, "one"), (2, "two"), (5, "three\u2028still three")]


def test_documents_are_of_text_files_alone(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"documents: line: .*a\.jsonl is no plain text file"):
        list_files(Source(path=str(tmp_path / "a.jsonl"), documents="line"))


def test_every_format_has_a_file_in_these_tests():
    assert set(WRITERS) == {kind for kind in FORMATS if not kind.startswith("text ")}


def test_globs_and_folders_give_their_files_in_the_order_of_their_names(tmp_path: Path):
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", ".hidden.jsonl", "_SUCCESS"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert [row["text"] for row in read(tmp_path)] == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert [row["text"] for row in read(tmp_path / "*.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [row["text"] for row in read(tmp_path / "**/c.jsonl")] == ["sub/c.jsonl"]


def test_what_of_a_folder_is_not_read_is_said(tmp_path: Path):
    for name in ("a.jsonl", "_more/b.jsonl", ".git/c", "_SUCCESS", "notes.pdf", "sub/d.jsonl.bz2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    found = list_source(Source(path=str(tmp_path)))
    assert [Path(file.origin).name for file in found.files] == ["a.jsonl"]
    assert found.left_out == (
        "not read: names that begin with . or _: 3 (.git, _SUCCESS, _more); files of a kind podtune does not know: 2 "
        "(notes.pdf, sub/d.jsonl.bz2); links that lead nowhere, pipes and the like: 1 (gone.jsonl)"
    )
    matched = list_source(Source(path=str(tmp_path / "*.jsonl")))
    assert matched.left_out.endswith(f"({tmp_path / 'gone.jsonl'})")
    assert list_source(Source(path=str(tmp_path / "a.jsonl"))).left_out == ""
    assert survey_source(str(tmp_path)).lines()[-1] == f"besides  {found.left_out}"


def test_what_of_a_remote_folder_is_not_read_is_said():
    import fsspec

    system = fsspec.filesystem("memory")
    try:
        for name in ("a.jsonl", "_SUCCESS", "_old/b.jsonl", "c.pdf"):
            system.pipe(f"/bucket/_run/{name}", b'{"text": "a"}')
        found = list_source(Source(path="memory://bucket/_run"))
        assert [file.origin for file in found.files] == ["memory://bucket/_run/a.jsonl"]
        assert (
            "begin with . or _: 2 (_SUCCESS, _old/b.jsonl); files of a kind podtune does not know: 1" in found.left_out
        )
    finally:
        system.rm("/bucket", recursive=True)


def test_a_link_to_a_folder_above_gives_no_file_twice(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    for name in ("a.jsonl", "sub/b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "a.jsonl")  # asked for by its own name
    assert [row["text"] for row in read(tmp_path / "**/*.jsonl")] == ["a.jsonl", "a.jsonl", "sub/b.jsonl"]
    assert [row["text"] for row in read(tmp_path)] == ["a.jsonl", "a.jsonl", "sub/b.jsonl"]


def test_shards_as_tensorflow_names_them_are_tfrecords(tmp_path: Path):
    write_tfrecords(tmp_path / "train.tfrecord-00000-of-00001")
    assert read(tmp_path) == ROWS


def test_features_of_numbers_stay_lists(tmp_path: Path):
    import numpy as np

    data = encode_example({"tokens": np.array([0, 1, 2**40]), "text": [b"a", b"b"]})
    (tmp_path / "x.tfrecord").write_bytes(frame_record(data))
    assert read(tmp_path / "x.tfrecord") == [{"text": ["a", "b"], "tokens": [0, 1, 2**40]}]


def test_remote_files_are_read_through_fsspec(tmp_path: Path):
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("b", "a"):
        memory.pipe(f"/bucket/rows/{name}.jsonl.gz", gzip.compress(json.dumps({"text": name}).encode()))
    try:
        for path in ("memory://bucket/rows", "memory://bucket/rows/*.jsonl.gz"):
            files = list_files(Source(path=path))
            assert [file.origin for file in files] == [f"memory://bucket/rows/{name}.jsonl.gz" for name in "ab"]
            assert all(file.signature for file in files)
            assert [row["text"] for row in read(path)] == ["a", "b"]
        before = list_files(Source(path="memory://bucket/rows"))[0].signature
        memory.pipe("/bucket/rows/a.jsonl.gz", gzip.compress(b'{"text": "changed"}'))
        assert list_files(Source(path="memory://bucket/rows"))[0].signature != before
        with pytest.raises(UserError, match=r"memory://bucket/none: there is no such file or folder"):
            list_files(Source(path="memory://bucket/none"))
    finally:
        memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_file_is_never_whole_in_memory(tmp_path: Path, kind: str):
    path, text = tmp_path / f"large.{kind}", "x" * 10_000
    rows = [{"text": text, "n": str(number)} for number in range(2000)]
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500, use_dictionary=False)
    elif kind == "csv":
        path.write_text("text,n\n" + "".join(f"{row['text']},{row['n']}\n" for row in rows))
    elif kind == "json":
        path.write_text('{"info": {"a": [1]}, "rows": [' + ",\n".join(map(json.dumps, rows)) + "]}")
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    del rows
    tracemalloc.start()
    count = sum(1 for _ in read_records(Source(path=str(path))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 2000
    # 20 MB of text. A document of JSON is looked at as a whole up to 16 MiB (decoded, and copied while it grows).
    assert peak < (36 << 20 if kind == "json" else 12 << 20)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with serve(FakeHub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def test_a_hub_dataset_gives_the_split_asked_for(tmp_path: Path, hub: FakeHub):
    write_parquet(tmp_path / "rows.parquet")
    rows = (tmp_path / "rows.parquet").read_bytes()
    hub.files["owner/training-data"] = {
        "README.md": b"x",
        "dataset_infos.json": b"{}",
        "data/train-00000-of-00001.parquet": rows,
        "data/test-00000-of-00001.parquet": rows,
    }
    assert read("hub://owner/training-data@v1") == ROWS
    (file,) = list_files(Source(path="hub://owner/training-data@v1:test"))
    assert file.origin == "hub://owner/training-data@v1/data/test-00000-of-00001.parquet"
    assert list_files(Source(path="hub://owner/training-data@v1", split="test")) == (file,)
    with pytest.raises(UserError, match="there is no split dev; it has test, train"):
        list_files(Source(path="hub://owner/training-data@v1:dev"))


def test_a_hub_dataset_is_listed_once_and_all_its_files_are_of_that_commit(hub: FakeHub):
    names = [f"train-{number:05d}-of-00006.jsonl" for number in range(6)]
    hub.files["owner/rows"] = {name: b'{"text": "%d"}\n' % at for at, name in enumerate(names)}
    assert [row["text"] for row in read("hub://owner/rows")] == list("012345")
    assert sum("/api/" in line for line in hub.log) == 1
    fetched = [line for line in hub.log if "/resolve/" in line]
    assert len(fetched) >= 6
    assert all(f"/resolve/{COMMIT}/" in line for line in fetched)


def test_a_remote_folder_leaves_out_what_a_local_one_does(tmp_path: Path):
    import fsspec

    memory = fsspec.filesystem("memory")
    inside = ("day/part.jsonl", "_temporary/0/part.jsonl", ".ipynb_checkpoints/part.jsonl", "day/_part.jsonl")
    for name in inside:
        memory.pipe(f"/bucket/_job/{name}", b'{"text": "a"}\n')
        (tmp_path / "_job" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "_job" / name).write_bytes(b'{"text": "a"}\n')
    try:
        for folder in (str(tmp_path / "_job"), "memory://bucket/_job", "memory://bucket/_job/"):
            files = list_files(Source(path=folder))
            assert [file.origin for file in files] == [f"{folder.rstrip('/')}/day/part.jsonl"]
    finally:
        memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("told", [{}, {"LastModified": "changes"}])
def test_a_remote_file_that_changes_has_another_identity_whatever_its_store_tells(monkeypatch, told):
    import fsspec

    from podtune.config.rows import Data
    from podtune.data.prepare_inputs import open_input

    system = fsspec.filesystem("memory")
    monkeypatch.setattr(
        type(system),
        "info",
        lambda self, path, **_: {
            "name": path, "type": "file", "size": 13, **{key: str(self.store[path].getvalue()) for key in told}
        },
    )  # fmt: skip
    data = Data(train="memory://told/rows.jsonl")

    def identity(content: bytes) -> object:
        system.store.clear()
        system.pipe_file("/told/rows.jsonl", content)
        return open_input(data, data.train[0]).identity({})

    one, other = b'{"text": "a"}', b'{"text": "b"}'
    assert identity(one) == identity(one) != identity(other)
    system.store.clear()
