"""Matrix products of activations and weights, and their gradients, each in the form that is quick. Used by leaves.

A device sums a product of 16-bit floats in float32 and rounds it once, to the dtype of the first factor.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def contract(x: Float[Array, "..."], weight: Float[Array, "..."], inputs: int) -> Float[Array, "..."]:
    """(rows…, in…) and (in…, out…), of `inputs` dimensions in, to (rows…, out…)."""
    return _contract(inputs, x, weight)


def contract_last(x: Float[Array, "*rows outputs"], weight: Float[Array, "_ _"]) -> Float[Array, "*rows _"]:
    """(rows…, out) and (in, out) to (rows…, in)."""
    return _contract(1, x, weight.T)


def input_gradient(gradient: Float[Array, "..."], weight: Float[Array, "..."], inputs: int) -> Float[Array, "..."]:
    """(rows…, out…) and (in…, out…), of `inputs` dimensions in, to (rows…, in…)."""
    outputs = weight.ndim - inputs
    return _dot(
        gradient, weight, tuple(range(gradient.ndim - outputs, gradient.ndim)), tuple(range(inputs, weight.ndim))
    )


def weight_gradient(x: Float[Array, "..."], gradient: Float[Array, "..."], rows: int) -> Float[Array, "..."]:
    """(rows…, in…) and (rows…, out…), of `rows` dimensions of rows, to (in…, out…)."""
    summed = tuple(range(rows))
    ins, outs = x.shape[rows:], gradient.shape[rows:]
    if math.prod(ins) <= math.prod(outs):
        return _dot(x, gradient, summed, summed)
    # A product over rows transposes its left operand: of wide activations that costs more than a narrow product itself.
    turned = _dot(gradient, x, summed, summed)
    return jnp.moveaxis(turned, tuple(range(len(outs))), tuple(range(len(ins), turned.ndim)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(inputs: int, x: Array, weight: Array) -> Array:
    return _dot(x, weight, tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs)))


def _contract_forward(inputs: int, x: Array, weight: Array) -> tuple[Array, Any]:
    return _contract(inputs, x, weight), (x, weight)


def _contract_backward(inputs: int, kept: Any, gradient: Array) -> tuple[Array, Array]:
    x, weight = kept
    # Of a frozen weight nothing uses the gradient, and XLA drops it.
    return input_gradient(gradient, weight, inputs), weight_gradient(x, gradient, x.ndim - inputs)


_contract.defvjp(_contract_forward, _contract_backward)


def _dot(x: Array, y: Array, of_x: tuple[int, ...], of_y: tuple[int, ...]) -> Array:
    """Contracts these dimensions."""
    product = partial(lax.dot_general, dimension_numbers=((of_x, of_y), ((), ())))
    if x.dtype.itemsize >= 4:
        return product(x, y)

    def through_float32(x: Array, y: Array) -> Array:
        return product(x, y, preferred_element_type=jnp.float32).astype(x.dtype)

    # On a CPU, XLA's fast kernels go from bfloat16 to float32 only; on accelerators a float32 result costs bandwidth.
    return lax.platform_dependent(x, y, cpu=through_float32, default=product)
