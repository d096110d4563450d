"""`podtune prepare`: the data alone, as `podtune run` will find it prepared."""

from typing import Annotated

import typer

from podtune.cli.arguments import Overrides, RunFile

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]


def prepare(file: RunFile, overrides: Overrides = None, quiet: Quiet = False) -> None:
    """Tokenise and pack the data into TFRecord files and say what became of the rows. `run` then finds them."""
    from rich.console import Console

    from podtune.config.loading import load_run
    from podtune.workflow.beginning import prepare_alone

    run = load_run(file, overrides or ())
    work = prepare_alone(run, Console(quiet=quiet, stderr=True), report=Console(quiet=quiet))
    if not quiet:
        typer.echo(work.prepared.folder)
