"""Finds the model a run names and opens it: its configuration, tensors and tokenizer files.

Used by families (configuration and weights), tokenizer.py and the planner.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from podtune.config.errors import RunFailure, UserError
from podtune.config.wording import nearest_to
from podtune.hub.addresses import check_address, is_remote
from podtune.hub.download import HubId, fetch_model, parse_hub_id
from podtune.hub.file_hashes import FileHashes
from podtune.hub.gguf_config import hugging_face_config, hugging_face_generation_config
from podtune.hub.gguf_file import GgufFile, open_gguf
from podtune.hub.gguf_store import GgufStore
from podtune.hub.remote import fetch_remote_model
from podtune.hub.safetensors_store import SafetensorsStore
from podtune.hub.selection import Amount
from podtune.hub.telling import Progress
from podtune.hub.tensors import TensorStore

_BLOB = re.compile(r"[0-9a-f]{64}")  # what the Hub's cache calls a large file: its SHA-256
_KINDS = "a Hub id (owner/name, optionally @revision), a folder, a .gguf file, or a gs:// or s3:// address of either"


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine: a folder as on the Hub, or one GGUF file. `config` is the content of its config.json."""

    source: str
    folder: Path | None
    gguf: Path | None
    config: dict[str, Any]
    generation_config: dict[str, Any]
    content: tuple[Path, ...]
    """The files that make it this model: configuration and weights."""
    header: GgufFile | None = field(default=None, repr=False, compare=False)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content: any change of a weight changes it."""
        return content_fingerprint(self.content)

    def tensors(self) -> TensorStore:
        """The weights. Raises UserError when they are absent or damaged."""
        if self.header is not None:
            return GgufStore(self.header)
        assert self.folder is not None
        return SafetensorsStore(self.folder)

    def read_text(self, name: str) -> str | None:
        """The content of a text file of the folder, or None where there is no such file. Raises UserError."""
        if self.folder is None or not (self.folder / name).is_file():
            return None
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except ValueError:
            raise UserError(f"{self.folder / name}: is not UTF-8. Download or save the model again.") from None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The mapping in a JSON file of the folder, or None where there is no such file. Raises UserError."""
        return None if self.folder is None else _read_json(self.folder / name)


def resolve_model(
    source: str,
    *,
    cache: Path | None = None,
    offline: bool = False,
    amount: Amount = "weights",
    progress: Progress | None = None,
) -> ModelFiles:
    """Fetches (where it is not here yet) and opens the model that `source` names.

    amount: how much is fetched of a model that is not here; a GGUF file comes whole. Raises UserError when there is no
    such model or it cannot be used, RunFailure when the network gives out.
    """
    hub_id = check_model_source(source)
    if is_remote(source):
        local = fetch_remote_model(source, cache=cache, offline=offline, amount=amount, progress=progress)
        return _open_local(source, local)
    if hub_id is None:
        try:
            return _open_local(source, Path(source).expanduser())
        except OSError as error:
            raise UserError(
                f"model: {source} cannot be read: {error.filename or source}: {error.strerror}. Name another, or make "
                "it readable."
            ) from error
    try:
        folder = fetch_model(hub_id, cache=cache, offline=offline, amount=amount, progress=progress)
    except (UserError, RunFailure) as error:
        if hint := perhaps_a_path(source):
            raise type(error)(f"{error}{hint}") from error
        raise
    return _open_folder(source, folder)


def check_model_source(source: str) -> HubId | None:
    """The Hub id that `source` is, if it is one and no path or address. Raises UserError for what is none of these, or
    an address that cannot be reached from here. Asks no network."""
    if is_remote(source):
        if source.lower().startswith(("http://", "https://")):
            raise UserError(f"model: {source} is a web address. Name {_KINDS}.")
        try:
            check_address(source)
        except UserError as error:
            raise UserError(f"model: {error}") from error
        return None
    if is_path(source):
        return None
    hub_id = parse_hub_id(source)
    if hub_id is None:
        raise UserError(f"model: {source!r} is not {_KINDS}.")
    return hub_id


def perhaps_a_path(source: str) -> str:
    """What to add where a Hub id begins with the name of a folder that is here: it may have been meant as a path."""
    path = Path(source)
    if not path.parent.name or not path.parent.is_dir():
        return ""
    return f" If it was meant as a path: the folder {path.parent} here holds no {path.name}{nearest_to(path)}"


def is_path(source: str) -> bool:
    """Whether `source` is a file or folder here, or written as one, so that a missing one is never looked for on the
    Hub."""
    if is_remote(source):
        return False
    return (
        os.path.exists(os.path.expanduser(source))
        or source.startswith((".", "/", "~"))
        or source.endswith((".gguf", "/"))
        or "\\" in source
    )


def _open_local(source: str, path: Path) -> ModelFiles:
    if path.is_dir():
        return _open_folder(source, path)
    if path.suffix == ".gguf" and path.exists():
        return _open_gguf(source, path)
    if path.exists():
        raise UserError(
            f"model: {source} is a file but not a .gguf. Name {_KINDS}; "
            "for .safetensors that is the folder that also holds config.json."
        )
    if path.suffix == ".gguf":
        raise UserError(f"model: {source}: no such file ({path.absolute()}){nearest_to(path)}")
    raise UserError(
        f"model: {source}: no such directory ({path.absolute()}){nearest_to(path)} A Hub id is written owner/name."
    )


def _open_gguf(source: str, path: Path) -> ModelFiles:
    header = open_gguf(path)
    return ModelFiles(
        source=source,
        folder=None,
        gguf=path,
        config=hugging_face_config(header),
        generation_config=hugging_face_generation_config(header),
        content=(path,),
        header=header,
    )


def _open_folder(source: str, folder: Path) -> ModelFiles:
    config = _read_json(folder / "config.json")
    if config is None and (folder / "model" / "config.json").is_file():
        raise UserError(f"model: {folder} is the output of a run. Its model is {folder / 'model'}.")
    if config is None:
        found = sorted(path.name for path in folder.iterdir())
        raise UserError(
            f"model: {folder} has no config.json, which describes the model. It holds "
            f"{', '.join(found[:8]) or 'nothing'}{', …' if len(found) > 8 else ''}. Name {_KINDS}."
        )
    weights = sorted({*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")})
    return ModelFiles(
        source=source,
        folder=folder,
        gguf=None,
        config=config,
        generation_config=_read_json(folder / "generation_config.json") or {},
        content=(folder / "config.json", *weights),
    )


def content_fingerprint(paths: Iterable[Path]) -> str:
    """A hash of the names and whole contents of files. Each is read once: its hash is remembered beside the other
    caches of podtune until the file changes, and that of a file in the Hub's cache is its name there."""
    named = {path: _name_in_hub_cache(path) for path in paths}
    home = Path(os.environ.get("PODTUNE_CACHE", "~/.cache/podtune")).expanduser()
    unnamed = [path for path, digest in named.items() if digest is None]
    hashed = dict(zip(unnamed, FileHashes(home / "hashes.json").of(unnamed), strict=True))
    lines = [f"{path.name} {digest or hashed[path]}\n" for path, digest in named.items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _name_in_hub_cache(path: Path) -> str | None:
    """The SHA-256 of a large file that lies in the Hub's cache, by which it is called there and was checked."""
    if not path.is_symlink():
        return None
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name) else None


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}). Download or save the model again.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, not a mapping. Download or save the model again.")
    return content
