"""Values in the place of a description's Params, for tests that make weights of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from podtune.weights.param import Param, is_param
from podtune.weights.tree import map_named


def map_params(function: Callable[[str, Param], Any], description: Any) -> Any:
    """The description with each Param replaced by `function(name, param)`."""
    return map_named(function, description, is_leaf=is_param)
