"""The language objective: next-token cross-entropy over the trained positions, as a sum and a count.

The sums are divided once, by the step, after they have been added up over micro-batches and devices, so that neither
accumulation nor the mesh changes how much a token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from podtune.objectives.cross_entropy import chunked_cross_entropy
from podtune.parallel.sharding import data_shards
from podtune.weights.leaves import beside

# Of a row: with fewer there is little to pass over where a third of its positions bear loss, and from there on each
# reads the unembedding once more.
_LEAST_CHUNKS = 4


@runtime_checkable
class LanguageModel(Protocol):
    """What the objective needs of a model: embeddings, states before the unembedding, and the unembedding itself."""

    def embed(self, weights: Any, tokens: Any, *, compute_dtype: Any) -> Any: ...

    @property
    def hidden(self) -> Callable[..., Any]: ...

    def unembedding(self, weights: Any) -> Any: ...


@dataclass(frozen=True)
class LanguageSettings:
    """How the loss is computed. chunk_tokens: positions that a device takes through the unembedding at a time, at
    most."""

    label_smoothing: float = 0.0
    remat: str = "none"
    compute_dtype: DTypeLike = "float32"
    mesh: Mesh | None = None
    chunk_tokens: int = 512

    @property
    def row_shards(self) -> int:
        """Devices that rows are split over."""
        return 1 if self.mesh is None else data_shards(self.mesh)


def sft_loss(
    model: LanguageModel,
    weights: Any,
    batch: Mapping[str, Array],
    *,
    settings: LanguageSettings,
    embedding_noise: Callable[..., Float[Array, "rows seq embed"]] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The summed loss of the trained positions of a batch (tokens, targets, weights, segments, positions: (rows, seq)),
    and `tokens`, how many they are.

    embedding_noise(embed=width) gives what is added to the embeddings, (rows, seq, embed).
    """
    embedded = None
    if embedding_noise is not None:
        clean = model.embed(weights, batch["tokens"], compute_dtype=settings.compute_dtype)
        embedded = clean + embedding_noise(embed=clean.shape[-1]).astype(clean.dtype)
    hidden = model.hidden(
        weights,
        batch["tokens"],
        positions=batch["positions"],
        segments=batch["segments"],
        embedded=embedded,
        remat=settings.remat,
        compute_dtype=settings.compute_dtype,
        mesh=settings.mesh,
    )
    unembedding = model.unembedding(weights)
    states, matrix = beside(hidden.states, unembedding.weight, transposed=unembedding.tied)
    loss = chunked_cross_entropy(
        states,
        matrix,
        batch["targets"],
        batch["weights"],
        vocab_first=unembedding.tied,
        label_smoothing=settings.label_smoothing,
        soft_cap=unembedding.softcap,
        chunk_positions=chunk_positions(settings, *batch["tokens"].shape),
    )
    return loss, {"tokens": jnp.sum(batch["weights"])}


def chunk_positions(settings: LanguageSettings, rows: int, seq: int) -> int:
    """Of how many positions of each row a chunk is, for a batch of so many rows over all devices."""
    rows_here = max(1, rows // settings.row_shards)
    return max(1, min(settings.chunk_tokens // rows_here, seq // _LEAST_CHUNKS))
