"""Reads a run file into a Run, or says everything that is wrong with it at once. Downloads nothing, imports no jax."""

import codecs
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from podtune.config.document import MAX_BYTES, Fault, Node, Place, read_document
from podtune.config.errors import ConfigError
from podtune.config.other_names import called_here
from podtune.config.overrides import apply_override, holds_list, subject_in
from podtune.config.schema import NOT_IN_THIS_VERSION, Run, Subject
from podtune.config.subject import LIST_TAG, SCALAR_TAG
from podtune.config.writing import dump_run

__all__ = ["ConfigError", "dump_run", "load_run"]

Key = tuple[str | int, ...]

STAND_INS: Mapping[str, Any] = {"method": "full"}
"""What takes the place of a faulty required key, so that the rest can still be checked."""

_DATA_ENDINGS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")  # nobody's YAML: JSON may be, and a .txt too


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The Run that the file and the overrides (`train.learning_rate=1e-4`) describe.

    Raises ConfigError with every fault of both, sorted as they stand.
    """
    name = str(path)
    if Path(path).suffix in _DATA_ENDINGS and Path(path).is_file():
        fault = f"this is data, and no run file. `podtune init {name}` writes a run file for it"
        raise ConfigError(name, [f"{name}: {fault}"])
    document = read_document(_read_text(Path(path), name), name)
    faults = document.faults
    root = document.root
    if root is None:
        if not faults:
            faults = [Fault(Place.in_file(name, 1), "the file is empty; a run needs model, data, method and output")]
        raise ConfigError(name, _sorted(faults))
    if not isinstance(root.value, dict):
        read = "a list" if isinstance(root.value, list) else "a single value" if root.value is not None else "nothing"
        wanted = f"wanted a mapping with model, data, method and output, read {read}"
        raise ConfigError(name, _sorted([*faults, Fault(root.place, wanted)]))
    given: dict[str, str] = {}
    for position, override in enumerate(overrides):
        fault = apply_override(root, override, position)
        key = _in_full(override.partition("=")[0].strip())
        if fault is None and key in given:
            place = Place.on_command_line(position, override)
            fault = Fault(place, f'the key "{key}" is given twice (also as {given[key]}); keep one')
        if fault is None:
            given[key] = override
        else:
            faults.append(fault)
    run = _check(root, faults)
    if run is None or faults:
        raise ConfigError(name, _sorted(faults))
    return run


def _in_full(key: str) -> str:
    """The key, or the one below it that its scalar form stands for: output is output.path."""
    *above, last = key.split(".")
    field = _block(tuple(above)).model_fields.get(last)
    inner = None if field is None or holds_list(field.annotation) else subject_in(field.annotation)
    return f"{key}.{inner.scalar_key}" if inner is not None and inner.scalar_key else key


def _sorted(faults: Sequence[Fault]) -> list[str]:
    return [str(fault) for fault in sorted(dict.fromkeys(faults), key=lambda fault: fault.place.order)]


def _read_text(path: Path, name: str) -> str:
    """The file's text: UTF-8 with or without a byte-order mark, or UTF-16 with one."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(name, [f"{name}: there is no such file"]) from None
    except IsADirectoryError:
        raise ConfigError(name, [f"{name}: this is a directory; give the run file in it"]) from None
    except (OSError, ValueError) as error:
        raise ConfigError(name, [f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}"]) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(name, [f"{name}: larger than 1 MiB, so this is hardly a run file"])
    encoding = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            name, [f"{name}:{line}: not UTF-8 (byte 0x{raw[error.start]:02x}); save the file as UTF-8"]
        ) from None


def _check(root: Node, faults: list[Fault]) -> Run | None:
    """The Run of a tree. Adds the faults: first those of single keys, then, with the faulty keys set aside, those of
    rules that span several."""
    plain = root.plain()
    faulty: dict[Key, None] = {}
    stood_in: set[Key] = set()
    while True:
        try:
            return Run.model_validate(plain)
        except ValidationError as error:
            known = len(faulty) + len(stood_in)
            for key, fault in list(_faults(error, root, tuple(faulty))):
                if fault is not None:
                    faults.append(fault)
                faulty[key] = None
                if _set_aside(plain, key):
                    stood_in.add(key)
            if len(faulty) + len(stood_in) == known or error.errors()[0]["type"] == "podtune_rules":
                return None


def _faults(error: ValidationError, root: Node, faulty: Sequence[Key]) -> Iterator[tuple[Key, Fault | None]]:
    """Each error as a key and what to say of it (nothing, when it only follows from a fault already told)."""
    for detail in error.errors(include_url=False):
        key = tuple(part for part in detail["loc"] if part not in (LIST_TAG, SCALAR_TAG))
        context = detail.get("ctx", {})
        if detail["type"] == "podtune_rules":
            for breach in context["breaches"]:
                if not any(_overlap(one, other) for one in (breach.key, *breach.others) for other in faulty):
                    yield breach.key, Fault(root.place_of(breach.key), _said(breach.key, breach.message))
            continue
        if "under" in context:
            key = (*key, context["under"])
        if detail["type"] == "missing":
            follows = any(_overlap(key, other) for other in faulty)
            yield key, None if follows else Fault(root.place_of(key[:-1]), _missing(key))
        elif detail["type"] == "extra_forbidden":
            yield key, Fault(root.place_of(key), _unknown(key, tuple(_block(key[:-1]).model_fields)))
        elif "unknown" in context:
            yield (
                (*key, context["unknown"]),
                Fault(
                    root.place_of((*key, context["unknown"])), _unknown((*key, context["unknown"]), context["known"])
                ),
            )
        else:
            follows = any(len(other) > len(key) and other[: len(key)] == key for other in faulty)
            yield key, None if follows else Fault(root.place_of(key), _said(key, detail["msg"]))


def _said(key: Key, message: str) -> str:
    return f"{'.'.join(map(str, key))}: {message}"


def _overlap(one: Key, other: Key) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _missing(key: Key) -> str:
    field = _block(key[:-1]).model_fields[str(key[-1])]
    return f'missing key "{key[-1]}"{_under(key)}: {field.description or ""}'.rstrip(": ")


def _under(key: Key) -> str:
    return f" under {'.'.join(map(str, key[:-1]))}" if len(key) > 1 else ""


def _unknown(key: Key, known: Sequence[str]) -> str:
    """What to say of a key that does not exist: the nearest that does, or where it belongs."""
    name = str(key[-1])
    said = f'unknown key "{name}"'
    if name in BLOCKS_TO_COME and len(key) == 1:
        return f'"{name}" is not part of this version of podtune; remove it'
    if name in NOT_IN_THIS_VERSION:
        return NOT_IN_THIS_VERSION[name]
    if (ours := called_here(name)) is not None:
        return f"{said}; here it is called {ours}"
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    if near:
        return f'{said}, did you mean "{near[0]}"?'
    homes = [home for home in _homes(Run, ()) if home[-1] == name]
    if homes:
        return f"{said}{_under(key)}; it belongs under {'.'.join(homes[0][:-1]) or 'the top level'}"
    place = ".".join(map(str, key[:-1])) or "the top level"
    return f"{said}; {place} takes {', '.join(known)}" if known else f"{said}; {place} takes no keys"


BLOCKS_TO_COME = ("tpu", "moe", "tune", "launch")


def _homes(block: type[Subject], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The path of every key there is."""
    for name, field in block.model_fields.items():
        yield (*above, name)
        inner = subject_in(field.annotation)
        if inner is not None:
            yield from _homes(inner, (*above, name))


def _block(key: Key) -> type[Subject]:
    """The model of the block at a key."""
    block: type[Subject] = Run
    for part in key:
        if isinstance(part, str) and part in block.model_fields:
            block = subject_in(block.model_fields[part].annotation) or block
    return block


def _set_aside(plain: Any, key: Key) -> bool:
    """Takes a faulty key out of the plain tree; where it is out already, and so is required, puts a stand-in there and
    returns True."""
    holder: Any = None
    last: Any = None
    value = plain
    for part in key:
        if isinstance(value, dict) and isinstance(part, str):
            holder, last = cast(dict[str, Any], value), part
            value = holder.get(part)
            if part not in holder:
                break
        elif isinstance(value, list) and isinstance(part, int):
            holder, last = cast(list[Any], value), part
            value = holder[part]
    if holder is None:
        return False
    if isinstance(holder, list):
        holder[last] = "stand-in"
    elif last in holder:
        del holder[last]
    else:
        holder[last] = STAND_INS.get(last, "stand-in")
        return True
    return False
