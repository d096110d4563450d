"""What became of the rows, over all chunks: the report of each source, and the refusals that end a preparation."""

from collections.abc import Sequence

from podtune.config.errors import UserError
from podtune.config.wording import counted
from podtune.data.prepare_encode import Chunk
from podtune.data.prepare_job import PrepareJob
from podtune.data.prepare_report import DROPPED, REASON_ANSWER, REASON_LONG, SourceReport, Tally
from podtune.data.prepare_select import Examples

REFUSALS = {
    "nothing_to_train": "with nothing to train on",
    "too_long": "longer than max_length (data.too_long is refuse; drop or truncate would go on)",
    "template": "refused by the chat template",
    "not_rendered": "not rendered whole by the chat template",
    "invalid": "of the wrong form",
}


def source_reports(job: PrepareJob, chunks: Sequence[Chunk]) -> list[SourceReport]:
    """Adds up what the chunks of each source say."""
    reports = [SourceReport(entry.name, entry.source.weight, files=entry.file_names) for entry in job.inputs]
    for chunk in chunks:
        summary = chunk.summary
        report = reports[summary.source]
        report.read += summary.read
        report.kept += summary.kept
        report.dropped.merge(summary.dropped)
        report.changed.merge(summary.changed)
        report.noted.merge(summary.notes)
    for report in reports:
        if report.noted.counts.get("glued") != report.read:  # where some have a space, the others are meant so
            report.noted.counts.pop("glued", None)
            report.noted.places.pop("glued", None)
    return reports


def refuse_faults(chunks: Sequence[Chunk], *, read_all: bool) -> None:
    """Raises UserError naming the first refused rows of each kind, and how many there are."""
    refused = Tally()
    for chunk in chunks:
        refused.merge(chunk.summary.refused)
    if not refused.total:
        return
    read = sum(chunk.summary.read for chunk in chunks)
    lines = [f"{counted(refused.total, 'row')} of {read:,} read cannot be trained on."]
    if not read_all:
        lines[0] += " The rest was not read."
    for kind, count in refused.counts.items():
        named = refused.places[kind]
        lines.append(f"{counted(count, 'row')} {REFUSALS[kind]}:")
        lines += [f"  {place}" for place in named]
        lines += [f"  … and {count - len(named):,} more"] if count > len(named) else []
    lines.append("Mend or remove them and run again.")
    raise UserError("\n".join(lines))


def refuse_nothing(job: PrepareJob, examples: Examples, reports: Sequence[SourceReport], split: str) -> None:
    """Raises UserError when no example is left of the reported sources."""
    if len(examples):
        return
    where = ", ".join(report.name for report in reports)
    read = sum(report.read for report in reports)
    if not read:
        raise UserError(f"{where}: no rows. There is nothing for the {split} split.")
    dropped = Tally()
    for report in reports:
        dropped.merge(report.dropped)
    why = "; ".join(f"{counted(count, 'row')} {DROPPED[reason]}" for reason, count in dropped.counts.items())
    raise UserError(
        f"{where}: none of {counted(read, 'row')} is left for the {split} split ({why or 'the weights leave none'}). "
        f"{_way_out(job, dropped)}{paragraphs_hint(job, reports)}"
    )


def _way_out(job: PrepareJob, dropped: Tally) -> str:
    if not {REASON_LONG, REASON_ANSWER} & dropped.counts.keys():
        return "Give more rows, or larger weights."
    truncate = ", or set data.too_long: truncate" if job.data.too_long != "truncate" else ""
    return f"max_length is {job.max_length}: raise data.max_length{truncate}."


def paragraphs_hint(job: PrepareJob, reports: Sequence[SourceReport]) -> str:
    """What makes more rows of text files that are one document each; nothing where there are none."""
    names = {report.name for report in reports}
    for entry in job.inputs:
        if entry.name in names and entry.source.documents == "file" and entry.files[0].format == "text":
            return (
                f" Each text file is one document, and so one row: {{path: {entry.name}, documents: paragraph}} makes "
                "one of each paragraph."
            )
    return ""
