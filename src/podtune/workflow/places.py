"""A run with its paths in full, as the output folder keeps it: it is the same run from wherever it is started again."""

from __future__ import annotations

import os

from podtune.config.rows import Source
from podtune.config.schema import Run
from podtune.hub.addresses import is_address
from podtune.hub.sources import is_path


def with_full_paths(run: Run) -> Run:
    """The run with paths of this machine from the root on; addresses and Hub ids stay as they are."""
    model, data = run.model, run.data
    validation = data.validation
    return run.model_copy(
        update={
            "model": model.model_copy(
                update={
                    "source": _full(model.source) if is_path(model.source) else model.source,
                    "chat_template": _full(model.chat_template),
                    "cache": _full(model.cache),
                }
            ),
            "data": data.model_copy(
                update={
                    "train": _sources(data.train),
                    "validation": _sources(validation) if isinstance(validation, tuple) else validation,
                    "cache": _full(data.cache),
                }
            ),
            "output": run.output.model_copy(update={"path": _full(run.output.path)}),
        }
    )


def _sources(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    return tuple(source.model_copy(update={"path": _full(source.path)}) for source in sources)


def _full(path: str | None) -> str | None:
    return path if path is None or is_address(path) else os.path.abspath(path)
