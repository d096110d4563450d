"""Writes a Run as the YAML of a run file, every key resolved. Loading it again gives an equal Run."""

import json
import re
from typing import Any, cast

from podtune.config.document import resolve
from podtune.config.schema import Run

BARE = re.compile(r"[A-Za-z_./~][\w./~+@:-]*(?<!:)", re.ASCII)
"""Text that needs no quotes."""


def dump_run(run: Run, *, without_defaults: bool = False) -> str:
    """The run file as resolved: loading it gives an equal Run. without_defaults: only what differs from them."""
    return "\n".join(_mapping(run.model_dump(exclude_defaults=without_defaults), "")) + "\n"


def _mapping(values: dict[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{as_yaml(key)}:", *_mapping(cast(dict[str, Any], value), indent + "  ")]
        elif isinstance(value, list | tuple) and value:
            lines.append(f"{indent}{as_yaml(key)}:")
            for item in cast(list[Any], value):
                lines += _item(item, indent + "  ")
        else:
            lines.append(f"{indent}{as_yaml(key)}: {scalar_as_yaml(value)}")
    return lines


def _item(value: Any, indent: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{indent}- {scalar_as_yaml(value)}"]
    first, *rest = _mapping(cast(dict[str, Any], value), indent + "  ")
    return [f"{indent}- {first.lstrip()}", *rest]


def scalar_as_yaml(value: Any) -> str:
    """A text, number, truth value, nothing, or an empty mapping or list, as YAML reads it back."""
    if isinstance(value, str):
        return as_yaml(value)
    if isinstance(value, dict | list | tuple):
        return "{}" if isinstance(value, dict) else "[]"
    return json.dumps(value)


def as_yaml(text: str) -> str:
    """A text as YAML reads it back: bare where that reads back as the same text, else in double quotes."""
    if BARE.fullmatch(text) and isinstance(resolve(text), str):
        return text
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
