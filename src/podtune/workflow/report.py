"""The report of a run: one HTML file that needs nothing else, in light and dark. Used by the workflow's last stage."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podtune.workflow.charts import Point, Series, line_chart, smoothed
from podtune.workflow.report_style import SCRIPT, STYLE


@dataclass(frozen=True)
class Chart:
    title: str
    series: Sequence[Series]
    note: str = ""


@dataclass(frozen=True)
class SampleRow:
    """One prompt with what was expected and what the model said, by moment: before, step 20, after."""

    prompt: str
    answers: Mapping[str, str]
    expected: str | None = None


@dataclass(frozen=True)
class Report:
    """All that a report shows. Tables are (name, value) rows; figures are (name, value, remark)."""

    title: str
    summary: str
    figures: Sequence[tuple[str, str, str]] = ()
    warnings: Sequence[str] = ()
    samples: Sequence[SampleRow] = ()
    charts: Sequence[Chart] = ()
    data: Sequence[tuple[str, str]] = ()
    dropped: Sequence[tuple[str, int]] = ()
    training: Sequence[tuple[str, str]] = ()
    environment: Sequence[tuple[str, str]] = ()
    configuration: str = ""
    footer: str = field(default="")


def render(report: Report) -> str:
    """The whole page. Everything that came from outside is escaped."""
    sections = [
        _figures(report.figures),
        _section("Warnings", _list(report.warnings)),
        _section("Answers, before and after", _samples(report.samples)),
        _section("Curves", _charts(report.charts)),
        _section("Data", _table(report.data) + _dropped(report.dropped)),
        _section("Training", _table(report.training)),
        _section("Environment", _table(report.environment)),
        _section("Configuration", f"<pre>{_text(report.configuration)}</pre>" if report.configuration else ""),
    ]
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_text(report.title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><header><h1>{_text(report.title)}</h1><p>{_text(report.summary)}</p></header>\n"
        + "\n".join(section for section in sections if section)
        + f"\n<footer>{_text(report.footer)}</footer></main><script>{SCRIPT}</script></body></html>\n"
    )


def curves(metrics: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The charts of a run's metrics.jsonl rows. A row holds `step` and any of the names below."""
    loss = series_of(metrics, "loss")
    evaluated = series_of(metrics, "eval_loss")
    span = max(2, len(loss) // 20)
    charts = []
    if loss or evaluated:
        lines = [Series("training, each step", loss, "faint"), Series("training", smoothed(loss, span=span), "main")]
        charts.append(Chart("Loss (nats per token)", [*lines, Series("held out", evaluated, "second", dots=True)]))
    for name, title in CURVES.items():
        points = series_of(metrics, name)
        if points:
            charts.append(Chart(title, [Series(title, points, "main")]))
    return charts


# What else is drawn, by its name in metrics.jsonl.
CURVES = {
    "learning_rate": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "grad_norm": "Gradient norm",
    "data_wait": "Waiting for data (share of the step)",
}


def series_of(metrics: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    points = []
    for row in metrics:
        value, step = row.get(name), row.get("step")
        if isinstance(value, int | float) and isinstance(step, int | float) and not isinstance(value, bool):
            points.append((float(step), float(value)))
    return points


def _figures(figures: Sequence[tuple[str, str, str]]) -> str:
    if not figures:
        return ""
    tiles = [
        f'<div class="figure"><div class="name">{_text(name)}</div><div class="value">{_text(value)}</div>'
        f'<div class="remark">{_text(remark)}</div></div>'
        for name, value, remark in figures
    ]
    return f'<div class="figures">{"".join(tiles)}</div>'


def _samples(samples: Sequence[SampleRow]) -> str:
    blocks = []
    for sample in samples:
        moments = list(sample.answers)
        if not moments:
            continue
        first, last = moments[0], moments[-1]
        columns = [_answer(first, sample.answers[first], "before")]
        if last != first:
            columns.append(_answer(last, sample.answers[last], "after"))
        if sample.expected:
            columns.append(_answer("expected", sample.expected, "expected"))
        between = "".join(_answer(moment, sample.answers[moment], "during") for moment in moments[1:-1])
        during = f"<details><summary>during training</summary>{between}</details>" if between else ""
        blocks.append(
            f'<article><p class="prompt">{_text(sample.prompt)}</p>'
            f'<div class="answers">{"".join(columns)}</div>{during}</article>'
        )
    return "".join(blocks)


def _answer(moment: str, text: str, kind: str) -> str:
    return (
        f'<div class="answer {kind}"><div class="name">{_text(moment)}</div><div class="said">{_text(text)}</div></div>'
    )


def _charts(charts: Sequence[Chart]) -> str:
    blocks = []
    for chart in charts:
        drawn = [one for one in chart.series if one.points]
        named = [one for one in drawn if one.style != "faint"]
        legend = "".join(f'<span class="key {one.style}">{_text(one.name)}</span>' for one in named)
        blocks.append(
            f"<figure><figcaption>{_text(chart.title)}{legend if len(named) > 1 else ''}</figcaption>"
            f'{line_chart(drawn, label=chart.title)}<div class="tip" hidden></div></figure>'
        )
    return f'<div class="charts">{"".join(blocks)}</div>' if blocks else ""


def _table(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    body = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    return f"<table>{body}</table>"


def _dropped(rows: Sequence[tuple[str, int]]) -> str:
    if not rows:
        return ""
    body = "".join(f'<tr><th>{_text(reason)}</th><td class="count">{count:,}</td></tr>' for reason, count in rows)
    return f"<h3>Rows left out or cut, and why</h3><table>{body}</table>"


def _list(lines: Sequence[str]) -> str:
    return f'<ul class="warnings">{"".join(f"<li>{_text(line)}</li>" for line in lines)}</ul>' if lines else ""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>" if body else ""


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
