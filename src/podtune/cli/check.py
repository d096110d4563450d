"""`podtune check`: the run file, then the model, data and output it names, before anything is fetched or trained."""

from typing import Annotated

import typer

from podtune.cli.arguments import Overrides, RunFile

Rows = Annotated[
    int | None, typer.Option(min=1, help="Look at the form of so many rows of each source, and prepare none.")
]


def check(file: RunFile, overrides: Overrides = None, rows: Rows = None) -> None:
    """Check a run file, its model, data and output, and say everything that is wrong. Downloads nothing; the data stay
    prepared for the run."""
    from rich.console import Console

    from podtune.config.errors import UserError
    from podtune.config.loading import load_run
    from podtune.workflow.checking import faults_of

    run = load_run(file, overrides or ())
    console = Console()
    console.print(f"{file}: the configuration is right", markup=False, highlight=False, soft_wrap=True)
    faults = list(faults_of(run, console, rows=rows))
    if faults:
        typer.echo("\n".join(faults), err=True)
        raise UserError(f"{file}: a run would be refused for this")
