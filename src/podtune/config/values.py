"""The kinds of scalar a run file holds. Each reads what YAML gave, and says what it wanted when it got something else.

Used as annotations: `rank: Annotated[int, Whole(at_least=1)]`. Words that a field also takes ("auto", None) are read
from the field's own type: `Annotated[float | Literal["auto"], Real(above=0)]`.
"""

import math
import os
import re
import types
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

JsonSchema = dict[str, Any]


class Wrong(ValueError):
    """A value refused with a message of its own."""


def wrong(message: str, **context: Any) -> PydanticCustomError:
    """An error whose message stands as it is (braces are no placeholders)."""
    return PydanticCustomError("podtune", "{message}", {"message": message, **context})


def describe(value: object) -> str:
    """What was read, as a user would say it: `the text "fast"`, `the number 3`, `a list`, `nothing`."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        shown = value if len(value) <= 60 else value[:57] + "..."
        return f'the text "{shown}"'
    if isinstance(value, list | tuple):
        return "a list"
    return "a mapping" if isinstance(value, dict) else f"a {type(value).__name__}"


def literals_of(annotation: Any) -> tuple[str, ...]:
    """The words of every Literal in a type, and None as a word of its own kind is left out."""
    if get_origin(annotation) is Literal:
        return tuple(str(word) for word in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(word for part in get_args(annotation) for word in literals_of(part))
    return ()


def admits_none(annotation: Any) -> bool:
    """Whether a type has None in it."""
    return annotation is type(None) or (
        get_origin(annotation) in (Union, types.UnionType) and any(admits_none(part) for part in get_args(annotation))
    )


@dataclass(frozen=True)
class Kind:
    """What all kinds share: words, null, and the way into pydantic. A kind has `read`, `wanted`, `json_schema`."""

    def read(self, value: Any) -> Any:
        """The value as the field holds it. Raises ValueError when it is not of this kind, Wrong to say more."""
        raise NotImplementedError

    def checked(self, value: Any, words: tuple[str, ...] = (), null: bool = False) -> Any:
        """`read` with the message a user sees."""
        try:
            return self.read(value)
        except Wrong as error:
            raise wrong(str(error)) from None
        except (ValueError, OverflowError):
            raise wrong(f"wanted {self.wanted_with(words, null)}, read {describe(value)}") from None

    def write(self, value: Any) -> Any:
        """The value as a run file holds it: `read` turned round."""
        return value

    @property
    def wanted(self) -> str:
        """What the field takes, to stand after "wanted"."""
        raise NotImplementedError

    @property
    def json_schema(self) -> JsonSchema:
        """The JSON Schema of the field, apart from its words."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        words, null = literals_of(source), admits_none(source)

        def read(value: Any) -> Any:
            if value is None and null:
                return None
            if isinstance(value, str) and value.strip() in words:
                return value.strip()
            if null and isinstance(value, str) and value.strip() == "none":
                return None
            return self.checked(value, words, null)

        def write(value: Any) -> Any:
            return value if value is None or (isinstance(value, str) and value in words) else self.write(value)

        return core_schema.no_info_plain_validator_function(
            read,
            metadata={"words": words, "null": null},
            serialization=core_schema.plain_serializer_function_ser_schema(write),
        )

    def wanted_with(self, words: tuple[str, ...], null: bool) -> str:
        """`wanted` with the field's words after it."""
        extra = [*words, *(["none"] if null else [])]
        return " or ".join([self.wanted, *extra])

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        metadata: dict[str, Any] = schema.get("metadata") or {}
        options = [self.json_schema]
        if metadata["words"]:
            options.append({"enum": list(metadata["words"])})
        if metadata["null"]:
            options.append({"enum": [None, "none"]})
        return options[0] if len(options) == 1 else {"anyOf": options}


@dataclass(frozen=True)
class Real(Kind):
    """A finite number. `1e-4`, `"1e-4"` and `0.0001` are one and the same."""

    at_least: int | float | None = None
    above: int | float | None = None
    at_most: int | float | None = None
    below: int | float | None = None

    def read(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise ValueError from None
        if not math.isfinite(number) or not self._holds(number):
            raise ValueError
        return number

    def _holds(self, number: int | float) -> bool:
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    @property
    def limits(self) -> str:
        """The limits in words, with a blank before them; empty when there are none."""
        lower = f"above {_short(self.above)}" if self.above is not None else None
        lower = f"at least {_short(self.at_least)}" if self.at_least is not None else lower
        upper = f"below {_short(self.below)}" if self.below is not None else None
        upper = f"at most {_short(self.at_most)}" if self.at_most is not None else upper
        said = " and ".join(part for part in (lower, upper) if part)
        return f" {said}" if said else ""

    @property
    def wanted(self) -> str:
        return f"a number{self.limits}"

    @property
    def json_schema(self) -> JsonSchema:
        limits = {
            "minimum": self.at_least,
            "exclusiveMinimum": self.above,
            "maximum": self.at_most,
            "exclusiveMaximum": self.below,
        }
        return {"type": "number"} | {name: limit for name, limit in limits.items() if limit is not None}


def _short(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


@dataclass(frozen=True)
class Whole(Real):
    """A whole number. `2048` and `"2048"` and `2e3`; `2.5` is refused."""

    def read(self, value: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(value, str):
            try:
                value = int(value.strip())
            except ValueError:
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if isinstance(value, float) and not (math.isfinite(value) and value.is_integer()):
            raise ValueError
        whole = int(value)
        if not -(2**63) <= whole < 2**63 or not self._holds(whole):
            raise ValueError
        return whole

    @property
    def wanted(self) -> str:
        return f"a whole number{self.limits}"

    @property
    def json_schema(self) -> JsonSchema:
        return super().json_schema | {"type": "integer"}


@dataclass(frozen=True)
class CountOrFraction(Kind):
    """A whole number of things (1 or more), or a fraction of them between 0 and 1 (a number with a point)."""

    things: str
    zero: bool = False

    def read(self, value: Any) -> int | float:
        if isinstance(value, str):
            value = int(value) if re.fullmatch(r"\s*[-+]?\d+\s*", value) else float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        if isinstance(value, int) and (1 if not self.zero else 0) <= value < 2**63:
            return value
        if isinstance(value, float) and (0 < value < 1 or (self.zero and value == 0.0)):
            return value
        if isinstance(value, float) and value > 1 and value.is_integer() and value < 2**63:
            return int(value)
        raise ValueError

    @property
    def wanted(self) -> str:
        least = 0 if self.zero else 1
        return f"a whole number of {self.things} (at least {least}) or a fraction between 0 and 1"

    @property
    def json_schema(self) -> JsonSchema:
        return {
            "anyOf": [
                {"type": "integer", "minimum": 0 if self.zero else 1},
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            ]
        }


@dataclass(frozen=True)
class Switch(Kind):
    """true or false, and nothing that merely looks like it."""

    def read(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "y", "n"):
            raise Wrong(
                f'wanted true or false, read the text "{value}" (YAML 1.2 has no yes and no: write true or false)'
            )
        raise ValueError

    @property
    def wanted(self) -> str:
        return "true or false"

    @property
    def json_schema(self) -> JsonSchema:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Text(Kind):
    """Any text but the empty one."""

    def read(self, value: Any) -> str:
        if isinstance(value, int | float):
            raise Wrong(f"wanted text, read {describe(value)}; put it in quotes if it is meant as text")
        if not isinstance(value, str):
            raise ValueError
        if not value.strip():
            raise Wrong("wanted text, read an empty text")
        return value

    @property
    def wanted(self) -> str:
        return "text"

    @property
    def json_schema(self) -> JsonSchema:
        return {"type": "string", "minLength": 1}


# What Linux takes as the name of one file and as a whole path, in bytes.
LONGEST_NAME, LONGEST_PATH = 255, 4096


@dataclass(frozen=True)
class Place(Text):
    """A path, a pattern or an address. `~` and `$NAME` are expanded; `$$` stands for a dollar sign."""

    def read(self, value: Any) -> str:
        path = os.path.expanduser(expand_variables(super().read(value)))
        if path.startswith("~"):  # neither a home that is known nor, as ./~name would be, a file of such a name
            raise Wrong(f"wanted a path, read {path}: whose home that is is not known; write ./{path} for a file here")
        if "\0" in path:
            raise Wrong(f"wanted a path, read {path!r}: no path holds a NUL character")
        if "://" not in path and any(len(os.fsencode(name)) > LONGEST_NAME for name in path.split("/")):
            raise Wrong(f"wanted a path, read one with a name of more than {LONGEST_NAME} bytes ({path[:40]}...)")
        if len(os.fsencode(path)) >= LONGEST_PATH:
            raise Wrong(f"wanted a path, read one of {len(path):,} characters; systems take {LONGEST_PATH:,} bytes")
        return path

    def write(self, value: Any) -> str:
        return str(value).replace("$", "$$")

    @property
    def wanted(self) -> str:
        return "a path"


def expand_variables(text: str) -> str:
    """`$NAME` and `${NAME}` from the environment. Raises Wrong naming a variable that is not set."""

    def replace(match: re.Match[str]) -> str:
        name = match["braced"] or match["bare"]
        if name is None:
            return "$"
        if name not in os.environ:
            raise Wrong(f"the variable ${name} is not set; set it, or write $$ for a dollar sign")
        return os.environ[name]

    return re.sub(r"\$(?:\$|\{(?P<braced>[A-Za-z_]\w*)\}|(?P<bare>[A-Za-z_]\w*))", replace, text)


DURATION_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Duration(Kind):
    """A time with its unit: 90s, 10m, 1h30m. The field holds seconds."""

    def read(self, value: Any) -> float:
        if isinstance(value, str) and re.fullmatch(r"\s*(\d+(\.\d+)?\s*[smhd]\s*)+", value):
            seconds = sum(
                float(amount) * DURATION_SECONDS[unit]
                for amount, unit in re.findall(r"(\d+(?:\.\d+)?)\s*([smhd])", value)
            )
            if 0 < seconds < 1e9:
                return seconds
        raise ValueError

    def write(self, value: Any) -> str:
        for unit, seconds in reversed(DURATION_SECONDS.items()):
            if value % seconds == 0:
                return f"{value / seconds:.0f}{unit}"
        return f"{value:.17f}".rstrip("0") + "s"

    @property
    def wanted(self) -> str:
        return "a time with its unit (s, m, h or d), such as 10m or 1h30m"

    @property
    def json_schema(self) -> JsonSchema:
        return {"type": "string", "pattern": r"^\s*(\d+(\.\d+)?\s*[smhd]\s*)+$"}


@dataclass(frozen=True)
class Choice(Kind):
    """One of the field's own words."""

    refused: dict[str, str] = field(default_factory=dict[str, str], hash=False)
    """Words that a user may well write, and what to say to them."""

    def read(self, value: Any) -> str:
        if isinstance(value, str) and value in self.refused:
            raise Wrong(self.refused[value])
        raise ValueError

    def wanted_with(self, words: tuple[str, ...], null: bool) -> str:
        return "one of " + ", ".join([*words, *(["none"] if null else [])])

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        metadata: dict[str, Any] = schema.get("metadata") or {}
        return {"enum": [*metadata["words"], *([None, "none"] if metadata["null"] else [])]}


Bool = Annotated[bool, Switch()]
String = Annotated[str, Text()]
PathText = Annotated[str, Place()]
