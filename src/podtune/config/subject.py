"""What every block of the run file shares: it is frozen, refuses unknown keys, and may have a scalar form."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from podtune.config.values import JsonSchema, describe, wrong


def as_sequence(value: object) -> tuple[object, ...]:
    """A list as it is; anything else as a list of one."""
    return tuple(cast(list[object], value)) if isinstance(value, list | tuple) else (value,)


def list_or_scalar(value: object) -> str:
    """Tells the two members of a union apart, so that errors speak of the one that is meant."""
    return "<list>" if isinstance(value, list | tuple) else "<scalar>"


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
