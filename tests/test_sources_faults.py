"""Every fault of a file ends in one message that names the file, the place, the rule and a way out."""

# ruff: noqa: E501 (a table of faults reads best with one on a line)

import bz2
import gzip
import io
import json
import lzma
import os
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from record_cases import read_records

from podtune.config.errors import UserError
from podtune.config.rows import Source
from podtune.data import read_json
from podtune.data.rows import Record, Refused
from podtune.data.sources import list_files, read_file

GOOD = b'{"text": "fine"}\n'


def parquet(columns: dict[str, list[str]]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


# name of the file, its bytes, what the message must say (a pattern; the file's own name stands before it)
FAULTS: dict[str, tuple[str, bytes, str]] = {
    "a key twice in a line": (
        "a.jsonl", GOOD + b'{"prompt": "a", "completion": "b", "completion": "c"}\n',
        r':2: the key "completion" stands twice in one object; keep one\.',
    ),
    "a key twice in a document": (
        "a.json", b'[{"messages": [{"role": "user", "content": "a", "role": "system"}]}]',
        r': line 1, column 2: record 1: the key "role" stands twice in one object; keep one\.',
    ),
    "a key twice in a document of one object": (
        "a.json", b'{"rows": [{"text": "a"}], "rows": [{"text": "b"}]}',
        r': line 1, column 1: the key "rows" stands twice in one object; keep one\.',
    ),
    "cut off in mid-string": ("a.jsonl", GOOD + b'{"text": "and the', r":2: not valid JSON in column 10: it is cut off here"),
    "cut off in mid-object": ("a.jsonl", GOOD + b'{"text": "a",', r":2: not valid JSON in column 14: it is cut off here"),
    "not JSON": ("a.jsonl", GOOD + b"hello\n", r":2: not valid JSON in column 1"),
    "python's print": ("a.jsonl", b"{'text': 'a'}\n", r":1: .*single quotes are not JSON .*json.dumps"),
    "a trailing comma": ("a.jsonl", b'{"text": "a",}\n', r":1: not valid JSON in column 1[34]: a trailing comma"),
    "commas between lines": ("a.jsonl", b'{"text": "a"},\n{"text": "b"}\n', r":1: .*a comma after the object"),
    "two objects on a line": ("a.jsonl", b'{"text": "a"} {"text": "b"}\n', r":1: .*something follows the object"),
    "a raw control character": ("a.jsonl", b'{"text": "a\tb"}\n', r":1: .*column 12: a raw control character \(0x09\)"),
    "a list in JSONL": ("a.jsonl", b'[{"text": "a"}]\n', r":1: the line is a list.*name the file \.json"),
    "pretty JSON in JSONL": ("a.jsonl", b'{\n  "text": "a"\n}\n', r":1: .*name the file \.json"),
    "a pretty list in JSONL": ("a.jsonl", b'[\n{"text": "a"}\n]\n', r":1: .*name the file \.json"),
    "a number": ("a.jsonl", GOOD + b"12\n", r":2: the line is a number, not an object"),
    "null": ("a.jsonl", GOOD + b"null\n", r":2: the line is null, not an object"),
    "not UTF-8": ("a.jsonl", GOOD + b'{"text": "caf\xe9"}\n', r":2: not UTF-8: byte 0xe9 in column 14.*iconv"),
    "UTF-16": ("a.jsonl", '{"text": "a"}'.encode("utf-16"), r": the file is UTF-16"),
    "UTF-16 without a mark": ("a.jsonl", '{"text": "a"}'.encode("utf-16-le"), r":1: a NUL byte.*UTF-16"),
    "a NUL byte": ("a.jsonl", GOOD + b'{"text": "a\0b"}\n', r":2: a NUL byte in column 12"),
    "a lone surrogate": ("a.jsonl", GOOD + b'{"text": "a\\ud83d"}\n', r":2: .*ud83d is half of a surrogate pair"),
    "a lone surrogate deep down": ("a.jsonl", b'{"m": [{"c": "\\ude00"}]}\n', r":1: .*ude00 is half of a surrogate pair"),
    "too deep": ("a.jsonl", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", r":1: .*nested too deeply"),
    "too many digits": ("a.jsonl", b'{"a": ' + b"1" * 5000 + b"}", r":1: a whole number has more than 4,300 digits; put it in quotes"),
    "too many digits in a document": ("a.json", b'[{"a": ' + b"1" * 5000 + b"}]", r": line 1, .*more than 4,300 digits"),
    "carriage returns alone": ("a.jsonl", GOOD.strip() + b"\r" + GOOD.strip() + b"\r", r":1: .*carriage return alone.*tr "),
    "gzip by another name": ("a.jsonl", gzip.compress(GOOD), r": the file is compressed by gzip.*\.gz"),
    "zstandard by another name": ("a.csv", zstandard.ZstdCompressor().compress(GOOD), r": .*zstandard.*\.zst"),
    "Parquet by another name": ("a.json", parquet({"text": ["a"]}), r": the file is Parquet"),
    "bzip2 by another name": ("a.jsonl", bz2.compress(GOOD), r": the file is compressed by bzip2"),
    "xz by another name": ("a.jsonl", lzma.compress(GOOD), r": the file is compressed by xz"),
    "a zip archive": ("a.txt", b"PK\x03\x04 and so on", r": the file is a zip archive"),
    "JSON cut off in a string": ("a.json", b'[{"text": "a"},\n {"text": "b', r": line 2, column 11: record 2: it is cut off here"),
    "JSON cut off after a record": ("a.json", b'[{"text": "a"}', r": .*after record 1 the file ends without \]"),
    "JSON cut off after a comma": ("a.json", b'[{"text": "a"},', r": .*record 2 is cut off here"),
    "JSON with a trailing comma": ("a.json", b'[{"text": "a"},\n]', r": line 2, column 1: after record 1: a trailing comma"),
    "JSON without a comma": ("a.json", b'[{"text": "a"}\n{"text": "b"}]', r": line 2, column 1: after record 1: a comma is missing"),
    "JSON with a number": ("a.json", b'[{"text": "a"}, 3]', r": line 1, column 17: record 2 is not an object; wanted are objects such as"),
    "JSON with a trailing comma in a row": ("a.json", b'[{"text": "a",}]', r": line 1, .*record 1: a trailing comma"),
    "JSON with something after": ("a.json", b'[{"text": "a"}] x', r": line 1, column 17: something follows the end"),
    "JSON that is a text": ("a.json", b'"text"', r": line 1, column 1: a list of rows"),
    "JSON not in UTF-8": ("a.json", b'[{"text": "caf\xe9"}]', r": not UTF-8 near byte 14"),
    "JSON with NUL": ("a.json", b'[{"text": "a\0"}]', r": a NUL byte near byte 12"),
    "JSON with a surrogate": ("a.json", b'[{"text": "\\ud800"}]', r": record 1: .*ud800 is half"),
    "something far behind an object": (
        "a.json", b'{"text": "a"}' + b"\n" * 9000 + b"garbage", r": line 9001, column 1: record 2",
    ),
    "JSON with two lists": ("a.json", b'{"a": [{"t": "x"}], "b": [{"t": "y"}]}', r": the document holds several lists \(a, b\)"),
    "CSV with a short row": ("a.csv", b"text,n\na,1\nb\n", r":3: 1 field, but the header names 2 \(text, n\)"),
    "CSV with a long row": ("a.csv", b"text,n\na,1,2\n", r":2: 3 fields, but the header names 2"),
    "CSV with an open quote": ("a.csv", b'text,n\n"a,1\nb,2\n', r":2: a double quote is opened in this row and never closed"),
    "CSV with a stray quote": ("a.csv", b'text,n\n"a"b,1\n', r":2: text follows a closing double quote"),
    "CSV with a column twice": ("a.csv", b"text,text\na,1\n", r":1: the header names text twice"),
    "CSV with a nameless column": ("a.csv", b"text,\na,1\n", r":1: column 2 has no name"),
    "CSV with semicolons": ("a.csv", b"text;n\na;1\n", r":1: the columns seem to be separated by semicolons"),
    "CSV with tabs": ("a.csv", b"text\tn\na\t1\n", r":1: .*separated by tabs; name the file \.tsv"),
    "CSV not in UTF-8": ("a.csv", b"text,n\ncaf\xe9,1\n", r":2: not UTF-8: byte 0xe9 in column 4"),
    "not Parquet": ("a.parquet", b"hello there, this is no table", r": it cannot be read as Parquet"),
    "empty Parquet": ("a.parquet", b"", r": it cannot be read as Parquet"),
    "text not in UTF-8": ("a.txt", b"one\ncaf\xe9\n", r":2: not UTF-8: byte 0xe9 in column 4"),
    "not TFRecord": ("a.tfrecord", b"hello there, this is no record", r": record 1 at byte 0 has a damaged header"),
    "gz that is not": ("a.jsonl.gz", b"hello", r": the \.gz is damaged or cut off"),
    "gz cut off": ("a.jsonl.gz", gzip.compress(GOOD * 10_000)[:-20], r": the \.gz is damaged or cut off"),
    "gz damaged": ("a.jsonl.gz", gzip.compress(GOOD)[:12] + b"\xff\xff" + gzip.compress(GOOD)[14:], r": the \.gz is damaged"),
    "zst that is not": ("a.jsonl.zst", b"hello there", r": the \.zst is damaged or cut off"),
    # zstandard's own stream ends in silence here, and rows would be missing
    "zst cut off": ("a.jsonl.zst", zstandard.ZstdCompressor().compress(GOOD * 10_000)[:-6], r": the \.zst is damaged or cut off"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_names_the_file_the_place_and_what_to_do(tmp_path: Path, fault: str):
    name, data, says = FAULTS[fault]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        list(read_records(Source(path=str(path))))
    assert re.match(re.escape(str(path)) + says, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.tfrecord", "a.jsonl.gz"])
def test_an_empty_file_has_no_records(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    assert list(read_records(Source(path=str(tmp_path / name)))) == []


def test_a_file_that_is_not_there_is_named_with_the_nearest(tmp_path: Path):
    (tmp_path / "train.jsonl").write_bytes(GOOD)
    with pytest.raises(
        UserError, match=r'trian\.jsonl: there is no such file or folder\. Did you mean ".*train\.jsonl"'
    ):
        list(read_records(Source(path=str(tmp_path / "trian.jsonl"))))
    with pytest.raises(UserError, match="nor a folder"):
        list(read_records(Source(path=str(tmp_path / "no" / "train.jsonl"))))


def test_a_pattern_without_a_match_an_empty_folder_and_an_unknown_kind_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="the pattern matches no file"):
        list(read_records(Source(path=str(tmp_path / "*.jsonl"))))
    with pytest.raises(UserError, match="the folder holds no files"):
        list(read_records(Source(path=str(tmp_path))))
    (tmp_path / "a.docx").write_bytes(b"x")
    with pytest.raises(UserError, match=r"the folder holds 1 file, none of which podtune reads\. It reads jsonl"):
        list(read_records(Source(path=str(tmp_path))))
    with pytest.raises(UserError, match="does not know this kind of file"):
        list(read_records(Source(path=str(tmp_path / "a.docx"))))


def test_a_folder_of_several_kinds_is_refused_so_that_a_licence_is_not_trained_on(tmp_path: Path):
    (tmp_path / "train.jsonl").write_bytes(GOOD)
    (tmp_path / "LICENSE.txt").write_text("Permission is hereby granted")
    with pytest.raises(UserError, match=r"several kinds of file \(1 text, 1 jsonl\)\. Name one: .*/\*\.jsonl"):
        list(read_records(Source(path=str(tmp_path))))


def test_lines_behind_one_that_is_no_text_are_read_and_told(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b'{"text": "\xff"}\n' + GOOD + b'{"text": "\0"}\n' + GOOD + b"{\n" + GOOD)
    (file,) = list_files(Source(path=str(path)))
    read = list(read_file(file))
    assert [isinstance(line, Refused) for line in read] == [False, True, False, True, False, True, False]
    assert [line.number for line in read] == [1, 2, 3, 4, 5, 6, 7]
    assert "not UTF-8" in read[1].reason
    assert "NUL" in read[3].reason


def test_rows_behind_one_with_too_few_fields_are_read_and_told(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("text,n\na,1\nb\nc,3,4\nd,5\n")
    (file,) = list_files(Source(path=str(path)))
    assert [(isinstance(row, Refused), row.number) for row in read_file(file)] == [
        (False, 2), (True, 3), (True, 4), (False, 5),
    ]  # fmt: skip


def test_a_pipe_is_no_file_of_rows_and_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"no regular file"):
        list_files(Source(path=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize(("name", "text"), [
    ("a.csv", "PAR1,text\n1,a\n"), ("a.csv", "PK,text\n1,a\n"), ("a.txt", "BZhang wrote this."), ("a.txt", "PAR1 is text"),
])  # fmt: skip
def test_texts_that_begin_like_something_else_are_texts(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    assert len(list(read_records(Source(path=str(tmp_path / name))))) == 1


@pytest.mark.parametrize("data", [
    json.dumps([{"text": "a"}] * 9, indent=2).encode(), json.dumps({"text": "a"}, indent=1).encode(),
    b"<!DOCTYPE html>\n<html>\n<body>\n</body>\n", b"\n<?xml version='1.0'?>\n<rows>\n", b"\x89PNG\r\n\x1a\n\x00\x00\n" * 9,
    b"%PDF-1.7\n%\xe2\xe3\n" * 9, b"\x80\x04\x95\x1a\n\x94\x8c\n" * 9, b"\x7fELF\x02\x01\x01\xff\n" * 9,
    (GOOD * 9).decode().encode("utf-16-le"), "".join(f'{{"text": "{i}"}}\n' for i in range(9)).encode("utf-16"),
])  # fmt: skip
def test_a_file_that_is_another_thing_throughout_is_one_fault(tmp_path: Path, data: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    (file,) = list_files(Source(path=str(path)))
    with pytest.raises(UserError):
        next(iter(read_file(file)))


def write_parquet(path: Path, columns: dict[str, Any], names: list[str] | None = None) -> list[Record]:
    table = pyarrow.table(list(columns.values()), names=names or list(columns))
    pyarrow.parquet.write_table(table, path)
    return list(read_records(Source(path=str(path))))


def test_two_columns_of_one_name_are_refused_in_parquet_too(tmp_path: Path):
    with pytest.raises(UserError, match=r'a\.parquet: two columns are named "text"'):
        write_parquet(tmp_path / "a.parquet", {"x": ["a"], "y": ["b"]}, ["text", "text"])


def test_a_moment_that_python_cannot_hold_hides_no_row(tmp_path: Path):
    when = {
        "late": pyarrow.array([2**60], pyarrow.timestamp("us")),
        "where": pyarrow.array([0], pyarrow.timestamp("us", tz="Mars/Base")),
    }
    (record,) = write_parquet(tmp_path / "a.parquet", {"text": ["a"], **when})
    assert record.value["text"] == "a"
    assert list(record.value) == ["text", "late", "where"]


def test_a_column_that_cannot_be_read_is_named(tmp_path: Path):
    latin = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"caf\xe9"]).buffers())
    with pytest.raises(
        UserError, match=r'a\.parquet: column "text" cannot be read \(a text in it is not UTF-8: byte 0xe9'
    ):
        write_parquet(tmp_path / "a.parquet", {"text": latin})
    late = pyarrow.array([{"at": 2**60}], pyarrow.struct([("at", pyarrow.timestamp("us"))]))
    with pytest.raises(UserError, match=r'a\.parquet: column "meta" cannot be read \(.*Write the file anew'):
        write_parquet(tmp_path / "a.parquet", {"text": ["a"], "meta": late})


def test_rows_before_a_fault_are_given_so_that_the_fault_is_the_first(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 3 + b"{")
    records = read_records(Source(path=str(path)))
    assert [next(records).number for _ in range(3)] == [1, 2, 3]
    with pytest.raises(UserError, match=":4:"):
        next(records)


def test_a_row_of_many_megabytes_is_read(tmp_path: Path):
    row = {"text": "x" * (20 << 20)}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (tmp_path / "a.json").write_text(json.dumps([{"text": "first"}, row]))
    (tmp_path / "a.csv").write_text("text,n\n" + row["text"] + ",1\n")
    for name, at in (("a.jsonl", 0), ("a.json", 1), ("a.csv", 0)):
        assert len(list(read_records(Source(path=str(tmp_path / name))))[at].value["text"]) == 20 << 20


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"rows": [{"text": "a"}], "rows": [{"text": "b"}]}', 'the key "rows" stands twice in one object'),
        (b'{"version": 1, "version": 2, "rows": [{"text": "a"}]}', 'the key "version" stands twice'),
        (b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}', r"holds several lists \(train, test\)"),
        (b'{"rows": [{"text": "a"}],}', "a trailing comma; take it out"),
        (b'{"rows": [{"text": "a"}] "b": 1}', "a comma is missing"),
        (b'{"messages": [{"role": "user"}], "id": 1, "id": 2}\n{"id": 3}', 'the key "id" stands twice'),
    ],
)
def test_a_document_too_large_to_look_at_whole_has_the_same_faults(tmp_path: Path, monkeypatch, data, says):
    monkeypatch.setattr(read_json, "_WHOLE_BYTES", 4)
    monkeypatch.setattr(read_json, "_CHUNK_BYTES", 8)
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(UserError, match=says):
        list(read_records(Source(path=str(tmp_path / "a.json"))))
    (tmp_path / "a.json").write_bytes(b'{"version": 1, "tags": ["x"], "rows": [{"text": "a"}, {"text": "b"}], "n": []}')
    assert [record.value for record in read_records(Source(path=str(tmp_path / "a.json")))] == [
        {"text": "a"}, {"text": "b"},
    ]  # fmt: skip


def test_deep_nesting_with_an_escape_is_read_or_refused_cleanly(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\u0041", "x": ' + "[" * 900 + "]" * 900 + "}\n")
    assert len(list(read_records(Source(path=str(tmp_path / "a.jsonl"))))) == 1
