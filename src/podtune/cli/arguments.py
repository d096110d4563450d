"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(metavar="FILE", help="The run file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that replace the file's: train.learning_rate=1e-4"),
]
