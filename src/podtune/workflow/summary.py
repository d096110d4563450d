"""What the report says of a run, gathered from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podtune.config.loading import dump_run
from podtune.config.wording import counted
from podtune.train.display import clock
from podtune.train.flops import token_cost
from podtune.workflow.charts import number
from podtune.workflow.environment import machine, versions
from podtune.workflow.report import Report, SampleRow, curves
from podtune.workflow.work import Work


def make_report(
    work: Work, *, samples: Sequence[SampleRow], metrics: Sequence[Mapping[str, Any]], version: str
) -> Report:
    """Everything the page shows, in words."""
    record = work.output.record
    results, model = record.get("results", {}), record.get("model", {})
    return Report(
        title=run_name(work),
        summary=_summary(work, results),
        figures=_figures(results, model, metrics),
        warnings=record.get("warnings", []),
        samples=samples,
        charts=curves(metrics),
        data=_data(work),
        dropped=_dropped(work),
        training=_training(work, results, model),
        environment=_environment(work),
        configuration=dump_run(work.run),
        footer=f"podtune {version}; data {work.prepared.fingerprint[:16]}, model {work.files.fingerprint[:16]}",
    )


def _summary(work: Work, results: Mapping[str, Any]) -> str:
    lora = work.run.method.lora
    method = f"LoRA of rank {lora.rank}" if lora else "full fine-tuning"
    steps = f" in {counted(results['steps'], 'step')}" if results.get("steps") else ""
    examples = counted(work.prepared.train.examples, "example")
    return f"{short_source(work.run.model.source)}, {method} on {examples}{steps}"


def run_name(work: Work) -> str:
    """The last part of the output's name."""
    return (work.output.address or str(work.output.path.resolve())).rstrip("/").rsplit("/", 1)[-1]


def short_source(source: str) -> str:
    """A model's name without the folders it lies in; Hub ids as they are."""
    return Path(source).name if source.startswith(("/", "~", ".")) else source


def _figures(
    results: Mapping[str, Any], model: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
    figures: list[tuple[str, str, str]] = []
    before, after = results.get("before"), results.get("after")
    if after is not None:
        was = f"was {before['loss']:.3f} before" if before else ""
        figures.append(("Held-out loss", f"{after['loss']:.3f}", was))
        was = f"was {before['perplexity']:,.2f} before" if before else ""
        figures.append(("Perplexity", f"{after['perplexity']:,.2f}", was))
    elif results.get("train_loss") is not None:
        why = "these weights were not evaluated" if before else "nothing was held out"
        figures.append(("Training loss", f"{results['train_loss']:.3f}", f"at the last step; {why}"))
    if model:
        share = model["trained_parameters"] / model["parameters"]
        figures.append(
            ("Trained", number(model["trained_parameters"]), f"{share:.2%} of {number(model['parameters'])}")
        )
    if results.get("seconds"):
        figures.append(("Training time", clock(results["seconds"]), counted(results["steps"], "step")))
    speeds = [row["tokens_per_second"] for row in metrics if isinstance(row.get("tokens_per_second"), int | float)]
    if speeds:
        figures.append(("Speed", f"{sorted(speeds)[len(speeds) // 2]:,.0f}", "tokens per second, median"))
    return figures


def _data(work: Work) -> list[tuple[str, str]]:
    rows = []
    for source in work.prepared.report.sources:
        weight = "" if source.weight == 1 else f", seen {source.weight:g} times an epoch"
        rows.append((source.name, f"{counted(source.read, 'row')} read, {source.kept:,} kept{weight}"))
    for split in work.prepared.report.splits:
        share = split.trained_tokens / split.tokens if split.tokens else 0.0
        rows.append(
            (
                split.name,
                f"{counted(split.examples, 'example')} in {counted(split.rows, 'row')} of {split.row_tokens:,} tokens "
                f"({split.efficiency:.1%} filled); {split.tokens:,} tokens, "
                f"{split.trained_tokens:,} of them trained on ({share:.0%})",
            )
        )
    rows.append(("longest example", f"{work.prepared.report.longest:,} tokens"))
    rows += [("note", note) for note in work.prepared.report.notes]
    return rows


def _dropped(work: Work) -> list[tuple[str, int]]:
    rows: list[tuple[str, int]] = []
    for source in work.prepared.report.sources:
        for tally in (source.dropped, source.changed):
            for reason, count in tally.counts.items():
                places = ", ".join(tally.places.get(reason, [])[:3])
                rows.append((f"{source.name}: {reason}" + (f" ({places})" if places else ""), count))
    return rows


def _training(work: Work, results: Mapping[str, Any], model: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("steps", f"{results.get('steps', 0):,} of {results.get('total_steps', 0):,}"),
        ("weights of step", str(results.get("weights_step", ""))),
        ("optimizer", work.run.train.optimizer.name),
        ("arithmetic of a token", f"{token_cost(work.description, work.run.method.name)}"),
        ("weights held in", work.held_dtype.name),
    ]
    if "peak_learning_rate" in results:
        rows.append(("peak learning rate", f"{results['peak_learning_rate']:.3g}, {work.run.train.schedule.name}"))
    if results.get("skipped_steps"):
        rows.append(("steps skipped", str(results["skipped_steps"])))
    if results.get("stopped"):
        rows.append(("stopped", str(results["stopped"])))
    lora = work.run.method.lora
    if lora is not None:
        rsl = ", rsLoRA" if lora.rslora else ""
        rows.append(("LoRA", f"rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}{rsl}"))
    timings = work.output.record.get("timings", {})
    rows += [(name, f"{seconds:.1f} s") for name, seconds in timings.items() if not name.startswith("samples")]
    return rows


def _environment(work: Work) -> list[tuple[str, str]]:
    return [
        ("device", work.device),
        ("mesh", ", ".join(f"{axis}={size}" for axis, size in work.mesh.shape.items())),
        *machine().items(),
        *versions().items(),
    ]
