"""Small whole runs: a tiny model in a folder, a handful of chats, and the run file that joins them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from export_cases import model_folder
from rich.console import Console

from podtune.config.loading import load_run
from podtune.config.schema import Run

QUESTIONS = ["red", "blue", "green", "grey", "pink", "gold", "teal", "plum"]


def chats(count: int = 24) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{QUESTIONS[n % 8]} {n}?"},
                {"role": "assistant", "content": f"{QUESTIONS[n % 8]}!"},
            ]
        }
        for n in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_file(folder: Path, **changes: Any) -> Path:
    """A run file beside a tiny model and data that are made once. changes: of whole blocks."""
    model = folder / "base"
    if not model.exists():
        model_folder("llama-tied", model)
        write_jsonl(folder / "chats.jsonl", chats())
    content = {
        "model": str(model),
        "data": {
            "train": str(folder / "chats.jsonl"), "validation": 4, "max_length": 64, "workers": 0,
            "cache": str(folder / "prepared"),
        },
        "method": {"lora": {"rank": 4}},
        "output": str(folder / "out"),
        "train": {"steps": 4, "batch_tokens": 128, "learning_rate": 1e-2, "log_every": 1},
        "eval": {"samples": 2, "max_new_tokens": 8, "every": 2, "prompts": ["Is <b>this</b> escaped?"]},
        "mesh": {"data": 1, "fsdp": 1},
        **changes,
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(json.dumps(content))
    return path


def a_run(folder: Path, **changes: Any) -> Run:
    return load_run(run_file(folder, **changes))


@contextlib.contextmanager
def one_device_shown() -> Iterator[None]:
    """Tests show 8 CPU devices; small runs take the first, as on a laptop."""
    import jax

    devices = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_, **__: devices)
        yield


def a_console(*, terminal: bool = False) -> Console:
    """Records what is printed; `text_of` gives it."""
    import io

    return Console(file=io.StringIO(), width=120, force_terminal=terminal, record=True)
