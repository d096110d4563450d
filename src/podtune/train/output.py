"""The part of an output folder that has to be local, whatever the folder is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from podtune.hub.addresses import is_address


def local_folder(output: str) -> Path:
    """Where files that are appended to are written: the output folder, or a local stand-in for a remote one."""
    if not is_address(output):
        return Path(output)
    home = Path(os.environ.get("PODTUNE_CACHE", "~/.cache/podtune")).expanduser()
    return home / "outputs" / hashlib.blake2b(output.encode(), digest_size=8).hexdigest()
