"""`podtune eval`: loss, perplexity and answers on the held-out rows."""

import json
from pathlib import Path
from typing import Annotated

import typer

from podtune.cli.arguments import Overrides
from podtune.cli.run import Quiet


def evaluate(
    source: Annotated[
        str, typer.Argument(metavar="OUTPUT", help="A run's output folder, or a run file.", show_default=False)
    ],
    overrides: Overrides = None,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout, and all else on stderr.")
    ] = False,
) -> None:
    """Evaluate what a run has trained, or, where it has not trained yet, the model it starts from."""
    from podtune.config.loading import load_run
    from podtune.workflow.output import open_output, refuse_remote

    refuse_remote(source, command="eval")
    folder = Path(source)
    if not folder.is_dir():
        run = load_run(folder, overrides or ())
    else:  # where it is now, which may not be where it was written
        run = open_output(folder).load_run(overrides or ())
        run = run.model_copy(update={"output": run.output.model_copy(update={"path": str(folder)})})

    from podtune.workflow.afterwards import evaluate_run
    from podtune.workflow.console import make_console

    found = evaluate_run(run, make_console(quiet=quiet, stderr=as_json))
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
