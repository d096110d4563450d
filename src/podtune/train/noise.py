"""Randomness of a step, row by row: which rows share a micro-batch or a device must not change what they draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def row_keys(seed: int, step: Int[Array, ""], rows: Int[Array, "rows"]) -> Key[Array, "rows"]:
    """One key per row of the global batch, a function of (seed, step, row)."""
    of_step = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(of_step, row))(rows)


def neftune_noise(
    keys: Key[Array, "rows"], segments: Int[Array, "rows seq"], *, alpha: float, embed: int
) -> Float[Array, "rows seq embed"]:
    """Uniform noise of +-alpha / sqrt(L d) for the embeddings (Jain et al. 2023, algorithm 1).

    L is the length of the token's own segment, so that packing does not change it; padding gets none.
    """
    seq = segments.shape[1]
    lengths = jax.vmap(lambda row: jnp.bincount(row, length=seq + 1)[row])(segments)
    bound = jnp.where(segments > 0, alpha / jnp.sqrt(jnp.maximum(lengths, 1) * embed), 0.0)
    # The paper's noise has its own stream, apart from the dropout drawn with the same row key.
    draw = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (seq, embed), minval=-1, maxval=1))
    return draw(keys) * bound[..., None]
