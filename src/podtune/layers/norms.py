"""Normalisation of activations. Used by models."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows features"], weight: Array, *, epsilon: float, offset: float = 0.0) -> Array:
    """Root-mean-square normalisation (Zhang and Sennrich 2019), times (offset + weight). In float32; in x's dtype.

    offset: 1.0 for Gemma, whose weights are stored as their distance from one.
    """
    wide = x.astype(jnp.float32)
    normalised = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    scale = weight.astype(jnp.float32)
    return (normalised * (scale + offset if offset else scale)).astype(x.dtype)
