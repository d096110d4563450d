"""Held-out questions and the user's own, answered before, during and after training, and shown side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from podtune.export.folders import write_text
from podtune.serve.prompts import prompt_ids
from podtune.train.metrics import read_metrics
from podtune.workflow.report import SampleRow

if TYPE_CHECKING:
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
    prepared: Prepared, tokenizer: Tokenizer, *, samples: int, own: Sequence[str], most_tokens: int
) -> list[Prompt]:
    """Held-out prompts and the user's, those that fit into `most_tokens`."""
    prompts = [
        Prompt(one.prompt_ids, shown_prompt(one), one.expected_text.strip())
        for one in prepared.held_out_prompts(samples)
    ]
    prompts += [Prompt(prompt_ids(tokenizer, text), text) for text in own]
    return [prompt for prompt in prompts if 0 < len(prompt.ids) <= most_tokens]


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
    """samples.jsonl by prompt, each with its answers in the order of the steps."""
    prompts: dict[str, dict[str, str]] = {}
    expected: dict[str, str | None] = {}
    for row in sorted(read_metrics(path), key=lambda row: (row["step"], row["moment"] == "after")):
        prompts.setdefault(row["prompt"], {})[row["moment"]] = row["answer"]
        expected[row["prompt"]] = row.get("expected")
    return [SampleRow(prompt, answers, expected[prompt]) for prompt, answers in prompts.items()]


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
