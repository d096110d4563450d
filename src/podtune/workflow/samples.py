"""Held-out questions and the user's own, answered before, during and after training, and shown side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from podtune.config.errors import UserError
from podtune.export.folders import write_text
from podtune.serve.prompts import prompt_ids
from podtune.train.metrics import read_metrics
from podtune.workflow.report import SampleRow

if TYPE_CHECKING:
    from podtune.data.forms import Form
    from podtune.data.prepared import HeldOut, Prepared
    from podtune.hub.tokenizer import Tokenizer
    from podtune.serve.generate import Generator


@dataclass(frozen=True)
class Prompt:
    """ids: what the model is given; text: what is shown; expected: the answer in the data, if it is from there."""

    ids: Sequence[int]
    text: str
    expected: str | None = None


def choose_prompts(
    prepared: Prepared,
    tokenizer: Tokenizer,
    *,
    samples: int,
    own: Sequence[str],
    form: Form | None,
    most_tokens: int,
    warn: Callable[[str], object],
) -> list[Prompt]:
    """Held-out prompts, those that fit into `most_tokens`, and the user's.

    form: what was trained, which the user's own take too. warn: is told how many held-out ones do not fit. Raises
    UserError when one of the user's does not.
    """
    held_out = prepared.held_out_prompts(samples)
    fitting = [one for one in held_out if 0 < len(one.prompt_ids) <= most_tokens]
    if len(fitting) < len(held_out):
        warn(
            f"{len(held_out) - len(fitting)} of {len(held_out)} held-out prompts are not answered: they are empty, or "
            f"longer than the {max(most_tokens, 0):,} tokens that eval.max_new_tokens leaves of the model's context."
        )
    prompts = [Prompt(one.prompt_ids, shown_prompt(one), one.expected_text.strip()) for one in fitting]
    return prompts + own_prompts(tokenizer, own, form=form, most_tokens=most_tokens)


def own_prompts(tokenizer: Tokenizer, own: Sequence[str], *, form: Form | None, most_tokens: int) -> list[Prompt]:
    """The prompts of eval.prompts. Raises UserError for one without tokens, or with more than `most_tokens`."""
    prompts = [Prompt(prompt_ids(tokenizer, text, form), text) for text in own]
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt.ids) <= most_tokens:
            start = prompt.text if len(prompt.text) <= 40 else f"{prompt.text[:40]}…"
            raise UserError(
                f"eval.prompts[{number}] ({start!r}) has {len(prompt.ids):,} tokens, and the model's context less "
                f"eval.max_new_tokens leaves room for 1 to {max(most_tokens, 0):,}. Change it, or lower "
                "eval.max_new_tokens."
            )
    return prompts


def shown_prompt(held_out: HeldOut) -> str:
    """The question as a person wrote it: the last user's message of a chat, else the text."""
    asked = [message for message in held_out.messages if message.get("role") == "user"]
    if not asked:
        return held_out.prompt_text.strip()
    content = asked[-1].get("content")
    return (content if isinstance(content, str) else json.dumps(content)).strip()


def answer_all(generator: Generator, prompts: Sequence[Prompt], *, max_new_tokens: int) -> list[str]:
    """Greedy answers, all prompts side by side."""
    return [text.strip() for text in generator.texts([one.ids for one in prompts], max_new_tokens=max_new_tokens)]


def record_answers(path: Path, prompts: Sequence[Prompt], answers: Sequence[str], *, moment: str, step: int) -> None:
    """Puts the answers of a moment into samples.jsonl, in the place of those of that moment or of later steps."""
    kept = [row for row in read_metrics(path) if row["moment"] != moment and row["step"] <= step]
    rows = kept + [
        {"moment": moment, "step": step, "prompt": one.text, "answer": answer, "expected": one.expected}
        for one, answer in zip(prompts, answers, strict=True)
    ]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_samples(path: Path) -> list[SampleRow]:
    """samples.jsonl by prompt, each with its answers in the order of the steps. Of prompts that look the same (what is
    shown of a chat is its last question) the first of a moment is the first of every other, and so on."""
    found: dict[tuple[str, str | None, int], dict[str, str]] = {}
    seen: Counter[tuple[str, str, str | None]] = Counter()
    for row in sorted(read_metrics(path), key=lambda row: (row["step"], row["moment"] == "after")):
        moment, prompt, expected = row["moment"], row["prompt"], row.get("expected")
        found.setdefault((prompt, expected, seen[moment, prompt, expected]), {})[moment] = row["answer"]
        seen[moment, prompt, expected] += 1
    return [SampleRow(prompt, answers, expected) for (prompt, expected, _), answers in found.items()]


def print_side_by_side(console: Console, samples: Sequence[SampleRow], losses: Mapping[str, Any]) -> None:
    """Each question with its answer before and after: a table on a terminal, plain lines elsewhere."""
    shown = [sample for sample in samples if {"before", "after"} <= set(sample.answers)]
    if console.is_terminal and shown:
        table = Table(title="Held-out questions, before and after", show_lines=True, expand=True, title_justify="left")
        for heading in ("question", "before", "after", "expected"):
            table.add_column(heading, ratio=3 if heading == "question" else 4, overflow="fold")
        for sample in shown:
            cells = (sample.prompt, sample.answers["before"], sample.answers["after"], sample.expected or "")
            table.add_row(*(Text(cell) for cell in cells))
        console.print(table)
    else:
        for sample in shown:
            lines = [("Q", sample.prompt), ("before", sample.answers["before"]), ("after", sample.answers["after"])]
            lines += [("expected", sample.expected)] if sample.expected else []
            for name, text in lines:
                console.print(f"{name:>9}: {' '.join(text.split())}", markup=False, highlight=False, soft_wrap=True)
            console.print()
    before, after = losses.get("before"), losses.get("after")
    if before is not None and after is not None:
        console.print(
            f"held-out loss {before['loss']:.4f} before, {after['loss']:.4f} after; "
            f"perplexity {before['perplexity']:.2f} before, {after['perplexity']:.2f} after",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
