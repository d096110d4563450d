"""Which tensors of a checkpoint make up each weight, and in which shape they lie there. Used by loading and saving.

A linear layer's tensor is (out, in) there and (in…, out…) here; stacked weights are one tensor per layer there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from podtune.families.family import LAYER, Model
from podtune.weights.param import Param, is_param
from podtune.weights.tree import named_leaves


class CheckpointTensor(NamedTuple):
    """One tensor of a checkpoint. ours: the weight it is (a layer of); layer: which, None where it is not stacked."""

    name: str
    shape: tuple[int, ...]
    ours: str
    layer: int | None


def checkpoint_tensors(model: Model) -> Iterator[CheckpointTensor]:
    """Every tensor of the model's checkpoint under its own names, layer by layer as a checkpoint lists them."""
    params: dict[str, Param] = named_leaves(model.describe(), is_leaf=is_param)
    rows = model.rows()
    stacked = [row for row in rows if params[row.ours].is_stacked]
    first = [row for row in rows if row.ours == "embedding"]
    last = [row for row in rows if not params[row.ours].is_stacked and row not in first]
    for row in first:
        yield CheckpointTensor(row.theirs, checkpoint_shape(params[row.ours]), row.ours, None)
    for layer in range(model.config.layers):
        for row in stacked:
            name = row.theirs.replace(LAYER, str(layer))
            yield CheckpointTensor(name, checkpoint_shape(params[row.ours]), row.ours, layer)
    for row in last:
        yield CheckpointTensor(row.theirs, checkpoint_shape(params[row.ours]), row.ours, None)


def is_transposed(param: Param) -> bool:
    """True where a checkpoint holds the weight as (out, in)."""
    return param.kind in ("linear", "head")


def layer_shape(param: Param) -> tuple[int, ...]:
    """The weight's shape without `layers`."""
    return param.shape[1:] if param.is_stacked else param.shape


def checkpoint_shape(param: Param) -> tuple[int, ...]:
    """The shape of (one layer of) the weight in a checkpoint."""
    if is_transposed(param):
        return (math.prod(param.output_shape), math.prod(param.input_shape))
    if param.kind == "lookup":
        return layer_shape(param)
    return (math.prod(layer_shape(param)),)
