"""`Param` describes one array before it exists: planning, sharding, loading and initialisation all start from it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from podtune.parallel.sharding import sharding_for

Initialiser = Literal["normal", "zeros", "ones", "fan_in_uniform"]
Kind = Literal["linear", "lookup", "head", "vector"]


@dataclass(frozen=True)
class Param:
    """One array: its shape, a logical axis name per dimension, how it starts and what it is for.

    kind: "linear" (multiplied by activations), "lookup" (an embedding), "head" (the output projection), "vector"
    (biases, norms). A linear weight has shape (in…, out…); `inputs` counts its input dimensions.
    A stacked Param has a leading `layers` dimension that `inputs` does not count.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: Kind = "linear"
    inputs: int = 1
    init: Initialiser = "normal"
    scale: float = 0.02
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"shape {self.shape} and axes {self.axes} differ in length"

    @property
    def is_stacked(self) -> bool:
        return self.axes[:1] == ("layers",)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * jnp.dtype(self.dtype).itemsize

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The input dimensions of a linear or lookup weight, without `layers`."""
        first = int(self.is_stacked)
        return self.shape[first : first + self.inputs]

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.shape[int(self.is_stacked) + self.inputs :]

    def of_dtype(self, dtype: DTypeLike) -> Param:
        return dataclasses.replace(self, dtype=dtype)

    def stacked(self, layers: int) -> Param:
        """This array, once per layer, on a new leading dimension."""
        return dataclasses.replace(self, shape=(layers, *self.shape), axes=("layers", *self.axes))


def is_param(leaf: Any) -> bool:
    return isinstance(leaf, Param)


def stack(tree: Any, layers: int) -> Any:
    """A description of one layer, turned into that of `layers` of them."""
    return jax.tree.map(lambda param: param.stacked(layers), tree, is_leaf=is_param)


def named_key(key: jax.Array, name: str) -> jax.Array:
    """A key of its own for the weight of that name."""
    return jax.random.fold_in(key, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big"))


def initialise(param: Param, key: jax.Array, *, name: str) -> jax.Array:
    """The starting value of one array. The key is mixed with the name, so that it depends on no order and no mesh."""
    return _start(param, named_key(key, name))


def _start(param: Param, key: jax.Array) -> jax.Array:
    match param.init:
        case "zeros":
            return jnp.zeros(param.shape, param.dtype)
        case "ones":
            return jnp.ones(param.shape, param.dtype)
        case "normal":
            return (jax.random.normal(key, param.shape, jnp.float32) * param.scale).astype(param.dtype)
        case "fan_in_uniform":
            # PEFT starts its down-projections so: kaiming_uniform with a = sqrt(5).
            bound = 1 / math.sqrt(math.prod(param.input_shape))
            return jax.random.uniform(key, param.shape, jnp.float32, -bound, bound).astype(param.dtype)


def initialise_on(mesh: jax.sharding.Mesh, param: Param, key: jax.Array, *, name: str) -> jax.Array:
    """As `initialise`, made in place on the mesh."""
    sharding = sharding_for(mesh, param.axes, param.shape)
    if param.init == "zeros":
        return jnp.zeros(param.shape, param.dtype, device=sharding)
    return _start_in_place(param, sharding)(named_key(key, name))


@lru_cache(maxsize=256)
def _start_in_place(param: Param, sharding: jax.sharding.NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Compiled once for all weights of one shape: the name is in the key, not in the program."""
    # LLVM takes seconds over the unrolled rounds of threefry, for a program that runs once in milliseconds.
    on_cpu = all(device.platform == "cpu" for device in sharding.device_set)
    quickly = {"xla_backend_optimization_level": 1} if on_cpu else None
    return jax.jit(partial(_start, param), out_shardings=sharding, compiler_options=quickly)


def abstract(description: Any, mesh: jax.sharding.Mesh | None = None) -> Any:
    """The description as shapes and dtypes (with shardings when a mesh is given), to trace and compile with."""

    def one(param: Param) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else sharding_for(mesh, param.axes, param.shape)
        return jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=sharding)

    return jax.tree.map(one, description, is_leaf=is_param)
