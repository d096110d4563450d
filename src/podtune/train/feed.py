"""From the loader's numpy rows to arrays on the mesh, with the time the loop had to wait for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from podtune.data.loader import Batch, Loader
from podtune.parallel.sharding import batch_sharding

# What a host may ask of all of them; the step returns the largest request of any.
NO_REQUEST, SAVE, STOP = 0, 1, 2


class Feed:
    """Batches from `start_step` on, in order. `waited` sums the seconds spent waiting for data."""

    def __init__(self, loader: Loader, mesh: Mesh, *, start_step: int, passed_over: Set[int] = frozenset()) -> None:
        self._mesh, self._loader = mesh, loader
        self._batches: Iterator[Batch] = loader.iterate(start_step)
        self._step = start_step
        self._passed_over = passed_over
        self.waited = 0.0

    def next(self, request: int = NO_REQUEST) -> dict[str, jax.Array]:
        """The next batch on the devices. A step that is passed over gets its rows with nothing to train in them."""
        started = time.perf_counter()
        batch = next(self._batches)
        self.waited += time.perf_counter() - started
        trained = self._step not in self._passed_over
        self._step += 1
        return on_mesh(batch, self._mesh, loader=self._loader, request=request, trained=trained)

    def close(self) -> None:
        """Ends the loader's threads."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


def on_mesh(
    batch: Batch, mesh: Mesh, *, loader: Loader | None = None, request: int = NO_REQUEST, trained: bool = True
) -> dict[str, jax.Array]:
    """This process's rows as part of the global arrays. loader: that it comes from, and that knows which rows of the
    global batch these are; without one they are all of them."""
    sharding = batch_sharding(mesh)
    arrays: dict[str, np.ndarray] = dict(vars(batch))
    arrays["requests"] = np.full(len(batch.tokens), request, np.int32)
    if not trained:
        arrays["weights"] = np.zeros_like(batch.weights)
    rows, places = (len(batch.tokens), None) if loader is None else (loader.batch_rows, loader.places)

    def placed(array: np.ndarray) -> jax.Array:
        shape = (rows, *array.shape[1:])

        def of_device(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(rows)
            first = start if places is None else int(np.searchsorted(places, start))
            return array[first : first + stop - start]

        return jax.make_array_from_callback(shape, sharding, of_device)

    return {name: placed(array) for name, array in arrays.items()}


def loader_for(split: Any, mesh: Mesh, *, seed: int, batch_rows: int, once: bool = False) -> Loader:
    """A loader of the rows that this process's devices hold: jax lays a mesh along the links between chips, so the rows
    of a host may lie apart. Where processes share rows (a tensor axis over hosts), each of them loads those rows."""
    held = batch_sharding(mesh).addressable_devices_indices_map((batch_rows, 1))
    ranges = {index[0].indices(batch_rows) for index in held.values() if index is not None}
    places = sorted({place for each in ranges for place in range(*each)})
    return Loader(split, seed=seed, batch_rows=batch_rows, places=places, once=once)
