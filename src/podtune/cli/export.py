"""`podtune export`: write what a run has trained, from its checkpoint; or any model as a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from podtune.cli.run import Quiet

ExportOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings of the export that replace the run's: export.dtype=bfloat16"),
]


def export(
    source: Annotated[
        str,
        typer.Argument(metavar="OUTPUT", help="A run's output folder; or, with --to, any model.", show_default=False),
    ],
    overrides: ExportOverrides = None,
    to: Annotated[Path | None, typer.Option(help="Where to write a model that is not a run's.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; otherwise as the run file says.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Export a run again, with nothing asked twice: rank, alpha and the rest are what was trained."""
    from podtune.config.errors import UserError
    from podtune.workflow.afterwards import convert_model, export_run
    from podtune.workflow.console import make_console
    from podtune.workflow.output import open_output, refuse_remote

    console = make_console(quiet=quiet)
    if to is not None:
        if overrides:
            raise UserError(f"{overrides[0]}: settings are those of a run, and --to is for models that are none.")
        convert_model(source, to, console, dtype=dtype)
    else:
        refuse_remote(source, command="export")
        output = open_output(Path(source))
        if other := [one for one in overrides or () if not one.startswith("export")]:
            raise UserError(f"{other[0]}: only settings of the export (export.dtype=..., export.checkpoint=best).")
        if dtype and any(one.startswith("export.dtype=") for one in overrides or ()):
            raise UserError(f"--dtype {dtype} and export.dtype both say how to export; keep one.")
        export_run(output, console, dtype=dtype, overrides=overrides or ())
