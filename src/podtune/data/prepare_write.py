"""Second half of preparing: the packed rows of each split go to TFRecord shards, several processes at a time."""

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from podtune.data.packing import Packing, assemble_row
from podtune.data.prepare_encode import TRAINED_BIT, WorkSettings, chunk_path
from podtune.data.prepare_select import Examples
from podtune.data.prepared import encode_row, shard_name
from podtune.data.record_index import index_path, read_index
from podtune.data.records import RecordWriter

_SHARD_TOKENS = 1 << 20  # about 5 MB of TFRecord: small enough that no process waits long for the last of another
_MOST_SHARDS = 256  # each is an open file while training


def shard_rows(rows: int, row_tokens: int) -> tuple[int, ...]:
    """Rows of each shard: as many in every one but the last. Depends on the data alone."""
    shards = min(_MOST_SHARDS, -(-rows * row_tokens // _SHARD_TOKENS))
    each = max(1, -(-rows // max(1, shards)))
    return tuple(min(each, rows - start) for start in range(0, rows, each))


def write_plan(chunks: Path, split: str, examples: Examples, packing: Packing) -> None:
    """Puts down for the workers which tokens make which row."""
    order = packing.order
    parts = np.column_stack([examples.chunk[order], examples.start[order], examples.length[order]]).astype(np.int64)
    np.save(chunks / f"plan-{split}-parts.npy", parts)
    np.save(chunks / f"plan-{split}-rows.npy", packing.starts)


def write_shard(settings: WorkSettings, split: str, shard: int, sizes: tuple[int, ...]) -> int:
    """Writes one shard unless it is there; returns its rows."""
    path = settings.shards / shard_name(split, shard, len(sizes))
    if path.exists() and index_path(path).exists() and len(read_index(path)) == sizes[shard] + 1:
        return sizes[shard]
    parts: Int64[np.ndarray, "parts 3"] = np.load(settings.chunks / f"plan-{split}-parts.npy", mmap_mode="r")
    starts: Int64[np.ndarray, "rows_and_one"] = np.load(settings.chunks / f"plan-{split}-rows.npy", mmap_mode="r")
    first = sum(sizes[:shard])
    with RecordWriter(path) as writer:
        for row in range(first, first + sizes[shard]):
            examples = [_read_part(settings.chunks, *part) for part in parts[starts[row] : starts[row + 1]].tolist()]
            writer.write(encode_row(assemble_row(examples)))
    return sizes[shard]


def read_example(chunks: Path, examples: Examples, index: int) -> tuple[np.ndarray, np.ndarray]:
    """The (tokens, trained) of one example."""
    return _read_part(chunks, int(examples.chunk[index]), int(examples.start[index]), int(examples.length[index]))


def _read_part(chunks: Path, chunk: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    data = os.pread(_descriptor(chunks, chunk).number, 4 * length, 4 * start)
    marked = np.frombuffer(data, np.uint32)
    return (marked & ~TRAINED_BIT).view(np.int32), marked >= TRAINED_BIT


class _Descriptor:
    """An open file that closes when forgotten."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


@lru_cache(maxsize=128)
def _descriptor(chunks: Path, chunk: int) -> _Descriptor:
    return _Descriptor(chunk_path(chunks, chunk))


def forget_chunks() -> None:
    """Closes the staged chunks that this process has open."""
    _descriptor.cache_clear()
