"""Downloads what is needed of a model or dataset repository on the Hugging Face Hub. Used by sources and by data."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from podtune.config.errors import PodtuneError, RunFailure, UserError
from podtune.hub.safetensors_store import INDEX_NAME, SINGLE_NAME, parse_index, weight_files
from podtune.hub.selection import Amount, is_of_tokenizer, missing_file, model_files
from podtune.hub.telling import Progress, teller
from podtune.hub.transfer import Repository, fetch_file, patiently

_ID = re.compile(r"(?:hub://)?([\w][\w.-]*(?:/[\w.-]+)?)(?:@([^@\s]+))?", re.ASCII)
_PARALLEL_FILES = 4


class HubId(NamedTuple):
    """A repository on the Hub; revision None is its main branch."""

    name: str
    revision: str | None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def parse_hub_id(source: str) -> HubId | None:
    """`owner/name[@revision]` (also after hub://), or None when `source` is not written like one."""
    match = _ID.fullmatch(source)
    return HubId(match[1], match[2]) if match else None


def fetch_model(
    hub_id: HubId,
    *,
    cache: Path | None = None,
    offline: bool = False,
    amount: Amount = "weights",
    progress: Progress | None = None,
) -> Path:
    """The local folder of a model: configuration, tokenizer and safetensors, or so much of them as `amount` says, and
    nothing else of its repository.

    Without a network (or with `offline`, or HF_HUB_OFFLINE) it is what the cache holds, which is said. Raises UserError
    for a model that does not exist, may not be read or has no safetensors; RunFailure when the network gives out.
    """
    tell = teller(progress)
    listing = _list_repository(hub_id, "model", cache, offline, tell)
    if isinstance(listing, Path):
        return _cached_model(hub_id, listing, amount=amount)
    repository, names = listing
    fault = missing_file(names, amount=amount)
    if fault is not None:
        raise UserError(f"model: {hub_id} (commit {repository.commit[:12]}) {fault}")
    wanted = model_files(names, amount=amount)
    paths = _fetch_all(repository, wanted, tell)
    if amount == "weights" and SINGLE_NAME not in names:
        index = paths[wanted.index(INDEX_NAME)]
        shards = sorted(set(parse_index(index.read_text(encoding="utf-8"), index).values()))
        absent = [name for name in shards if name not in names]
        if absent:
            raise UserError(f"model: {hub_id}: {INDEX_NAME} names {absent[0]}, which the repository does not hold.")
        _fetch_all(repository, shards, tell)
    return paths[0].parent


@dataclass(frozen=True)
class HubDataset:
    """A dataset repository at one commit. names: its files, sorted; without a network, those in the cache.

    place: where they are fetched from, or the folder in the cache."""

    names: tuple[str, ...]
    place: Repository | Path

    def fetch(self, names: Sequence[str], *, progress: Progress | None = None) -> list[Path]:
        """The local paths of some of its files, in their order, downloaded where the cache lacks them. Raises UserError
        for what may not be read, RunFailure when the network gives out."""
        assert set(names) <= set(self.names)
        if isinstance(self.place, Path):
            return [self.place / name for name in names]
        return _fetch_all(self.place, names, teller(progress))


def open_hub_dataset(
    hub_id: HubId, *, cache: Path | None = None, offline: bool = False, progress: Progress | None = None
) -> HubDataset:
    """Asks the Hub once what a dataset holds. Raises UserError when there is none or it may not be read."""
    listing = _list_repository(hub_id, "dataset", cache, offline, teller(progress))
    if isinstance(listing, Path):
        names = (str(path.relative_to(listing)) for path in listing.rglob("*") if path.is_file())
        return HubDataset(tuple(sorted(names)), listing)
    repository, names = listing
    return HubDataset(tuple(sorted(names)), repository)


def _list_repository(
    hub_id: HubId, kind: str, cache: Path | None, offline: bool, tell: Progress
) -> tuple[Repository, list[str]] | Path:
    """The commit a revision stands for and its file names; or, without a network, the cached snapshot's folder."""
    from huggingface_hub import HfApi, constants

    folder = Path(cache or os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE).expanduser()
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    if (
        offline
        or constants.HF_HUB_OFFLINE
        or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    ):
        return _snapshot(hub_id, kind, folder, "offline was asked for", tell)
    api = HfApi(endpoint=endpoint, library_name="podtune")
    ask = api.model_info if kind == "model" else api.dataset_info
    try:
        info = patiently(
            lambda: ask(hub_id.name, revision=hub_id.revision, timeout=20.0), tell, str(hub_id), network_tries=2
        )
    except RunFailure as error:
        return _snapshot(hub_id, kind, folder, f"{endpoint} cannot be reached", tell, because=error)
    except Exception as error:
        _raise_told(error, hub_id, kind, endpoint)
    assert info.sha is not None
    names = [sibling.rfilename for sibling in info.siblings or []]
    _remember(hub_id, kind, folder, info.sha)
    return Repository(hub_id.name, kind, info.sha, folder, endpoint), names


def _fetch_all(repository: Repository, names: Sequence[str], tell: Progress) -> list[Path]:
    """Several files at once, each resumed by itself; the first failure is raised when the others have ended."""
    hub_id = HubId(repository.name, None)
    with ThreadPoolExecutor(_PARALLEL_FILES, thread_name_prefix="hub") as pool:
        pending = [pool.submit(fetch_file, repository, name, tell) for name in names]
        try:
            return [one.result() for one in pending]
        except PodtuneError:
            raise
        except Exception as error:
            _raise_told(error, hub_id, repository.kind, repository.endpoint)
        finally:
            for one in pending:
                one.cancel()


def _raise_told(error: Exception, hub_id: HubId, kind: str, endpoint: str) -> NoReturn:
    """What the Hub refused, in the user's terms."""
    from huggingface_hub import errors

    where = "model" if kind == "model" else "data"
    token = "Give a token that may read it in HF_TOKEN (or run `hf auth login`)."
    page = f"{endpoint}/{'' if kind == 'model' else 'datasets/'}{hub_id.name}"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        message = f"is gated: its terms have to be accepted at {page} by the account whose token is used. {token}"
    elif isinstance(error, errors.RevisionNotFoundError):
        message = f"has no revision {hub_id.revision!r}. Check the branch, tag or commit at {page}."
    elif isinstance(error, errors.RepositoryNotFoundError):
        message = f"is not on the Hub, or is private. Check the spelling (owner/name). If it is private: {token}"
    elif status in (401, 403):
        message = f"may not be read with the token in use (the Hub answers {status}). {token}"
    elif isinstance(error, errors.HFValidationError):
        message = f"is not a Hub id: {error}"
    elif status is not None:
        raise RunFailure(f"{where}: {hub_id}: the Hub answers {status}. Try again later. ({endpoint})") from error
    else:
        raise error
    raise UserError(f"{where}: {hub_id} {message}") from error


def _snapshot(
    hub_id: HubId, kind: str, cache: Path, reason: str, tell: Progress, because: Exception | None = None
) -> Path:
    """The cached folder of a revision. Raises UserError (RunFailure after a network failure) when there is none."""
    from huggingface_hub.file_download import repo_folder_name

    storage = cache / repo_folder_name(repo_id=hub_id.name, repo_type=kind)
    revision = hub_id.revision or "main"
    reference = storage / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = storage / "snapshots" / commit
    if folder.is_dir():
        tell(f"{hub_id}: {reason}; using the cached commit {commit[:12]} in {cache}")
        return folder
    message = (
        f"{hub_id} is no file or folder here, is not in the cache ({cache}), and {reason}. Connect to the network, or "
        "name what is here."
    )
    where = "model" if kind == "model" else "data"
    if because is not None:
        raise RunFailure(f"{where}: {message}") from because
    raise UserError(f"{where}: {message}")


def _cached_model(hub_id: HubId, folder: Path, *, amount: Amount) -> Path:
    """`folder`, when the cached snapshot has all that is needed."""
    try:
        complete = (folder / "config.json").is_file()
        if amount == "tokenizer":
            complete &= any(is_of_tokenizer(path.name) for path in folder.iterdir())
        elif amount == "weights":
            complete &= weight_files(folder) is not None
    except UserError:
        complete = False
    if not complete:
        raise UserError(f"model: {hub_id}: only part of it is in the cache ({folder}). Connect once to fetch the rest.")
    return folder


def _remember(hub_id: HubId, kind: str, cache: Path, commit: str) -> None:
    """Notes which commit a branch stood for, where huggingface_hub notes it, for use without a network."""
    from huggingface_hub.file_download import repo_folder_name

    from podtune.hub.atomic import atomic_file

    revision = hub_id.revision or "main"
    if revision == commit:
        return
    reference = cache / repo_folder_name(repo_id=hub_id.name, repo_type=kind) / "refs" / revision
    if not reference.is_file() or reference.read_text() != commit:
        with atomic_file(reference) as file:
            file.write(commit.encode())
