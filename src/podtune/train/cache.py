"""JAX's persistent cache of compiled programs: the second run of a job does not compile its step again."""

from __future__ import annotations

import os
from pathlib import Path

import jax

FOLDER_VARIABLE = "PODTUNE_COMPILE_CACHE"


def enable_compile_cache() -> Path | None:
    """Turns the cache on and says where it is: $PODTUNE_COMPILE_CACHE, else jax's own setting if there is one, else
    ~/.cache/podtune/jax. None where the variable is `off`."""
    asked = os.environ.get(FOLDER_VARIABLE)
    if asked == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    present = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    home = Path(os.environ.get("PODTUNE_CACHE", "~/.cache/podtune")).expanduser()
    folder = Path(asked).expanduser() if asked else Path(present) if present else home / "jax"
    folder.mkdir(parents=True, exist_ok=True)
    if str(folder) != present:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # jax opens its cache at the first compile and then keeps to it.
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()
    # All programs: a run compiles some dozens of small ones besides its step, together seconds of each start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder
