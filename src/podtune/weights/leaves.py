"""The kinds of leaf a weight may be, and the few operations in which weights meet activations.

Models call `linear`, `lookup` and `as_array` and never look at a leaf: a method (LoRA, later quantisation) swaps
leaves.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from podtune.weights.keeping import PRODUCT, keepable
from podtune.weights.tree import static, weight_dataclass

Leaf = TypeVar("Leaf")


@weight_dataclass
class LoRA(Generic[Leaf]):
    """A frozen weight and a low-rank update to it: base + scale * a b (Hu et al. 2021, eq. 3).

    base: (in…, out…); a: (in…, rank); b: (rank, out…), each with a leading `layers` when stacked.
    dropout_key: keys, one per row, set for one training step by `adapters.with_dropout`; drops inputs of the update
    only, as PEFT does.
    """

    base: Leaf
    a: Leaf
    b: Leaf
    scale: float = static()
    dropout: float = static(default=0.0)
    dropout_key: Any = None


Weight = Array | LoRA[Array]


def is_weight(leaf: Any) -> bool:
    """True at the nodes that are one weight to a model, whatever arrays they hold."""
    return isinstance(leaf, LoRA)


def linear(x: Float[Array, "..."], weight: Weight, *, inputs: int = 1) -> Float[Array, "..."]:
    """x (…, in…) times weight (in…, out…), contracting `inputs` dimensions; in x's dtype. The one place for this."""
    return keepable(_linear(x, weight, inputs), PRODUCT)


def _linear(x: Array, weight: Weight, inputs: int) -> Array:
    if not isinstance(weight, LoRA):
        return _contract(x, weight.astype(x.dtype), inputs)
    dropped = x
    if weight.dropout > 0 and weight.dropout_key is not None:
        dropped = _drop(x, weight.dropout, weight.dropout_key)
    elif x.dtype == jnp.float32 and math.prod(x.shape[: x.ndim - inputs]) >= _FEW_ROWS:
        return _merged_linear(inputs, weight.scale, x, weight.base.astype(x.dtype), weight.a, weight.b)
    # In bfloat16 the sum of base and update would round the update away, so the two products are added instead.
    update = _contract(_contract(dropped, weight.a.astype(x.dtype), inputs), weight.b.astype(x.dtype), 1)
    return _contract(x, weight.base.astype(x.dtype), inputs) + weight.scale * update


def linear_transposed(x: Float[Array, "*rows outputs"], weight: Weight) -> Float[Array, "*rows inputs"]:
    """x times the transpose of weight (in, out): an embedding (vocab, embed) used as output projection."""
    if not isinstance(weight, LoRA):
        return _contract_last(x, weight.astype(x.dtype))
    update = _contract_last(_contract_last(x, weight.b.astype(x.dtype)), weight.a.astype(x.dtype))
    return _contract_last(x, weight.base.astype(x.dtype)) + weight.scale * update


def lookup(weight: Weight, ids: Int[Array, "*batch"], *, dtype: Any) -> Float[Array, "*batch embed"]:
    """The rows of an embedding (vocab, embed) that the ids name."""
    if not isinstance(weight, LoRA):
        return weight[ids].astype(dtype)
    update = weight.scale * (weight.a[ids] @ weight.b)
    return (weight.base[ids] + update).astype(dtype)


def as_array(weight: Weight, *, dtype: DTypeLike | None = None) -> Array:
    """The weight as one array, its update added in float32; in the dtype of the base unless told otherwise."""
    if not isinstance(weight, LoRA):
        return weight if dtype is None else weight.astype(dtype)
    stacked = weight.b.ndim + weight.a.ndim - 2 != weight.base.ndim
    product = jax.vmap(lambda a, b: _contract(a, b, 1)) if stacked else (lambda a, b: _contract(a, b, 1))
    update = weight.scale * product(weight.a.astype(jnp.float32), weight.b.astype(jnp.float32))
    return (weight.base.astype(jnp.float32) + update).astype(weight.base.dtype if dtype is None else dtype)


def _contract(x: Array, weight: Array, inputs: int) -> Array:
    """The last `inputs` dimensions of x with the first of the weight; in x's dtype."""
    return _product(inputs, x, weight)


def _contract_last(x: Array, weight: Array) -> Array:
    """The last dimension of both; in x's dtype."""
    return _contract(x, weight.T, 1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(inputs: int, x: Array, weight: Array) -> Array:
    return _dot(x, weight, tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs)))


def _product_forward(inputs: int, x: Array, weight: Array) -> tuple[Array, Any]:
    return _product(inputs, x, weight), (x, weight)


def _product_backward(inputs: int, kept: Any, gradient: Array) -> tuple[Array, Array]:
    x, weight = kept
    # Of a frozen weight nothing uses the gradient, and XLA drops it.
    return _back_through(gradient, weight, inputs), _over_rows(x, gradient, x.ndim - inputs)


_product.defvjp(_product_forward, _product_backward)


def _back_through(gradient: Array, weight: Array, inputs: int) -> Array:
    """(rows…, out…) and (in…, out…) to (rows…, in…)."""
    outputs = weight.ndim - inputs
    return _dot(
        gradient, weight, tuple(range(gradient.ndim - outputs, gradient.ndim)), tuple(range(inputs, weight.ndim))
    )


def _over_rows(x: Array, gradient: Array, rows: int) -> Array:
    """(rows…, in…) and (rows…, out…) to (in…, out…)."""
    summed = tuple(range(rows))
    ins, outs = x.shape[rows:], gradient.shape[rows:]
    if math.prod(ins) <= math.prod(outs):
        return _dot(x, gradient, summed, summed)
    # A product over rows first turns its left side round, and that costs less for the narrower.
    turned = _dot(gradient, x, summed, summed)
    return jnp.moveaxis(turned, tuple(range(len(outs))), tuple(range(len(ins), turned.ndim)))


def _dot(x: Array, y: Array, of_x: tuple[int, ...], of_y: tuple[int, ...]) -> Array:
    """Contracts these dimensions, summing in float32; in x's dtype."""
    as_asked = partial(lax.dot_general, dimension_numbers=((of_x, of_y), ((), ())))
    if x.dtype == jnp.float32:
        return as_asked(x, y)
    # On a CPU, XLA has fast kernels from bfloat16 to float32 only; elsewhere a float32 result could cost bandwidth.
    return lax.platform_dependent(
        x, y, cpu=lambda x, y: as_asked(x, y, preferred_element_type=jnp.float32).astype(x.dtype), default=as_asked
    )


def _drop(x: Array, rate: float, keys: Key[Array, "rows"]) -> Array:
    """keys: one per row of x."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def _merged(scale: float, base: Array, a: Array, b: Array) -> Array:
    return base + scale * _contract(a, b, 1)


def _merged_linear_forward(inputs: int, scale: float, x: Array, base: Array, a: Array, b: Array) -> tuple[Array, Any]:
    return _contract(x, _merged(scale, base, a, b), inputs), (x, base, a, b)


def _merged_linear_backward(inputs: int, scale: float, kept: Any, gradient: Array) -> tuple[Array, ...]:
    x, base, a, b = kept
    rows = x.ndim - inputs
    of_x = _back_through(gradient, _merged(scale, base, a, b), inputs)
    # The update's gradients through the rank: (rows, rank) products, never the (in, out) gradient of the whole weight.
    of_a = _over_rows(x, scale * _back_through(gradient, b, 1), rows)
    of_b = _over_rows(scale * _contract(x, a, inputs), gradient, rows)
    # Not computed when the base is frozen: nothing uses it then, and XLA drops it.
    return of_x, _over_rows(x, gradient, rows), of_a, of_b


def _merged_linear_primal(inputs: int, scale: float, x: Array, base: Array, a: Array, b: Array) -> Array:
    return _contract(x, _merged(scale, base, a, b), inputs)


# While decoding a token at a time, the sum costs far more than its use.
_FEW_ROWS = 32

# float32: one matmul by (base + update) in each direction costs less than skinny products beside every wide one.
_merged_linear = jax.custom_vjp(_merged_linear_primal, nondiff_argnums=(0, 1))
_merged_linear.defvjp(_merged_linear_forward, _merged_linear_backward)


def parameter_count(weights: Any) -> int:
    """How many numbers a tree of arrays or Params holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights, is_leaf=lambda leaf: hasattr(leaf, "shape")))
