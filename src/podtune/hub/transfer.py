"""Brings one file of a Hub repository into the local cache: resumed, patient, checked. Used by download.

The cache is huggingface_hub's own, and so is the request code. What is added: a partial file survives the process (that
library drops it), a 429 is waited out on every request, and what arrived is compared with the hash the Hub gives.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

from podtune.config.errors import RunFailure
from podtune.config.wording import readable_bytes
from podtune.hub.telling import Progress

_Result = TypeVar("_Result")
_BUSY = (408, 429, 500, 502, 503, 504)
TRIES = 6
_LONGEST_WAIT_S = 120.0
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Repository:
    """One commit of a repository on the Hub. `kind` is model or dataset."""

    name: str
    kind: str
    commit: str
    cache: Path
    endpoint: str


def fetch_file(repository: Repository, file: str, tell: Progress) -> Path:
    """The local path of one file, downloaded where the cache lacks it.

    Raises RunFailure when the connection keeps breaking (what has arrived is kept for the next try) or when what
    arrives does not have the hash the Hub gives; errors of huggingface_hub for what the Hub refuses.
    """
    from huggingface_hub.file_download import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        repo_folder_name,
        try_to_load_from_cache,
    )
    from huggingface_hub.utils._runtime import is_xet_available

    at: dict[str, Any] = {"repo_type": repository.kind, "revision": repository.commit, "cache_dir": repository.cache}
    cached = try_to_load_from_cache(repository.name, file, **at)
    if isinstance(cached, str):
        return Path(cached)
    url = hf_hub_url(
        repository.name,
        file,
        repo_type=repository.kind,
        revision=repository.commit,
        endpoint=repository.endpoint,
    )
    about = patiently(lambda: get_hf_file_metadata(url, timeout=_TIMEOUT_S, endpoint=repository.endpoint), tell, file)
    if about.etag is None:
        raise RunFailure(f"{url}: the server gives no ETag, so what arrives could not be checked.")
    storage = repository.cache / repo_folder_name(repo_id=repository.name, repo_type=repository.kind)
    blob = storage / "blobs" / about.etag
    if not blob.exists() and not (about.xet_file_data is not None and is_xet_available()):
        _download_blob(about, url, blob, tell, file)
    is_new = not blob.exists()
    # Finds the blob just stored and links it into the snapshot; files on Xet storage it fetches itself.
    path = patiently(
        lambda: hf_hub_download(repository.name, file, endpoint=repository.endpoint, **at),
        tell,
        file,
    )
    if is_new and blob.exists() and not has_hash(blob, about.etag):
        blob.unlink()
        Path(path).unlink(missing_ok=True)
        raise _wrong_hash(file, url)
    return Path(path)


def _download_blob(about: Any, url: str, blob: Path, tell: Progress, file: str) -> None:
    """Downloads into a partial file beside `blob`, going on from where an earlier try stopped."""
    from filelock import FileLock
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(headers={"Accept-Encoding": "identity"})
    if urlparse(url).netloc != urlparse(about.location).netloc:
        # The storage behind the Hub has its own signed address; the token is not for it.
        headers.pop("authorization", None)
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(blob.name + ".podtune-partial")
    with FileLock(partial.with_name(partial.name + ".lock")):
        for attempt in (1, 2):
            if blob.exists():
                return

            def go_on() -> None:
                with partial.open("ab") as out:
                    here = out.tell()
                    if about.size is not None and here > about.size:
                        out.truncate(0)
                        here = 0
                    if here:
                        tell(f"{file}: going on at {readable_bytes(here)} of {readable_bytes(about.size or 0)}")
                    http_get(
                        about.location,
                        out,
                        resume_size=here,
                        headers=headers,
                        expected_size=about.size,
                        displayed_filename=file,
                        tqdm_class=_telling_bar(file, tell),  # pyright: ignore[reportArgumentType]
                    )

            patiently(go_on, tell, file, advanced=lambda: partial.stat().st_size if partial.exists() else 0)
            if has_hash(partial, about.etag):
                os.replace(partial, blob)
                return
            partial.unlink()
            if attempt == 1:
                tell(f"{file}: what arrived does not have the hash the Hub gives; downloading it again")
    raise _wrong_hash(file, url)


def patiently(
    request: Callable[[], _Result],
    tell: Progress,
    what: str,
    *,
    advanced: Callable[[], int] | None = None,
    network_tries: int = TRIES,
) -> _Result:
    """Makes a request again while the server is busy (429, 5xx) or the connection breaks.

    Waits as long as Retry-After asks, else 1, 2, 4, … s. `advanced` gives the bytes there are so far: tries are counted
    anew whenever they have grown. Raises what the last try raised when it was busy, RunFailure for a dead connection.
    """
    from httpx2 import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    tried = 0
    reached = advanced() if advanced else 0
    while True:
        try:
            return request()
        except OfflineModeIsEnabled:
            raise
        except HfHubHTTPError as error:
            tried += 1
            status = error.response.status_code
            if status not in _BUSY or tried >= TRIES:
                raise
            wait = _asked_wait_s(error.response.headers.get("Retry-After"), tried)
            tell(f"{what}: the Hub answers {status}; waiting {wait:.0f} s (try {tried} of {TRIES})")
        except (HTTPError, OSError) as error:
            # Of huggingface_hub's HTTP library come only broken and refused connections here; OSError is a short read.
            tried += 1
            here = advanced() if advanced else 0
            if here > reached:
                tried, reached = 1, here
            if tried >= network_tries:
                raise RunFailure(
                    f"{what}: the connection to the Hub broke {tried} times ({type(error).__name__}: {error}). "
                    "What has arrived is kept; run the same again to go on from there."
                ) from error
            wait = _asked_wait_s(None, tried)
            tell(f"{what}: the connection broke ({type(error).__name__}); trying again in {wait:.0f} s")
        time.sleep(wait)


def _asked_wait_s(retry_after: str | None, tried: int) -> float:
    if retry_after is not None and retry_after.strip().isdigit():
        return min(float(retry_after), _LONGEST_WAIT_S)
    return min(2.0 ** (tried - 1), _LONGEST_WAIT_S)


def has_hash(path: Path, etag: str) -> bool:
    """Whether a file is what its ETag says: a SHA-256 for large files, git's blob hash for small ones.

    True for an ETag that is neither, since nothing is known then.
    """
    if len(etag) == 64:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == etag
    if len(etag) == 40:
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        return digest.hexdigest() == etag
    return True


def _wrong_hash(file: str, url: str) -> RunFailure:
    return RunFailure(
        f"{file}: arrived twice with another hash than the Hub gives ({url}). A proxy or mirror on the way changes it; "
        "nothing was kept. Try another network or endpoint (HF_ENDPOINT)."
    )


def _telling_bar(file: str, tell: Progress) -> type:
    """A stand-in for the progress bar of huggingface_hub that tells every tenth of the way, and not of small files."""

    class Bar:
        def __init__(self, *_: Any, total: int | None = None, initial: int = 0, **__: Any):
            self._total, self._done, self._told = total, initial, initial

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def update(self, count: int | None = 1) -> None:
            self._done += count or 0
            total = self._total or 0
            if total > 10_000_000 and self._done - self._told >= total / 10:
                self._told = self._done
                tell(f"{file}: {readable_bytes(self._done)} of {readable_bytes(total)}")

    return Bar
