"""The stages after training: export, the check that it loads, the report and the model card."""

from __future__ import annotations

from podtune import __version__
from podtune.config.wording import readable_bytes
from podtune.export.folders import write_text
from podtune.train.metrics import read_metrics
from podtune.workflow.beginning import base_name, export_dtype
from podtune.workflow.model_card import model_card
from podtune.workflow.report import render
from podtune.workflow.samples import print_side_by_side, read_samples
from podtune.workflow.summary import make_report
from podtune.workflow.work import Work
from podtune.workflow.writing import shown_writing


def export_model(work: Work) -> None:
    """The merged folder and the adapter, each appearing when it is whole."""
    from podtune.export.huggingface import write_model
    from podtune.export.peft import write_adapter

    lora, run = work.run.method.lora, work.run
    exported: dict[str, object] = {}
    if work.merged_too:
        with shown_writing(work.console, work.output.model) as progress:
            written = write_model(
                work.output.model,
                work.model,
                work.weights,
                work.tokenizer,
                dtype=export_dtype(work),
                generation_config=work.files.generation_config,
                extra_files={"README.md": model_card(work, "model")},
                progress=progress,
            )
        if written.lost:
            work.warn(written.lost)
        exported["model"] = {
            "folder": "model",
            "tensors": written.tensors,
            "dtype": written.dtype,
            "bytes": written.bytes,
        }
        work.say(
            f"exported {work.output.model}: {written.tensors} tensors, {readable_bytes(written.bytes)}, {written.dtype}"
        )
    if lora is not None and run.exports_adapter:
        base, revision = base_name(work)
        write_adapter(
            work.output.adapter,
            work.model,
            work.weights,
            lora,
            work.tokenizer,
            base=base,
            revision=revision,
            extra_files={"README.md": model_card(work, "adapter")},
        )
        exported["adapter"] = {"folder": "adapter"}
        work.say(f"exported {work.output.adapter}: a PEFT adapter of rank {lora.rank} for {base}")
    work.output.update(exported=exported)


def check_exported(work: Work) -> None:
    """Reads back what was written and compares it with what was trained."""
    from podtune.export.rehearsal import check_reloads

    if work.merged_too:
        check_reloads(work.output.model, work.model, work.weights, work.tokenizer, dtype=export_dtype(work))
    if work.output.has_reached("trained"):  # else the training can be gone on with
        work.output.reach("exported")


def write_report(work: Work) -> None:
    """report.html, the model card, and both answers side by side on the console."""
    if not work.output.writes:
        return
    samples = read_samples(work.output.samples)
    results = work.output.record.get("results", {})
    if not work.console.quiet:
        print_side_by_side(work.console, samples, results)
    work.output.update(timings=work.timings, warnings=list(dict.fromkeys(work.warnings)))
    report = make_report(work, samples=samples, metrics=read_metrics(work.output.metrics), version=__version__)
    write_text(work.output.path / "report.html", render(report))
    write_text(work.output.path / "README.md", model_card(work, "output"))
