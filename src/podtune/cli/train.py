"""`podtune train`: as `run`, without the export."""

from podtune.cli.arguments import Overrides, RunFile
from podtune.cli.run import Fresh, Quiet


def train(file: RunFile, overrides: Overrides = None, fresh: Fresh = False, quiet: Quiet = False) -> None:
    """Check, prepare, train and evaluate; `podtune export OUTPUT` writes the model afterwards."""
    from podtune.config.loading import load_run
    from podtune.workflow.output import check_usable

    settings = load_run(file, overrides or ())
    check_usable(settings, fresh=fresh)

    from podtune.workflow.console import make_console
    from podtune.workflow.run import run_workflow

    run_workflow(settings, make_console(quiet=quiet), export=False, fresh=fresh)
