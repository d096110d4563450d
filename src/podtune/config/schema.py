"""The run file as frozen models, one per subject. `load_run` makes a Run from a file, and everything that follows
configuration reads it. A subject that has a scalar form (`model: name`, `method: lora`) takes it or a mapping.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag, model_validator
from pydantic_core import PydanticCustomError

from podtune.config.rows import Columns, Data, Shape, Source, TrainOn
from podtune.config.subject import LIST_TAG, SCALAR_TAG, OneOrMany, Subject, list_or_scalar, says_none
from podtune.config.training import LEARNING_RATE_FACTORS, EarlyStopping, Optimizer, Schedule, SpikeGuard, Train
from podtune.config.values import (
    Bool,
    Choice,
    CountOrFraction,
    JsonSchema,
    PathText,
    Place,
    Real,
    String,
    Switch,
    Whole,
    describe,
    wrong,
)

__all__ = [
    "Columns", "Data", "EarlyStopping", "Eval", "Export", "Full", "LoRA", "Mesh", "Method", "Model", "Optimizer",
    "Output", "Run", "Schedule", "Shape", "Source", "SpikeGuard", "Subject", "Train", "TrainOn",
]  # fmt: skip


class Model(Subject):
    """The model to start from. Scalar form: its source."""

    scalar_key = "source"

    source: Annotated[str, Place()]
    """A Hub id with an optional @revision, a directory, a .gguf file, gs://... or s3://..."""
    chat_template: Annotated[str | None, Place()] = None
    """A file holding a Jinja chat template, to use instead of the tokenizer's own."""
    cache: Annotated[str | None, Place()] = None
    """Where downloads are kept; by default the Hugging Face cache."""


class Full(Subject):
    """Every weight is trained."""


class LoRA(Subject):
    """Low-rank adapters are trained beside frozen weights (Hu et al., 2021)."""

    rank: Annotated[int, Whole(at_least=1)] = 16
    """Rank of each adapter."""
    alpha: Annotated[float, Real(above=0)] = 32.0
    """The adapter's product is scaled by alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: Annotated[float, Real(at_least=0, below=1)] = 0.0
    """Dropout on the adapter's input."""
    targets: Annotated[
        Annotated[Literal["all-linear"], Tag(SCALAR_TAG)] | Annotated[tuple[String, ...], Tag(LIST_TAG)],
        Discriminator(list_or_scalar),
        OneOrMany(words=("all-linear",), empty=False),
    ] = "all-linear"
    """all-linear, or patterns over weight paths such as layers.attention.q, of which all-linear may be one. One that
    matches nothing is refused."""
    rslora: Bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski, 2023)."""

    @property
    def scale(self) -> float:
        """What the adapter's product is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


NOT_IN_THIS_VERSION = {
    "qlora": "qlora is not part of this version of podtune; use lora",
    "dora": "dora is not part of this version of podtune; use lora",
}


class Method(Subject):
    """How the weights change: exactly one of full and lora. Scalar form: its name."""

    full: Full | None = None
    """Train every weight."""
    lora: LoRA | None = None
    """Train low-rank adapters."""

    @property
    def name(self) -> Literal["full", "lora"]:
        """Which of the two it is."""
        return "full" if self.full is not None else "lora"

    @classmethod
    def expand(cls, value: object) -> Mapping[str, Any]:
        if isinstance(value, str) and value.strip() in cls.model_fields:
            return {value.strip(): {}}
        if isinstance(value, str) and value.strip() in NOT_IN_THIS_VERSION:
            raise wrong(NOT_IN_THIS_VERSION[value.strip()])
        raise wrong(f"wanted one of {', '.join(cls.model_fields)} or a mapping, read {describe(value)}")

    @classmethod
    def complete(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if len(given) > 1:
            given = {name: None if says_none(value) else value for name, value in given.items()}
        named = [name for name in given if name in cls.model_fields]
        if len(given) == 1 and named:  # `lora:` with nothing under it is LoRA with its defaults
            return {named[0]: {} if given[named[0]] is None else given[named[0]]}
        chosen = [name for name in named if given[name] is not None]
        if len(chosen) > 1:
            raise wrong("wanted exactly one of full and lora, read both")
        if not chosen and len(named) == len(given):
            raise wrong("wanted exactly one of full and lora, read neither")
        return given

    @classmethod
    def scalar_json_schema(cls, properties: Mapping[str, JsonSchema]) -> JsonSchema | None:
        return {"enum": list(cls.model_fields)}


class Output(Subject):
    """Where results go. Scalar form: the folder."""

    scalar_key = "path"

    path: PathText
    """A folder, or gs://bucket/folder. A run found there is resumed."""
    keep_checkpoints: Annotated[int, Whole(at_least=1)] = 2
    """The newest checkpoints that are kept, beside the best."""
    keep_best: Annotated[bool | Literal["auto"], Switch()] = "auto"
    """Also keep the checkpoint with the lowest validation loss; auto: when there is a validation split."""


class Eval(Subject):
    """Looking at the model while it trains."""

    every: Annotated[int | float | None, CountOrFraction("steps")] = 0.25
    """Steps, or the fraction of the run, between evaluations; none: only before and after."""
    samples: Annotated[int, Whole(at_least=0)] = 3
    """Held-out prompts answered before, during and after training."""
    prompts: Annotated[tuple[String, ...], OneOrMany()] = ()
    """Prompts of your own that are answered too, in the form of the training rows: as a user's message where any
    are chats, else as text to go on from."""
    max_new_tokens: Annotated[int, Whole(at_least=1)] = 64
    """Longest answer."""


class Mesh(Subject):
    """How devices are laid out. The three multiply to the number of devices."""

    data: Annotated[int | Literal["auto"], Whole(at_least=1)] = "auto"
    """Copies of the model, each with its own rows."""
    fsdp: Annotated[int | Literal["auto"], Whole(at_least=1)] = "auto"
    """Devices that share one copy and still take rows of their own."""
    tensor: Annotated[int, Whole(at_least=1)] = 1
    """Devices that split each matrix product."""


class Export(Subject):
    """What is written at the end."""

    merged: Bool = True
    """A Hugging Face folder with the adapter merged in."""
    adapter: Annotated[bool | Literal["auto"], Switch()] = "auto"
    """A PEFT adapter; auto: for lora."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Choice()] = "auto"
    """Type of the exported weights; auto: the type of the model it started from."""
    checkpoint: Annotated[Literal["last", "best"], Choice()] = "last"
    """Which weights are exported: the last, or those with the lowest validation loss."""


def rules_broken(breaches: list[Any]) -> PydanticCustomError:
    """One error for every rule that a run breaks."""
    said = "; ".join(f"{'.'.join(map(str, breach.key))}: {breach.message}" for breach in breaches)
    return PydanticCustomError("podtune_rules", "{said}", {"said": said, "breaches": breaches})


class Run(Subject):
    """A whole run file. The first four keys are required."""

    model: Model
    """The model to start from: a Hub id[@revision], a directory, a .gguf file, gs://... or s3://..."""
    data: Data
    """The rows to train on: a path, or a mapping."""
    method: Method
    """full, lora, or a mapping such as {lora: {rank: 32}}."""
    output: Output
    """The folder that results go to."""
    train: Train = Train()
    """The training itself."""
    eval: Eval = Eval()
    """Looking at the model while it trains."""
    mesh: Mesh = Mesh()
    """How devices are laid out."""
    export: Export = Export()
    """What is written at the end."""
    seed: Annotated[int, Whole(at_least=0, at_most=2**32 - 1)] = 0
    """Everything random follows from it."""

    @model_validator(mode="after")
    def _keep_rules(self) -> "Run":
        from podtune.config.rules import breaches  # here, since the rules are about this class

        broken = breaches(self)
        if broken:
            raise rules_broken(broken)
        return self

    @property
    def learning_rate(self) -> float:
        """train.learning_rate with auto resolved, before any scaling with the batch."""
        given = self.train.learning_rate
        if given != "auto":
            return given
        factor = LEARNING_RATE_FACTORS[self.train.optimizer.name]
        assert factor is not None, "config.rules refuses auto there"
        return LEARNING_RATES[self.method.name] * factor

    @property
    def exports_adapter(self) -> bool:
        """export.adapter with auto resolved."""
        return self.method.lora is not None and self.export.adapter is not False


LEARNING_RATES = {"lora": 2e-4, "full": 2e-5}
"""For AdamW, by the method."""
