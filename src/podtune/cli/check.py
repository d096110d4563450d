"""`podtune check`: the run file and its data, before anything is downloaded."""

import typer

from podtune.cli.arguments import Overrides, RunFile


def check(file: RunFile, overrides: Overrides = None) -> None:
    """Check a run file and its data, and say everything that is wrong with them. Downloads nothing."""
    from podtune.config.loading import load_run

    load_run(file, overrides or ())
    typer.echo(f"{file}: the configuration is right")
