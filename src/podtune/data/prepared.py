"""What `prepare` leaves on disk, opened: splits of packed rows with random access, and held-out prompts for samples.

A prepared folder holds `manifest.json` (written last: a folder without one is not there), sharded TFRecord files with
their indexes for each split, and `held_out.json`.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from podtune.config.errors import RunFailure
from podtune.data.example_codec import ExampleError, decode_example, encode_example
from podtune.data.packing import PackedRow, packing_efficiency
from podtune.data.prepare_report import PrepareReport
from podtune.data.records import RecordFile

MANIFEST = "manifest.json"
HELD_OUT = "held_out.json"


@dataclass(frozen=True)
class HeldOut:
    """A row kept from training, cut before its answer. messages: the row's own up to there; empty when not a chat."""

    prompt_ids: list[int]
    prompt_text: str
    expected_text: str
    messages: list[dict[str, Any]]


@dataclass(frozen=True)
class PreparedSplit:
    """Packed rows of one split. tokens and trained_tokens count one pass; shard_rows holds the rows of each file."""

    folder: Path
    name: str
    fingerprint: str
    rows: int
    row_tokens: int
    examples: int
    tokens: int
    trained_tokens: int
    shard_rows: tuple[int, ...]
    _open: dict[int, RecordFile] = field(default_factory=dict[int, RecordFile], compare=False, repr=False)

    @property
    def efficiency(self) -> float:
        """The share of row positions that hold a token, 0 to 1."""
        return packing_efficiency(self.tokens, self.rows, self.row_tokens)

    def shard_path(self, shard: int) -> Path:
        return self.folder / shard_name(self.name, shard, len(self.shard_rows))

    def read(self, index: int) -> PackedRow:
        """Row `index`, without padding. Raises RunFailure when its bytes are damaged."""
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of the {self.name} split, which has {self.rows}")
        shard, at = divmod(index, self.shard_rows[0])  # every shard but the last holds as many rows as the first
        file = self._open.get(shard)
        if file is None:
            file = self._open[shard] = RecordFile(self.shard_path(shard))
        return decode_row(file[at], f"{file.path}: record {at}")


@dataclass(frozen=True)
class Prepared:
    """A prepared data set. reused says that it was found in the cache."""

    folder: Path
    fingerprint: str
    train: PreparedSplit
    validation: PreparedSplit | None
    report: PrepareReport
    reused: bool = False

    def held_out_prompts(self, count: int) -> list[HeldOut]:
        """Up to `count` prompts from the validation split, always the same ones; none without a validation split."""
        if self.validation is None or count <= 0:
            return []
        try:
            held_out: list[dict[str, Any]] = json.loads((self.folder / HELD_OUT).read_text())
            return [HeldOut(**entry) for entry in held_out[:count]]
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise RunFailure(
                f"{self.folder / HELD_OUT} cannot be read ({error}). Delete the folder to prepare it anew."
            ) from error


def encode_row(row: PackedRow) -> bytes:
    """A row as a tf.train.Example of the int64 lists tokens, trained and segments."""
    return encode_example({"tokens": row.tokens, "trained": row.trained.view(np.uint8), "segments": row.segments})


def decode_row(data: bytes, where: str) -> PackedRow:
    """The row in these bytes. Raises RunFailure naming `where`."""
    try:
        features = decode_example(data)
        tokens, trained, segments = (cast(np.ndarray, features[name]) for name in ("tokens", "trained", "segments"))
    except (ExampleError, KeyError) as error:
        raise RunFailure(f"{where} is not a prepared row ({error}). Delete the folder to prepare it anew.") from error
    return PackedRow(tokens.astype(np.int32), trained.astype(np.bool_), segments.astype(np.int32))


def shard_name(split: str, shard: int, shards: int) -> str:
    return f"{split}-{shard:05d}-of-{shards:05d}.tfrecord"


def write_manifest(prepared: Prepared, folder: Path, settings: dict[str, Any]) -> None:
    """Writes the manifest into `folder`, the last file to be written there."""
    splits = [split for split in (prepared.train, prepared.validation) if split is not None]
    manifest = {
        "fingerprint": prepared.fingerprint,
        "settings": settings,
        "splits": {split.name: _split_fields(split) for split in splits},
        "report": prepared.report.to_json(),
    }
    unfinished = folder / (MANIFEST + ".tmp")
    with open(unfinished, "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MANIFEST)


def open_prepared(folder: Path, *, reused: bool = True) -> Prepared | None:
    """The prepared data in `folder`; None when it is not there or not finished. Raises RunFailure for damage."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RunFailure(f"{folder / MANIFEST} cannot be read ({error}). Delete the folder to prepare anew.") from error
    try:
        fingerprint = manifest["fingerprint"]
        splits = {name: _open_split(folder, name, fingerprint, entry) for name, entry in manifest["splits"].items()}
        report = PrepareReport.from_json(manifest["report"])
        return Prepared(folder, fingerprint, splits["train"], splits.get("validation"), report, reused)
    except (KeyError, TypeError, AttributeError) as error:
        raise RunFailure(
            f"{folder / MANIFEST} is not as it was written ({error!r}). Delete the folder to prepare anew."
        ) from error


def _split_fields(split: PreparedSplit) -> dict[str, Any]:
    names = ("rows", "row_tokens", "examples", "tokens", "trained_tokens", "shard_rows")
    return {name: getattr(split, name) for name in names}


def _open_split(folder: Path, name: str, fingerprint: str, entry: dict[str, Any]) -> PreparedSplit:
    split = PreparedSplit(
        folder,
        name,
        fingerprint,
        entry["rows"],
        entry["row_tokens"],
        entry["examples"],
        entry["tokens"],
        entry["trained_tokens"],
        tuple(entry["shard_rows"]),
    )
    missing = [shard for shard in range(len(split.shard_rows)) if not split.shard_path(shard).exists()]
    if missing:
        raise RunFailure(f"{split.shard_path(missing[0])} is missing. Delete {folder} to prepare it anew.")
    return split
