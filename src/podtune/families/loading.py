"""Streams a checkpoint into the shards of a mesh, tensor by tensor. Used by train, serve and export.

The host never holds more than the part of one tensor that its devices need, as it lies in the file; turning it to our
layout and dtype happens on the devices, where each layer is written into a stack that was made once.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from podtune.config.errors import UserError
from podtune.families.family import Model
from podtune.families.tensors import checkpoint_shape, checkpoint_tensors, is_transposed, layer_shape
from podtune.hub.tensors import TensorInfo, TensorStore
from podtune.parallel.sharding import partition, sharding_for
from podtune.weights.leaves import LoRA, is_weight
from podtune.weights.param import Param, initialise_on, is_param
from podtune.weights.tree import map_named

Say = Callable[[str], object]

# Tensors that any checkpoint may hold and no model here needs, each with the reason.
IGNORED: tuple[tuple[str, str], ...] = (
    ("*.rotary_emb.inv_freq", "rotary frequencies, which follow from the configuration"),
    ("*.rotary_emb.cos_cached", "rotary tables, which follow from the configuration"),
    ("*.rotary_emb.sin_cached", "rotary tables, which follow from the configuration"),
    ("*.attn.masked_bias", "a mask, which follows from the positions"),
)
_SHOWN = 20
_COMPARED_ROWS = 4096


class _Plan(NamedTuple):
    """sources: the names in the store of each weight, one per layer for stacked ones, in order."""

    sources: dict[str, list[str]]


def load_weights(
    model: Model,
    description: Any,
    store: TensorStore,
    mesh: Mesh,
    *,
    dtype: DTypeLike | None = None,
    key: jax.Array | None = None,
    say: Say | None = None,
) -> Any:
    """The description with its arrays, on the mesh.

    dtype: of what is loaded; None keeps what the description says. Adapters keep theirs and start from the key.
    say: is told which tensors are left unread, and which are held in another dtype than they are stored in.
    Raises UserError listing tensors that are missing, left over, of another shape or no floats, before it reads any,
    and naming one that holds what is not finite.
    """
    plan = plan_loading(model, store, say=say)
    converted: Counter[tuple[str, str]] = Counter()

    def one(name: str, leaf: Any) -> Any:
        base: Param = leaf.base if isinstance(leaf, LoRA) else leaf
        if dtype is not None:
            base = base.of_dtype(dtype)
        names = plan.sources[name]
        for source in names:
            converted[store.names()[source].dtype.name, jnp.dtype(base.dtype).name] += 1
        array = _load(base, names, store, mesh)
        if not isinstance(leaf, LoRA):
            return array
        if key is None:
            raise ValueError("adapters start from random numbers: load_weights needs a key")
        adapter = {part: initialise_on(mesh, getattr(leaf, part), key, name=f"{name}.{part}") for part in "ab"}
        return LoRA(base=array, **adapter, scale=leaf.scale, dropout=leaf.dropout)

    weights = map_named(one, description, is_leaf=lambda leaf: is_weight(leaf) or is_param(leaf))
    for (theirs, ours), count in converted.items():
        if say is not None and theirs != ours:
            say(f"tensors stored as {theirs} and held as {ours}: {count}")
    return weights


def plan_loading(model: Model, store: TensorStore, *, say: Say | None = None) -> _Plan:
    """Matches every weight with its tensors. Raises UserError where the two do not account for each other.

    say: is told which tensors are left unread, and why.
    """
    held = store.names()
    to_theirs = _own_names(model, held)
    sources: dict[str, list[str]] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    not_floating: list[str] = []
    for tensor in checkpoint_tensors(model):
        name = to_theirs(tensor.name)
        sources.setdefault(tensor.ours, []).append(name)
        if name not in held:
            missing.append(name)
        elif held[name].shape != tensor.shape:
            misshapen.append(f"{name} is {held[name].shape}, config.json says {tensor.shape}")
        elif not jnp.issubdtype(held[name].dtype, jnp.floating):
            not_floating.append(f"{name} is {held[name].dtype.name}")
    used = {name for names in sources.values() for name in names}
    spare = [name for name in held if name not in used]
    left, ignored = _sort_out(spare, (*IGNORED, *model.family.ignored))
    if model.config.tied:
        left = _without_tied_head(left, model, store, embedding=sources["embedding"][0])
    faults = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing", missing),
            ("left over", left),
            ("of another shape", misshapen),
            ("of another kind of number", not_floating),
        )
        if names
    ]
    if faults:
        raise UserError(
            f"the checkpoint does not hold what model_type {model.family.name!r} with this config.json has. Tensors "
            + "; ".join(faults)
            + "."
        )
    for reason, count in ignored.items():
        if say is not None:
            say(f"tensors left unread: {count} ({reason})")
    return _Plan(sources)


def _own_names(model: Model, held: Mapping[str, TensorInfo]) -> Any:
    """From the names of the rows to those of this checkpoint, which may have other prefixes."""
    prefixes = [prefix for prefix in model.family.prefixes if f"{prefix}embed_tokens.weight" in held]
    heads = [head for head in model.family.heads if f"{head}weight" in held]
    prefix, head = (prefixes or ["model."])[0], (heads or ["lm_head."])[0]

    def own(name: str) -> str:
        if name.startswith("lm_head."):
            return head + name.removeprefix("lm_head.")
        return prefix + name.removeprefix("model.")

    return own


def _sort_out(names: Iterable[str], patterns: tuple[tuple[str, str], ...]) -> tuple[list[str], Counter[str]]:
    """(left over, how many are ignored for which reason)."""
    left: list[str] = []
    ignored: Counter[str] = Counter()
    for name in names:
        reason = next((reason for pattern, reason in patterns if fnmatch.fnmatchcase(name, pattern)), None)
        if reason is None:
            left.append(name)
        else:
            ignored[reason] += 1
    return left, ignored


def _without_tied_head(left: list[str], model: Model, store: TensorStore, *, embedding: str) -> list[str]:
    """A head beside a tied embedding is a copy of it, or the configuration is wrong."""
    heads = [f"{head}weight" for head in model.family.heads if f"{head}weight" in left]
    for head in heads:
        info, other = store.names()[head], store.names()[embedding]
        same = info.shape == other.shape and all(
            np.array_equal(store.read(head, rows), store.read(embedding, rows))
            for start in range(0, other.shape[0], _COMPARED_ROWS)
            for rows in [(slice(start, min(start + _COMPARED_ROWS, other.shape[0])),)]
        )
        if not same:
            raise UserError(
                f"config.json says tie_word_embeddings=true, yet {head} differs from {embedding}. Set "
                "tie_word_embeddings to false to use both, or remove the tensor."
            )
    return [name for name in left if name not in heads]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} ({', '.join(names[:_SHOWN])}{more})"


def _load(param: Param, names: list[str], store: TensorStore, mesh: Mesh) -> jax.Array:
    sharding = sharding_for(mesh, param.axes, param.shape)
    if param.kind == "vector":  # so small that all layers may lie on the host at once
        vectors = [store.read(name) for name in names]
        for name, vector in zip(names, vectors, strict=True):
            _require_finite(name, np.all(np.isfinite(vector)))
        whole = np.stack(vectors).reshape(param.shape).astype(param.dtype)
        return jax.make_array_from_callback(param.shape, sharding, lambda index: whole[index])
    if not param.is_stacked:
        array, finite = _converter(param, sharding)(_read(param, names[0], store, mesh))
        _require_finite(names[0], finite)
        return array
    stack = jnp.zeros(param.shape, param.dtype, device=sharding)
    write = _writer(param, sharding)
    for layer, name in enumerate(names):
        stack, finite = write(stack, _read(param, name, store, mesh), layer)
        _require_finite(name, finite)
        # One at a time: without waiting, the tensors of many layers would lie on the host at once.
        stack.block_until_ready()
    return stack


def _require_finite(name: str, finite: Any) -> None:
    if not finite:
        raise UserError(f"the checkpoint's tensor {name} holds NaN or infinity. Download the model's weights again.")


def _read(param: Param, name: str, store: TensorStore, mesh: Mesh) -> jax.Array:
    """One tensor on the mesh as it lies in the file; each device's part read by itself, equal parts once."""
    shape = checkpoint_shape(param)
    parts: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        where = str(index)
        if where not in parts:
            parts[where] = store.read(name, index)
        return parts[where]

    return jax.make_array_from_callback(shape, NamedSharding(mesh, _checkpoint_partition(param, mesh)), part)


def _checkpoint_partition(param: Param, mesh: Mesh) -> PartitionSpec:
    """How a tensor as it lies in a checkpoint is split, so that turning it to our layout moves nothing."""
    first = int(param.is_stacked)
    spec = tuple(partition(mesh, param.axes[first:], param.shape[first:]))
    if not is_transposed(param):
        return PartitionSpec(*spec)
    inner = (*spec[1 : param.inputs], *spec[param.inputs + 1 :])
    assert not any(inner), f"only the first dimension of a group may be split, and {param.axes} splits {spec}"
    return PartitionSpec(spec[param.inputs], spec[0])


def _to_ours(tensor: jax.Array, param: Param) -> tuple[jax.Array, jax.Array]:
    """The tensor as we hold it, and whether all of it is finite."""
    turned = tensor.T if is_transposed(param) else tensor
    return turned.reshape(layer_shape(param)).astype(param.dtype), jnp.all(jnp.isfinite(tensor))


@lru_cache(maxsize=64)
def _converter(param: Param, sharding: NamedSharding) -> Any:
    return jax.jit(
        partial(_to_ours, param=param), out_shardings=(sharding, NamedSharding(sharding.mesh, PartitionSpec()))
    )


@lru_cache(maxsize=64)
def _writer(param: Param, sharding: NamedSharding) -> Any:
    def write(stack: jax.Array, tensor: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        ours, finite = _to_ours(tensor, param)
        return jax.lax.dynamic_update_index_in_dim(stack, ours, layer, axis=0), finite

    return jax.jit(write, out_shardings=(sharding, NamedSharding(sharding.mesh, PartitionSpec())), donate_argnums=0)
