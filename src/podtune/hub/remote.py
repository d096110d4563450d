"""Models and files in object stores (gs://, s3://) through fsspec. Used by sources and data."""

import re
from pathlib import Path

from podtune.config.errors import UserError
from podtune.hub.telling import Progress

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.ASCII)


def is_remote(source: str) -> bool:
    """Whether `source` is an address (scheme://…) other than the Hub's."""
    match = _SCHEME.match(source)
    return match is not None and match[1] != "hub"


def fetch_remote_model(
    source: str,
    *,
    cache: Path | None = None,
    offline: bool = False,
    config_only: bool = False,
    progress: Progress | None = None,
) -> Path:
    raise UserError(f"{source}: not yet")
