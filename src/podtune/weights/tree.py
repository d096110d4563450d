"""Typed trees of weights: frozen dataclasses that jax walks, and the names of what is in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import jax

Class = TypeVar("Class", bound=type)
Tree = TypeVar("Tree")


def static(**keywords: Any) -> Any:
    """A field of a weight dataclass that is part of the program (a number, a name), not an array."""
    return dataclasses.field(metadata={"static": True}, **keywords)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def weight_dataclass(cls: Class) -> Class:
    """Makes a frozen dataclass that jax sees as a tree: every field a child, except those made by `static()`."""
    cls = dataclasses.dataclass(frozen=True)(cls)  # type: ignore[assignment]
    fields = dataclasses.fields(cls)
    return jax.tree_util.register_dataclass(
        cls,
        data_fields=[field.name for field in fields if not field.metadata.get("static")],
        meta_fields=[field.name for field in fields if field.metadata.get("static")],
    )


def named_leaves(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves by dotted name, such as `layers.attention.q`, in the tree's own order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def map_named(
    function: Callable[..., Any], tree: Tree, *others: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Tree:
    """The tree with each leaf replaced by `function(name, leaf, *leaves of others)`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(jax.tree_util.keystr(path, simple=True, separator="."), *leaves),
        tree,
        *others,
        is_leaf=is_leaf,
    )
