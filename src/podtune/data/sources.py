"""Where rows come from: a source of the run file -> its files -> records, streamed. Used by prepare and init."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from podtune.config.errors import UserError
from podtune.config.rows import Source
from podtune.config.wording import counted, nearest_to
from podtune.data.local_files import HIDDEN, files_below, files_matching, is_pattern, matched_otherwise, passed_over
from podtune.data.open_files import DataFile, split_compression
from podtune.data.read_json import read_json, read_jsonl
from podtune.data.read_tables import read_csv, read_parquet, read_tsv
from podtune.data.read_text import read_text, read_text_lines, read_text_paragraphs, read_tfrecord
from podtune.data.rows import Record, Refused
from podtune.hub.addresses import check_address, file_system, is_address
from podtune.hub.download import HubId, open_hub_dataset, parse_hub_id
from podtune.hub.remote import content_identity

Reader = Callable[[DataFile], Iterator[Record | Refused]]

FORMATS: Mapping[str, Reader] = {
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "tsv": read_tsv,
    "parquet": read_parquet,
    "text": read_text,
    "text lines": read_text_lines,
    "text paragraphs": read_text_paragraphs,
    "tfrecord": read_tfrecord,
}

_ENDINGS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".txt": "text", ".text": "text", ".md": "text", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord",
}  # fmt: skip
_HUB_METADATA = ("dataset_infos.json", "dataset_info.json", "state.json", "config.json")
_SPLIT_WORDS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "eval": "validation", "test": "test", "testing": "test",
}  # fmt: skip
_SHARD = re.compile(r"-\d+-of-\d+$")  # TensorFlow names shards after the ending: train.tfrecord-00000-of-00008
_READ = "jsonl, json, csv, tsv, parquet, txt, md and tfrecord, each also with .gz or .zst"


class Listing(NamedTuple):
    """The files of a source; and what a folder holds besides and is not read, in words, empty where that is nothing."""

    files: tuple[DataFile, ...]
    left_out: str = ""


def list_files(source: Source) -> tuple[DataFile, ...]:
    """The files of a source, sorted by name. Raises UserError when there are none, or of a kind podtune cannot read."""
    return list_source(source).files


def list_source(source: Source) -> Listing:
    """As list_files, with what is left out."""
    check_data_source(source)
    path = source.path
    if path.startswith("hub://"):
        found = Listing(_hub_files(source))
    elif is_address(path):
        found = _remote_files(path)
    else:
        found = _local_files(path)
    return found if source.documents == "file" else Listing(_divided(source, found.files), found.left_out)


def check_data_source(source: Source) -> None:
    """Raises UserError for what can be known to be wrong before anything is fetched or looked for."""
    path = source.path
    assert not source.split or path.startswith("hub://"), "as config/rules.py sees to, with file and line"
    if path.startswith("hub://"):
        _hub_dataset(path)
    elif is_address(path):
        check_address(path)


def read_file(file: DataFile) -> Iterator[Record | Refused]:
    """The records of one file, streamed, and the lines that are none. Raises UserError where reading cannot go on,
    naming the file, the line or record, and the column."""
    return FORMATS[file.format](file)


def format_of(name: str) -> tuple[str, str] | None:
    """The format and the compression that a file name stands for; None when it stands for none that is read."""
    plain, compression = split_compression(_SHARD.sub("", name.lower()))
    found = _ENDINGS.get(Path(_SHARD.sub("", plain)).suffix)
    return (found, compression) if found else None


def _divided(source: Source, files: Sequence[DataFile]) -> tuple[DataFile, ...]:
    """Text files to be read as several documents each."""
    if other := next((file for file in files if file.format != "text"), None):
        raise UserError(
            f"data: documents: {source.documents}: {other.origin} is no plain text file; its rows are its documents."
        )
    return tuple(replace(file, format=f"text {source.documents}s") for file in files)


def _local_files(path: str) -> Listing:
    here = Path(path).expanduser()
    if here.is_dir():
        inside = files_below(here)
        names = [str(p) for p in inside if format_of(p.name)]
        hidden, irregular = passed_over(here)
        unknown = [str(p.relative_to(here)) for p in inside if not format_of(p.name)]
        left_out = _left_out(hidden, unknown, irregular)
        if not names:
            what = f"{counted(len(inside), 'file')}, none of which podtune reads" if inside else "no files"
            raise UserError(f"{path}: the folder holds {what}. It reads {_READ}.{f' {left_out}.' if left_out else ''}")
        return Listing(_one_kind(path, [_local(name) for name in names]), left_out)
    if here.is_file():
        return Listing((_local(str(here)),))
    if here.exists():
        raise UserError(f"{path}: this is no regular file (a pipe or a device). Write what it gives to a file first.")
    if is_pattern(path):
        names = files_matching(str(here))
        if not names:
            raise UserError(f"{path}: the pattern matches no file (looked from {Path.cwd()}).")
        return Listing(tuple(_local(name) for name in names), _left_out(irregular=matched_otherwise(str(here))))
    if here.is_symlink():
        raise UserError(f"{path}: this is a link to {os.readlink(here)}, which is not there, or leads back to itself.")
    raise UserError(f"{path}: there is no such file or folder{nearest_to(here)}")


def _local(name: str) -> DataFile:
    found = format_of(name)
    if found is None:
        raise UserError(f"{name}: podtune does not know this kind of file. It reads {_READ}.")
    return DataFile(name, *found, local=Path(name))


def _left_out(hidden: Sequence[str] = (), unknown: Sequence[str] = (), irregular: Sequence[str] = ()) -> str:
    """What a folder holds, or a pattern matches, that is not read, counted, with the first names of each kind."""
    kinds = {
        "names that begin with . or _": hidden,
        "files of a kind podtune does not know": unknown,
        "links that lead nowhere, pipes and the like": irregular,
    }
    told = [
        f"{why}: {len(names):,} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
        for why, names in kinds.items()
        if names
    ]
    return f"not read: {'; '.join(told)}" if told else ""


def _hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith(HIDDEN) for part in parts)


def _one_kind(path: str, files: Sequence[DataFile]) -> tuple[DataFile, ...]:
    """The files of a folder, which must be of one kind: a LICENSE.txt beside the data is not data."""
    kinds: dict[str, int] = {}
    for file in files:
        kinds[file.format] = kinds.get(file.format, 0) + 1
    kinds_without_notes = {kind: count for kind, count in kinds.items() if kind != "text"}
    if len(kinds) > 1:
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        kind = next(iter(kinds_without_notes))
        raise UserError(f"{path}: the folder holds several kinds of file ({listed}). Name one: {path}/*.{kind}")
    return tuple(files)


def _remote_files(url: str) -> Listing:
    system, path = file_system(url)
    scheme = url.partition("://")[0]
    try:
        if is_pattern(path):
            found: list[str] = sorted(system.glob(path))
            infos = [system.info(name) for name in found]
        else:
            info = system.info(path)
            infos = list(system.find(path, detail=True).values()) if info["type"] == "directory" else [info]
    except FileNotFoundError as error:
        raise UserError(f"{url}: there is no such file or folder.") from error
    except Exception as error:  # each storage has exceptions of its own for a key that is wrong or missing
        raise UserError(
            f"{url}: cannot be reached: {error}. `podtune doctor` says which credentials there are."
        ) from error
    there = {
        str(info["name"]): info for info in sorted(infos, key=lambda info: str(info["name"])) if info["type"] == "file"
    }
    folder = path.strip("/") + "/"
    below = {name: name.lstrip("/").removeprefix(folder) for name in there}
    whole = not is_pattern(path) and all(name.lstrip("/").startswith(folder) for name in there)
    hidden = {name for name in there if whole and _hidden(Path(below[name]).parts)}
    unknown = {name for name in there.keys() - hidden if not format_of(name)}
    files = [_remote(scheme, info) for name, info in there.items() if name not in hidden | unknown]
    if not files:
        what = "the pattern matches no file" if is_pattern(path) else "there is no file of a kind that podtune reads"
        raise UserError(f"{url}: {what}. It reads {_READ}.")
    if not whole:
        return Listing(tuple(files))
    return Listing(
        _one_kind(url, files), _left_out(*(sorted(below[name] for name in names) for names in (hidden, unknown)))
    )


def _remote(scheme: str, info: Mapping[str, Any]) -> DataFile:
    name = str(info["name"])
    found = format_of(name)
    assert found is not None, "filtered before"
    told = content_identity(info)
    signature = f"{info.get('size')} {told}" if told else ""
    return DataFile(f"{scheme}://{name.lstrip('/')}", *found, signature=signature)


def _hub_files(source: Source) -> tuple[DataFile, ...]:
    """The files of one split of a Hub dataset, fetched; all of one commit, whatever is pushed meanwhile."""
    hub_id, split = _hub_dataset(source.path)
    dataset = open_hub_dataset(hub_id)
    names = [name for name in dataset.names if not _hidden(Path(name).parts)]
    files = [
        DataFile(f"hub://{hub_id}/{name}", *found)
        for name in names
        if (found := format_of(name)) and found[0] != "text" and Path(name).name not in _HUB_METADATA
    ]
    if not files:
        listed = ", ".join(names[:8]) or "nothing"
        raise UserError(f"{source.path}: the dataset holds no file that podtune reads ({_READ}). It holds {listed}.")
    chosen = _of_split(source.path, files, source.split or split)
    start = len(f"hub://{hub_id}/")
    paths = dataset.fetch([file.origin[start:] for file in chosen])
    return tuple(replace(file, local=path) for file, path in zip(chosen, paths, strict=True))


def _hub_dataset(path: str) -> tuple[HubId, str | None]:
    """The repository and the split that hub://owner/name@revision:split names."""
    repository, _, split = path.removeprefix("hub://").partition(":")
    hub_id = parse_hub_id(repository)
    if hub_id is None:
        raise UserError(f"data: {path}: a Hub dataset is written hub://owner/name, with @revision or :split after.")
    return hub_id, split or None


def _of_split(path: str, files: Sequence[DataFile], split: str | None) -> tuple[DataFile, ...]:
    """Files by the split that their names tell; the train split unless another is asked for."""
    splits: dict[str, list[DataFile]] = {}
    for file in files:
        within = file.origin.removeprefix("hub://").split("/", 2)[-1]  # owner/name may hold such words too
        splits.setdefault(_split_in(within), []).append(file)
    known = ", ".join(sorted(splits))
    if split is not None:
        if split not in splits:
            raise UserError(f"{path}: there is no split {split}; it has {known}.")
        return _one_kind(path, splits[split])
    return _one_kind(path, splits.get("train") or next(iter(splits.values())))


def _split_in(name: str) -> str:
    """The split that a file's name (or a folder on its way) tells, the innermost word first."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((_SPLIT_WORDS[word] for word in reversed(words) if word in _SPLIT_WORDS), "train")
