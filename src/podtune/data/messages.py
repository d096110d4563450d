"""Chats as data sets write them -> messages: OpenAI's role/content, ShareGPT's from/value, tool calls, reasoning.

Faults name the message and its key; shapes puts the file and the line before them.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from podtune.data.read_json import kind_of, parse_json
from podtune.data.rows import Message

SHAREGPT_KEYS = ("from", "value")

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "system": "system", "developer": "developer",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool", "function": "tool",
    "function_call": "function_call", "tool_call": "function_call",
}  # fmt: skip
_ROLE_NAMES = {"model": "assistant", "gpt": "assistant", "bot": "assistant", "human": "user"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_READ_KEYS = {
    "role", "content", "from", "value", "train", "weight", "name", "tool_calls", "tool_call_id", "function_call",
    *_REASONING,
}  # fmt: skip


class Fault(ValueError):
    """What is wrong with a record, its place apart."""


def says_something(value: object) -> bool:
    """Whether this is neither null nor empty."""
    return value is not None and value not in ("", [], ())


def refuse_difference(said: Mapping[str, object], where: str) -> None:
    """Raises Fault naming two keys that mean one thing where what they say differs. said: what stands under each;
    null and what is empty say nothing."""
    given = [(key, value) for key, value in said.items() if says_something(value)]
    for key, value in given[1:]:
        if value != given[0][1]:
            raise Fault(
                f"{where} has {given[0][0]} and {key}, which mean one thing and say two ({_short(given[0][1])} and "
                f"{_short(value)}). Keep one."
            )


def read_messages(value: object, column: str, keys: Mapping[str, str]) -> tuple[Message, ...]:
    """The messages in a column; a text is read as JSON. keys: other names of role, content and train. Raises Fault."""
    turns = _json_list(value, column)
    return tuple(_read_message(turn, f"{column}[{at}]", keys) for at, turn in enumerate(turns))


def read_tools(value: object, column: str) -> tuple[dict[str, Any], ...]:
    """The tools a chat may call, in the form {type: function, function: {...}}; bare functions are put into it."""
    if value is None or value in ("", []):
        return ()
    tools = _json_list(value, column)
    read: list[dict[str, Any]] = []
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise Fault(f"{column}[{at}] is {kind_of(tool)}, an object that describes a tool is wanted.")
        described = cast(dict[str, Any], tool)
        bare = "name" in described and "function" not in described and described.get("type") in (None, "function")
        bare_function = {key: part for key, part in described.items() if key != "type"}
        read.append({"type": "function", "function": bare_function} if bare else described)
    return tuple(read)


def _json_list(value: object, column: str) -> list[object]:
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise Fault(
                f"column {column} is a text that is not JSON ({error}); a list, or JSON of a list, is wanted. "
                "Write it with json.dumps."
            ) from error
    if not isinstance(value, list):
        raise Fault(f"column {column} is {kind_of(value)}, a list is wanted.")
    return cast(list[object], value)


def _read_message(turn: object, where: str, keys: Mapping[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise Fault(f"{where} is {kind_of(turn)}, an object with role and content is wanted.")
    message = cast(dict[str, Any], turn)
    role_key = keys.get("role") or ("from" if "from" in message and "role" not in message else "role")
    content_key = keys.get("content") or (
        "value" if "content" not in message and ("value" in message or role_key == "from") else "content"
    )
    role = message.get(role_key)
    if not isinstance(role, str) or not role:
        has = ", ".join(message) or "nothing"
        what = "is missing" if role_key not in message else f"is {kind_of(role) if role != '' else 'empty'}"
        raise Fault(f"{where}.{role_key} {what}; a role such as user or assistant is wanted. The message has {has}.")
    if role_key == "from":
        if role not in _SHAREGPT_ROLES:
            raise Fault(f"{where}.from is {role}; known are {', '.join(_SHAREGPT_ROLES)}.")
        role = _SHAREGPT_ROLES[role]
    role = _ROLE_NAMES.get(role, role)
    if role_key == "role" and isinstance(speaker := message.get("from"), str):
        refuse_difference({"role": role, "from": _SHAREGPT_ROLES.get(speaker, speaker)}, where)
    if "content" not in keys:
        contents = {key: message.get(key) for key in ("content", "value")}
        refuse_difference(contents, where)
        content_key = next((key for key in contents if says_something(contents[key])), content_key)
    calls = _tool_calls(message, where)
    content = message.get(content_key)
    if role == "function_call":
        in_text = _calls_in_text(content, f"{where}.{content_key}")
        if calls:
            refuse_difference({content_key: _without_ids(in_text), "tool_calls": _without_ids(calls)}, where)
        role, calls, content = "assistant", in_text, None
    text = None if content is None else _text_of(content, f"{where}.{content_key}")
    if text is None and not calls:
        what = "is missing" if content_key not in message else "is null"
        raise Fault(f"{where}.{content_key} {what}; a text is wanted (only beside tool_calls may it be absent).")
    train_key = keys.get("train", "train")
    known = _READ_KEYS | {role_key, content_key, train_key}
    return Message(
        role=role,
        content=text,
        train=_train(message, train_key, where),
        reasoning=_reasoning(message, where),
        tool_calls=calls,
        name=_optional_text(message, "name", where),
        tool_call_id=_optional_text(message, "tool_call_id", where),
        extra={key: part for key, part in message.items() if key not in known and part is not None}
        if not message.keys() <= known
        else {},
    )


def _text_of(content: object, where: str) -> str:
    """The content as one text; parts of text are joined as they stand, as templates that know parts do."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Fault(f"{where} is {kind_of(content)} ({_short(content)}), a text is wanted.")
    texts: list[str] = []
    for at, part in enumerate(cast(list[object], content)):
        if isinstance(part, str):
            texts.append(part)
            continue
        entry = cast(dict[str, object], part) if isinstance(part, dict) else {}
        text = entry.get("text")
        if entry.get("type", "text") != "text":
            raise Fault(f"{where}[{at}] is of type {entry['type']}; podtune trains on parts of type text alone.")
        if not isinstance(text, str):
            raise Fault(
                f"{where}[{at}].text is {'missing' if 'text' not in entry else kind_of(text)}, a text is wanted."
            )
        texts.append(text)
    return "".join(texts)


def _train(message: Mapping[str, Any], key: str, where: str) -> bool | None:
    """The message's own word on whether it bears loss: train: true or false, or a weight of 0 or 1."""
    train, weight = message.get(key), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise Fault(f"{where}.{key} is {kind_of(train)} ({_short(train)}), true or false is wanted.")
    if weight is not None and not (isinstance(weight, int | float) and weight in (0, 1)):
        raise Fault(f"{where}.weight is {_short(weight)}; 0 (not trained) or 1 (trained) is wanted.")
    by_weight = None if weight is None else bool(weight)
    refuse_difference({key: train, "weight": by_weight}, where)
    return by_weight if train is None else train


def _reasoning(message: Mapping[str, Any], where: str) -> str | None:
    said = {key: _text_of(message[key], f"{where}.{key}") for key in _REASONING if message.get(key) is not None}
    refuse_difference(said, where)
    return next(filter(None, said.values()), next(iter(said.values()), None))


def _optional_text(message: Mapping[str, Any], key: str, where: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise Fault(f"{where}.{key} is {kind_of(value)}, a text is wanted.")
    return value


def _tool_calls(message: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    calls = message.get("tool_calls")
    listed = () if calls is None or calls in ("", []) else _json_list(calls, f"{where}.tool_calls")
    read = tuple(_tool_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(listed))
    if (before := message.get("function_call")) is None:  # OpenAI's form before tool_calls
        return read
    alone = (_tool_call(before, f"{where}.function_call"),)
    if read:
        refuse_difference({"function_call": _without_ids(alone), "tool_calls": _without_ids(read)}, where)
    return read or alone


def _without_ids(calls: tuple[dict[str, Any], ...]) -> list[object]:
    return [call["function"] for call in calls]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    """A call as {type: function, function: {name, arguments}}, the arguments an object, as chat templates want it."""
    if not isinstance(call, dict):
        raise Fault(f"{where} is {kind_of(call)}, an object with a function is wanted.")
    outer = cast(dict[str, Any], call)
    function: object = outer.get("function", outer)
    if not isinstance(function, dict) or not isinstance(cast(dict[str, Any], function).get("name"), str):
        raise Fault(f"{where} has no function name; {{function: {{name: ..., arguments: ...}}}} is wanted.")
    inner = cast(dict[str, Any], function)
    if inner is not outer:
        for key in ("name", "arguments"):
            refuse_difference({key: outer.get(key), f"function.{key}": inner.get(key)}, where)
    refuse_difference({key: inner.get(key) for key in ("arguments", "parameters")}, where)
    arguments: Any = inner.get("parameters") if inner.get("arguments") is None else inner["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise Fault(f"{where}: the arguments are not JSON ({error}): {_short(arguments)}.") from error
    if arguments is None:
        arguments = dict[str, Any]()
    if not isinstance(arguments, dict):
        raise Fault(f"{where}: the arguments are {kind_of(cast(object, arguments))}, an object is wanted.")
    kept = {key: part for key, part in outer.items() if key in ("id", "type") and part is not None}
    return {"type": "function", **kept, "function": {"name": inner["name"], "arguments": arguments}}


def _calls_in_text(content: object, where: str) -> tuple[dict[str, Any], ...]:
    """ShareGPT writes a call as JSON in the text of a turn of its own."""
    try:
        value = parse_json(content) if isinstance(content, str) else content
    except ValueError as error:
        raise Fault(f"{where} is not JSON ({error}); a call, {{name: ..., arguments: ...}}, is wanted.") from error
    calls = cast(list[object], value if isinstance(value, list) else [value])
    return tuple(_tool_call(call, where) for call in calls)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
