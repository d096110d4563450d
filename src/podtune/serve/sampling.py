"""The next token from its logits: greedy, or drawn with a temperature, top-k and top-p. Used by `generate`."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from podtune.config.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k 0 and top_p 1 leave every token in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature={self.temperature} is below 0. Use 0 for greedy answers, or up to about 1.5.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is not above 0 and at most 1. Use 1 to leave every token in.")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} is below 0. Use 0 to leave every token in.")


def next_token(
    logits: Float[Array, " vocab"],
    key: PRNGKeyArray,
    *,
    temperature: Float[Array, ""],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
) -> Int[Array, ""]:
    """The settings are arrays, so that changing them compiles nothing anew."""

    def drawn() -> Int[Array, ""]:
        order = jnp.argsort(-logits)
        ranked = logits[order] / temperature
        probabilities = jax.nn.softmax(jnp.where(_first(ranked, top_k), ranked, -jnp.inf))
        # The smallest set whose probability reaches top_p: a token stays if those before it do not reach it.
        before = jnp.cumsum(probabilities) - probabilities
        kept = _first(ranked, top_k) & ((before < top_p) | (top_p >= 1))
        return order[jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf))].astype(jnp.int32)

    return lax.cond(temperature > 0, drawn, lambda: jnp.argmax(logits).astype(jnp.int32))


def _first(ranked: Float[Array, " vocab"], top_k: Int[Array, ""]) -> Array:
    return (jnp.arange(ranked.shape[0]) < top_k) | (top_k == 0)
