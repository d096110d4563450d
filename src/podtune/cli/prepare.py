"""`podtune prepare`: the data alone, as `podtune run` will find it prepared."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podtune.cli.arguments import Overrides, RunFile

if TYPE_CHECKING:
    from rich.console import Console

    from podtune.config.schema import Run
    from podtune.data.prepare import Prepared
    from podtune.hub.tokenizer import Tokenizer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
DEFAULT_ROW_TOKENS = 2048


def prepare(file: RunFile, overrides: Overrides = None, quiet: Quiet = False) -> None:
    """Tokenise and pack the data into TFRecord files and say what became of the rows. `run` then finds them."""
    from rich.console import Console

    from podtune.config.loading import load_run

    console = Console(quiet=quiet, stderr=True)
    prepared, _ = prepare_run(load_run(file, overrides or ()), None if quiet else console)
    report = Console(quiet=quiet)
    prepared.report.print(report)
    if not quiet:
        typer.echo(prepared.folder)


def prepare_run(run: "Run", progress: "Console | None") -> "tuple[Prepared, Tokenizer]":
    """The prepared data of a run and the tokenizer it was prepared with. Fetches no weights."""
    from podtune.data.prepare import prepare as prepare_data
    from podtune.hub.sources import resolve_model
    from podtune.hub.tokenizer import load_tokenizer

    cache = Path(run.model.cache) if run.model.cache else None
    files = resolve_model(run.model.source, cache=cache, config_only=True)
    tokenizer = load_tokenizer(files, read_template(run.model.chat_template))
    max_length = row_tokens(run.data.max_length, files.config)
    return prepare_data(run.data, tokenizer, max_length=max_length, seed=run.seed, progress=progress), tokenizer


def row_tokens(asked: int | None, config: dict[str, Any]) -> int:
    """data.max_length, or 2048, or the model's context where that is less. Raises UserError beyond the context."""
    from podtune.config.errors import UserError

    inner = config.get("text_config")
    context = {**config, **(inner if isinstance(inner, dict) else {})}.get("max_position_embeddings")
    if context is not None and (isinstance(context, bool) or not isinstance(context, int) or context < 1):
        raise UserError(f"config.json: max_position_embeddings={context!r} must be a positive whole number.")
    if asked is not None and context is not None and asked > context:
        raise UserError(
            f"data.max_length={asked:,} is more than the model's context of {context:,} tokens. "
            f"Use at most {context:,}."
        )
    return asked or min(DEFAULT_ROW_TOKENS, context or DEFAULT_ROW_TOKENS)


def read_template(path: str | None) -> str | None:
    """The chat template in a file; None without one."""
    from podtune.config.errors import UserError

    try:
        return Path(path).expanduser().read_text(encoding="utf-8") if path is not None else None
    except OSError as error:
        raise UserError(f"model.chat_template: {path} cannot be read ({error.strerror}). Name a Jinja file.") from error
