"""What a narrower dtype would make of the weights: infinity, which is refused, and zeros, which are told. Used by the
export and its rehearsal."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
from jax.typing import DTypeLike

from podtune.config.errors import UserError
from podtune.families.saving import SavedTensor

_TOLD_SHARE = 1e-3
"""Of all values. Fewer that become 0 are the tail of any distribution of weights."""


def check_narrowing(tensors: Iterable[SavedTensor], dtype: DTypeLike) -> str | None:
    """A sentence for the user where more than a trifle of the values would become 0, else None.

    Raises UserError, naming tensor and value, when a finite value would be infinite in this dtype. With several
    processes all must call it.
    """
    name, flushed, values = jnp.dtype(dtype).name, 0, 0
    for tensor in tensors:
        if tensor.fit is None:
            continue
        fit = tensor.fit()
        if fit.overflowing is not None:
            wider = "float32" if name == "bfloat16" else "bfloat16 or float32"
            raise UserError(
                f"export.dtype: {name} ends at {float(jnp.finfo(dtype).max):.6g}, and {tensor.name} holds a value of "
                f"{fit.overflowing:.6g}, which it would turn into infinity. Use {wider}: export: {{dtype: …}} in the "
                "run file, --dtype with podtune export."
            )
        flushed, values = flushed + fit.flushed, values + fit.values
    if flushed <= _TOLD_SHARE * values:
        return None
    return (
        f"{flushed:,} of {values:,} weights ({flushed / values:.1%}) are so small that they become 0 in {name}. "
        "bfloat16 and float32 keep them (export.dtype)."
    )
