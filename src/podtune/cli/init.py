"""`podtune init`: looks at the data and writes the four lines that train on it."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

DataPath = Annotated[str, typer.Argument(metavar="DATA", help="A file, glob, folder, hub://, gs:// or s3:// address.")]
ModelName = Annotated[str, typer.Option("--model", "-m", help="Hub id, folder or .gguf file to start from.")]
OutputFile = Annotated[Path, typer.Option("--output", "-o", help="The run file to write.")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]


def init(
    data: DataPath, model: ModelName = DEFAULT_MODEL, output: OutputFile = Path("run.yaml"), force: Force = False
) -> None:
    """Look at the data, say what it is, and write a run file of four lines for it. Downloads no model."""
    from podtune.config.errors import UserError

    if output.exists() and not force:
        raise UserError(f"{output} is there already. Name another with --output, or write over it with --force.")
    if output.is_dir() or (output.parent.exists() and not output.parent.is_dir()):
        raise UserError(f"--output {output}: a file cannot be there. Name another.")
    from podtune.config.wording import counted
    from podtune.config.writing import as_yaml
    from podtune.data.shapes import UnknownShape
    from podtune.data.survey import survey_source
    from podtune.hub.atomic import atomic_file

    def write(rows: str) -> str:
        name = as_yaml(f"./runs/{_run_name(data)}")
        text = f"model: {as_yaml(model)}\ndata: {rows}\nmethod: lora\noutput: {name}\n"
        with atomic_file(output) as file:
            file.write(text.encode())
        return f"\nwrote {output}:\n{text}"

    try:
        survey = survey_source(data)
    except UnknownShape as error:
        if not error.nameable:
            raise
        written = write(f"{{train: {as_yaml(data)}, columns: {{instruction: NAME, output: NAME}}}}")
        typer.echo(
            f"{error}\n{written}\nnext: put the columns' names in the place of NAME, then podtune check {output}"
        )
        return
    typer.echo("\n".join(survey.lines()))
    columns = ", ".join(f"{role}: {as_yaml(name)}" for role, name in survey.columns.items())
    if columns:
        rows = f"{{train: {as_yaml(data)}, columns: {{{columns}}}}}"
    elif survey.documents == "paragraph":
        rows = f"{{train: {{path: {as_yaml(data)}, documents: paragraph}}}}"
        typer.echo(
            "documents  each paragraph is one; a whole file as one would leave too few rows to hold any out "
            "(documents: file takes it so)"
        )
    else:
        rows = as_yaml(data)
    written = write(rows)
    if columns:
        typer.echo("columns  taken for what their names usually mean; mend the run file where they mean something else")
    if survey.faulty:
        typer.echo(f"faults   {counted(survey.faulty, 'row')} with faults, the first {survey.first_fault}")
    if survey.glued and survey.glued == survey.rows:
        typer.echo(
            "spaces   no prompt ends with one and no completion begins with one: they are put together as they stand; "
            "where one belongs between them, put it into the data"
        )
    typer.echo(f"{written}\nnext: podtune check {output}, podtune inspect {output}, then podtune run {output}")


def _run_name(data: str) -> str:
    """A name for the run out of the data's: chats of ./data/chats.jsonl.gz."""
    words = [part for part in data.replace(":", "/").split("/") if part and "*" not in part]
    stem = (words[-1] if words else "run").lstrip(".").split(".")[0].split("@")[0]
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem) or "run"
