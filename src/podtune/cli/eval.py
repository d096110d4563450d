"""`podtune eval`: loss, perplexity and answers on the held-out rows."""

from pathlib import Path
from typing import Annotated

import typer

from podtune.cli.arguments import Overrides
from podtune.cli.run import Quiet


def evaluate(
    source: Annotated[Path, typer.Argument(help="A run's output folder, or a run file.", show_default=False)],
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Evaluate what a run has trained, or, where it has not trained yet, the model it starts from."""
    from podtune.config.loading import load_run
    from podtune.workflow.output import open_output

    run = load_run(open_output(source).path / "run.yaml" if source.is_dir() else source, overrides or ())

    from podtune.workflow.afterwards import evaluate_run
    from podtune.workflow.console import make_console

    evaluate_run(run, make_console(quiet=quiet))
