"""Adapters as a change of the tree: which weights get one, what is trained, and how both come together again."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Key

from podtune.config.errors import UserError
from podtune.config.schema import LoRA as LoRASettings
from podtune.weights.leaves import LoRA, as_array, is_weight
from podtune.weights.param import Param, is_param, named_key
from podtune.weights.tree import map_named, named_leaves

ALL_LINEAR = "all-linear"


def attach(description: Any, settings: LoRASettings, *, aliases: Mapping[str, str] | None = None) -> Any:
    """The description with a LoRA pair at every target.

    aliases: the Hugging Face module name of each weight, such as `self_attn.q_proj`, so that targets may use either.
    Raises UserError when a pattern matches nothing.
    """
    targets = target_names(description, settings, aliases=aliases or {})
    scale = settings.scale

    def one(name: str, param: Param) -> Any:
        if name not in targets:
            return param
        layers, layers_axis = (param.shape[:1], param.axes[:1]) if param.is_stacked else ((), ())
        inputs, outputs = param.input_shape, param.output_shape
        first = len(layers)
        down = Param(
            shape=(*layers, *inputs, settings.rank),
            axes=(*layers_axis, *param.axes[first : first + param.inputs], "rank"),
            inputs=param.inputs,
            init="fan_in_uniform",
        )
        up = Param(
            shape=(*layers, settings.rank, *outputs),
            axes=(*layers_axis, "rank", *param.axes[first + param.inputs :]),
            init="zeros",
        )
        return LoRA(base=param, a=down, b=up, scale=scale, dropout=settings.dropout)

    return map_named(one, description, is_leaf=is_param)


def target_names(description: Any, settings: LoRASettings, *, aliases: Mapping[str, str]) -> list[str]:
    """The weights that get an adapter, by name. A pattern is a glob over a whole name or over its last parts;
    all-linear stands for every linear weight but the head, alone or among patterns."""
    params: dict[str, Param] = named_leaves(description, is_leaf=is_param)
    able = [name for name, param in params.items() if param.kind in ("linear", "lookup", "head")]
    linear = [name for name in able if params[name].kind == "linear"]
    if settings.targets == ALL_LINEAR:
        return linear
    chosen: set[str] = set()
    for pattern in settings.targets:
        if pattern == ALL_LINEAR:
            chosen.update(linear)
            continue
        matched = [name for name in able if _matches(pattern, name) or _matches(pattern, aliases.get(name, ""))]
        if not matched:
            known = sorted({*able, *(aliases[name] for name in able if name in aliases)})
            raise UserError(
                f"method.lora.targets: {pattern!r} matches no weight of this model. "
                f"Its weights are: {', '.join(known)}; {ALL_LINEAR} stands for every linear one."
            )
        chosen.update(matched)
    return [name for name in able if name in chosen]


def _matches(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def adapter_mask(tree: Any) -> Any:
    """True at every adapter array, False elsewhere; the same tree otherwise."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, LoRA):
            return False
        return dataclasses.replace(leaf, base=False, a=True, b=True, dropout_key=None)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: is_weight(leaf) or is_param(leaf))


def split(tree: Any, mask: Any) -> tuple[Any, Any]:
    """(what the mask marks, the rest): two trees with None where the other has a leaf."""
    marked = jax.tree.map(lambda leaf, keep: leaf if keep else None, tree, mask, is_leaf=is_param)
    rest = jax.tree.map(lambda leaf, keep: None if keep else leaf, tree, mask, is_leaf=is_param)
    return marked, rest


def join(marked: Any, rest: Any) -> Any:
    """The whole tree again from the two of `split`."""
    return jax.tree.map(
        lambda one, other: other if one is None else one, marked, rest, is_leaf=lambda leaf: leaf is None
    )


def with_dropout(weights: Any, keys: Key[Array, "rows"]) -> Any:
    """The weights with dropout keys in every adapter that asks for them: one per row, for stacked adapters per layer.

    keys: one per row, so that what a row drops does not depend on which rows are beside it.
    """

    def one(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, LoRA) or leaf.dropout == 0:
            return leaf
        own = jax.vmap(lambda key: named_key(key, name))(keys)
        if leaf.a.ndim + leaf.b.ndim - 2 != leaf.base.ndim:
            own = jax.vmap(lambda key: jax.random.split(key, leaf.a.shape[0]), out_axes=1)(own)
        return dataclasses.replace(leaf, dropout_key=own)

    return map_named(one, weights, is_leaf=is_weight)


def merge(weights: Any) -> Any:
    """Plain arrays, each adapter added to its base."""
    return jax.tree.map(as_array, weights, is_leaf=is_weight)
