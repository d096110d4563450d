"""Reads a folder of safetensors, single or sharded, by memory map. Used by sources."""

import json
import mmap
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from podtune.config.errors import UserError
from podtune.hub.safetensors_file import Placed, header_length, read_header
from podtune.hub.tensors import TensorIndex, TensorInfo, resolved_index

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsStore:
    """A TensorStore over the safetensors of one folder. Reads are read-only views of the mapped files.

    `only`: the one file to read, such as an adapter's, in place of the model's.
    """

    def __init__(self, folder: Path, *, only: str | None = None):
        self._folder = folder
        self._tensors: dict[str, tuple[Placed, mmap.mmap]] = {}
        listed = weight_files(folder) if only is None else dict[str, str]()
        homes: dict[str, str] = {}
        for file_name in dict.fromkeys(listed.values()) if listed else [only or SINGLE_NAME]:
            view, placed = _open_file(folder / file_name)
            for name, place in placed.items():
                if name in homes:
                    raise UserError(
                        f"{folder}: tensor {name} is in both {homes[name]} and {file_name}; which one counts cannot be "
                        "told. Delete the stale files, or download the model again."
                    )
                homes[name] = file_name
                self._tensors[name] = (place, view)
        if listed:
            _check_index(folder, listed, homes)

    def names(self) -> Mapping[str, TensorInfo]:
        return {name: place.info for name, (place, _) in self._tensors.items()}

    def read(self, name: str, index: TensorIndex | None = None) -> np.ndarray:
        if name not in self._tensors:
            raise UserError(f"{self._folder}: holds no tensor {name}.")
        (info, offset), view = self._tensors[name]
        count = info.bytes // info.dtype.itemsize
        whole = np.frombuffer(view, np.uint8, count=info.bytes, offset=offset) if count else np.empty(0, np.uint8)
        # The ellipsis keeps a scalar an array.
        return whole.view(info.dtype).reshape(info.shape)[(*resolved_index(info.shape, index), ...)]


def weight_files(folder: Path) -> dict[str, str]:
    """Which file of `folder` holds which tensor, from the index; empty for a single model.safetensors.

    Raises UserError when the folder has no weights, has them in pickles, or its index cannot be followed.
    """
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if single.exists() and index.exists():
        raise UserError(
            f"{folder}: holds both {SINGLE_NAME} and {INDEX_NAME}; which counts cannot be told. Delete the stale one."
        )
    if single.exists():
        return {}
    if not index.exists():
        raise _no_weights(folder)
    listed = parse_index(index.read_text(encoding="utf-8", errors="replace"), index)
    absent = sorted({file for file in listed.values() if not (folder / file).is_file()})
    if absent:
        raise UserError(
            f"{index}: names {len(absent)} files that are not there: {', '.join(absent[:4])}"
            f"{', …' if len(absent) > 4 else ''}. Download the model again."
        )
    return listed


def parse_index(text: str, where: str | Path) -> dict[str, str]:
    """Tensor name to file name from the content of an index. Raises UserError when it is not one."""
    try:
        listed = json.loads(text)["weight_map"]
        sound = all(isinstance(file, str) and Path(file).name == file for file in listed.values()) and listed
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: is not an index of safetensors ({error!r}). Download the model again.") from None
    if not sound:
        raise UserError(f"{where}: its weight_map must name files of this folder. Download the model again.")
    return listed


def _open_file(path: Path) -> tuple[mmap.mmap, dict[str, Placed]]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise UserError(f"{path}: {size} bytes is too short for a safetensors file. Download it again.")
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    length = header_length(view[:8], size, path)
    return view, read_header(view[8 : 8 + length], size, path)


def _check_index(folder: Path, listed: Mapping[str, str], homes: Mapping[str, str]) -> None:
    wrong = [name for name, file in listed.items() if homes.get(name) != file]
    unlisted = [name for name in homes if name not in listed]
    if wrong or unlisted:
        what = f"{wrong[0]} is not in {listed[wrong[0]]}" if wrong else f"{unlisted[0]} is in no list"
        raise UserError(
            f"{folder / INDEX_NAME}: does not agree with the files beside it for {len(wrong) + len(unlisted)} tensors "
            f"({what}). Index and files are of different saves; download or save the model again."
        )


def _no_weights(folder: Path) -> UserError:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    shards = [name for name in names if _SHARD.fullmatch(name)]
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if shards:
        return UserError(
            f"{folder}: has {len(shards)} shards ({shards[0]}, …) but no {INDEX_NAME}, which says what belongs to the "
            "model. Download the index as well."
        )
    if pickles:
        return UserError(
            f"{folder}: has its weights in {pickles[0]}, a pickle, which can run any code when it is opened and is not "
            "read. Convert it once where you trust it: AutoModelForCausalLM.from_pretrained(folder)."
            "save_pretrained(new_folder) writes safetensors."
        )
    return UserError(
        f"{folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}. "
        f"It holds {', '.join(names[:8]) or 'no files'}{', …' if len(names) > 8 else ''}. Name a folder with weights."
    )
