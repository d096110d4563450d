"""Naming what a remat policy may keep for the backward pass. Used wherever such a value is made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

PRODUCT = "product"  # of a matrix and activations
ROTATED = "rotated"  # queries and keys after rotary embeddings
ATTENDED = "attended"  # what attention's backward pass needs of its forward one
LAYER_INPUT = "layer_input"


def keepable(x: Array, name: str) -> Array:
    """x, to be kept under this name."""
    return _keepable(x, name)


def keepable_residual(x: Array, name: str) -> Array:
    """The same where nothing is differentiated any more: in the forward half of a `custom_vjp`.

    16-bit floats are kept as their bits: on a CPU, XLA writes into a stack of bfloat16 by converting the whole stack to
    float32 and back, at every layer.
    """
    if jnp.dtype(x.dtype).itemsize != 2:
        return checkpoint_name(x, name)
    bits = lax.bitcast_convert_type(x, jnp.uint16)
    return lax.bitcast_convert_type(checkpoint_name(bits, name), x.dtype)


_keepable = jax.custom_jvp(keepable_residual, nondiff_argnums=(1,))


@_keepable.defjvp
def _keepable_jvp(name: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return keepable_residual(primals[0], name), tangents[0]
