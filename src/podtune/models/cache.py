"""The keys and values of tokens already seen, for generation. Used by the decoder and by serve."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from podtune.parallel.sharding import sharding_for
from podtune.weights.tree import weight_dataclass


@weight_dataclass
class KVCache:
    """k, v: (layers, batch, length, kv_heads, head_dim). A slot is seen by queries of its own segment only.

    positions, segments: (batch, length) of each slot; segment 0 marks a slot that is empty or holds padding.
    filled: () int32, the slots written so far; the next tokens of every row go there.
    """

    k: Any
    v: Any
    positions: Any
    segments: Any
    filled: Any

    @property
    def length(self) -> int:
        return self.positions.shape[1]

    def write_places(self, positions: jax.Array, segments: jax.Array) -> KVCache:
        """The cache with the places of new tokens (batch, seq) in its next slots; `filled` moves on."""
        return dataclasses.replace(
            self,
            positions=jax.lax.dynamic_update_slice(self.positions, positions, (0, self.filled)),
            segments=jax.lax.dynamic_update_slice(self.segments, segments, (0, self.filled)),
            filled=self.filled + positions.shape[1],
        )


def create_cache(
    *,
    layers: int,
    batch: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
) -> KVCache:
    """An empty cache; on a mesh its rows lie with the batch and its heads with the kv heads."""

    def zeros(shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike) -> jax.Array:
        return jnp.zeros(shape, dtype, device=None if mesh is None else sharding_for(mesh, axes, shape))

    shape, axes = (layers, batch, length, kv_heads, head_dim), ("layers", "batch", "seq", "kv_heads", "head_dim")
    return KVCache(
        k=zeros(shape, axes, dtype),
        v=zeros(shape, axes, dtype),
        positions=zeros((batch, length), ("batch", "seq"), jnp.int32),
        segments=zeros((batch, length), ("batch", "seq"), jnp.int32),
        filled=zeros((), (), jnp.int32),
    )
