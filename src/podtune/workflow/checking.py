"""What a run would refuse, as far as it can be told without fetching anything and without the machine that will train:
what `podtune check` looks at.

Each part yields its faults and goes on, so that one does not hide the others. The model is opened, and the data
prepared, as the run does it. Devices, mesh and memory are not looked at: they are those of another machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rich.console import Console

from podtune.config.errors import PodtuneError, UserError
from podtune.config.rows import Data, Source
from podtune.config.schema import Run
from podtune.config.wording import counted
from podtune.hub.addresses import check_address, is_remote
from podtune.workflow import identity
from podtune.workflow.output import OutputFolder, check_usable, is_output_folder, open_output
from podtune.workflow.work import Work

SHOWN_FAULTS = 10
"""Faults of one source that are told one by one; the others are counted."""


def faults_of(run: Run, console: Console, *, rows: int | None = None) -> Iterator[str]:
    """The faults of a run's model, data and output; what was found is said on the console.

    rows: look at so many rows of each source, and prepare nothing.
    """
    from podtune.hub.sources import is_path

    work = Work(run, console, OutputFolder(Path(run.output.path), writes=False))
    opened = False
    if is_path(run.model.source):
        faults = list(_model_faults(work))
        yield from faults
        opened = not faults
    else:
        yield from _address_faults(work)
    if opened and rows is None and not any(_is_address(source.path) for _, source in _sources(run.data)):
        yield from _row_faults(work)
    else:
        yield from _form_faults(work, rows)
    yield from _output_faults(work)


def _is_address(path: str) -> bool:
    """Whether it has to be fetched: gs://, s3://, hub://."""
    return "://" in path


def _address_faults(work: Work) -> Iterator[str]:
    """Of a model that is fetched when the run starts, and of the template it is to have."""
    from podtune.hub.sources import check_source, perhaps_a_path

    source, template = work.run.model.source, work.run.model.chat_template
    try:
        check_source(source)
        work.say(f"model: {source} is fetched when the run starts; it was not looked at.{perhaps_a_path(source)}")
    except UserError as error:
        yield str(error)
    if template is not None and not Path(template).expanduser().is_file():
        yield f"model.chat_template: there is no file {template}"


def _model_faults(work: Work) -> Iterator[str]:
    """Of a model on this machine: its files, tokenizer and template, and what the run asks of them."""
    from podtune.weights.adapters import attach
    from podtune.workflow import beginning, training

    try:
        beginning.open_model(work, offline=True)
    except (PodtuneError, OSError) as error:
        yield str(error) if str(error).startswith("model") else f"model: {error}"
        return
    try:
        beginning.row_tokens(work)
    except UserError as error:
        yield str(error)
    try:
        if (lora := work.run.method.lora) is not None:
            attach(work.model.describe(), lora, aliases=work.model.aliases())
    except UserError as error:
        yield str(error)
    try:
        training.check_prompts(work)
    except UserError as error:
        yield str(error)


def _sources(data: Data) -> list[tuple[str, Source]]:
    """Every source with what its rows are for."""
    validation = data.validation if isinstance(data.validation, tuple) else ()
    return [*(("training", source) for source in data.train), *(("validation", source) for source in validation)]


def _form_faults(work: Work, rows: int | None) -> Iterator[str]:
    """Of the form of the rows that lie on this machine, where there is no tokenizer to prepare them with."""
    from podtune.data.sources import check_source

    for use, source in _sources(work.run.data):
        if _is_address(source.path):
            try:
                check_source(source)
            except UserError as error:
                yield str(error)
                continue
            work.say(f"data: {source.path} is fetched when the run starts; it was not looked at")
        else:
            yield from _source_faults(work, source, use=use, limit=rows)
    work.say("data: whether rows can be tokenised and have something to train on was not looked at")


def _source_faults(work: Work, source: Source, *, use: str, limit: int | None) -> Iterator[str]:
    from podtune.data.prepare_inputs import open_input
    from podtune.data.rows import Refused
    from podtune.data.shapes import to_row

    read = told = 0
    try:
        shape, records = open_input(work.run.data, source).read()
        if shape is None:
            yield f"data: {source.path} holds no rows"
            return
        for record in islice(records, limit):
            read += 1
            fault = str(record) if isinstance(record, Refused) else ""
            try:
                if not isinstance(record, Refused):
                    to_row(record, shape, chat=True)
            except PodtuneError as error:
                fault = str(error)
            if fault:
                told += 1
                if told <= SHOWN_FAULTS:
                    yield fault
    except PodtuneError as error:
        yield str(error)
        return
    if told > SHOWN_FAULTS:
        yield f"{source.path}: and {counted(told - SHOWN_FAULTS, 'more row')} with faults"
    work.say(f"data: {source.path}: {counted(read, f'{use} row')}, {shape.describe()}, {told:,} with faults")


def _row_faults(work: Work) -> Iterator[str]:
    """Of rows as the run prepares them; it then finds them so."""
    from podtune.workflow.beginning import prepare_data

    try:
        prepare_data(work)
    except PodtuneError as error:
        yield str(error)


def _output_faults(work: Work) -> Iterator[str]:
    output = work.run.output.path
    if is_remote(output):
        try:
            check_address(output)
        except UserError as error:
            yield f"output: {error}"
            return
        work.say(f"output: {output} was not looked at")
        return
    try:
        check_usable(work.run)
        if hasattr(work, "prepared") and is_output_folder(Path(output)):
            work.output = open_output(Path(output))
            identity.refuse_changes(work, identity.fingerprints(work))
    except PodtuneError as error:
        yield str(error)
