"""A tiny model, rows and jobs that the training tests share. Shapes are small enough to compile in a second or two."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podtune.config.schema import LoRA, Mesh, Run
from podtune.data.packing import PackedRow
from podtune.families import model_from_config
from podtune.parallel.mesh import build_mesh
from podtune.train.job import Job
from podtune.weights.adapters import attach
from podtune.weights.param import initialise_all

VOCAB, ROW_TOKENS = 97, 24


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows in memory, as a split of prepared data would give them: two documents of uneven length in each,
    about two thirds of their tokens trained."""

    rows: int
    row_tokens: int = ROW_TOKENS
    name: str = "train"
    seed: int = 0
    vocab: int = VOCAB
    trained: bool = True

    @property
    def fingerprint(self) -> str:
        return f"{self.rows}-{self.row_tokens}-{self.seed}"

    def read(self, index: int) -> PackedRow:
        random = np.random.default_rng((self.seed, index))
        used = int(random.integers(self.row_tokens // 3, self.row_tokens + 1))
        cut = int(random.integers(2, used - 1))
        segments = np.where(np.arange(used) < cut, 1, 2).astype(np.int32)
        # Each token follows from the one before it, nearly always: there is something to learn.
        tokens = np.zeros(used, np.int32)
        tokens[0] = random.integers(1, self.vocab)
        for at in range(1, used):
            tokens[at] = (
                random.integers(1, self.vocab) if random.random() < 0.1 else (tokens[at - 1] * 5 + 3) % self.vocab
            )
        trained = (random.random(used) < 2 / 3) & self.trained
        return PackedRow(tokens, trained, segments)


def tiny_model(*, tied: bool = True, layers: int = 2, **settings: Any) -> Any:
    content = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": layers,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        **settings,
    }
    return model_from_config(content)


def make_run(output: Path | str = "out", *, method: Any = "lora", **blocks: Any) -> Run:
    train = {"log_every": 1, "batch_tokens": 8 * ROW_TOKENS, "learning_rate": 1e-2, **blocks.pop("train", {})}
    return Run.model_validate(
        {
            "model": "tiny",
            "data": "rows.jsonl",
            "method": method if method != "lora" else {"lora": {"rank": 2}},
            "output": str(output),
            "train": train,
            "eval": {"every": None, "samples": 0, **blocks.pop("eval", {})},
            **blocks,
        }
    )


def one_device_mesh() -> jax.sharding.Mesh:
    return build_mesh(Mesh(), jax.devices()[:1])


def make_job(
    run: Run,
    *,
    rows: Any,
    validation: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    model: Any = None,
    **rest: Any,
) -> Job:
    """A job with freshly initialised weights: the same for every call, whatever the mesh."""
    mesh = mesh or one_device_mesh()
    model = model or tiny_model()
    description = model.describe()
    if run.method.lora is not None:
        description = attach(description, run.method.lora)
    weights = initialise_all(description, jax.random.key(7), mesh=mesh)
    return Job(
        run=run,
        model=model,
        description=description,
        weights=weights,
        mesh=mesh,
        train_split=rows,
        validation_split=validation,
        output=run.output.path,
        **rest,
    )


__all__ = ["LoRA", "Rows", "make_job", "make_run", "one_device_mesh", "tiny_model"]
