"""What a run ran on and with: versions, devices, memory. For run.json, the report and the check of memory."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from podtune.parallel.devices import core_count

_PACKAGES = ("podtune", "jax", "jaxlib", "libtpu", "optax", "orbax-checkpoint", "grain", "transformers", "tokenizers")


def versions() -> dict[str, str]:
    """Python and the packages that decide results, those that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(core_count()),
        "memory": f"{host_memory() / 2**30:.1f} GiB" if host_memory() else "unknown",
    }


def host_memory() -> int:
    """Bytes of memory of this machine or of its container, whichever is less; 0 where it cannot be known."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total
