"""Answers from a model: prefill, then one token at a time on a cache. Used by chat, by samples while training, and by
the check of what was exported.

Programs are compiled for lengths in buckets, never for one prompt or one token: a few for prompts, one for decoding per
cache length, whatever the sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from podtune.config.errors import UserError
from podtune.models.cache import KVCache
from podtune.models.decoder import Decoder, DecoderConfig, cache_for, hidden, unembed
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
        weights: Any,
        tokenizer: Any,
        *,
        compute_dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
    ) -> None:
        self.config: DecoderConfig = model.config
        self.weights: Any = weights
        self.tokenizer = tokenizer
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.mesh = mesh

    def stream(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """The ids of the answer as they come, the one that ends it left out. Raises UserError when they cannot fit."""
        for (token,) in self.stream_many([prompt_ids], max_new_tokens=max_new_tokens, sampling=sampling):
            assert token is not None
            yield token

    def stream_many(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, sampling: Sampling | None = None
    ) -> Iterator[list[int | None]]:
        """The next id of each answer, side by side, at the price of one; None for an answer that has ended."""
        for prompt in prompts:
            self.check_room(prompt, max_new_tokens)
        settings = _Settings.of(sampling or Sampling())
        program = {"config": self.config, "compute_dtype": self.compute_dtype, "mesh": self.mesh}
        counts = np.asarray([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((len(prompts), bucket(int(counts.max()))), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        slots = tokens.shape[1] + bucket(max_new_tokens)
        chosen, cache = _prefill(self.weights, tokens, counts, settings, slots=slots, **program)
        going = [True] * len(prompts)
        for place in range(max_new_tokens):
            said = np.asarray(chosen).tolist()
            going = [goes and token not in self.tokenizer.turn_end_ids for goes, token in zip(going, said, strict=True)]
            if not any(going):
                return
            yield [token if goes else None for goes, token in zip(going, said, strict=True)]
            if place + 1 < max_new_tokens:
                chosen, cache = _decode(self.weights, chosen, counts + place, cache, settings, **program)

    def texts(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, sampling: Sampling | None = None
    ) -> list[str]:
        """The whole answer to each prompt."""
        answers: list[list[int]] = [[] for _ in prompts]
        if prompts:
            for tokens in self.stream_many(prompts, max_new_tokens=max_new_tokens, sampling=sampling):
                for answer, token in zip(answers, tokens, strict=True):
                    answer += [] if token is None else [token]
        return [self.tokenizer.decode(answer) for answer in answers]

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

    def check_room(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """Raises UserError when the prompt and the answer do not fit into the model's context."""
        if not len(prompt_ids):
            raise UserError("The prompt has no tokens. Write something to answer.")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens} leaves no room for an answer. Use at least 1.")
        context = self.config.context_length
        if len(prompt_ids) + max_new_tokens > context:
            raise UserError(
                f"The prompt has {len(prompt_ids):,} tokens and max_new_tokens={max_new_tokens:,}, together more than "
                f"the model's context of {context:,}. Use at most {max(context - len(prompt_ids), 0):,} new tokens, "
                "or a shorter prompt."
            )


def bucket(length: int) -> int:
    """The length that a program is compiled for: a power of two, at least 64."""
    return max(SHORTEST_BUCKET, 1 << (length - 1).bit_length())


@partial(jax.tree_util.register_dataclass, data_fields=["key", "temperature", "top_k", "top_p"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class _Settings:
    """The sampling as arrays, so that it is no part of the program."""

    key: Any
    temperature: Any
    top_k: Any
    top_p: Any

    @classmethod
    def of(cls, sampling: Sampling) -> _Settings:
        return cls(
            key=jax.random.key(sampling.seed),
            temperature=jnp.float32(sampling.temperature),
            top_k=jnp.int32(sampling.top_k),
            top_p=jnp.float32(sampling.top_p),
        )

    def choose(
        self, logits: Float[Array, "rows vocab"], places: Int[Array, " rows"], *, mesh: Mesh | None
    ) -> Int[Array, " rows"]:
        """A token for each row; its key depends on the row and on the place of the token in it."""

        def one(logits: Array, row: Array, place: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(self.key, row), place)
            return next_token(logits, key, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

        chosen = jax.lax.map(lambda each: one(*each), (logits, jnp.arange(logits.shape[0]), places))
        # Whole on every device, so that each process can read them.
        return (
            chosen if mesh is None else jax.lax.with_sharding_constraint(chosen, NamedSharding(mesh, PartitionSpec()))
        )


@partial(jax.jit, static_argnames=("config", "slots", "compute_dtype", "mesh"))
def _prefill(
    weights: Decoder[Any],
    tokens: Int[Array, "rows bucket"],
    counts: Int[Array, " rows"],
    settings: _Settings,
    *,
    config: DecoderConfig,
    slots: int,
    compute_dtype: DTypeLike,
    mesh: Mesh | None,
) -> tuple[Int[Array, " rows"], KVCache]:
    """The first token of each answer, and the cache that holds the prompts: of each row its first `counts` tokens."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # Padding is a segment of its own, which no later token sees.
    segments = (positions < counts[:, None]).astype(jnp.int32)
    cache = cache_for(config, batch=tokens.shape[0], length=slots, dtype=compute_dtype)
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
    last = jnp.take_along_axis(seen.states, (counts - 1)[:, None, None], axis=1)[:, 0]
    assert seen.cache is not None
    return settings.choose(unembed(config, weights, last), counts, mesh=mesh), seen.cache


@partial(jax.jit, static_argnames=("config", "compute_dtype", "mesh"), donate_argnames=("cache",))
def _decode(
    weights: Decoder[Any],
    tokens: Int[Array, " rows"],
    positions: Int[Array, " rows"],
    cache: KVCache,
    settings: _Settings,
    *,
    config: DecoderConfig,
    compute_dtype: DTypeLike,
    mesh: Mesh | None,
) -> tuple[Int[Array, " rows"], KVCache]:
    """The token after each of `tokens`, which stand at `positions`, and the cache with them in it."""
    seen = hidden(
        config,
        weights,
        tokens[:, None],
        positions=positions[:, None],
        segments=jnp.ones((tokens.shape[0], 1), jnp.int32),
        cache=cache,
        compute_dtype=compute_dtype,
        mesh=mesh,
    )
    assert seen.cache is not None
    return settings.choose(unembed(config, weights, seen.states[:, 0]), positions + 1, mesh=mesh), seen.cache
