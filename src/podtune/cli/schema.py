"""`podtune schema`: the JSON Schema of a run file."""

from typing import Annotated

import typer


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print every key as a page to read instead.")] = False,
) -> None:
    """Print the JSON Schema of a run file, for editors that complete and check YAML."""
    import json

    from podtune.config.documentation import document_reference, document_schema

    typer.echo(document_reference() if markdown else json.dumps(document_schema(), indent=2), nl=not markdown)
