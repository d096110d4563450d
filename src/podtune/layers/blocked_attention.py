"""Attention block of queries by block of queries, with a backward pass of its own. Used by `attention`.

Between the passes only the inputs, the output and one number a query are kept; the backward pass makes the scores again
from them (Dao et al. 2022), a block at a time. Where the forward pass is recomputed beside it (`remat: full`), XLA may
share the scores of the two and hold those of all blocks. A block holds all query heads that share a kv head, so that
every product is one wide matmul.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podtune.layers.places import Places, visible
from podtune.weights.keeping import ATTENDED, keepable_residual

MASKED = -1e30  # finite: a row that sees nothing must not become NaN


class BlockedSettings(NamedTuple):
    """What the program depends on. block: queries at a time; window: None when it is an array or there is none.

    own_keys: the keys are those of the queries, so that a block needs only the keys up to its end.
    """

    scale: float
    softcap: float | None
    block: int
    window: int | None
    own_keys: bool

    def blocks(self, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
        """Each block's queries, and the keys that some of them may see."""
        for start in range(0, queries, self.block):
            stop = min(start + self.block, queries)
            if not self.own_keys:
                # With a cache, which keys are seen is known only when the program runs.
                yield slice(start, stop), slice(0, keys)
                continue
            # Positions rise by at least one a token, so a key `window` tokens back is `window` positions back or more.
            first = 0 if self.window is None else max(0, start - self.window + 1)
            yield slice(start, stop), slice(first, stop)


class _Seen(NamedTuple):
    """Who sees whom. window: an array when it differs between the layers of one scan."""

    queries: Places
    keys: Places
    window: Array | None

    def among(self, settings: BlockedSettings, queries: slice, keys: slice) -> Array:
        """(batch, 1, queries, 1, keys): against scores (batch, kv_heads, queries, group, keys)."""
        window = settings.window if self.window is None else self.window
        seen = visible(self.queries.part(queries), self.keys.part(keys), window=window)
        return seen[:, None, :, None, :]


def blocked_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    *,
    queries: Places,
    keys: Places,
    window: Array | None,
    settings: BlockedSettings,
) -> Float[Array, "batch seq heads head_dim"]:
    """Softmax in float32, in q's dtype. A query that sees no key gets the mean of the values, and passes no gradient.

    window: an array when it is not the program's own (`settings.window`).
    """
    return _blocked(settings, q, k, v, _Seen(queries, keys, window))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(settings: BlockedSettings, q: Array, k: Array, v: Array, seen: _Seen) -> Array:
    return _forward(settings, q, k, v, seen)[0]


def _forward(settings: BlockedSettings, q: Array, k: Array, v: Array, seen: _Seen) -> tuple[Array, Any]:
    """The output, and what the backward pass needs: the inputs, the output, and each query's logsumexp of scores,
    (batch, kv_heads, seq, group)."""
    k_by_head, v_by_head = _by_head(k), _by_head(v)
    by_head = _by_head(_grouped(q, k))
    outputs: list[Array] = []
    logsumexps: list[Array] = []
    for rows, columns in settings.blocks(q.shape[1], k.shape[1]):
        scores, _ = _scores(
            settings, by_head[:, :, rows], k_by_head[:, :, columns], seen.among(settings, rows, columns)
        )
        greatest = scores.max(axis=-1)
        weights = jnp.exp(scores - greatest[..., None])
        total = weights.sum(axis=-1)
        output = _product("bhqgk,bhkd->bhqgd", weights.astype(v.dtype), v_by_head[:, :, columns]) / total[..., None]
        outputs.append(output.astype(q.dtype))
        logsumexps.append(greatest + jnp.log(total))
    output = _by_position(jnp.concatenate(outputs, axis=2)).reshape(q.shape)
    output = keepable_residual(output, ATTENDED)
    return output, (q, k, v, seen, output, keepable_residual(jnp.concatenate(logsumexps, axis=2), ATTENDED))


def _backward(settings: BlockedSettings, kept: Any, gradient: Array) -> tuple[Array | None, ...]:
    q, k, v, seen, output, logsumexps = kept
    k_by_head, v_by_head = _by_head(k), _by_head(v)
    by_head, of_output, output = (_by_head(_grouped(x, k)) for x in (q, gradient, output))
    # delta: for each query the sum over keys of weight x gradient, as output x gradient gives it (Dao et al. 2022).
    delta = jnp.sum(of_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    of_q: list[Array] = []
    # Summed as (batch, kv_heads, head_dim, keys): a product over queries transposes its left operand, so that is the
    # narrow one.
    of_k, of_v = (jnp.zeros(jnp.swapaxes(x, 2, 3).shape, jnp.float32) for x in (k_by_head, v_by_head))
    for rows, columns in settings.blocks(q.shape[1], k.shape[1]):
        mask = seen.among(settings, rows, columns)
        scores, slope = _scores(settings, by_head[:, :, rows], k_by_head[:, :, columns], mask)
        weights = jnp.where(mask, jnp.exp(scores - logsumexps[:, :, rows, :, None]), 0)
        of_weights = _product("bhqgd,bhkd->bhqgk", of_output[:, :, rows], v_by_head[:, :, columns])
        of_scores = weights * (of_weights - delta[:, :, rows, :, None])
        if slope is not None:
            of_scores = of_scores * slope
        weights, of_scores = weights.astype(q.dtype), of_scores.astype(q.dtype)
        of_q.append(_product("bhqgk,bhkd->bhqgd", of_scores, k_by_head[:, :, columns]))
        of_k = of_k.at[..., columns].add(_product("bhqgd,bhqgk->bhdk", by_head[:, :, rows], of_scores))
        of_v = of_v.at[..., columns].add(_product("bhqgd,bhqgk->bhdk", of_output[:, :, rows], weights))
    scale = settings.scale
    return (
        _by_position(jnp.concatenate(of_q, axis=2) * scale).reshape(q.shape).astype(q.dtype),
        jnp.moveaxis(of_k * scale, 3, 1).astype(k.dtype),
        jnp.moveaxis(of_v, 3, 1).astype(v.dtype),
        None,
    )


_blocked.defvjp(_forward, _backward)


def _scores(settings: BlockedSettings, q: Array, k: Array, mask: Array) -> tuple[Array, Array | None]:
    """Scores (batch, kv_heads, queries, group, keys) in float32, and the soft cap's slope at each."""
    scores = _product("bhqgd,bhkd->bhqgk", q, k) * settings.scale
    slope = None
    if settings.softcap is not None:
        scores = jnp.tanh(scores / settings.softcap)
        slope = 1 - jnp.square(scores)
        scores = scores * settings.softcap
    return jnp.where(mask, scores, MASKED), slope


def _grouped(x: Array, k: Array) -> Array:
    """(batch, seq, heads, head_dim) as (batch, seq, kv_heads, group, head_dim)."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])


def _by_head(x: Array) -> Array:
    """(batch, seq, kv_heads, …) as (batch, kv_heads, seq, …), and back with `_by_position`."""
    return jnp.swapaxes(x, 1, 2)


_by_position = _by_head

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)
