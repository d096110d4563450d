"""Attention within segments, in two ways that agree. Used by models.

"plain" builds all scores at once and is the reference. "blocked" takes the queries in blocks, each over no more keys
than it can see, and keeps no scores for the backward pass. How many blocks are alive at once is for XLA to choose.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podtune.layers.blocked_attention import MASKED, BlockedSettings, blocked_attention
from podtune.layers.places import Places, visible

Method = Literal["auto", "plain", "blocked"]
BLOCK = 128
MOST_BLOCKS = 16  # blocks are unrolled: more of them skip more of what is masked, and make the program longer


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
    method: auto is plain for a single query, blocked for more. block: queries at a time in the blocked way.
    """
    batch, length, heads, head_dim = q.shape
    block = block or max(BLOCK, -(-length // MOST_BLOCKS))
    if method == "plain" or (method == "auto" and length == 1):
        grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)
        out = _attend(grouped, k, v, queries, keys, window, softcap=softcap, scale=scale)
        return out.reshape(q.shape)

    settings = BlockedSettings(
        scale=scale,
        softcap=softcap,
        block=block,
        window=window if isinstance(window, int) else None,
        own_keys=keys.slot is queries.slot,
    )
    traced = None if window is None or isinstance(window, int) else window
    return blocked_attention(q, k, v, queries=queries, keys=keys, window=traced, settings=settings)


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
    scores = jnp.where(visible(queries, keys, window=window)[:, None, None], scores, MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = weights.sum(axis=-1)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (out / jnp.moveaxis(total, 3, 1)[..., None]).astype(q.dtype)
