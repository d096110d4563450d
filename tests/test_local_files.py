"""Files by folder and pattern: what glob matches, and each file once however many links lead to its folder."""

import glob
import os
from pathlib import Path

import pytest

from podtune.config.errors import UserError
from podtune.data.local_files import files_below, files_matching

NAMES = ("a.jsonl", "b.json", "sub/c.jsonl", "sub/deep/d.jsonl", "sub/deep/e.txt", ".hidden.jsonl", ".git/f.jsonl",
         "sub/.cache/g.jsonl", "x1/h.jsonl", "x2/h.jsonl")  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("pattern", [
    "*.jsonl", "**/*.jsonl", "**", "**/d*", "sub/**", "sub/**/*.jsonl", "*/**/*.jsonl", "x?/*.jsonl", "x[12]/h.*",
    "**/deep/*", ".*", "**/.*", "**/.cache/*", ".git/**/*.jsonl", "**/**/d.jsonl", "none/**", "sub/**/none", "x[!1]/*",
    "**/x1/**/*",
])  # fmt: skip
@pytest.mark.parametrize("absolute", [False, True])
def test_a_pattern_matches_what_glob_does(tree: Path, pattern: str, absolute: bool):
    asked = str(tree / pattern) if absolute else pattern
    wanted = sorted({name for name in glob.glob(asked, recursive=True) if Path(name).is_file()})
    assert files_matching(asked) == wanted


def test_links_that_lead_round_in_circles_end(tree: Path):
    for name in ("up", "again", "once more"):
        (tree / "sub" / name).symlink_to(tree)
        (tree / "x1" / name).symlink_to(tree / "sub")
    assert files_matching("**/*.jsonl") == [
        "a.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl", "x1/h.jsonl", "x2/h.jsonl",
    ]  # fmt: skip
    assert sorted(file.read_text() for file in files_below(tree)) == [
        "a.jsonl", "b.json", "sub/c.jsonl", "sub/deep/d.jsonl", "sub/deep/e.txt", "x1/h.jsonl", "x2/h.jsonl",
    ]  # fmt: skip


def test_a_link_whose_name_is_not_wanted_hides_no_folder(tree: Path):
    (tree / "current").symlink_to(tree / "x2")
    (tree / ".old").symlink_to(tree / "sub")
    (tree / "_x").symlink_to(tree / "x1")
    assert files_matching("x*/**/*.jsonl") == ["x1/h.jsonl", "x2/h.jsonl"]
    assert {tree / "sub" / "c.jsonl", tree / "x1" / "h.jsonl"} <= set(files_below(tree))


def test_a_folder_that_cannot_be_read_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch):
    scandir = os.scandir

    def refuse(folder: str | Path):
        if Path(folder).name == "x1":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    for look in (lambda: files_below(tree), lambda: files_matching("**/*.jsonl")):
        with pytest.raises(UserError, match=r"x1: this folder cannot be read \(Permission denied\)"):
            look()
