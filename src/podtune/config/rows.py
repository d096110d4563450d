"""The `data` block of the run file: where rows come from, what they look like, and what becomes of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag
from pydantic_core import CoreSchema, core_schema

from podtune.config.subject import LIST_TAG, SCALAR_TAG, OneOrMany, OrNone, Subject, as_sequence, list_or_scalar
from podtune.config.values import (
    Bool,
    Choice,
    CountOrFraction,
    JsonSchema,
    PathText,
    Place,
    Real,
    Whole,
    describe,
    wrong,
)

Shape = Literal["auto", "messages", "conversations", "prompt_completion", "alpaca", "text", "tfrecord"]
ColumnRole = Literal[
    "messages", "role", "content", "train", "tools", "system", "prompt", "completion",
    "instruction", "input", "output", "text", "tokens", "trained", "segments",
]  # fmt: skip
COLUMN_ROLES: tuple[str, ...] = get_args(ColumnRole)


def _read_columns(value: object) -> dict[str, str]:
    """A mapping from what podtune looks for to the name it has in the data."""
    if not isinstance(value, dict):
        raise wrong(f"wanted a mapping such as {{prompt: question, completion: answer}}, read {describe(value)}")
    columns = cast(dict[str, object], value)
    for role, name in columns.items():
        if role not in COLUMN_ROLES:
            raise wrong(
                f'unknown key "{role}"; columns takes {", ".join(COLUMN_ROLES)}', unknown=role, known=COLUMN_ROLES
            )
        if not isinstance(name, str) or not name:
            raise wrong(f"wanted the name of a column, read {describe(name)}", under=role)
    return dict(cast(dict[str, str], columns))


Columns = Annotated[dict[ColumnRole, str], BeforeValidator(_read_columns)]


class Source(Subject):
    """One place that rows come from. Scalar form: its path."""

    scalar_key = "path"

    path: PathText
    """A file, a glob, a directory, hub://owner/name[@revision][:split], gs://... or s3://..."""
    weight: Annotated[float, Real(above=0, at_most=1000)] = 1.0
    """How many times an epoch of training passes over it."""
    shape: Annotated[Shape | None, Choice()] = None
    """As data.shape, for this source alone."""
    columns: Annotated[Columns | None, OrNone()] = None
    """As data.columns, for this source alone."""
    split: Annotated[str | None, Place()] = None
    """The split of a Hub dataset."""
    documents: Annotated[Literal["file", "paragraph", "line"], Choice()] = "file"
    """What a document is in a plain text file: the whole file, each paragraph between blank lines, or each line."""


@dataclass(frozen=True)
class ValidationRows:
    """Annotation of data.validation: words and numbers are themselves, anything else is sources."""

    def read(self, value: object) -> object:
        """The value, checked if it is a scalar."""
        if isinstance(value, str) and value.strip() in ("auto", "none"):
            return value.strip()
        if value is None or isinstance(value, bool) or value in ([], ()):
            raise wrong(
                "wanted auto, none, a fraction of the rows, a number of rows or a path, "
                f"read {describe(value)}; write none for no validation split"
            )
        return CountOrFraction("rows").checked(value) if isinstance(value, int | float) else as_sequence(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        many = next(part for part in handler(schema)["oneOf"] if part.get("type") == "array")
        numbers = CountOrFraction("rows").json_schema["anyOf"]
        return {"anyOf": [{"enum": ["auto", "none"]}, *numbers, many["items"], many | {"minItems": 1}]}


Sources = Annotated[tuple[Source, ...], OneOrMany(empty=False)]
TrainOn = Literal["assistant", "completion", "all", "last"]


class Data(Subject):
    """The rows to train on. Scalar form: the path of the training rows."""

    scalar_key = "train"

    train: Sources
    """One path, or a list of paths and mappings {path, weight, shape, columns, split, documents}."""
    validation: Annotated[
        Annotated[Literal["auto", "none"] | int | float, Tag(SCALAR_TAG)]
        | Annotated[tuple[Source, ...], Tag(LIST_TAG)],
        Discriminator(list_or_scalar),
        ValidationRows(),
    ] = "auto"
    """Held-out rows: auto (5 % of the rows, at most 500), none, a fraction, a number of rows, or paths of their own."""
    train_on: Annotated[TrainOn, Choice()] = "assistant"
    """Which tokens bear loss: every assistant turn (or completion), the completion, everything, or the last turn.
    Plain text always trains on everything."""
    too_long: Annotated[Literal["drop", "truncate", "refuse"], Choice()] = "drop"
    """What becomes of a row longer than max_length. Whatever it is, the rows are counted and said."""
    max_length: Annotated[int | None, Whole(at_least=8)] = None
    """Tokens in a row; none: 2048, or the model's context where that is less, and no longer than gives a small data set
    about 100 rows."""
    packing: Bool = True
    """Several examples share a row, isolated from one another."""
    deduplicate: Bool = False
    """Drop rows that are equal to an earlier one."""
    shape: Annotated[Shape, Choice()] = "auto"
    """What a row looks like; auto looks at the first rows."""
    columns: Columns = Field(default_factory=dict[ColumnRole, str])
    """Names the data uses for what podtune looks for, such as {prompt: question, completion: answer}. It looks for
    messages, role, content, train, tools, system, prompt, completion, instruction, input, output, text, tokens, trained
    and segments."""
    workers: Annotated[int | None, Whole(at_least=0)] = None
    """Processes that tokenise; none: one per core."""
    cache: Annotated[str | None, Place()] = None
    """Where prepared TFRecord files are kept; none: beside the other caches of podtune."""

    @classmethod
    def complete(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if given.get("shape") == "text" and "train_on" not in given:
            return {**given, "train_on": "all"}
        return given
