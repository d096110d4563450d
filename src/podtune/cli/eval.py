"""`podtune eval`: loss, perplexity and answers on the held-out rows."""

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
) -> None:
    """Evaluate what a run has trained, or, where it has not trained yet, the model it starts from."""
    from podtune.config.loading import load_run
    from podtune.workflow.output import open_output, refuse_remote

    refuse_remote(source, command="eval")
    folder = Path(source)
    run = load_run(open_output(folder).path / "run.yaml" if folder.is_dir() else folder, overrides or ())
    if folder.is_dir():  # where it is now, which may not be where it was written
        run = run.model_copy(update={"output": run.output.model_copy(update={"path": str(folder)})})

    from podtune.workflow.afterwards import evaluate_run
    from podtune.workflow.console import make_console

    evaluate_run(run, make_console(quiet=quiet))
