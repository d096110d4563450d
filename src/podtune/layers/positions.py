"""Rotary position embeddings: frequencies for each kind of scaling, and the rotation itself. Used by models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Rope:
    """Rotary embeddings as a configuration states them (Su et al. 2021), with one kind of scaling from `ROPES`.

    original_length: the context the frequencies were trained for ("llama3", "yarn", "dynamic").
    attention_factor: multiplies cosine and sine; None lets "yarn" derive it from factor, mscale and mscale_all_dim.
    """

    base: float
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def depends_on_length(self) -> bool:
        """True when the frequencies change with the length of the sequence."""
        return self.kind == "dynamic"


class Rotation(NamedTuple):
    """cos, sin: (batch, seq, head_dim / 2) float32."""

    cos: Array
    sin: Array


def _plain(rope: Rope, head_dim: int) -> np.ndarray:
    return rope.base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _linear(rope: Rope, head_dim: int) -> np.ndarray:
    return _plain(rope, head_dim) / rope.factor


def _llama3(rope: Rope, head_dim: int) -> np.ndarray:
    """Long waves are slowed by the factor, short ones kept, those between blended (Llama 3.1)."""
    frequencies = _plain(rope, head_dim)
    waves_in_context = rope.original_length * frequencies / (2 * math.pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = np.clip((waves_in_context - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _yarn(rope: Rope, head_dim: int) -> np.ndarray:
    """Interpolates slow dimensions and keeps fast ones, with a linear ramp between (Peng et al. 2023, section 3.2)."""
    frequencies = _plain(rope, head_dim)

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a ramp of no width would divide by zero
    interpolated = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    return interpolated * frequencies / rope.factor + (1 - interpolated) * frequencies


# The names are those of `rope_type` in a Hugging Face configuration. "dynamic" is plain up to its original length.
ROPES: dict[str, Callable[[Rope, int], np.ndarray]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,
    "llama3": _llama3,
    "yarn": _yarn,
}


def attention_factor(rope: Rope) -> float:
    """What cosine and sine are multiplied by: 1 but for yarn (Peng et al. 2023, section 3.4)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def of_mscale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return of_mscale(rope.mscale) / of_mscale(rope.mscale_all_dim)
    return of_mscale(1.0)


def rotation(
    rope: Rope, positions: Int[Array, "batch seq"], *, head_dim: int, lengths: Int[Array, "batch seq"] | None = None
) -> Rotation:
    """Cosine and sine at each position.

    lengths: of the sequence each token belongs to; only "dynamic" looks at them, and only beyond its original length.
    """
    # float32: bfloat16 cannot tell position 256 from 257
    where = positions.astype(jnp.float32)[..., None]
    if rope.depends_on_length and lengths is not None:
        angles = where * _dynamic_frequencies(rope, lengths, head_dim)
    else:
        angles = where * jnp.asarray(ROPES[rope.kind](rope, head_dim), jnp.float32)
    factor = attention_factor(rope)
    return Rotation(cos=jnp.cos(angles) * factor, sin=jnp.sin(angles) * factor)


def _dynamic_frequencies(rope: Rope, lengths: Array, head_dim: int) -> Array:
    """The base grows with the length of the sequence beyond the original one (dynamic NTK)."""
    ratio = jnp.maximum(lengths, rope.original_length).astype(jnp.float32) / rope.original_length
    growth = (rope.factor * ratio - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return (rope.base * growth)[..., None] ** -exponents


def rotate(x: Float[Array, "batch seq heads head_dim"], by: Rotation) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates the pairs (i, i + head_dim / 2); in float32, given back in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def positions_in_segments(segments: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """0, 1, 2, … starting anew at each segment of a row."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    starts = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
