"""`podtune inspect`: what is trained on, token by token, on the terminal or as a page."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from podtune.cli.arguments import Overrides, RunFile

Rows = Annotated[int | None, typer.Option("--rows", min=1, help="How many rows (3 on a terminal, 20 in a page).")]
OneRow = Annotated[int | None, typer.Option("--row", min=0, help="This row alone.")]
Page = Annotated[Path | None, typer.Option("--html", metavar="OUT", help="Write a page that needs nothing else.")]
Ids = Annotated[bool, typer.Option("--ids", help="Show token ids too.")]
Split = Annotated[Literal["train", "validation"], typer.Option("--split", help="Which rows.")]


def inspect(
    file: RunFile,
    overrides: Overrides = None,
    rows: Rows = None,
    row: OneRow = None,
    html: Page = None,
    ids: Ids = False,
    split: Split = "train",
) -> None:
    """Show rows as the model will see them: packed, with what is trained set off from what is given."""
    from rich.console import Console

    from podtune.config.errors import UserError
    from podtune.config.loading import load_run
    from podtune.data.inspection import inspect_row, legend, print_row, rows_to_show
    from podtune.data.inspection_html import page_of
    from podtune.workflow.beginning import prepare_alone

    console = Console()
    run = load_run(file, overrides or ())
    work = prepare_alone(run, Console(stderr=True), report=console if html is None else Console(quiet=True))
    prepared = work.prepared
    chosen = prepared.train if split == "train" else prepared.validation
    if chosen is None:
        raise UserError(f"{file}: there is no validation split to look at (data.validation).")
    if row is not None and row >= chosen.rows:
        raise UserError(f"--row {row}: the {split} split has rows 0 to {chosen.rows - 1}.")
    indices = [row] if row is not None else rows_to_show(chosen, rows or (3 if html is None else 20))
    inspected = [inspect_row(chosen, index, work.tokenizer) for index in indices]
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(page_of(inspected, prepared, chosen, title=str(file)), encoding="utf-8")
        console.print(f"wrote {len(inspected)} rows to {html}", highlight=False, soft_wrap=True)
        return
    console.print()
    console.print(legend(console.color_system is not None and not console.no_color))
    console.print()
    for each in inspected:
        print_row(console, each, with_ids=ids)
