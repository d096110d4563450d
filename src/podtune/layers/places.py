"""Where tokens stand in their rows and segments, and which of them see which. Used by attention and models."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Places(NamedTuple):
    """Where tokens stand. slot: in the row; position: in the segment, rising strictly; segment: 0 is padding."""

    slot: Int[Array, " tokens"]
    position: Int[Array, "batch tokens"]
    segment: Int[Array, "batch tokens"]

    def part(self, tokens: slice) -> Places:
        return Places(self.slot[tokens], self.position[:, tokens], self.segment[:, tokens])


def places(position: Int[Array, "batch tokens"], segment: Int[Array, "batch tokens"]) -> Places:
    return Places(jnp.arange(position.shape[1]), position, segment)


def visible(queries: Places, keys: Places, *, window: int | Array | None) -> Array:
    """(batch, queries, keys): the key is of the same segment, no later, and less than `window` positions before."""
    distance = queries.position[:, :, None] - keys.position[:, None, :]
    seen = (queries.segment[:, :, None] == keys.segment[:, None, :]) & (distance >= 0)
    seen &= queries.slot[:, None] >= keys.slot[None, :]
    return seen if window is None else seen & (distance < window)


def segment_lengths(tokens: Places, keys: Places) -> Int[Array, "batch tokens"]:
    """For each token, one more than the greatest position among the keys of its segment."""

    def of_row(segments: Array, key_positions: Array, key_segments: Array) -> Array:
        # A row holds at most as many segments as keys; padding, segment 0, is one of its own.
        greatest = jax.ops.segment_max(key_positions, key_segments, num_segments=key_positions.shape[0] + 1)
        return greatest[segments]

    return jax.vmap(of_row)(tokens.segment, keys.position, keys.segment) + 1
