"""What a family is, and the `Model` that training, serving and export work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from podtune.layers.attention import Method
from podtune.models import decoder
from podtune.models.cache import KVCache
from podtune.models.decoder import Decoder, DecoderConfig, Hidden, Unembedding
from podtune.weights.param import Param, is_param
from podtune.weights.tree import named_leaves

LAYER = "{layer}"


@dataclass(frozen=True)
class NameRow:
    """One weight in both tongues: ours, such as layers.attention.q; theirs with {layer} for the number of the layer."""

    ours: str
    theirs: str


@dataclass(frozen=True)
class Family:
    """How the models of one `model_type` are configured and how their tensors are named.

    rows: every weight such a model may have, in the order of a checkpoint.
    prefixes: what a checkpoint may have in place of the leading `model.`; heads: in place of `lm_head.`.
    ignored: patterns of tensors that a checkpoint may hold and the model does without, each with the reason.
    text_config: where a configuration holds that of the text model inside it, the key.
    saved_as: (model_type, architecture) of what is saved, where a saved model is another than the one read.
    """

    name: str
    architecture: str
    config_from_hf: Callable[[Mapping[str, Any]], DecoderConfig]
    rows: tuple[NameRow, ...]
    prefixes: tuple[str, ...] = ("model.", "")
    heads: tuple[str, ...] = ("lm_head.",)
    ignored: tuple[tuple[str, str], ...] = ()
    text_config: str | None = None
    saved_as: tuple[str, str] | None = None


@dataclass(frozen=True)
class Model:
    """A family at one size. Hashable, so that it may be a static argument; holds no array."""

    family: Family
    config: DecoderConfig
    hf_config: dict[str, Any] = field(hash=False, compare=False, repr=False, default_factory=dict)

    def describe(self, *, dtype: DTypeLike = jnp.float32) -> Decoder[Param]:
        """Every weight, to be held in `dtype`."""
        return decoder.describe(self.config, dtype=dtype)

    def embed(
        self, weights: Decoder[Any], tokens: Int[Array, "batch seq"], *, compute_dtype: DTypeLike = jnp.float32
    ) -> Float[Array, "batch seq embed"]:
        return decoder.embed(self.config, weights, tokens, compute_dtype=compute_dtype)

    def hidden(
        self,
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
        """States ready for `unembedding`; see `models.decoder.hidden`."""
        return decoder.hidden(
            self.config,
            weights,
            tokens,
            positions=positions,
            segments=segments,
            cache=cache,
            embedded=embedded,
            remat=remat,
            compute_dtype=compute_dtype,
            attention=attention,
            mesh=mesh,
        )

    def unembedding(self, weights: Decoder[Any]) -> Unembedding:
        """The output projection, for losses that never build all logits."""
        return decoder.unembedding(self.config, weights)

    def unembed(self, weights: Decoder[Any], states: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """Logits in float32."""
        return decoder.unembed(self.config, weights, states)

    def cache(self, *, batch: int, length: int, dtype: DTypeLike, mesh: Mesh | None = None) -> KVCache:
        """An empty cache for `length` tokens a row."""
        return decoder.cache_for(self.config, batch=batch, length=length, dtype=dtype, mesh=mesh)

    def aliases(self) -> dict[str, str]:
        """The module each weight belongs to in Hugging Face's names, such as self_attn.q_proj."""
        return {row.ours: module_of(row.theirs) for row in self.rows()}

    def rows(self) -> tuple[NameRow, ...]:
        """The name rows of the weights that this model has."""
        present = named_leaves(self.describe(), is_leaf=is_param)
        named = {row.ours for row in self.family.rows}
        assert set(present) <= named, f"weights without a name row: {sorted(set(present) - named)}"
        return tuple(row for row in self.family.rows if row.ours in present)


def module_of(theirs: str) -> str:
    """`model.layers.{layer}.self_attn.q_proj.weight` -> `self_attn.q_proj`."""
    return theirs.removesuffix(".weight").removesuffix(".bias").split(f"{LAYER}.")[-1].removeprefix("model.")
