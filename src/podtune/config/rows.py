"""The `data` block of the run file: where rows come from, what they look like, and what becomes of them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from podtune.config.subject import Subject, as_sequence, list_or_scalar
from podtune.config.values import Bool, Choice, CountOrFraction, PathText, Place, Real, Whole, describe, wrong

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
    weight: Annotated[float, Real(above=0)] = 1.0
    """How many times an epoch passes over it."""
    shape: Annotated[Shape | None, Choice()] = None
    """As data.shape, for this source alone."""
    columns: Columns | None = None
    """As data.columns, for this source alone."""
    split: Annotated[str | None, Place()] = None
    """The split of a Hub dataset."""


def _read_sources(value: object) -> object:
    """One source, or a list of them."""
    if value is None or value == [] or value == ():
        raise wrong(f"wanted a path or a list of paths, read {'an empty list' if value is not None else 'nothing'}")
    return as_sequence(value)


def _read_validation(value: object) -> object:
    """Words and numbers are themselves; anything else is sources."""
    if isinstance(value, str) and value.strip() in ("auto", "none"):
        return value.strip()
    if value is None or isinstance(value, bool):
        raise wrong(
            "wanted auto, none, a fraction of the rows, a number of rows or a path, "
            f"read {describe(value)}; write none for no validation split"
        )
    if isinstance(value, int | float):
        return CountOrFraction("rows").checked(value)
    return _read_sources(value)


Sources = Annotated[tuple[Source, ...], BeforeValidator(_read_sources)]
TrainOn = Literal["assistant", "completion", "all", "last"]


class Data(Subject):
    """The rows to train on. Scalar form: the path of the training rows."""

    scalar_key = "train"

    train: Sources
    """One path, or a list of paths and mappings {path, weight, shape, columns, split}."""
    validation: Annotated[
        Annotated[Literal["auto", "none"] | int | float, Tag("<scalar>")]
        | Annotated[tuple[Source, ...], Tag("<list>")],
        Discriminator(list_or_scalar),
        BeforeValidator(_read_validation),
    ] = "auto"
    """Held-out rows: auto (5 % of the rows, at most 500), none, a fraction, a number of rows, or paths of their own."""
    train_on: Annotated[TrainOn, Choice()] = "assistant"
    """Which tokens bear loss: every assistant turn (or completion), the completion, everything, or the last turn.
    Plain text always trains on everything."""
    too_long: Annotated[Literal["drop", "truncate", "refuse"], Choice()] = "drop"
    """What becomes of a row longer than max_length. Whatever it is, the rows are counted and said."""
    max_length: Annotated[int | None, Whole(at_least=8)] = None
    """Tokens in a row; none: 2048, or the model's context where that is less."""
    packing: Bool = True
    """Several examples share a row, isolated from one another."""
    deduplicate: Bool = False
    """Drop rows that are equal to an earlier one."""
    shape: Annotated[Shape, Choice()] = "auto"
    """What a row looks like; auto looks at the first rows."""
    columns: Columns = Field(default_factory=dict[ColumnRole, str])
    """Names the data uses for what podtune looks for, such as {prompt: question, completion: answer}."""
    workers: Annotated[int | None, Whole(at_least=0)] = None
    """Processes that tokenise; none: one per core."""
    cache: Annotated[str | None, Place()] = None
    """Where prepared TFRecord files are kept; none: beside the other caches of podtune."""

    @classmethod
    def complete(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if given.get("shape") == "text" and "train_on" not in given:
            return {**given, "train_on": "all"}
        return given
