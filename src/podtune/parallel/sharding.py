"""Where each array lies: logical axis names on every Param, and the one table that maps them to mesh axes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

log = logging.getLogger(__name__)

# Logical axis -> the mesh axes that split it. Axes that are not here are whole on every device.
RULES: dict[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}
KNOWN_AXES = frozenset({*RULES, "layers", "head_dim", "rank", "norm", "seq"})

_said: set[tuple[str, int, int]] = set()


def partition(mesh: Mesh, axes: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
    """The partition of an array with these logical axes.

    A dimension that does not divide is kept whole, and that is said.
    Two logical axes of one array may ask for the same mesh axis; the first gets it.
    """
    used: set[str] = set()
    parts: list[str | tuple[str, ...] | None] = []
    for axis, length in zip(axes, shape, strict=True):
        assert axis in KNOWN_AXES, f"no such logical axis: {axis}"
        rule = RULES.get(axis, ())
        names = tuple(name for name in ((rule,) if isinstance(rule, str) else rule) if name in mesh.shape)
        ways = math.prod(mesh.shape[name] for name in names)
        if ways == 1 or used & set(names):
            parts.append(None)
        elif length % ways:
            _say_once(axis, length, ways)
            parts.append(None)
        else:
            used |= set(names)
            parts.append(names[0] if len(names) == 1 else names)
    return PartitionSpec(*parts)


def sharding_for(mesh: Mesh, axes: Sequence[str], shape: Sequence[int]) -> NamedSharding:
    return NamedSharding(mesh, partition(mesh, axes, shape))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over every data and fsdp shard; columns whole."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def data_shards(mesh: Mesh | AbstractMesh) -> int:
    return mesh.shape["data"] * mesh.shape["fsdp"]


def _say_once(axis: str, length: int, ways: int) -> None:
    if (axis, length, ways) not in _said:
        _said.add((axis, length, ways))
        log.warning("%s=%d does not divide over %d devices; it is kept whole on each.", axis, length, ways)
