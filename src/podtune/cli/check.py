"""`podtune check`: the run file, then the model and data it names, before anything is downloaded or computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podtune.cli.arguments import Overrides, RunFile

if TYPE_CHECKING:
    from podtune.config.rows import Data, Source
    from podtune.config.schema import Run

SHOWN_FAULTS = 10
"""Faults of one source that are told one by one; the others are counted."""


def check(
    file: RunFile,
    overrides: Overrides = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Look at the first rows of each source only.")] = None,
) -> None:
    """Check a run file and its data, and say everything that is wrong with them. Downloads nothing."""
    from podtune.config.errors import ConfigError
    from podtune.config.loading import load_run

    run = load_run(file, overrides or ())
    typer.echo(f"{file}: the configuration is right")
    faults = [*check_model(run), *check_data(run.data, rows), *check_output(run.output.path)]
    if faults:
        raise ConfigError(str(file), faults)


def check_model(run: Run) -> Iterator[str]:
    """Faults of a model and chat template that lie on this machine."""
    from podtune.config.errors import PodtuneError
    from podtune.data.templates import require_readable
    from podtune.families import model_from_files
    from podtune.families.loading import plan_loading
    from podtune.hub.download import parse_hub_id
    from podtune.hub.sources import resolve_model
    from podtune.hub.tokenizer import load_tokenizer

    template = run.model.chat_template
    if template is not None and not Path(template).is_file():
        yield f"model.chat_template: there is no file {template}"
        template = None
    source = run.model.source
    if "://" in source or not (os.path.exists(source) or source.startswith((".", "/")) or source.endswith(".gguf")):
        if "://" not in source and parse_hub_id(source) is None:
            yield f"model: {source} is neither a file or folder here nor a Hub id (owner/name, optionally @revision)"
        else:
            typer.echo(f"model: {source} is fetched when the run starts; it was not looked at")
        return
    try:
        files = resolve_model(source, offline=True)
        # Each opens what the run will open: configuration, list of the weights, tokenizer and template.
        plan_loading(model_from_files(files), files.tensors())
        tokenizer = load_tokenizer(files, Path(template).read_text() if template is not None else None)
        require_readable(tokenizer, template or f"that of {source}")
    except (PodtuneError, OSError) as error:
        yield str(error) if str(error).startswith("model.") else f"model: {error}"
        return
    typer.echo(f"model: {source}: {files.config.get('model_type', 'a model of unknown type')}")


def check_data(data: Data, rows: int | None) -> Iterator[str]:
    """Faults of the rows that lie on this machine; says what the others are."""
    validation = data.validation if isinstance(data.validation, tuple) else ()
    for use, sources in (("training", data.train), ("validation", validation)):
        for source in sources:
            if "://" in source.path:
                typer.echo(f"data: {source.path} is fetched when the run starts; it was not looked at")
            else:
                yield from check_source(data, source, use, rows)


def check_source(data: Data, source: Source, use: str, limit: int | None) -> Iterator[str]:
    """Faults of the rows of one source; says their number and shape."""
    from itertools import islice

    from podtune.config.errors import PodtuneError
    from podtune.data.prepare_inputs import open_input
    from podtune.data.shapes import to_row

    read = told = 0
    try:
        shape, records = open_input(data, source).read()
        if shape is None:
            yield f"data: {source.path} holds no rows"
            return
        for record in islice(records, limit):
            read += 1
            try:
                to_row(record, shape, chat=True)
            except PodtuneError as error:
                told += 1
                if told <= SHOWN_FAULTS:
                    yield str(error)
    except PodtuneError as error:
        told += 1
        yield str(error)
        return
    if told > SHOWN_FAULTS:
        yield f"{source.path}: and {told - SHOWN_FAULTS:,} more rows with faults"
    typer.echo(f"data: {source.path}: {read:,} {use} rows, {shape.describe()}, {told:,} with faults")


def check_output(output: str) -> Iterator[str]:
    """A fault when results could not be written."""
    if "://" in output:
        return
    folder = Path(output).absolute()
    if folder.exists() and not folder.is_dir():
        yield f"output: {output} is a file; name a folder"
        return
    above = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(above, os.W_OK):
        yield f"output: {above} cannot be written to; choose another folder"
