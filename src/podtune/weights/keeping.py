"""Naming what a remat policy may keep for the backward pass. Used by leaves, attention and models.

16-bit floats are kept as their bits. XLA on a CPU writes a slice of bfloat16 into a stack by turning the whole stack
into float32 and back, once a layer; integers it writes where they belong.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

PRODUCT = "product"  # of a matrix and activations
ROTATED = "rotated"  # queries and keys after rotary embeddings
ATTENDED = "attended"  # attention's output, and its logsumexp
LAYER_INPUT = "layer_input"


def keepable_residual(x: Array, name: str) -> Array:
    """`keepable` for the forward half of a `custom_vjp`, where nothing is differentiated any more."""
    if x.dtype.itemsize != 2:
        return checkpoint_name(x, name)
    return lax.bitcast_convert_type(checkpoint_name(lax.bitcast_convert_type(x, jnp.uint16), name), x.dtype)


def keepable(x: Array, name: str) -> Array:
    """x, value and gradient unchanged, to be kept under this name."""
    return _keepable(x, name)


_keepable = jax.custom_jvp(keepable_residual, nondiff_argnums=(1,))


@_keepable.defjvp
def _keepable_jvp(name: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return keepable_residual(primals[0], name), tangents[0]
