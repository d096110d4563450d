"""The run file described for editors (JSON Schema) and for readers (docs/configuration.md), from its models."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from podtune.config.overrides import subject_in
from podtune.config.schema import Run, Subject

INTRODUCTION = """# The run file

<!-- Written by `podtune schema --markdown`; a test compares the two. -->

Four keys are a whole run file:

```yaml
model: HuggingFaceTB/SmolLM2-135M-Instruct
data: ./train.jsonl
method: lora
output: ./runs/support-bot
```

- A key that has a scalar form (`method: lora`) takes it or a mapping (`method: {lora: {rank: 32}}`).
- The file is YAML 1.2: `1e-4` is a number, `no` and `12:30:00` are text, only `true` and `false` are truth values. Keys
  given twice, unknown keys, merge keys and tags are refused. Anchors and aliases work.
- `podtune check FILE` reports every fault at once as `file:line: message`, with exit status 2 (0
  where there is none), and downloads nothing.
- Any key can be set on the command line of a command that reads the file, with the same checks:
  `podtune run FILE train.learning_rate=1e-4 data.train.0.weight=2 method.lora.rank=8`.
- In paths, `~` and `$NAME` are expanded, and `$$` is a dollar sign. Relative paths start at the current directory.
- Times carry their unit: `90s`, `10m`, `1h30m`. `none` switches off what can be absent.
- `podtune schema > run.schema.json` writes the JSON Schema; name it in the first line of a run file
  (`# yaml-language-server: $schema=run.schema.json`) and the editor completes and checks keys.

Every key, its default, and what it does:
"""


def document_schema() -> dict[str, Any]:
    """The JSON Schema of a run file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Run.model_json_schema()}


def document_reference() -> str:
    """docs/configuration.md."""
    lines = [INTRODUCTION]
    for title, block in _blocks(Run, "Top level"):
        lines += [f"## {title}", "", (block.__doc__ or "").strip(), ""]
        if block.model_fields:
            lines += ["| key | default | what it does |", "|---|---|---|"]
            lines += [
                f"| `{name}` | {_default(field)} | {_cell(field.description or '')} |"
                for name, field in block.model_fields.items()
            ]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _blocks(block: type[Subject], title: str) -> Iterator[tuple[str, type[Subject]]]:
    yield title, block
    for name, field in block.model_fields.items():
        inner = subject_in(field.annotation)
        if inner is not None and (block, name) != (_home(), "validation"):
            yield from _blocks(inner, f"`{name}`" if block is Run else f"{title[:-1]}.{name}`")


def _home() -> type[Subject]:
    return subject_in(Run.model_fields["data"].annotation) or Run


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        scalar = getattr(type(value), "scalar_key", None)
        return f"`{getattr(value, scalar)}`" if scalar is not None else "see below"
    return f"`{_written(field, value)}`"


def _written(field: FieldInfo, value: Any) -> str:
    for kind in field.metadata:
        if hasattr(kind, "write"):
            value = kind.write(value) if value is not None else None
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
