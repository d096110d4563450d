"""Writes a model's weights tensor by tensor into safetensors shards that appear all at once. Used by export."""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from podtune.hub.atomic import new_scratch_folder, replace_folder
from podtune.hub.safetensors_file import DTYPE_NAMES
from podtune.hub.safetensors_store import INDEX_NAME, SINGLE_NAME
from podtune.hub.tensors import TensorInfo

DEFAULT_SHARD_BYTES = 5_000_000_000
# Arrays that do not lie together in memory are written in pieces of about this size: no copy of a whole is made.
_PIECE_BYTES = 16 << 20


class _Place(NamedTuple):
    shard: int
    offset: int


class StreamedWriter:
    """Safetensors of a planned set of tensors, written one at a time in any order; nothing is kept in memory.

    All goes into `scratch`, a hidden folder beside `folder`, which takes the place of `folder` in `close`: a killed
    writer leaves the old folder or none. Files put into `scratch` before `close` (configuration, tokenizer) appear
    together with the weights; other files of an existing `folder` are kept. Leaving a `with` by an error discards it.
    """

    def __init__(
        self,
        folder: Path | str,
        plan: Mapping[str, TensorInfo],
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ):
        if not plan:
            raise ValueError("no tensors are planned")
        self.folder = Path(folder)
        self._plan = dict(plan)
        self._shards = _shards(self._plan, max_shard_bytes)
        count = len(self._shards)
        self._file_names = (
            [SINGLE_NAME]
            if count == 1
            else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        )
        self._places: dict[str, _Place] = {}
        self._unwritten = set(self._plan)
        self.scratch = new_scratch_folder(self.folder)
        self._files = [self._start(number) for number in range(count)]

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes one planned tensor. Raises ValueError when it is not as planned or was written before."""
        if name not in self._unwritten:
            raise ValueError(f"{name} was {'written before' if name in self._plan else 'not planned'}")
        planned = self._plan[name]
        if array.shape != planned.shape or array.dtype != planned.dtype:
            raise ValueError(f"{name} is {array.shape} {array.dtype}, planned {planned.shape} {planned.dtype}")
        place = self._places[name]
        file = self._files[place.shard]
        file.seek(place.offset)
        _write_array(file, array)
        self._unwritten.remove(name)

    def close(self) -> None:
        """Puts the finished folder in place. Raises ValueError when planned tensors are missing."""
        if self._unwritten:
            missing = sorted(self._unwritten)
            self.discard()
            raise ValueError(f"{len(missing)} planned tensors were not written: {', '.join(missing[:5])}")
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if len(self._file_names) > 1:
            self._write_index()
        _keep_other_files(self.folder, self.scratch)
        replace_folder(self.folder, self.scratch)

    def discard(self) -> None:
        """Gives up: what was written is deleted, `folder` stays as it was."""
        for file in self._files:
            file.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> "StreamedWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _start(self, number: int) -> BinaryIO:
        """Opens a shard at its full size with its header written."""
        # transformers refuses a file that does not say "format": "pt".
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in self._shards[number]:
            info = self._plan[name]
            content[name] = {
                "dtype": DTYPE_NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [position, position + info.bytes],
            }
            position += info.bytes
        header = json.dumps(content, separators=(",", ":")).encode()
        # Values begin at a multiple of 8 bytes, so that a map of the file is aligned.
        header += b" " * (-len(header) % 8)
        start = 8 + len(header)
        for name in self._shards[number]:
            self._places[name] = _Place(number, start)
            start += self._plan[name].bytes
        file = (self.scratch / self._file_names[number]).open("wb")
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(start)
        return file

    def _write_index(self) -> None:
        total = sum(info.bytes for info in self._plan.values())
        parameters = sum(info.bytes // info.dtype.itemsize for info in self._plan.values())
        weight_map = {name: self._file_names[self._places[name].shard] for name in sorted(self._plan)}
        content = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
        with (self.scratch / INDEX_NAME).open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())


def _shards(plan: Mapping[str, TensorInfo], max_shard_bytes: int) -> list[list[str]]:
    """Names in the plan's order, cut into files of at most `max_shard_bytes`; a tensor is never divided."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in plan.items():
        if shards[-1] and filled + info.bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += info.bytes
    return shards


def _write_array(file: BinaryIO, array: np.ndarray) -> None:
    if array.flags.c_contiguous:
        file.write(array.reshape(-1).view(np.uint8).data)
        return
    rows = max(1, _PIECE_BYTES // max(1, array[0].nbytes))
    for start in range(0, len(array), rows):
        file.write(np.ascontiguousarray(array[start : start + rows]).reshape(-1).view(np.uint8).data)


def _keep_other_files(old: Path, new: Path) -> None:
    """What else stood in the folder (configuration, tokenizer) stays; old weights and their index do not."""
    if not old.is_dir():
        return
    for path in old.iterdir():
        target = new / path.name
        if target.exists() or path.name.endswith((".safetensors", ".safetensors.index.json")):
            continue
        if path.is_dir():
            shutil.copytree(path, target, copy_function=_link)
        else:
            _link(str(path), str(target))


def _link(source: str, target: str) -> None:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)
