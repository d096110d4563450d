"""Weights as the tensors of a Hugging Face checkpoint: merged, one at a time, in its names and layout. For export."""

from __future__ import annotations

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
    """read: gathers this one tensor to the host. With several processes all must call it, in the same order."""

    name: str
    info: TensorInfo
    read: Callable[[], np.ndarray]


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
        yield SavedTensor(tensor.name, TensorInfo(tensor.shape, saved), read)


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
