"""Answers from a model: prefill, then one token at a time on a cache. Used by chat, by samples while training, and by
the check of what was exported.

Programs are compiled for lengths in buckets, never for one prompt or one token: a few for prompts, one for decoding per
cache length, whatever the sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from podtune.config.errors import UserError
from podtune.models.cache import KVCache
from podtune.models.decoder import Decoder, DecoderConfig, cache_for, hidden, unembed
from podtune.serve.prompts import chat_prompt
from podtune.serve.sampling import Sampling, next_token
from podtune.serve.text_stream import TextStream

SHORTEST_BUCKET = 64


class Generator:
    """Answers prompts with these weights, adapters included. `weights` may be set anew: nothing is compiled again.

    compute_dtype: of activations and cache; float32 on a CPU, bfloat16 where it pays.
    """

    def __init__(
        self,
        model: Any,
        weights: Decoder[Any],
        tokenizer: Any,
        *,
        compute_dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
    ) -> None:
        self.config: DecoderConfig = model.config
        self.weights = weights
        self.tokenizer = tokenizer
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.mesh = mesh

    def stream(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """The ids of the answer as they come, the one that ends it left out. Raises UserError when they cannot fit."""
        self.check_room(prompt_ids, max_new_tokens)
        sampling = sampling or Sampling()
        settings = _Settings(
            key=jax.random.key(sampling.seed),
            temperature=jnp.float32(sampling.temperature),
            top_k=jnp.int32(sampling.top_k),
            top_p=jnp.float32(sampling.top_p),
        )
        program = {"config": self.config, "compute_dtype": self.compute_dtype, "mesh": self.mesh}
        padded = np.zeros((1, bucket(len(prompt_ids), most=self.config.context_length)), np.int32)
        padded[0, : len(prompt_ids)] = prompt_ids
        cache_length = max(
            bucket(len(prompt_ids) + max_new_tokens, most=self.config.context_length), padded.shape[1]
        )
        token, cache = _prefill(
            self.weights, padded, np.int32(len(prompt_ids)), settings, cache_length=cache_length, **program
        )
        for count in range(1, max_new_tokens + 1):
            said = int(token)
            if said in self.stop_ids:
                return
            yield said
            if count < max_new_tokens:
                token, cache = _decode(self.weights, token, cache, settings, **program)

    def text(self, prompt_ids: Sequence[int], *, max_new_tokens: int, sampling: Sampling | None = None) -> str:
        """The whole answer."""
        return "".join(self.pieces(prompt_ids, max_new_tokens=max_new_tokens, sampling=sampling))

    def pieces(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, sampling: Sampling | None = None
    ) -> Iterator[str]:
        """The answer as text, piece by piece, cut between characters."""
        stream = TextStream(self.tokenizer.decode)
        for token in self.stream(prompt_ids, max_new_tokens=max_new_tokens, sampling=sampling):
            if piece := stream.add(token):
                yield piece
        if piece := stream.end():
            yield piece

    def answer(
        self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int = 256, sampling: Sampling | None = None
    ) -> str:
        """The assistant's next turn in a chat."""
        prompt = chat_prompt(self.tokenizer, messages)
        return self.text(prompt, max_new_tokens=max_new_tokens, sampling=sampling)

    @property
    def stop_ids(self) -> frozenset[int]:
        eos = self.tokenizer.eos_id
        return self.tokenizer.turn_end_ids | (frozenset() if eos is None else frozenset({eos}))

    def check_room(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """Raises UserError when the prompt and the answer do not fit into the model's context."""
        if not len(prompt_ids):
            raise UserError("The prompt has no tokens. Write something to answer.")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens} leaves no room for an answer. Use at least 1.")
        context = self.config.context_length
        if len(prompt_ids) + max_new_tokens > context:
            raise UserError(
                f"The prompt has {len(prompt_ids):,} tokens and max_new_tokens={max_new_tokens:,}, together more than the "
                f"model's context of {context:,}. Use at most {max(context - len(prompt_ids), 0):,} new tokens, "
                "or a shorter prompt."
            )


def bucket(length: int, *, most: int) -> int:
    """The length that a program is compiled for: a power of two, at least 64, at most the model's context."""
    wanted = max(SHORTEST_BUCKET, 1 << (length - 1).bit_length())
    return wanted if wanted <= most else max(length, most)


@partial(jax.tree_util.register_dataclass, data_fields=["key", "temperature", "top_k", "top_p"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class _Settings:
    """The sampling as arrays, so that it is no part of the program."""

    key: PRNGKeyArray
    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]

    def choose(self, logits: Float[Array, " vocab"], place: Int[Array, ""]) -> Int[Array, ""]:
        key = jax.random.fold_in(self.key, place)
        return next_token(logits, key, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@partial(jax.jit, static_argnames=("config", "cache_length", "compute_dtype", "mesh"))
def _prefill(
    weights: Decoder[Any],
    tokens: Int[Array, "1 bucket"],
    count: Int[Array, ""],
    settings: _Settings,
    *,
    config: DecoderConfig,
    cache_length: int,
    compute_dtype: DTypeLike,
    mesh: Mesh | None,
) -> tuple[Int[Array, ""], KVCache]:
    """The first token of the answer to the `count` first tokens, and the cache that holds those."""
    positions = jnp.arange(tokens.shape[1])[None]
    segments = (positions < count).astype(jnp.int32)
    cache = cache_for(config, batch=1, length=cache_length, dtype=compute_dtype)
    seen = hidden(
        config,
        weights,
        tokens,
        positions=positions,
        segments=segments,
        cache=cache,
        compute_dtype=compute_dtype,
        mesh=mesh,
    )
    last = jax.lax.dynamic_index_in_dim(seen.states[0], count - 1, keepdims=False)
    # The padding's slots are free: the answer goes there.
    return settings.choose(unembed(config, weights, last), count), dataclasses.replace(seen.cache, filled=count)


@partial(jax.jit, static_argnames=("config", "compute_dtype", "mesh"), donate_argnames=("cache",))
def _decode(
    weights: Decoder[Any],
    token: Int[Array, ""],
    cache: KVCache,
    settings: _Settings,
    *,
    config: DecoderConfig,
    compute_dtype: DTypeLike,
    mesh: Mesh | None,
) -> tuple[Int[Array, ""], KVCache]:
    """The token after `token`, and the cache with `token` in it."""
    seen = hidden(
        config,
        weights,
        token[None, None],
        positions=cache.filled[None, None],
        segments=jnp.ones((1, 1), jnp.int32),
        cache=cache,
        compute_dtype=compute_dtype,
        mesh=mesh,
    )
    assert seen.cache is not None
    return settings.choose(unembed(config, weights, seen.states[0, 0]), seen.cache.filled), seen.cache
