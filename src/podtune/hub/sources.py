"""Finds the model a run names and opens it: its configuration, tensors and tokenizer files.

Used by families (configuration and weights), tokenizer.py and the planner.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podtune.config.errors import UserError
from podtune.hub.gguf_config import hugging_face_config, hugging_face_generation_config
from podtune.hub.gguf_file import GgufFile, open_gguf
from podtune.hub.gguf_store import GgufStore
from podtune.hub.tensors import TensorStore

# Told what is being done, in one line.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine: a folder as on the Hub, or one GGUF file. `config` is the content of its config.json."""

    source: str
    folder: Path | None
    gguf: Path | None
    config: dict[str, Any]
    generation_config: dict[str, Any]
    fingerprint: str
    header: GgufFile | None = field(default=None, repr=False, compare=False)

    def tensors(self) -> TensorStore:
        """The weights. Raises UserError when they are absent or damaged."""
        if self.header is not None:
            return GgufStore(self.header)
        raise UserError(f"{self.source}: safetensors folders are not read yet.")

    def read_text(self, name: str) -> str | None:
        """The content of a text file of the folder, or None where there is no such file."""
        if self.folder is None or not (self.folder / name).is_file():
            return None
        return (self.folder / name).read_text(encoding="utf-8")


def resolve_model(
    source: str, *, cache: Path | None = None, offline: bool = False, progress: Progress | None = None
) -> ModelFiles:
    """Fetches (where it is not here yet) and opens the model that `source` names.

    `source` is a Hub id with an optional @revision, a folder, a .gguf file, or either under gs:// or s3://.
    """
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        return open_gguf_model(source, path)
    raise UserError(f"model: {source}: only .gguf files are read yet.")


def open_gguf_model(source: str, path: Path) -> ModelFiles:
    """A GGUF file as a model."""
    header = open_gguf(path)
    return ModelFiles(
        source=source,
        folder=None,
        gguf=path,
        config=hugging_face_config(header),
        generation_config=hugging_face_generation_config(header),
        fingerprint="",
        header=header,
    )
