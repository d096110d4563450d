"""What every source of weights looks like to its readers: names, shapes and partial reads.

Used by families/loading.py, which streams tensors into the mesh, and by the stores in this folder.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

TensorIndex = tuple[slice, ...]


class TensorInfo(NamedTuple):
    """Shape and type of one tensor, as in a Hugging Face checkpoint; `dtype` may be ml_dtypes.bfloat16."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """Size when held whole in memory."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@runtime_checkable
class TensorStore(Protocol):
    """Named tensors on disk. Reading one part costs memory and time for that part alone."""

    def names(self) -> Mapping[str, TensorInfo]:
        """Every tensor there is, in the order of the file."""
        ...

    def read(self, name: str, index: TensorIndex | None = None) -> np.ndarray:
        """One tensor, or the part that `index` cuts from it: plain slices without a step, one for each leading axis.

        The array may be a read-only view of the file. Raises UserError when there is no such tensor.
        """
        ...


def resolved_index(shape: tuple[int, ...], index: TensorIndex | None) -> tuple[slice, ...]:
    """`index` with a start and a stop for every axis of `shape`. Raises ValueError for a step or too many axes."""
    given = index or ()
    if len(given) > len(shape):
        raise ValueError(f"index {given} has more axes than shape {shape}")
    whole = given + (slice(None),) * (len(shape) - len(given))
    resolved = []
    for part, length in zip(whole, shape, strict=True):
        start, stop, step = part.indices(length)
        if step != 1:
            raise ValueError(f"index {given} has a step; stores read contiguous parts")
        resolved.append(slice(start, max(start, stop)))
    return tuple(resolved)
