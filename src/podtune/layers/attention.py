"""Attention within segments: who sees whom, and two ways to compute it that agree. Used by models.

"plain" builds all scores at once and is the reference. "blocked" takes the queries in blocks, each over no more keys
than it can see, and recomputes its scores in the backward pass, so that no (heads, seq, seq) array ever exists.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Method = Literal["auto", "plain", "blocked"]
BLOCK = 256
MOST_BLOCKS = 32  # blocks are unrolled: more of them only make the program longer
_HIDDEN = -1e30  # finite: a row that sees nothing must not become NaN


class Places(NamedTuple):
    """Where tokens stand. slot: in the row; position: in the segment, rising strictly; segment: 0 is padding."""

    slot: Int[Array, " tokens"]
    position: Int[Array, "batch tokens"]
    segment: Int[Array, "batch tokens"]

    def part(self, start: int, stop: int) -> Places:
        return Places(self.slot[start:stop], self.position[:, start:stop], self.segment[:, start:stop])


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


def attend(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    *,
    queries: Places,
    keys: Places,
    window: int | Array | None,
    softcap: float | None,
    scale: float,
    method: Method = "auto",
    block: int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention; each kv head serves a group of query heads. Softmax in float32; in q's dtype.

    window: in positions; an array when it differs between layers of one scan, None for no window.
    softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
    block: query rows at a time in the blocked way.
    """
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)
    block = block or max(BLOCK, -(-length // MOST_BLOCKS))
    if method == "plain" or (method == "auto" and length <= block):
        out = _attend(grouped, k, v, queries, keys, window, softcap=softcap, scale=scale)
        return out.reshape(q.shape)

    # With a cache the keys are not the queries, and which of them are seen is known only when the program runs.
    own_keys = keys.slot is queries.slot
    one = jax.checkpoint(partial(_attend, softcap=softcap, scale=scale))
    parts: list[Array] = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first, last = 0, k.shape[1]
        if own_keys:
            # Positions rise by at least one a token, so a key `window` tokens back is at least `window` positions back.
            first, last = (max(0, start - window + 1) if isinstance(window, int) else 0), stop
        parts.append(
            one(
                grouped[:, start:stop],
                k[:, first:last],
                v[:, first:last],
                queries.part(start, stop),
                keys.part(first, last),
                window,
            )
        )
    return jnp.concatenate(parts, axis=1).reshape(q.shape)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    queries: Places,
    keys: Places,
    window: int | Array | None,
    *,
    softcap: float | None,
    scale: float,
) -> Array:
    """q: (batch, seq, kv_heads, group, head_dim); k, v: (batch, keys, kv_heads, head_dim)."""
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    scores = jnp.where(visible(queries, keys, window=window)[:, None, None], scores, _HIDDEN)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (out / jnp.moveaxis(total, 3, 1)[..., None]).astype(q.dtype)
