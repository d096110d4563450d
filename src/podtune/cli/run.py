"""`podtune run`: the whole job."""

from typing import Annotated

import typer

from podtune.cli.arguments import Overrides, RunFile

Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew although the output folder holds this run.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]


def run(file: RunFile, overrides: Overrides = None, fresh: Fresh = False, quiet: Quiet = False) -> None:
    """Check, prepare, train, evaluate and export, as the run file says. Run again, it goes on from where it stopped."""
    from podtune.config.loading import load_run
    from podtune.workflow.output import check_usable

    settings = load_run(file, overrides or ())
    check_usable(settings, fresh=fresh)  # before anything slow is imported

    from podtune.workflow.console import make_console
    from podtune.workflow.run import run_workflow

    run_workflow(settings, make_console(quiet=quiet), fresh=fresh)
