"""Settings from the command line (`train.learning_rate=1e-4`), laid over a run file's tree before it is checked."""

import types
from typing import Any, Union, cast, get_args, get_origin

from pydantic_core import PydanticCustomError

from podtune.config.document import Entry, Fault, Node, Place, read_document
from podtune.config.schema import Run, Subject


def apply_override(root: Node, override: str, position: int) -> Fault | None:
    """Sets one key of the tree, making what lies on the way. A scalar form on the way becomes its mapping: after
    `method: lora`, `method.lora.rank=8` changes the rank alone. Returns what is wrong with its form, if anything is;
    whether key and value are right is checked with the rest of the file."""
    place = Place.on_command_line(position, override)
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        return Fault(place, "wanted key=value, such as train.learning_rate=1e-4")
    if not text.strip():
        return Fault(place, f"nothing stands behind {path.strip()}=; write none for no value")
    document = read_document(text, "")
    if document.faults:
        return Fault(place, document.faults[0].message)
    value = Node(document.root.value, place) if document.root is not None else Node(None, place)
    _stand_at(value, place)
    return _set(root, Run, parts, value)


def _stand_at(node: Node, place: Place) -> None:
    """Gives every node below the place of the override."""
    if isinstance(node.value, list):
        node.value = [Node(item.value, place) for item in node.value]
        children = node.value
    elif isinstance(node.value, dict):
        node.value = {key: Entry(place, Node(entry.node.value, place)) for key, entry in node.value.items()}
        children = [entry.node for entry in node.value.values()]
    else:
        children = []
    for child in children:
        _stand_at(child, place)


def _set(node: Node, annotation: Any, parts: list[str], value: Node) -> Fault | None:
    part, rest = parts[0], parts[1:]
    subject = subject_in(annotation)
    if holds_list(annotation) and part.isdecimal():
        return _set_item(node, annotation, parts, value)
    if holds_list(annotation) and isinstance(node.value, list):
        return Fault(value.place, f'"{part}" is asked of a list; name one of its items by number, from 0')
    if not isinstance(node.value, dict):
        _expand(node, subject)
    node.value = entries = dict(cast(dict[str, Entry], node.value))
    field = subject.model_fields.get(part) if subject is not None else None
    if not rest:
        entries[part] = Entry(value.place, value)
        return None
    # A copy of what lies on the way: an alias (*name) elsewhere in the file may share it.
    child = entries.get(part, Entry(value.place, Node({}, value.place)))
    entries[part] = Entry(child.place, Node(child.node.value, child.node.place))
    return _set(entries[part].node, field.annotation if field is not None else None, rest, value)


def _set_item(node: Node, annotation: Any, parts: list[str], value: Node) -> Fault | None:
    found = node.value if isinstance(node.value, list) else [Node(node.value, node.place)]
    items = [Node(item.value, item.place) for item in found]
    index = int(parts[0])
    if index > len(items) or (index == len(items) and len(parts) > 1):
        return Fault(value.place, f"there is no item {index}: the list has {len(items)} (the first is 0)")
    node.value = items
    if len(parts) == 1:
        items[index : index + 1] = [value]
        return None
    return _set(items[index], subject_in(annotation), parts[1:], value)


def _expand(node: Node, subject: type[Subject] | None) -> None:
    """Turns a scalar form into the mapping it stands for."""
    plain = node.plain()
    expanded: dict[str, Any] = {}
    if subject is not None and plain is not None:
        try:
            expanded = dict(subject.expand(plain))
        except PydanticCustomError:
            expanded = {}
    node.value = {
        key: Entry(node.place, Node(node.value if part is plain else {}, node.place)) for key, part in expanded.items()
    }


def keys_named(name: str, block: type[Subject] = Run, under: str = "") -> list[str]:
    """The keys in full whose last part is `name`: train.steps for steps."""
    found: list[str] = []
    for part, field in block.model_fields.items():
        key = f"{under}.{part}" if under else part
        inner = subject_in(field.annotation)
        if part == name:
            found.append(key)
        if inner is not None and not holds_list(field.annotation):
            found += keys_named(name, inner, key)
    return found


def subject_in(annotation: Any) -> type[Subject] | None:
    """The block that a field's type holds, itself or in a list, if any."""
    if isinstance(annotation, type) and issubclass(annotation, Subject):
        return annotation
    return next((found for part in get_args(annotation) if (found := subject_in(part)) is not None), None)


def holds_list(annotation: Any) -> bool:
    """Whether a field's type is, or may be, a list."""
    if get_origin(annotation) is tuple:
        return True
    return get_origin(annotation) in (Union, types.UnionType) and any(holds_list(part) for part in get_args(annotation))
