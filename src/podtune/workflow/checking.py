"""What a run would refuse, as far as it can be told without fetching anything and without the machine that will train:
what `podtune check` looks at.

Each part yields its faults and goes on, so that one does not hide the others. The model is opened, and the data
prepared, as the run does it. Devices, mesh and memory are not looked at: they are those of another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from rich.console import Console

from podtune.config.errors import PodtuneError
from podtune.config.rows import Data, Source
from podtune.config.schema import Run
from podtune.config.wording import counted
from podtune.hub.addresses import is_address
from podtune.workflow import identity
from podtune.workflow.output import OutputFolder, check_store, check_usable, has_begun, is_output_folder, open_output
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
    prepared = False
    if opened and rows is None and not any(is_address(source.path) for _, source in _sources(run.data)):
        faults = list(_row_faults(work))
        yield from faults
        prepared = not faults
    else:
        yield from _form_faults(work, rows)
    yield from _output_faults(work, prepared=prepared)


def _address_faults(work: Work) -> Iterator[str]:
    """Of a model that is fetched when the run starts, and of the template it is to have."""
    from podtune.hub.sources import check_model_source, perhaps_a_path

    source, template = work.run.model.source, work.run.model.chat_template
    faults = _faults_in(lambda: check_model_source(source))
    yield from faults
    if not faults:
        work.say(f"model: {source} is fetched when the run starts; it was not looked at.{perhaps_a_path(source)}")
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
    yield from _faults_in(lambda: beginning.row_tokens(work))
    yield from _faults_in(lambda: beginning.check_small_files(work))
    if (lora := work.run.method.lora) is not None:
        yield from _faults_in(lambda: attach(work.model.describe(), lora, aliases=work.model.aliases()))
    yield from _faults_in(lambda: training.check_prompts(work, offline=True))


def _sources(data: Data) -> list[tuple[str, Source]]:
    """Every source with what its rows are for."""
    validation = data.validation if isinstance(data.validation, tuple) else ()
    return [*(("training", source) for source in data.train), *(("validation", source) for source in validation)]


def _form_faults(work: Work, rows: int | None) -> Iterator[str]:
    """Of the form of the rows that lie on this machine, where there is no tokenizer to prepare them with."""
    from podtune.data.sources import check_data_source

    for use, source in _sources(work.run.data):
        if is_address(source.path):
            faults = _faults_in(partial(check_data_source, source))
            yield from faults
            if not faults:
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
    except PodtuneError as error:
        yield str(error)
        return
    ended = ""
    try:
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
        ended = str(error)
    if told > SHOWN_FAULTS:
        yield f"{source.path}: and {counted(told - SHOWN_FAULTS, 'more row')} with faults"
    if ended:
        yield ended
    work.say(f"data: {source.path}: {counted(read, f'{use} row')}, {shape.describe()}, {told:,} with faults")


def _row_faults(work: Work) -> Iterator[str]:
    """Of rows as the run prepares them; it then finds them so."""
    from podtune.parallel.mesh import stated_mesh
    from podtune.train.job import check_validation
    from podtune.workflow import training
    from podtune.workflow.beginning import prepare_data

    if faults := _faults_in(lambda: prepare_data(work)):
        yield from faults
        return
    yield from _faults_in(lambda: check_validation(work.run, work.prepared.validation))
    training.warn_of_short_batch(work)
    output = work.run.output.path
    if is_address(output) or not has_begun(Path(output)):  # a run that is gone on with keeps its batches
        yield from _faults_in(lambda: training.plan_steps(work, stated_mesh(work.run.mesh)))


def _output_faults(work: Work, *, prepared: bool) -> Iterator[str]:
    """prepared: model and data are open, and can be compared with those of the run that is there."""
    output = work.run.output.path
    if is_address(output):
        faults = _faults_in(lambda: check_store(output))
        yield from faults
        if not faults:
            work.say(f"output: {output} was not looked at")
        return
    faults = _faults_in(lambda: check_usable(work.run))
    yield from faults
    if not faults and is_output_folder(Path(output)):
        yield from _faults_in(lambda: identity.refuse_lost_checkpoints(open_output(Path(output))))
    if prepared and not faults and has_begun(Path(output)):
        work.output = open_output(Path(output))
        yield from _faults_in(lambda: identity.refuse_changes(work, identity.fingerprints(work)))


def _faults_in(look: Callable[[], object]) -> list[str]:
    """What is refused when looking, if anything is."""
    try:
        look()
    except PodtuneError as error:
        return [str(error)]
    return []
