"""One preparation: what it works from, what it is called by, and where its files go."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.config.rows import Data
from podtune.data.fingerprint import fingerprint_of
from podtune.data.prepare_inputs import Input, open_input
from podtune.data.prepare_progress import PrepareProgress
from podtune.hub.file_hashes import FileHashes
from podtune.hub.tokenizer import Tokenizer
from podtune.parallel.devices import core_count

_WORTH_PROCESSES = 8 << 20  # bytes of data
_NAME_DIGITS = 24  # of the fingerprint in a folder's name


@dataclass(frozen=True)
class PrepareJob:
    """Everything one preparation works from. The first train_inputs of inputs are trained on, the others held out."""

    data: Data
    tokenizer: Tokenizer
    max_length: int
    seed: int
    cache: Path
    inputs: tuple[Input, ...]
    train_inputs: int
    settings: dict[str, Any]
    hashes: FileHashes

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.settings)

    @property
    def folder(self) -> Path:
        """Where the finished result goes. Its name does not tell the data's, so that a moved file is found again."""
        return self.cache / self.fingerprint[:_NAME_DIGITS]

    @property
    def staging(self) -> Path:
        """Where the result is until it is whole."""
        return self.folder.with_name(self.folder.name + ".partial")

    @property
    def chunks(self) -> Path:
        """Where encoded examples are until the shards are written."""
        return self.folder.with_name(self.folder.name + ".examples")

    @property
    def local_files(self) -> list[Path]:
        return [path for entry in self.inputs for path in entry.local_files]

    def workers(self) -> int:
        """Processes to use: none for data that is prepared sooner than they start."""
        if self.data.workers is not None:
            return self.data.workers
        all_local = all(file.local is not None for entry in self.inputs for file in entry.files)
        if all_local and sum(path.stat().st_size for path in self.local_files) < _WORTH_PROCESSES:
            return 0
        return core_count()


def open_prepare_job(
    data: Data, tokenizer: Tokenizer, show: PrepareProgress, *, max_length: int, seed: int, cache: Path
) -> PrepareJob:
    """Finds the files and hashes those that are not known. Raises UserError for what is not there."""
    train = [open_input(data, source) for source in data.train]
    given = data.validation if isinstance(data.validation, tuple) else ()
    inputs = (*train, *(open_input(data, source) for source in given))
    files = [path for entry in inputs for path in entry.local_files]
    hashes = FileHashes(cache / "hashes.json")
    show.stage("reading", "bytes", sum(path.stat().st_size for path in files))
    digests = dict(zip(files, hashes.of(files, show.advance), strict=True))
    identities: Sequence[Any] = [entry.identity(digests) for entry in inputs]
    settings = {
        "train": identities[: len(train)],
        "weights": [source.weight for source in data.train],
        "validation": identities[len(train) :] if given else data.validation,
        "tokenizer": tokenizer.fingerprint,
        "template": tokenizer.chat_template,
        "max_length": max_length,
        "short_rows": data.packing and data.max_length is None,
        "seed": seed,
        **{name: getattr(data, name) for name in ("train_on", "too_long", "packing", "deduplicate")},
    }
    return PrepareJob(data, tokenizer, max_length, seed, cache, inputs, len(train), settings, hashes)
