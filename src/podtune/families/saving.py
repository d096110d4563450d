"""Weights as the tensors of a Hugging Face checkpoint: merged, one at a time, in its names and layout. For export."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from podtune.families.family import Model
from podtune.families.tensors import checkpoint_shape, checkpoint_tensors, is_transposed
from podtune.hub.tensors import TensorInfo
from podtune.weights.leaves import as_array, is_weight
from podtune.weights.param import Param, is_param
from podtune.weights.tree import named_leaves


class SavedTensor(NamedTuple):
    """read: gathers this one tensor to the host. fit: what becomes of its values in the dtype it is saved in; None
    where that is the one it is held in. With several processes all must call either, in the same order."""

    name: str
    info: TensorInfo
    read: Callable[[], np.ndarray]
    fit: Callable[[], Fit] | None = None


class Fit(NamedTuple):
    """How the values of a tensor fit the dtype they are saved in. overflowing: the size of the largest value that is
    finite and would not be any more, or None. flushed: values that are not 0 and would be; values: all there are."""

    overflowing: float | None
    flushed: int
    values: int


def hf_tensors(model: Model, weights: Any, *, dtype: DTypeLike | None = None) -> Iterator[SavedTensor]:
    """Every tensor of the model's checkpoint, adapters added to their weights.

    dtype: of what is saved; None keeps the dtype in which each weight is held.
    """
    params: dict[str, Param] = named_leaves(model.describe(), is_leaf=is_param)
    leaves = named_leaves(weights, is_leaf=is_weight)
    for tensor in checkpoint_tensors(model):
        param, leaf = params[tensor.ours], leaves[tensor.ours]
        held = leaf.base.dtype if is_weight(leaf) else leaf.dtype
        saved = jnp.dtype(held if dtype is None else dtype)
        read = partial(_gather, leaf, param, tensor.layer, saved)
        fit = partial(_fit, leaf, param, tensor.layer, saved)
        yield SavedTensor(tensor.name, TensorInfo(tensor.shape, saved), read, fit)


def hf_config(model: Model) -> dict[str, Any]:
    """The config.json to save beside the tensors: as it was read, less what no longer holds."""
    content = dict(model.hf_config)
    family = model.family
    if family.text_config is not None and isinstance(content.get(family.text_config), dict):
        content = {**content[family.text_config], "tie_word_embeddings": model.config.tied}
    if family.saved_as is not None:
        content["model_type"], architecture = family.saved_as
        content["architectures"] = [architecture]
    content.setdefault("model_type", family.name)
    content.setdefault("architectures", [family.architecture])
    return content


def _gather(leaf: Any, param: Param, layer: int | None, dtype: Any) -> np.ndarray:
    if layer is None and not is_weight(leaf) and not is_transposed(param) and leaf.dtype == dtype:
        array = leaf  # the embedding, the largest of all: as it lies, without a copy on the devices
    else:
        array = _one_layer(param, dtype, layer is not None)(leaf, 0 if layer is None else layer)
    if not array.is_fully_addressable:
        assert isinstance(array.sharding, NamedSharding)
        everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
        array = jax.jit(lambda x: x, out_shardings=everywhere)(array).addressable_data(0)
    return np.asarray(array)


def _fit(leaf: Any, param: Param, layer: int | None, dtype: Any) -> Fit:
    held = leaf.base.dtype if is_weight(leaf) else leaf.dtype
    count = math.prod(checkpoint_shape(param))
    if dtype == jnp.float32 or (not is_weight(leaf) and jnp.promote_types(held, dtype) == dtype):
        return Fit(None, 0, count)  # every value that is held, or computed in float32, is one of this dtype, too
    seen = _fitting(jnp.dtype(dtype), layer is not None)(leaf, 0 if layer is None else layer)
    overflowing, flushed = (one.addressable_data(0).item() for one in seen)
    return Fit(overflowing or None, int(flushed), count)


@lru_cache(maxsize=16)
def _fitting(dtype: Any, stacked: bool) -> Callable[[Any, int], tuple[jax.Array, jax.Array]]:
    """On the devices: the largest finite value that is not finite in this dtype (0: none), and how many become 0."""
    limits = jnp.finfo(dtype)
    # From here on a value is rounded to infinity, and up to there to 0: compared with these, and not cast and looked
    # at, for XLA may leave out a cast to a narrower dtype and back.
    infinite = float(limits.max) + 2.0 ** (math.frexp(float(limits.max))[1] - limits.nmant - 2)
    zero = float(limits.smallest_subnormal) / 2

    def look(leaf: Any, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        if stacked:
            leaf = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), leaf)
        exact = as_array(leaf, dtype=jnp.float32)
        size = jnp.abs(exact)
        overflowing = jnp.where(jnp.isfinite(exact) & (size >= infinite), size, 0)
        flushed = ((size > 0) & (size <= zero)).astype(jnp.int32)
        # One reduction for both: of two, each would be read from a copy of the whole tensor that they share.
        return jax.lax.reduce(
            (overflowing, flushed),
            (np.float32(0), np.int32(0)),
            lambda one, other: (jnp.maximum(one[0], other[0]), one[1] + other[1]),
            tuple(range(exact.ndim)),
        )

    return jax.jit(look)


@lru_cache(maxsize=256)
def _one_layer(param: Param, dtype: Any, stacked: bool) -> Callable[[Any, int], jax.Array]:
    """Takes one layer out of a leaf, adds its adapter and turns it to the layout of a checkpoint."""

    def take(leaf: Any, layer: jax.Array) -> jax.Array:
        if stacked:
            leaf = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), leaf)
        array = as_array(leaf, dtype=dtype)
        if is_transposed(param):
            outputs, inputs = checkpoint_shape(param)
            return array.reshape(inputs, outputs).T
        return array.reshape(checkpoint_shape(param))

    return jax.jit(take)
