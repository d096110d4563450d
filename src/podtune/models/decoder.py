"""The one decoder of all families: a stack of equal layers, scanned. Used by families; pure functions.

What differs between families is in `DecoderConfig`; what differs between layers of one model (the window, the rope
base) is data that is scanned along with their weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from podtune.layers.attention import Method, attend
from podtune.layers.feedforward import FeedForward, add_bias, describe_feedforward, feedforward
from podtune.layers.norms import rms_norm
from podtune.layers.places import Places, places, segment_lengths
from podtune.layers.positions import Rope, Rotation, positions_in_segments, rotate, rotation
from podtune.models.cache import KVCache, create_cache
from podtune.weights.keeping import ATTENDED, LAYER_INPUT, PRODUCT, ROTATED, keepable
from podtune.weights.leaves import Weight, linear, linear_transposed, lookup
from podtune.weights.param import Param, stack
from podtune.weights.tree import weight_dataclass

Leaf = TypeVar("Leaf")

# What the backward pass finds kept of each layer; the rest is computed again, as the scores of blocked attention always
# are. "none": all but those. "dots": what took a matrix product to make, and rotated queries and keys; norms and
# activations cost less to make again than to write and read.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(LAYER_INPUT, PRODUCT, ROTATED, ATTENDED),
    "full": jax.checkpoint_policies.save_only_these_names(LAYER_INPUT),
}
_NO_WINDOW = 2**30  # wider than any position


class LayerKind(NamedTuple):
    """window: in positions, None to see everything; rope: which of the config's ropes."""

    window: int | None = None
    rope: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides the decoder's program.

    norm_offset: added to norm weights. embed_scale: multiplies embeddings. post_norms: norms after attention and
    feed-forward too. tied: the embedding is also the output projection. context_length: what the model was made for.
    """

    vocab: int
    embed: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_kinds: tuple[LayerKind, ...]
    ropes: tuple[Rope, ...]
    context_length: int
    tied: bool
    activation: str = "silu"
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    init_scale: float = 0.02

    @property
    def layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale


@weight_dataclass
class Attention(Generic[Leaf]):
    """q: (embed, heads, head_dim); k, v: (embed, kv_heads, head_dim); o: (heads, head_dim, embed)."""

    q: Leaf
    k: Leaf
    v: Leaf
    o: Leaf
    q_bias: Leaf | None = None
    k_bias: Leaf | None = None
    v_bias: Leaf | None = None
    o_bias: Leaf | None = None
    q_norm: Leaf | None = None
    k_norm: Leaf | None = None


@weight_dataclass
class Layer(Generic[Leaf]):
    attention_norm: Leaf
    attention: Attention[Leaf]
    mlp_norm: Leaf
    mlp: FeedForward[Leaf]
    attention_post_norm: Leaf | None = None
    mlp_post_norm: Leaf | None = None


@weight_dataclass
class Decoder(Generic[Leaf]):
    """embedding: (vocab, embed); layers: one `Layer` whose arrays have a leading `layers`; head: (embed, vocab)."""

    embedding: Leaf
    layers: Layer[Leaf]
    norm: Leaf
    head: Leaf | None = None


class Hidden(NamedTuple):
    states: Float[Array, "batch seq embed"]
    cache: KVCache | None


class Unembedding(NamedTuple):
    """How states become logits. weight: (vocab, embed) when tied, else (embed, vocab); softcap: applied to logits."""

    weight: Weight
    tied: bool
    softcap: float | None

    def logits(self, states: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """In float32, soft-capped."""
        project = linear_transposed if self.tied else linear
        return soft_cap(project(states, self.weight).astype(jnp.float32), self.softcap)


def describe(config: DecoderConfig, *, dtype: DTypeLike = jnp.float32) -> Decoder[Param]:
    """Every weight of the model. dtype: in which it is to be held."""
    c = config
    q_axes, kv_axes = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")

    def matrix(shape: tuple[int, ...], axes: tuple[str, ...], inputs: int = 1) -> Param:
        return Param(shape, axes, inputs=inputs, scale=c.init_scale)

    def norm(length: int, axis: str = "norm") -> Param:
        return Param((length,), (axis,), kind="vector", init="zeros" if c.norm_offset else "ones")

    def bias(shape: tuple[int, ...], axes: tuple[str, ...], present: bool) -> Param | None:
        return Param(shape, axes, kind="vector", init="zeros") if present else None

    layer = Layer(
        attention_norm=norm(c.embed),
        attention=Attention(
            q=matrix((c.embed, c.heads, c.head_dim), q_axes),
            k=matrix((c.embed, c.kv_heads, c.head_dim), kv_axes),
            v=matrix((c.embed, c.kv_heads, c.head_dim), kv_axes),
            o=matrix((c.heads, c.head_dim, c.embed), ("heads", "head_dim", "embed"), inputs=2),
            q_bias=bias((c.heads, c.head_dim), q_axes[1:], c.qkv_bias),
            k_bias=bias((c.kv_heads, c.head_dim), kv_axes[1:], c.qkv_bias),
            v_bias=bias((c.kv_heads, c.head_dim), kv_axes[1:], c.qkv_bias),
            o_bias=bias((c.embed,), ("embed",), c.output_bias),
            q_norm=norm(c.head_dim, "head_dim") if c.qk_norm else None,
            k_norm=norm(c.head_dim, "head_dim") if c.qk_norm else None,
        ),
        mlp_norm=norm(c.embed),
        mlp=describe_feedforward(embed=c.embed, mlp=c.mlp, bias=c.mlp_bias, init_scale=c.init_scale),
        attention_post_norm=norm(c.embed) if c.post_norms else None,
        mlp_post_norm=norm(c.embed) if c.post_norms else None,
    )
    decoder = Decoder(
        embedding=Param((c.vocab, c.embed), ("vocab", "embed"), kind="lookup", scale=c.init_scale),
        layers=stack(layer, c.layers),
        norm=norm(c.embed),
        head=None if c.tied else Param((c.embed, c.vocab), ("embed", "vocab"), kind="head", scale=c.init_scale),
    )
    return jax.tree.map(lambda param: param.of_dtype(dtype), decoder, is_leaf=lambda leaf: isinstance(leaf, Param))


def embed(
    config: DecoderConfig, weights: Decoder[Any], tokens: Int[Array, "batch seq"], *, compute_dtype: DTypeLike
) -> Float[Array, "batch seq embed"]:
    """The embeddings of the tokens as the first layer sees them, before any noise."""
    x = lookup(weights.embedding, tokens, dtype=compute_dtype)
    # Rounded to the compute dtype first, as the models were trained: in bfloat16 the root of 3072 is 55.5.
    return x if config.embed_scale is None else x * jnp.asarray(config.embed_scale, x.dtype)


def hidden(
    config: DecoderConfig,
    weights: Decoder[Any],
    tokens: Int[Array, "batch seq"],
    *,
    positions: Int[Array, "batch seq"] | None = None,
    segments: Int[Array, "batch seq"] | None = None,
    cache: KVCache | None = None,
    embedded: Float[Array, "batch seq embed"] | None = None,
    remat: str = "none",
    compute_dtype: DTypeLike = jnp.float32,
    attention: Method = "auto",
    mesh: Mesh | None = None,
) -> Hidden:
    """The states after the last norm, ready for `unembedding`.

    segments: tokens see their own segment only; 0 is padding; absent, each row is one. positions: rise strictly within
    a segment; absent, they start at 0 in each, or go on from the cache.
    cache: the tokens go in its next slots and see what it holds. embedded: to use in place of `embed` (noise, images).
    mesh: keeps activations split by rows over it; without one XLA chooses.
    """
    segment = jnp.ones_like(tokens) if segments is None else segments
    if positions is None:
        position = positions_in_segments(segment) + (0 if cache is None else cache.filled)
    else:
        position = positions
    x = embed(config, weights, tokens, compute_dtype=compute_dtype) if embedded is None else embedded

    queries = keys = places(position, segment)
    first_slot: Array | int = 0
    if cache is not None:
        first_slot = cache.filled
        cache = cache.write_places(position, segment)
        queries, keys = queries._replace(slot=queries.slot + first_slot), places(cache.positions, cache.segments)

    turns = _rotations(config, queries, capacity=None if cache is None else cache.length)

    def keep(x: Array) -> Array:
        if mesh is None:
            return x
        spec = PartitionSpec(("data", "fsdp")) if x.shape[0] % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else None
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec or PartitionSpec()))

    def one_layer(carry: _Carry, scanned: tuple[Layer[Any], _Differs]) -> tuple[_Carry, None]:
        layer, differs = scanned
        w = layer.attention
        x = keepable(carry.x, LAYER_INPUT)
        y = _norm(config, x, layer.attention_norm)
        q = add_bias(linear(y, w.q), w.q_bias)
        k = add_bias(linear(y, w.k), w.k_bias)
        v = add_bias(linear(y, w.v), w.v_bias)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = _norm(config, q, w.q_norm), _norm(config, k, w.k_norm)
        turn = differs.rotation(config, turns)
        q, k = (keepable(rotate(x, turn), ROTATED) for x in (q, k))
        caches = carry.caches
        if caches is not None:
            caches, (k, v) = _through_cache(caches, k, v, layer=differs.layer, slot=first_slot)
        y = attend(
            q,
            k,
            v,
            queries=queries,
            keys=keys,
            window=differs.window_of(config),
            softcap=config.attention_softcap,
            scale=config.scale,
            method=attention,
        )
        y = add_bias(linear(y, w.o, inputs=2), w.o_bias)
        x = keep(x + (y if layer.attention_post_norm is None else _norm(config, y, layer.attention_post_norm)))
        y = feedforward(_norm(config, x, layer.mlp_norm), layer.mlp, activation=config.activation)
        x = keep(x + (y if layer.mlp_post_norm is None else _norm(config, y, layer.mlp_post_norm)))
        return _Carry(x, caches), None

    if REMAT_POLICIES[remat] is not None:
        one_layer = jax.checkpoint(one_layer, policy=REMAT_POLICIES[remat], prevent_cse=False)

    carry = _Carry(keep(x), None if cache is None else (cache.k, cache.v))
    carry, _ = jax.lax.scan(one_layer, carry, (weights.layers, _differences(config)))
    if cache is not None:
        assert carry.caches is not None
        cache = dataclasses.replace(cache, k=carry.caches[0], v=carry.caches[1])
    return Hidden(states=_norm(config, carry.x, weights.norm), cache=cache)


def unembedding(config: DecoderConfig, weights: Decoder[Any]) -> Unembedding:
    """For losses that never build all logits: take `.logits` of a few states at a time."""
    weight = weights.embedding if weights.head is None else weights.head
    return Unembedding(weight=weight, tied=weights.head is None, softcap=config.final_softcap)


def unembed(
    config: DecoderConfig, weights: Decoder[Any], states: Float[Array, "*rows embed"]
) -> Float[Array, "*rows vocab"]:
    """Logits in float32."""
    return unembedding(config, weights).logits(states)


def cache_for(config: DecoderConfig, *, batch: int, length: int, dtype: DTypeLike, mesh: Mesh | None = None) -> KVCache:
    """An empty cache for `length` tokens a row."""
    return create_cache(
        layers=config.layers,
        batch=batch,
        length=length,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        mesh=mesh,
    )


def soft_cap(logits: Array, cap: float | None) -> Array:
    """cap * tanh(logits / cap); unchanged without a cap."""
    return logits if cap is None else jnp.tanh(logits / cap) * cap


def _norm(config: DecoderConfig, x: Array, weight: Array) -> Array:
    return rms_norm(x, weight, epsilon=config.norm_epsilon, offset=config.norm_offset)


class _Carry(NamedTuple):
    x: Array
    caches: tuple[Array, Array] | None


@weight_dataclass
class _Differs:
    """What one layer has of its own. Where all layers are alike it is part of the program, not data."""

    layer: Any
    window: Any
    rope: Any

    def rotation(self, config: DecoderConfig, rotations: Rotation) -> Rotation:
        rope = config.layer_kinds[0].rope if self.rope is None else self.rope
        return Rotation(cos=rotations.cos[rope], sin=rotations.sin[rope])

    def window_of(self, config: DecoderConfig) -> Any:
        return config.layer_kinds[0].window if self.window is None else self.window


def _differences(config: DecoderConfig) -> _Differs:
    kinds = config.layer_kinds
    windows = [_NO_WINDOW if kind.window is None else kind.window for kind in kinds]
    ropes = [kind.rope for kind in kinds]
    return _Differs(
        layer=np.arange(len(kinds), dtype=np.int32),
        window=np.asarray(windows, np.int32) if len(set(windows)) > 1 else None,
        rope=np.asarray(ropes, np.int32) if len(set(ropes)) > 1 else None,
    )


def _rotations(config: DecoderConfig, tokens: Places, *, capacity: int | None) -> Rotation:
    """The turns of the tokens for every rope of the config: (ropes, batch, seq, head_dim / 2).

    capacity: the length of the cache. Where frequencies depend on the length of a sequence they are those of one as
    long as the cache, so that keys turned early still fit queries turned late.
    """
    lengths = None
    if any(rope.depends_on_length for rope in config.ropes):
        own = capacity is None
        lengths = segment_lengths(tokens, tokens) if own else jnp.full_like(tokens.position, capacity)
    each = [rotation(rope, tokens.position, head_dim=config.head_dim, lengths=lengths) for rope in config.ropes]
    return Rotation(cos=jnp.stack([one.cos for one in each]), sin=jnp.stack([one.sin for one in each]))


def _through_cache(
    caches: tuple[Array, Array], k: Array, v: Array, *, layer: Array, slot: Array | int
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Writes a layer's new keys and values; gives the caches and all of that layer's keys and values."""
    written = tuple(
        jax.lax.dynamic_update_slice(cache, new.astype(cache.dtype)[None], (layer, 0, slot, 0, 0))
        for cache, new in zip(caches, (k, v), strict=True)
    )
    whole = tuple(jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False).astype(k.dtype) for cache in written)
    return (written[0], written[1]), (whole[0], whole[1])
