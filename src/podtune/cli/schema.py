"""`podtune schema`: the JSON Schema of a run file."""

import typer


def schema() -> None:
    """Print the JSON Schema of a run file, for editors that complete and check YAML."""
    import json

    from podtune.config.schema import Run

    typer.echo(json.dumps(Run.model_json_schema(), indent=2))
