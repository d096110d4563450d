"""What is kept from layer to layer and for the backward pass: named for remat policies, and held as XLA is quick with.

XLA on a CPU takes a slice of bfloat16 out of a stack, or writes one into it, by way of the whole stack in float32:
anew for every layer, or as a second copy of the weights, twice as large. Bits are integers to it, and left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

    16-bit floats are kept as their bits.
    """
    if not _is_narrow(x):
        return checkpoint_name(x, name)
    return lax.bitcast_convert_type(checkpoint_name(_bits(x), name), x.dtype)


def stack_as_bits(stack: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A tree of frozen stacks to be scanned over, its 16-bit floats as bits; and what makes a slice of it whole again.

    Raises TypeError when such a weight is differentiated: no gradient passes through bits.
    """
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(stack)]

    def whole(layer: Any) -> Any:
        leaves, structure = jax.tree.flatten(layer)
        restored = [
            leaf if leaf.dtype == dtype else lax.bitcast_convert_type(leaf, dtype)
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ]
        return jax.tree.unflatten(structure, restored)

    return jax.tree.map(lambda leaf: _bits(_frozen(leaf)) if _is_narrow(leaf) else leaf, stack), whole


def _is_narrow(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize == 2


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint16)


@jax.custom_jvp
def _frozen(x: Array) -> Array:
    return x


@_frozen.defjvp
def _frozen_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    raise TypeError(f"weights of {primals[0].dtype} are frozen; hold those to be trained in float32")


_keepable = jax.custom_jvp(keepable_residual, nondiff_argnums=(1,))


@_keepable.defjvp
def _keepable_jvp(name: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return keepable_residual(primals[0], name), tangents[0]
