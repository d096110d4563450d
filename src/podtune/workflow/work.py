"""What the stages of a run hand on to one another, and how they say what they do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from podtune.config.schema import Run
from podtune.workflow.output import OutputFolder

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from podtune.data.forms import Form
    from podtune.data.prepared import Prepared
    from podtune.families.family import Model
    from podtune.hub.sources import ModelFiles
    from podtune.hub.tokenizer import Tokenizer
    from podtune.serve.generate import Generator
    from podtune.train.job import TrainResult
    from podtune.workflow.samples import Prompt


@dataclass
class Work:
    """A run under way. What a stage has not made yet is absent; each stage says what it needs by using it."""

    run: Run
    console: Console
    output: OutputFolder
    timings: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    device: str = ""
    merged_too: bool = True
    held_dtype: np.dtype = field(init=False)
    files: ModelFiles = field(init=False)
    model: Model = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    form: Form | None = None
    prepared: Prepared = field(init=False)
    mesh: Mesh = field(init=False)
    description: Any = field(init=False)
    weights: Any = field(init=False)
    generator: Generator = field(init=False)
    prompts: list[Prompt] = field(init=False)
    result: TrainResult = field(init=False)

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that is also kept for the report."""
        self.warnings.append(text)
        self.console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True, style="yellow")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.timings[name] = round(time.perf_counter() - started, 3)
