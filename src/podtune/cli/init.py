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
    from podtune.data.survey import survey_source
    from podtune.hub.atomic import atomic_file

    survey = survey_source(data)
    typer.echo("\n".join(survey.lines()))
    columns = ", ".join(f"{role}: {as_yaml(name)}" for role, name in survey.columns.items())
    rows = f"{{train: {as_yaml(data)}, columns: {{{columns}}}}}" if columns else as_yaml(data)
    text = f"model: {as_yaml(model)}\ndata: {rows}\nmethod: lora\noutput: {as_yaml(f'./runs/{_run_name(data)}')}\n"
    with atomic_file(output) as file:
        file.write(text.encode())
    if columns:
        typer.echo("columns  taken for what their names usually mean; mend the run file where they mean something else")
    if survey.faulty:
        typer.echo(f"faults   {counted(survey.faulty, 'row')} with faults, the first {survey.first_fault}")
    typer.echo(
        f"\nwrote {output}:\n{text}\nnext: podtune check {output}, podtune inspect {output}, then podtune run {output}"
    )


def _run_name(data: str) -> str:
    """A name for the run out of the data's: chats of ./data/chats.jsonl.gz."""
    words = [part for part in data.replace(":", "/").split("/") if part and "*" not in part]
    stem = (words[-1] if words else "run").lstrip(".").split(".")[0].split("@")[0]
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in stem) or "run"
