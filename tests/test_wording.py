"""How numbers, sizes and missing paths are said."""

import os
from pathlib import Path

import pytest

from podtune.config.wording import counted, nearest_to, readable_bytes


def test_one_thing_is_not_many():
    assert [counted(count, "row") for count in (0, 1, 2, 2000)] == ["0 rows", "1 row", "2 rows", "2,000 rows"]


def test_sizes_are_said_in_their_own_unit():
    assert [readable_bytes(size) for size in (999, 98_400_000, 2.5e13)] == ["999 bytes", "98.4 MB", "25.0 TB"]


def test_the_name_most_like_a_missing_one_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.jsonl").write_text("")
    assert nearest_to(tmp_path / "trian.jsonl") == f'. Did you mean "{tmp_path / "train.jsonl"}"?'
    assert nearest_to(tmp_path / "zzz") == "."
    assert nearest_to(tmp_path / "none" / "zzz") == f" (nor a folder {tmp_path / 'none'})."

    def refuse(_: Path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    assert nearest_to(tmp_path / "trian.jsonl") == "."
