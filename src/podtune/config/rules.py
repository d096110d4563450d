"""Rules that span several keys of a run file: a table of functions, each yielding what breaks it. A Run checks all."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from podtune.config.schema import Run
from podtune.config.training import LEARNING_RATE_FACTORS, OPTIMIZER_SETTINGS

Key = tuple[str | int, ...]


class Breach(NamedTuple):
    """A broken rule."""

    key: Key
    """Where it is told: the key to change."""
    message: str
    others: tuple[Key, ...] = ()
    """The other keys it depends on; when one of those is itself at fault, the breach is not told."""


def epochs_or_steps(run: Run) -> Iterator[Breach]:
    """The length of training is given once."""
    epochs, steps = run.train.epochs, run.train.steps
    if steps is not None and epochs is not None:
        yield Breach(
            ("train", "steps"),
            f"steps={steps} and epochs={epochs:g} both say how long to train; keep one",
            (("train", "epochs"),),
        )
    if steps is None and epochs is None:
        yield Breach(("train", "epochs"), "nothing says how long to train; give epochs or steps")


def adapter_export_needs_lora(run: Run) -> Iterator[Breach]:
    """There is an adapter only where one was trained."""
    if run.export.adapter is True and run.method.lora is None:
        yield Breach(
            ("export", "adapter"),
            "method: full trains no adapter to export; remove export.adapter or use method: lora",
            (("method",),),
        )


def something_is_exported(run: Run) -> Iterator[Breach]:
    """A run leaves a result."""
    if not run.export.merged and not run.exports_adapter:
        yield Breach(
            ("export", "merged"),
            "nothing would be exported; leave export.merged true",
            (("export", "adapter"), ("method",)),
        )


def validation_is_there(run: Run) -> Iterator[Breach]:
    """What watches the validation loss needs a validation split.

    This is told before anything is read, with file and line. Whether `auto` finds rows enough to hold any out is known
    when they are prepared: train/job.py, check_validation.
    """
    if run.data.validation != "none":
        return
    watchers: dict[Key, bool] = {
        ("train", "early_stopping"): run.train.early_stopping is not None,
        ("export", "checkpoint"): run.export.checkpoint == "best",
        ("output", "keep_best"): run.output.keep_best is True,
    }
    for key, watches in watchers.items():
        if watches:
            name = ".".join(map(str, key))
            yield Breach(
                key,
                f"{name} needs the validation loss, and data.validation is none; remove one of them",
                (("data", "validation"),),
            )


def evaluation_is_on(run: Run) -> Iterator[Breach]:
    """What compares evaluations during training needs some."""
    if run.eval.every is not None:
        return
    if run.train.early_stopping is not None:
        yield Breach(
            ("train", "early_stopping"),
            "early stopping needs evaluations, and eval.every is none",
            (("eval", "every"),),
        )
    if run.export.checkpoint == "best":
        yield Breach(
            ("export", "checkpoint"),
            "the best checkpoint is found by evaluations, and eval.every is none; set eval.every or export the last",
            (("eval", "every"),),
        )


def best_is_kept(run: Run) -> Iterator[Breach]:
    """The exported checkpoint is one that is kept."""
    if run.export.checkpoint == "best" and run.output.keep_best is False:
        yield Breach(
            ("export", "checkpoint"),
            "output.keep_best is false, so there is no best checkpoint to export",
            (("output", "keep_best"),),
        )


def text_has_no_turns(run: Run) -> Iterator[Breach]:
    """Plain text has no prompt, completion or turn to choose between."""
    if run.data.shape == "text" and run.data.train_on != "all":
        yield Breach(
            ("data", "train_on"),
            f"train_on: {run.data.train_on} does not apply to shape: text, which has no turns; use all or leave it out",
            (("data", "shape"),),
        )


def schedule_settings_fit(run: Run) -> Iterator[Breach]:
    """A schedule takes only its own settings, and its parts fit into the run."""
    schedule, key = run.train.schedule, ("train", "schedule")
    if schedule.decay_fraction is not None and schedule.name != "wsd":
        yield Breach(
            (*key, "decay_fraction"),
            f"decay_fraction belongs to wsd, and the schedule is {schedule.name}; remove it or set name: wsd",
        )
    if schedule.final_fraction and schedule.name == "constant":
        yield Breach((*key, "final_fraction"), "a constant schedule does not fall; remove final_fraction")
    warmup, decay = schedule.warmup, schedule.decay_fraction
    if isinstance(warmup, float) and decay is not None and warmup + decay > 1:
        yield Breach(
            (*key, "warmup"), f"warmup={warmup:g} and decay_fraction={decay:g} make more than the whole run; lower one"
        )
    if isinstance(warmup, int) and run.train.steps is not None and warmup >= run.train.steps:
        yield Breach(
            (*key, "warmup"),
            f"warmup={warmup} steps leaves nothing of train.steps={run.train.steps}; use fewer, or 0.03 of them",
            (("train", "steps"),),
        )


def optimizer_settings_fit(run: Run) -> Iterator[Breach]:
    """An optimizer takes only its own settings."""
    optimizer = run.train.optimizer
    taken = OPTIMIZER_SETTINGS[optimizer.name]
    for name in type(optimizer).model_fields:
        if name != "name" and name not in taken and getattr(optimizer, name) is not None:
            yield Breach(
                ("train", "optimizer", name),
                f"{optimizer.name} has no {name}; it takes {', '.join(taken)}",
                (("train", "optimizer", "name"),),
            )


def rate_is_known(run: Run) -> Iterator[Breach]:
    """The optimizer has a usual learning rate, or one is given."""
    name = run.train.optimizer.name
    if run.train.learning_rate == "auto" and LEARNING_RATE_FACTORS[name] is None:
        yield Breach(
            ("train", "learning_rate"),
            f"{name} has no usual rate, since its steps are as large as the gradient; give one, far larger than "
            "AdamW's: try 0.1, and less where the loss leaps",
            (("train", "optimizer"),),
        )


def evaluation_comes_before_the_end(run: Run) -> Iterator[Breach]:
    """An interval of evaluation longer than the run is a mistake."""
    every, steps = run.eval.every, run.train.steps
    if isinstance(every, int) and steps is not None and every > steps:
        yield Breach(
            ("eval", "every"),
            f"every={every} steps never comes in train.steps={steps}; use fewer, or a fraction such as 0.25",
            (("train", "steps"),),
        )


def validation_is_held_out(run: Run) -> Iterator[Breach]:
    """What is validated on is not trained on."""
    if not isinstance(run.data.validation, tuple):
        return
    trained = {(source.path, source.split) for source in run.data.train}
    for number, source in enumerate(run.data.validation):
        if (source.path, source.split) in trained:
            yield Breach(
                ("data", "validation", number),
                f"{source.path} is trained on as well, so it can validate nothing; use other rows or a fraction",
                (("data", "train"),),
            )


def validation_is_read_once(run: Run) -> Iterator[Breach]:
    """A weight is a number of passes of training."""
    for number, source in enumerate(run.data.validation if isinstance(run.data.validation, tuple) else ()):
        if source.weight != 1:
            yield Breach(
                ("data", "validation", number, "weight"),
                f"weight={source.weight:g} does not apply to held-out rows, which every evaluation reads once; "
                "remove it",
            )


def splits_are_of_hub_datasets(run: Run) -> Iterator[Breach]:
    """Only a Hub dataset has named splits."""
    validation = run.data.validation if isinstance(run.data.validation, tuple) else ()
    for name, sources in (("train", run.data.train), ("validation", validation)):
        for number, source in enumerate(sources):
            if source.split is not None and not source.path.startswith("hub://"):
                yield Breach(
                    ("data", name, number, "split"),
                    f"{source.path} has no splits; split belongs to hub:// datasets",
                    (("data", name, number, "path"),),
                )


def output_is_no_input(run: Run) -> Iterator[Breach]:
    """Results never overwrite what they are made from.

    Names are compared as they are written, whether or not they are there, and addresses too. What is there of files
    and folders, by their real paths and within one another, workflow/output.py looks at.
    """
    output = run.output.path.rstrip("/")
    validation = run.data.validation if isinstance(run.data.validation, tuple) else ()
    inputs = {
        "the model": run.model.source,
        **{f"data {source.path}": source.path for source in (*run.data.train, *validation)},
    }
    for name, path in inputs.items():
        if path.rstrip("/") == output:
            yield Breach(
                ("output",),
                f"output={run.output.path} is where {name} is read from; use another folder",
                (("model",), ("data",)),
            )


RULES: tuple[Callable[[Run], Iterator[Breach]], ...] = (
    epochs_or_steps,
    adapter_export_needs_lora,
    something_is_exported,
    validation_is_there,
    evaluation_is_on,
    best_is_kept,
    text_has_no_turns,
    schedule_settings_fit,
    optimizer_settings_fit,
    rate_is_known,
    evaluation_comes_before_the_end,
    validation_is_held_out,
    validation_is_read_once,
    splits_are_of_hub_datasets,
    output_is_no_input,
)


def breaches(run: Run) -> list[Breach]:
    """Everything that the run breaks."""
    return [breach for rule in RULES for breach in rule(run)]
