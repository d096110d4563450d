"""Cross-entropy over a large vocabulary without ever holding the logits of a whole batch.

The gradient is formed in the forward pass, chunk by chunk: the logits of a chunk of positions are made, used for the
loss and for the gradients of states and unembedding, and dropped. The backward pass only scales what was kept.

Within each row the positions that bear loss come first, and chunks in which no row has any are not computed. Of chats
that can be two thirds of the work, which for a small model with a large vocabulary is most of the step. The row with
the most such positions decides, rounded up to a whole chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class _Settings(NamedTuple):
    vocab_first: bool
    label_smoothing: float
    soft_cap: float | None
    chunk_positions: int


def chunked_cross_entropy(
    states: Float[Array, "rows seq embed"],
    unembedding: Float[Array, "_ _"],
    targets: Int[Array, "rows seq"],
    weights: Float[Array, "rows seq"],
    *,
    vocab_first: bool = True,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    chunk_positions: int = 512,
) -> Float[Array, ""]:
    """The weighted sum of -log p(target), float32.

    unembedding: (vocab, embed) when vocab_first, as an embedding lies, else (embed, vocab).
    label_smoothing e: (1 - e) of the target's loss plus e times the mean loss over the vocabulary.
    soft_cap c: logits become c tanh(logits / c) (Gemma 2). Chunks are cut along `seq`, so rows may be sharded.
    """
    settings = _Settings(vocab_first, label_smoothing, soft_cap, min(chunk_positions, states.shape[1]))
    return _loss(settings, states, unembedding, targets, weights)


class _Chunks(NamedTuple):
    """Positions in the order (rows, seq), those that bear loss first in their row, and cut along seq into chunks of
    (chunks, rows, chunk_positions, ...). The first `bearing` chunks hold all that bear loss; the last is filled up with
    weight 0."""

    order: Array
    bearing: Array
    states: Array
    targets: Array
    weights: Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(settings: _Settings, states: Array, unembedding: Array, targets: Array, weights: Array) -> Array:
    """Without a gradient: evaluation."""
    unembedding = unembedding.astype(states.dtype)
    chunks = _chunks(settings, states, targets=targets, weights=weights)

    def add_chunk(number: Array, total: Array) -> Array:
        return total + _chunk_loss(settings, chunks, number, matrix=unembedding).loss

    return lax.fori_loop(0, chunks.bearing, add_chunk, jnp.float32(0))


def _forward(settings: _Settings, states: Any, unembedding: Any, targets: Any, weights: Any) -> tuple[Array, Any]:
    # A frozen unembedding is not perturbed: its gradient, as large as itself, is then neither formed nor kept.
    trained = unembedding.perturbed
    rows, seq = states.value.shape[:2]
    # Cast once, outside the loop: a split matrix is then gathered once, and in the narrow type.
    matrix = unembedding.value.astype(states.value.dtype)
    chunks = _chunks(settings, states.value, targets=targets.value, weights=weights.value)

    def add_chunk(number: Array, carry: Any) -> Any:
        total, of_matrix, of_states = carry
        chunk = _chunk_loss(settings, chunks, number, matrix=matrix)
        of_logits = chunk.of_logits().astype(matrix.dtype)
        contracted = (((2,), (0 if settings.vocab_first else 1,)), ((), ()))
        here = lax.dot_general(of_logits, matrix, contracted, preferred_element_type=jnp.float32)
        of_states = lax.dynamic_update_index_in_dim(of_states, here.astype(matrix.dtype), number, axis=0)
        if trained:
            states = chunks.states[number]
            factors = (of_logits, states) if settings.vocab_first else (states, of_logits)
            of_matrix = of_matrix + lax.dot_general(
                *factors, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32
            )
        return total + chunk.loss, of_matrix, of_states

    start = (jnp.float32(0), jnp.zeros(matrix.shape, jnp.float32) if trained else None, jnp.zeros_like(chunks.states))
    # A loop that ends early, and no branch within one: what a branch needs of a split matrix is gathered in the branch.
    total, of_matrix, of_states = lax.fori_loop(0, chunks.bearing, add_chunk, start)
    of_states = jnp.moveaxis(of_states, 0, 1).reshape(rows, -1, of_states.shape[-1])[:, :seq]
    of_states = jnp.take_along_axis(of_states, jnp.argsort(chunks.order, axis=1)[..., None], axis=1)
    if trained:
        of_matrix = of_matrix.astype(unembedding.value.dtype)
    return total, (of_states, of_matrix)


def _backward(settings: _Settings, kept: Any, gradient: Array) -> tuple[Array | None, ...]:
    of_states, of_matrix = kept
    of_states = (of_states * gradient).astype(of_states.dtype)
    return of_states, None if of_matrix is None else (of_matrix * gradient).astype(of_matrix.dtype), None, None


_loss.defvjp(_forward, _backward, symbolic_zeros=True)


def _chunks(settings: _Settings, states: Array, *, targets: Array, weights: Array) -> _Chunks:
    size = settings.chunk_positions
    order = jnp.argsort(weights == 0, axis=1, stable=True)

    def cut(array: Array) -> Array:
        rows, seq, *rest = array.shape
        ordered = jnp.take_along_axis(array, order.reshape(rows, seq, *[1] * len(rest)), axis=1)
        padded = jnp.pad(ordered, [(0, 0), (0, -seq % size), *[(0, 0)] * len(rest)])
        return jnp.moveaxis(padded.reshape(rows, -1, size, *rest), 1, 0)

    most = jnp.max(jnp.sum(weights != 0, axis=1))
    return _Chunks(order, (most + size - 1) // size, cut(states), cut(targets), cut(weights))


class _ChunkLoss(NamedTuple):
    """The loss of a chunk, and what gives its gradient by the logits before the soft cap, float32."""

    loss: Array
    of_logits: Callable[[], Array]


def _chunk_loss(settings: _Settings, chunks: _Chunks, number: Array, *, matrix: Array) -> _ChunkLoss:
    states, targets, weights = (array[number] for array in (chunks.states, chunks.targets, chunks.weights))
    contracted = (((2,), (1 if settings.vocab_first else 0,)), ((), ()))
    logits = lax.dot_general(states, matrix, contracted, preferred_element_type=jnp.float32)
    if settings.soft_cap is not None:
        logits = settings.soft_cap * jnp.tanh(logits / settings.soft_cap)
    greatest = jnp.max(logits, axis=-1)
    exponentials = jnp.exp(logits - greatest[..., None])
    total = jnp.sum(exponentials, axis=-1)
    log_sum = jnp.log(total) + greatest
    of_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    smoothing = settings.label_smoothing
    loss = log_sum - (1 - smoothing) * of_target
    if smoothing:
        loss = loss - smoothing * jnp.mean(logits, axis=-1)

    def of_logits() -> Array:
        at_target = lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        wanted = jnp.where(at_target, 1 - smoothing, 0) + smoothing / logits.shape[-1]
        gradient = (weights / total)[..., None] * exponentials - weights[..., None] * wanted
        if settings.soft_cap is not None:
            gradient = gradient * (1 - jnp.square(logits / settings.soft_cap))
        return gradient

    return _ChunkLoss(jnp.sum(weights * loss), of_logits)
