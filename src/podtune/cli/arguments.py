"""Arguments that several commands share, and what is said of an option that is a setting."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

RunFile = Annotated[Path, typer.Argument(metavar="FILE", help="The run file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that replace the file's: train.learning_rate=1e-4"),
]


class HintingCommand(TyperCommand):
    """A command that, given `--steps 3`, says that settings are written train.steps=3."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # NoSuchOption, by what it holds: typer keeps the class in a module of its own that is not public.
            option = getattr(error, "option_name", "")
            if isinstance(option, str) and option and any(param.name == "overrides" for param in self.params):
                self._add_hint(error, option)
            raise

    def _add_hint(self, error: Any, option: str) -> None:
        from podtune.config.other_names import OTHER_NAMES
        from podtune.config.overrides import keys_named

        name = option.lstrip("-").replace("-", "_")
        if keys := keys_named(name) or [OTHER_NAMES[one] for one in (name,) if one in OTHER_NAMES]:
            written = " or ".join(f"{key}=…" for key in keys)
            error.message = f"{error.message.rstrip('.')}. Settings have no dashes: {written}"
