"""Models and files in object stores: copied here and there. Used by sources, data and export.

Files are copied into a local cache one by one, resumed and checked, and read from there by memory map.
"""

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from podtune.config.errors import PodtuneError, RunFailure, UserError
from podtune.config.wording import readable_bytes
from podtune.hub.addresses import file_system
from podtune.hub.atomic import atomic_file
from podtune.hub.safetensors_store import INDEX_NAME, SINGLE_NAME, parse_index
from podtune.hub.selection import Amount, missing_file, model_files
from podtune.hub.telling import Progress, teller

_PIECE_BYTES = 16 << 20
_TRIES = 5
# Of what a store tells about a file, the parts that change when its content does.
_IDENTITY = (
    "etag",
    "ETag",
    "md5Hash",
    "crc32c",
    "generation",
    "VersionId",
    "LastModified",
    "updated",
    "mtime",
    "created",
)


class RemoteFile(NamedTuple):
    """One file of a remote folder. `name` is relative to it; `identity` changes with the content."""

    name: str
    path: str
    bytes: int
    identity: str
    md5: str | None


def fetch_remote_model(
    source: str,
    *,
    cache: Path | None = None,
    offline: bool = False,
    amount: Amount = "weights",
    progress: Progress | None = None,
) -> Path:
    """The local copy of a model folder or a .gguf file in an object store; only what a model needs is copied.

    Raises UserError when it is not there, may not be read or is no model; RunFailure when the connection gives out.
    """
    tell = teller(progress)
    if offline:
        local = _place(source, cache)
        if not local.exists():
            raise UserError(f"model: {source} is not in the cache ({local}) and offline was asked for. Connect once.")
        tell(f"{source}: offline was asked for; using the copy in {local}")
        return local
    if source.endswith(".gguf"):
        return fetch_remote_file(source, cache=cache, progress=progress)
    files = {file.name: file for file in remote_files(source)}
    if not files:
        raise UserError(f"model: {source}: no such directory, or it is empty. Check the address.")
    fault = missing_file(list(files), amount=amount)
    if fault is not None:
        raise UserError(f"model: {source} {fault}")
    folder = _place(source, cache)
    for name in model_files(list(files), amount=amount):
        _fetch(source, files[name], folder / name, tell)
    if amount == "weights" and SINGLE_NAME not in files:
        shards = parse_index((folder / INDEX_NAME).read_text(encoding="utf-8"), f"{source}/{INDEX_NAME}")
        for name in sorted(set(shards.values())):
            if name not in files:
                raise UserError(f"model: {source}: {INDEX_NAME} names {name}, which is not there. Copy it there again.")
            _fetch(source, files[name], folder / name, tell)
    return folder


def fetch_remote_file(source: str, *, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The local copy of one file, copied again whenever the remote one has changed."""
    filesystem, path = file_system(source)
    try:
        about = _told(source, lambda: filesystem.info(path))
    except FileNotFoundError:
        raise UserError(f"{source}: no such file. Check the address.") from None
    if about["type"] == "directory":
        raise UserError(f"{source}: is a directory, not a file.")
    local = _place(source, cache)
    _fetch(source, _remote_file(local.name, about), local, teller(progress))
    return local


def remote_files(source: str) -> list[RemoteFile]:
    """The files of a remote folder and of its folders, sorted; empty when there is no such folder."""
    filesystem, path = file_system(source)
    found: dict[str, Any] = _told(source, lambda: filesystem.find(path, maxdepth=2, detail=True))
    root = filesystem._strip_protocol(path).rstrip("/") + "/"
    return sorted(_remote_file(name.removeprefix(root), about) for name, about in found.items())


def upload_folder(folder: Path, target: str, *, progress: Progress | None = None) -> None:
    """Copies a folder's files to a remote folder; the index of its weights and its config.json go last, so that a copy
    broken off is not taken for a model."""
    filesystem, path = file_system(target)
    tell = teller(progress)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    files.sort(key=lambda file: (file.name == "config.json", file.name.endswith(".index.json")))
    for file in files:
        name = file.relative_to(folder).as_posix()
        tell(f"copying {name} ({readable_bytes(file.stat().st_size)}) to {target}")
        _told(target, lambda file=file, name=name: filesystem.put_file(str(file), f"{path.rstrip('/')}/{name}"))


def _told(source: str, request: Any) -> Any:
    """What `request` gives; FileNotFoundError passes, other refusals are told in the user's terms."""
    try:
        return request()
    except (FileNotFoundError, PodtuneError):
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        words = f"{type(error).__name__} {error}".lower()
        if isinstance(error, PermissionError) or any(
            word in words for word in ("credential", "forbidden", "denied", "unauthorized", "anonymous", "401", "403")
        ):
            raise UserError(
                f"{source}: may not be read with the credentials in use ({reason}). For gs:// run "
                "`gcloud auth application-default login`; for s3:// set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
                "or a profile."
            ) from error
        raise RunFailure(f"{source}: {reason}. Run the same again to go on.") from error


def content_identity(about: Mapping[str, Any]) -> str:
    """All that a store tells about a file which changes with its content, as JSON; empty when it tells nothing."""
    told = {key: str(about[key]) for key in _IDENTITY if about.get(key) not in (None, "")}
    return json.dumps(told, sort_keys=True) if told else ""


def _remote_file(name: str, about: dict[str, Any]) -> RemoteFile:
    return RemoteFile(name, about["name"], int(about["size"]), content_identity(about), _md5(about))


def _md5(about: dict[str, Any]) -> str | None:
    """The MD5 that the store tells, hexadecimal: Google's md5Hash, or Amazon's ETag of what was put in one piece."""
    if about.get("md5Hash"):
        return base64.b64decode(about["md5Hash"]).hex()
    etag = str(about.get("ETag", "")).strip('"')
    encrypted = about.get("ServerSideEncryption") == "aws:kms"
    return etag if re.fullmatch(r"[0-9a-f]{32}", etag) and not encrypted else None


def _place(source: str, cache: Path | None) -> Path:
    """Where the copy of `source` lies: its name, in a folder made of a hash of its whole address."""
    home = cache or Path(os.environ.get("PODTUNE_CACHE", "~/.cache/podtune"))
    address = source.rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    return home.expanduser() / "remote" / digest / address.rsplit("/", 1)[1]


def _fetch(source: str, file: RemoteFile, local: Path, tell: Progress) -> None:
    """Copies one file to `local`, unless the copy there is of the same content. Of several processes or threads that
    want it, one copies and the others wait."""
    from filelock import FileLock, Timeout

    if _is_here(file, local):  # asked first without the lock, for a cache that may only be read
        return
    local.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(local.with_name(f".{local.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell(f"{file.name}: another process is copying it; waiting for that")
        lock.acquire()
    try:
        if not _is_here(file, local):
            _copy(source, file, local, tell)
    finally:
        lock.release()


def _is_here(file: RemoteFile, local: Path) -> bool:
    """Whether the copy is whole and of the content that the store has now."""
    return _is_noted(file, local) and local.is_file() and local.stat().st_size == file.bytes


def _is_noted(file: RemoteFile, local: Path) -> bool:
    """Whether what lies here of a file, whole or partial, is of the content that the store has now."""
    note = _note(local)
    return bool(file.identity) and note.is_file() and note.read_text() == f"{file.bytes} {file.identity}"


def _note(local: Path) -> Path:
    return local.with_name(f".{local.name}.identity")


def _copy(source: str, file: RemoteFile, local: Path, tell: Progress) -> None:
    partial = local.with_name(f".{local.name}.partial")
    if not _is_noted(file, local):
        # Whatever lies here, whole or partial, is of another content.
        partial.unlink(missing_ok=True)
        local.unlink(missing_ok=True)
        with atomic_file(_note(local)) as out:
            out.write(f"{file.bytes} {file.identity}".encode())
    filesystem, _ = file_system(source)
    if file.bytes > _PIECE_BYTES:
        tell(f"copying {file.name} ({readable_bytes(file.bytes)}) from {source}")
    digest = hashlib.md5(usedforsecurity=False)
    with partial.open("a+b") as out:
        out.seek(0)
        while piece := out.read(_PIECE_BYTES):
            digest.update(piece)
        here = out.tell()
        while here < file.bytes:
            piece = _read_piece(source, filesystem, file, here, tell)
            out.write(piece)
            digest.update(piece)
            here += len(piece)
        out.flush()
        os.fsync(out.fileno())
        written = os.fstat(out.fileno()).st_size
    if written != file.bytes or (file.md5 is not None and digest.hexdigest() != file.md5):
        partial.unlink()
        raise RunFailure(
            f"{source}: {file.name} arrived with another size or checksum than the store gives; it changed "
            "meanwhile or was damaged on the way. Nothing was kept; run the same again."
        )
    os.replace(partial, local)


def _read_piece(source: str, filesystem: Any, file: RemoteFile, start: int, tell: Progress) -> bytes:
    """The next piece of a file; a broken connection is tried again with longer and longer waits."""
    stop = min(start + _PIECE_BYTES, file.bytes)
    for tried in range(1, _TRIES + 1):
        try:
            piece: bytes = _told(source, lambda: filesystem.cat_file(file.path, start=start, end=stop))
            if piece:
                return piece
            raise RunFailure(f"{source}: {file.name} ends at byte {start:,}, before its {file.bytes:,}. Run it again.")
        except (RunFailure, FileNotFoundError) as error:
            if tried == _TRIES:
                raise RunFailure(str(error)) from error
            wait = 2.0 ** (tried - 1)
            tell(f"{file.name}: {error} Trying again in {wait:.0f} s")
            time.sleep(wait)
    raise AssertionError("unreachable")
