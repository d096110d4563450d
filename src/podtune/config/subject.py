"""What every block of the run file shares: it is frozen, refuses unknown keys, and may have a scalar form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from podtune.config.values import JsonSchema, describe, wrong

LIST_TAG, SCALAR_TAG = "\x01list", "\x01scalar"
"""Name the two members of a union; no key of a YAML file can be called so."""


def as_sequence(value: object) -> tuple[object, ...]:
    """A list as it is; anything else as a list of one."""
    return tuple(cast(list[object], value)) if isinstance(value, list | tuple) else (value,)


@dataclass(frozen=True)
class OneOrMany:
    """Annotation of a tuple field that also takes one item without a list round it."""

    words: tuple[str, ...] = ()
    """Texts that stand for themselves and are no item."""
    empty: bool = True
    """Whether a list with nothing in it will do."""

    def read(self, value: object) -> object:
        """The value with a list round it, unless it is a word."""
        if isinstance(value, str) and value.strip() in self.words:
            return value.strip()
        if value is None or (not self.empty and as_sequence(value) == ()):
            read = "an empty list" if value is not None else describe(value)
            raise wrong(f"wanted one or a list of them, read {read}; leave the key out to have its default")
        return as_sequence(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        inner = handler(schema)
        many = next(part for part in (inner, *inner.get("oneOf", ())) if part.get("type") == "array")
        if not self.empty:
            many["minItems"] = 1
        words = [{"enum": list(self.words)}] if self.words else []
        return {"anyOf": [*words, many["items"], many]}


@dataclass(frozen=True)
class OrNone:
    """Annotation of a block that may be absent: `none` says so."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: object) -> object:
            return None if says_none(value) else value

        return core_schema.no_info_before_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return {"anyOf": [{"enum": ["none"]}, *handler(schema)["anyOf"]]}


def says_none(value: object) -> bool:
    """Whether what stands in a run file says that there is nothing: null, or the word none."""
    return value is None or (isinstance(value, str) and value.strip() == "none")


def list_or_scalar(value: object) -> str:
    """Tells the two members of a union apart, so that errors speak of the one that is meant."""
    return LIST_TAG if isinstance(value, list | tuple) else SCALAR_TAG


class Subject(BaseModel):
    """A block of the run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    scalar_key: ClassVar[str | None] = None
    """The key that the scalar form fills; None for a block that is always a mapping."""

    @classmethod
    def expand(cls, value: object) -> Mapping[str, Any]:
        """The mapping that a scalar (or list) form stands for."""
        if cls.scalar_key is None:
            raise wrong(f"wanted a mapping with any of {', '.join(cls.model_fields)}, read {describe(value)}")
        return {cls.scalar_key: value}

    @classmethod
    def complete(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fills in defaults that depend on other keys of this block."""
        return given

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        if isinstance(value, BaseModel):
            return value
        if value is None:
            raise wrong("wanted a value, read nothing; leave the key out to have its default")
        if isinstance(value, dict):
            return cls.complete(cast(dict[str, Any], value))
        return cls.complete(cls.expand(value))

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        reference = handler(core_schema)
        mapping = handler.resolve_ref_schema(reference)
        scalar = cls.scalar_json_schema(mapping.get("properties", {}))
        if scalar is not None and "anyOf" not in mapping:
            whole = dict(mapping)
            mapping.clear()
            mapping.update(title=whole.pop("title"), description=whole.pop("description", ""), anyOf=[scalar, whole])
        return reference

    @classmethod
    def scalar_json_schema(cls, properties: Mapping[str, JsonSchema]) -> JsonSchema | None:
        """The JSON Schema of the scalar form, if there is one."""
        return None if cls.scalar_key is None else dict(properties[cls.scalar_key])
