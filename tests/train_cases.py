"""A tiny model, rows and jobs that the training tests share. Shapes are small enough to compile in a second or two."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from param_trees import map_params

from podtune.config.schema import Mesh, Run
from podtune.data.packing import PackedRow
from podtune.data.prepared import PreparedSplit
from podtune.families import model_from_config
from podtune.parallel.mesh import build_mesh
from podtune.parallel.sharding import sharding_for
from podtune.train.feed import Feed, loader_for, on_mesh
from podtune.train.geometry import plan_geometry
from podtune.train.job import Job
from podtune.train.metrics import MetricsLog, read_metrics
from podtune.train.program import make_program
from podtune.weights.adapters import attach
from podtune.weights.param import Param
from podtune.weights.tree import named_leaves

VOCAB, ROW_TOKENS = 97, 24
# Enough to have every kind of adapter (one or several inputs and outputs, sharded by heads, kv heads and mlp) and to
# compile in a moment.
LORA = {"rank": 2, "targets": ["attention.q", "attention.k", "attention.o", "mlp.down"]}


class Rows(PreparedSplit):
    """Packed rows in memory instead of files: two documents of uneven length in each, about two thirds of their tokens
    trained."""

    def __init__(self, rows: int, *, row_tokens: int = ROW_TOKENS, name: str = "train", seed: int = 0) -> None:
        super().__init__(
            folder=Path(),
            name=name,
            fingerprint=f"{rows}-{row_tokens}-{seed}",
            rows=rows,
            row_tokens=row_tokens,
            examples=2 * rows,
            tokens=rows * row_tokens,
            trained_tokens=rows * row_tokens,
            shard_rows=(rows,),
        )
        object.__setattr__(self, "seed", seed)

    def read(self, index: int) -> PackedRow:
        random = np.random.default_rng((self.seed, index))  # type: ignore[attr-defined]
        used = int(random.integers(self.row_tokens // 3, self.row_tokens + 1))
        cut = int(random.integers(2, used - 1))
        segments = np.where(np.arange(used) < cut, 1, 2).astype(np.int32)
        # Each token follows from the one before it, nearly always: there is something to learn.
        tokens = np.zeros(used, np.int32)
        tokens[0] = random.integers(1, VOCAB)
        for at in range(1, used):
            tokens[at] = random.integers(1, VOCAB) if random.random() < 0.1 else (tokens[at - 1] * 5 + 3) % VOCAB
        return PackedRow(tokens, random.random(used) < 2 / 3, segments)


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
            "method": method if method != "lora" else {"lora": LORA},
            "output": str(output),
            "train": train,
            "eval": {"every": None, "samples": 0, **blocks.pop("eval", {})},
            **blocks,
        }
    )


def one_device_mesh() -> jax.sharding.Mesh:
    return build_mesh(Mesh(), jax.devices()[:1])


def random_weights(description: Any, mesh: jax.sharding.Mesh) -> Any:
    """The same for every call, whatever the mesh; made by numpy, since that compiles nothing. Adapters do something
    from the first step on."""

    def one(name: str, param: Param) -> jax.Array:
        random = np.random.default_rng(list(name.encode()))
        fixed = {"zeros": 0.0, "ones": 1.0}.get(param.init, 0.0) if param.kind == "vector" else 0.0
        array = fixed + random.normal(size=param.shape).astype(np.float32) * (0.02 if param.kind == "vector" else 0.1)
        return jax.device_put(array.astype(np.float32), sharding_for(mesh, param.axes, param.shape))

    return map_params(one, description)


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
    weights = random_weights(description, mesh)
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


@dataclasses.dataclass
class Steps:
    """A program with its state, to take steps by hand."""

    program: Any
    state: Any
    loader: Any
    mesh: Any

    def batch(self, step: int) -> dict[str, jax.Array]:
        return on_mesh(self.loader.batch_at(step), self.mesh, loader=self.loader)

    def take(self, batch: dict[str, jax.Array]) -> dict[str, Any]:
        self.state, measured = self.program.step(self.state, self.program.frozen, batch)
        return {name: value.item() for name, value in jax.device_get(measured).items()}

    def losses(self, steps: int) -> list[float]:
        return [self.take(self.batch(step))["loss"] for step in range(steps)]


def make_steps(run: Run, *, mesh: jax.sharding.Mesh | None = None, rows: Any = None, model: Any = None) -> Steps:
    rows = rows or Rows(11)
    job = make_job(run, rows=rows, mesh=mesh, model=model)
    geometry = plan_geometry(run.train, rows=rows.rows, row_tokens=rows.row_tokens, mesh=job.mesh)
    program, trainable = make_program(
        run, job.model, job.description, weights=job.weights, mesh=job.mesh, geometry=geometry
    )
    loader = loader_for(rows, job.mesh, seed=run.seed, batch_rows=geometry.batch_rows)
    return Steps(program, program.start(trainable), loader, job.mesh)


def as_numpy(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


@contextlib.contextmanager
def at_step(step: int, action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` when the numbers of that step (counted from 1) are logged."""
    write = MetricsLog.write

    def watched(self: MetricsLog, at: int, values: Any) -> None:
        write(self, at, values)
        if at == step and "loss" in values:
            action()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsLog, "write", watched)
        yield


@contextlib.contextmanager
def recorded_batches(path: Path) -> Iterator[None]:
    """Appends a hash of every batch that is fed to the file, a line each."""
    next_batch = Feed.next

    def watched(self: Feed, request: int = 0) -> Any:
        batch = next_batch(self, request)
        digest = hashlib.sha256()
        for name in sorted(batch):
            if name != "requests":
                digest.update(np.asarray(batch[name]).tobytes())
        with path.open("a") as file:
            file.write(f"{self._step} {digest.hexdigest()}\n")
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "next", watched)
        yield


def poisoned(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The batch with one trained token of so large a weight that the loss overflows."""
    weights = np.asarray(batch["weights"])
    only = np.zeros_like(weights).ravel()
    only[np.flatnonzero(weights)[0]] = 3e38
    return batch | {"weights": jax.device_put(only.reshape(weights.shape), batch["weights"].sharding)}


@contextlib.contextmanager
def poisoned_steps(*steps: int) -> Iterator[None]:
    """Makes the loss of these steps (counted from 1) infinite."""
    next_batch = Feed.next

    def next_or_poisoned(self: Feed, request: int = 0) -> Any:
        batch = next_batch(self, request)
        passed_over = not np.asarray(batch["weights"]).any()
        return poisoned(batch) if self._step in steps and not passed_over else batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "next", next_or_poisoned)
        yield


def logged(output: Path, key: str = "loss") -> dict[int, float]:
    """step -> value of every line of the metrics file that has it."""
    lines = read_metrics(output / "metrics.jsonl")
    found = [(line["step"], line[key]) for line in lines if key in line]
    assert len(found) == len(dict(found)), f"a step is there twice: {found}"
    return dict(found)
