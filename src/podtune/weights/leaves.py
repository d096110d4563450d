"""The kinds of leaf a weight may be, and the few operations in which weights meet activations.

Models call `linear`, `lookup` and the like and never look at a leaf: a method (LoRA, later quantisation) swaps
leaves.
"""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from podtune.weights.keeping import PRODUCT, keepable
from podtune.weights.products import contract, contract_last, input_gradient, weight_gradient
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
        return contract(x, weight.astype(x.dtype), inputs)
    dropped = x
    if weight.dropout > 0 and weight.dropout_key is not None:
        dropped = _drop(x, weight.dropout, weight.dropout_key)
    elif x.dtype == jnp.float32 and math.prod(x.shape[: x.ndim - inputs]) >= _FEW_ROWS:
        return _merged_linear(inputs, weight.scale, x, weight.base.astype(x.dtype), weight.a, weight.b)
    # In bfloat16 the sum of base and update would round the update away, so the two products are added instead.
    at_rank = keepable(contract(dropped, weight.a.astype(x.dtype), inputs), PRODUCT)
    update = contract(at_rank, weight.b.astype(x.dtype), 1)
    return contract(x, weight.base.astype(x.dtype), inputs) + weight.scale * update


def linear_transposed(x: Float[Array, "*rows outputs"], weight: Weight) -> Float[Array, "*rows inputs"]:
    """x times the transpose of weight (in, out): an embedding (vocab, embed) used as output projection."""
    if not isinstance(weight, LoRA):
        return contract_last(x, weight.astype(x.dtype))
    update = contract_last(contract_last(x, weight.b.astype(x.dtype)), weight.a.astype(x.dtype))
    return contract_last(x, weight.base.astype(x.dtype)) + weight.scale * update


def beside(
    x: Float[Array, "*rows inputs"], weight: Weight, *, transposed: bool = False
) -> tuple[Float[Array, "*rows wider"], Array]:
    """(x', w') whose plain product is that of `linear` (`linear_transposed` when transposed): an update stands beside
    the base, wider by the rank, rather than in it, where bfloat16 would round it away. For what takes one matrix."""
    if not isinstance(weight, LoRA):
        return x, weight
    down, up = (weight.b, weight.a) if transposed else (weight.a, weight.b)
    dropped = x
    if weight.dropout > 0 and weight.dropout_key is not None:
        dropped = _drop(x, weight.dropout, weight.dropout_key)
    down = down.astype(x.dtype)
    at_rank = contract_last(dropped, down) if transposed else contract(dropped, down, 1)
    matrix = jnp.concatenate([weight.base.astype(x.dtype), up.astype(x.dtype)], axis=1 if transposed else 0)
    return jnp.concatenate([x, weight.scale * at_rank], axis=-1), matrix


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
    product = jax.vmap(lambda a, b: contract(a, b, 1)) if stacked else (lambda a, b: contract(a, b, 1))
    update = weight.scale * product(weight.a.astype(jnp.float32), weight.b.astype(jnp.float32))
    return (weight.base.astype(jnp.float32) + update).astype(weight.base.dtype if dtype is None else dtype)


def _drop(x: Array, rate: float, keys: Key[Array, "rows"]) -> Array:
    """keys: one per row of x."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def _merged(scale: float, base: Array, a: Array, b: Array) -> Array:
    return base + scale * contract(a, b, 1)


def _merged_linear_forward(inputs: int, scale: float, x: Array, base: Array, a: Array, b: Array) -> tuple[Array, Any]:
    return contract(x, _merged(scale, base, a, b), inputs), (x, base, a, b)


def _merged_linear_backward(inputs: int, scale: float, kept: Any, gradient: Array) -> tuple[Array, ...]:
    x, base, a, b = kept
    rows = x.ndim - inputs
    of_x = input_gradient(gradient, _merged(scale, base, a, b), inputs)
    # The update's gradients through the rank: (rows, rank) products, never the (in, out) gradient of the whole weight.
    of_a = weight_gradient(x, scale * input_gradient(gradient, b, 1), rows)
    of_b = weight_gradient(scale * contract(x, a, inputs), gradient, rows)
    # Not computed when the base is frozen: nothing uses it then, and XLA drops it.
    return of_x, weight_gradient(x, gradient, rows), of_a, of_b


def _merged_linear_primal(inputs: int, scale: float, x: Array, base: Array, a: Array, b: Array) -> Array:
    return contract(x, _merged(scale, base, a, b), inputs)


# While decoding a token at a time, the sum costs far more than its use.
_FEW_ROWS = 32

# float32: one matmul by (base + update) in each direction costs less than skinny products beside every wide one.
_merged_linear = jax.custom_vjp(_merged_linear_primal, nondiff_argnums=(0, 1))
_merged_linear.defvjp(_merged_linear_forward, _merged_linear_backward)


def parameter_count(weights: Any) -> int:
    """How many numbers a tree of arrays or Params holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights, is_leaf=lambda leaf: hasattr(leaf, "shape")))
