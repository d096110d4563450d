"""The report: whole by itself, sound whatever was measured, and safe whatever was said."""

import html.parser
import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from podtune.workflow.charts import Series, line_chart, number, smoothed, ticks
from podtune.workflow.report import Chart, Report, SampleRow, curves, render
from podtune.workflow.samples import Prompt, read_samples, record_answers

EVIL = "</style></script><script>alert('x')</script>\"'&<img src=http://x>"
VOID = {"meta", "line", "br", "img", "circle", "polyline"}


class Page(html.parser.HTMLParser):
    """Checks that tags nest; keeps attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.tags, self.text = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def full_report(text="plain"):
    return Report(
        title=text,
        summary=text,
        figures=[(text, text, text)],
        warnings=[text],
        samples=[SampleRow(text, {"before": text, "step 5": text, "after": text}, text)],
        charts=[Chart(text, [Series(text, [(0, 1.0), (1, 2.0)]), Series(text, [(0, 1.0)], "second", dots=True)])],
        data=[(text, text)],
        dropped=[(text, 3)],
        training=[(text, text)],
        environment=[(text, text)],
        configuration=text,
        footer=text,
    )


def test_everything_from_outside_is_escaped():
    page = Page(render(full_report(EVIL)))
    assert page.tags.count("script") == 1
    assert page.tags.count("style") == 1
    assert "img" not in page.tags
    assert "".join(page.text).count(EVIL) >= 15


def test_the_page_fetches_nothing():
    text = render(full_report())
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)""", text)
    assert "prefers-color-scheme:dark" in text


def test_an_empty_report_is_a_page_too():
    page = Page(render(Report(title="t", summary="s")))
    assert "section" not in page.tags


def test_samples_show_before_after_and_expected_and_fold_what_lies_between():
    text = render(full_report())
    assert text.index(">before<") < text.index(">after<") < text.index(">expected<") < text.index(">step 5<")
    assert "<details>" in text


NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(st.integers(0, 10**6).map(float), NUMBERS), max_size=12))
@example([(0.0, 1.7120886998688722e308)])
def test_any_series_makes_a_sound_chart(points):
    text = line_chart([Series("loss", points, dots=True)], label="loss")
    Page(text)
    assert "nan" not in re.sub(r'data-lines="[^"]*"', "", text)
    assert "inf" not in re.sub(r'data-lines="[^"]*"', "", text)


def test_a_value_that_is_no_number_breaks_the_line():
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 2.0), (4.0, 1.0)]
    assert line_chart([Series("loss", points)], label="loss").count("<polyline") == 2


def test_long_series_are_thinned_to_their_means():
    points = [(float(n), float(n % 2)) for n in range(100_000)]
    text = line_chart([Series("loss", points)], label="loss")
    assert len(text) < 60_000
    assert "0.5" in text


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_inside(low, spread):
    high = low + spread
    if high <= low:
        return
    found = ticks(low, high)
    assert 1 <= len(found) <= 11
    # Two roundings, of a quotient and of a product: they show where the range is but a few floats wide.
    room = 1e-6 * spread + 2 * math.ulp(max(abs(low), abs(high)))
    assert all(low - room <= value <= high + room for value in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0002, "0.0002"), (1.5e-05, "1.5e-05"), (12_500, "12.5k"), (3_400_000, "3.4M"), (2.345678, "2.346")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_smoothing_keeps_a_constant_and_passes_over_what_is_no_number():
    points = [(0.0, 2.0), (1.0, math.nan), (2.0, 2.0)]
    assert smoothed(points, span=5) == [(0.0, pytest.approx(2.0)), (2.0, pytest.approx(2.0))]


def test_the_curves_of_a_run():
    metrics = [
        {"step": 0, "eval_loss": 3.0},
        {
            "step": 1,
            "loss": 2.5,
            "learning_rate": 1e-4,
            "tokens_per_second": 900.0,
            "data_wait": 0.01,
            "grad_norm": 1.0,
        },
        {
            "step": 2,
            "loss": None,
            "learning_rate": 9e-5,
            "tokens_per_second": 950.0,
            "data_wait": 0.0,
            "grad_norm": 1.1,
        },
        {"step": 2, "eval_loss": 2.0},
    ]
    charts = curves(metrics)
    assert [chart.title.split(" (")[0] for chart in charts] == [
        "Loss",
        "Learning rate",
        "Tokens per second",
        "Gradient norm",
        "Waiting for data",
    ]
    assert [series.points for series in charts[0].series][-1] == [(0.0, 3.0), (2.0, 2.0)]
    assert curves([]) == []


def test_questions_that_look_the_same_are_shown_each_with_its_own_answers(tmp_path):
    """Two chats may end in the same question, and a prompt of the user's may be that question too."""
    prompts = [Prompt([1], "So?", "yes"), Prompt([2], "So?", "yes"), Prompt([3], "So?"), Prompt([4], "Why?")]
    for moment, step in (("before", 0), ("after", 4)):
        answers = [f"{moment} {number}" for number in range(4)]
        record_answers(tmp_path / "samples.jsonl", prompts, answers, moment=moment, step=step)
    rows = read_samples(tmp_path / "samples.jsonl")
    assert [(row.prompt, row.expected) for row in rows] == [
        ("So?", "yes"),
        ("So?", "yes"),
        ("So?", None),
        ("Why?", None),
    ]
    assert [row.answers for row in rows] == [{"before": f"before {n}", "after": f"after {n}"} for n in range(4)]
