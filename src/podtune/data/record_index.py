"""The index beside a TFRecord shard: where each record starts, so that any of them is read without the others.

`train-00000-of-00004.tfrecord.idx.npy` is a plain numpy array of uint64: the byte at which each record begins, then the
size of the file.
"""

import os
from pathlib import Path

import numpy as np
from jaxtyping import UInt64

from podtune.config.errors import RunFailure


def index_path(shard: Path) -> Path:
    return shard.with_name(shard.name + ".idx.npy")


def write_index(shard: Path, offsets: UInt64[np.ndarray, "records_and_one"]) -> None:
    """Writes the index whole or not at all: it is on disk before it has its name."""
    unfinished = shard.with_name(f"{shard.name}.idx.{os.getpid()}.tmp.npy")  # so named, preparing clears it away
    with open(unfinished, "wb") as file:
        np.save(file, offsets.astype(np.uint64))
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, index_path(shard))


def read_index(shard: Path) -> UInt64[np.ndarray, "records_and_one"]:
    """Raises RunFailure when the index is missing, damaged or of another file."""
    path = index_path(shard)
    try:
        offsets: np.ndarray = np.load(path, mmap_mode="r")
        size = shard.stat().st_size
    except (OSError, ValueError, EOFError) as error:
        raise RunFailure(
            f"{path}: the index cannot be read ({error}). Delete the folder to prepare it anew."
        ) from error
    if offsets.dtype != np.uint64 or not len(offsets) or int(offsets[-1]) != size:
        raise RunFailure(
            f"{path}: the index does not belong to {shard.name} ({size} bytes). Delete the folder to prepare it anew."
        )
    return offsets
