"""Small chats and documents on disk, and `prepare` on them. Used by test_prepare*, test_loader and test_inspection."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chat_tokenizers import family_tokenizer

from podtune.config.rows import Data
from podtune.data.prepare import Prepared, prepare


def chat(question: str, answer: str, **extra: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **extra}


def chats(count: int) -> list[dict[str, Any]]:
    """Chats that are all different, of skewed lengths."""
    return [chat(f"Number {n}?", f"The answer is {n}. " * (1 + (n * n) % 5)) for n in range(count)]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare_chats(folder: Path, data: Any, **options: Any) -> Prepared:
    """Prepares with a small ChatML tokenizer into folder/cache. data: a path, or the fields of Data."""
    fields = data if isinstance(data, dict) else {"train": str(data)}
    options = {"max_length": 128, "cache": folder / "cache", **options}
    return prepare(Data.model_validate(fields), family_tokenizer("chatml"), **options)


def all_rows(prepared: Prepared) -> list[tuple[list[int], list[bool], list[int]]]:
    """Every stored row of both splits."""
    splits = [split for split in (prepared.train, prepared.validation) if split is not None]
    rows = [split.read(index) for split in splits for index in range(split.rows)]
    return [(row.tokens.tolist(), row.trained.tolist(), row.segments.tolist()) for row in rows]


def examples_of(prepared: Prepared, split: str = "train") -> list[list[int]]:
    """The tokens of each example of a split, sorted."""
    chosen = prepared.train if split == "train" else prepared.validation
    found: list[list[int]] = []
    for index in range(chosen.rows if chosen else 0):
        row = chosen.read(index)
        found += [row.tokens[row.segments == segment].tolist() for segment in range(1, row.segments[-1] + 1)]
    return sorted(found)
