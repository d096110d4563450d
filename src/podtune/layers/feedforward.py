"""The gated feed-forward block and the activations it may use. Used by models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podtune.weights.leaves import linear
from podtune.weights.param import Param
from podtune.weights.tree import weight_dataclass

Leaf = TypeVar("Leaf")

# The names are those of `hidden_act` in a Hugging Face configuration.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


@weight_dataclass
class FeedForward(Generic[Leaf]):
    """gate, up: (embed, mlp); down: (mlp, embed); biases where the model has them."""

    gate: Leaf
    up: Leaf
    down: Leaf
    gate_bias: Leaf | None = None
    up_bias: Leaf | None = None
    down_bias: Leaf | None = None


def describe_feedforward(*, embed: int, mlp: int, bias: bool, init_scale: float) -> FeedForward[Param]:
    wide = Param((embed, mlp), ("embed", "mlp"), scale=init_scale)
    wide_bias = Param((mlp,), ("mlp",), kind="vector", init="zeros") if bias else None
    return FeedForward(
        gate=wide,
        up=wide,
        down=Param((mlp, embed), ("mlp", "embed"), scale=init_scale),
        gate_bias=wide_bias,
        up_bias=wide_bias,
        down_bias=Param((embed,), ("embed",), kind="vector", init="zeros") if bias else None,
    )


def feedforward(
    x: Float[Array, "batch seq embed"], weights: FeedForward[Any], *, activation: str
) -> Float[Array, "batch seq embed"]:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020)."""
    gate = add_bias(linear(x, weights.gate), weights.gate_bias)
    up = add_bias(linear(x, weights.up), weights.up_bias)
    # Made again for the backward pass, so that gate and up are kept as they are, and not in float32.
    gated = jax.checkpoint(partial(_gated, ACTIVATIONS[activation]), prevent_cse=False)(gate, up)
    return add_bias(linear(gated, weights.down), weights.down_bias)


def _gated(activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    """In float32, rounded once: step by step in bfloat16 takes a CPU longer than the products around it."""
    return (activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def add_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias.astype(x.dtype)
