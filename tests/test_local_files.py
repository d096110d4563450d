"""Files by folder and pattern: what glob matches, and each folder once however many links lead to it."""

import glob
from pathlib import Path

import pytest

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
    assert len(files_below(tree)) == len(NAMES)


def test_a_folder_behind_a_link_is_looked_into(tree: Path, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "far.jsonl").write_text("")
    (tree / "link").symlink_to(elsewhere)
    assert "link/far.jsonl" in files_matching("**/*.jsonl")
    assert tree / "link" / "far.jsonl" in files_below(tree)
