"""podtune's side of `sft_cpu.py`: the very program that `podtune run` trains with, fed one fixed batch."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from support.pairs import serve_steps
from support.sft_inputs import (
    ALPHA,
    LEARNING_RATE,
    RANK,
    adapter_start,
    fixed_batch,
    stacked_adapters,
    unstacked_gradients,
)


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    import jax
    import jax.numpy as jnp
    import optax

    from podtune.config.schema import Run
    from podtune.families import model_from_files
    from podtune.families.loading import load_weights
    from podtune.hub.sources import resolve_model
    from podtune.parallel.mesh import build_mesh
    from podtune.train.feed import on_mesh
    from podtune.train.geometry import Geometry
    from podtune.train.program import make_program
    from podtune.weights.adapters import attach

    rows, row_tokens = arguments["rows"], arguments["row_tokens"]
    run = Run.model_validate(
        {
            "model": arguments["folder"],
            "data": "unused.jsonl",
            "method": {"lora": {"rank": RANK, "alpha": ALPHA}},
            "output": "unused",
            "train": {
                "compute_dtype": arguments["precision"],
                "learning_rate": LEARNING_RATE,
                "schedule": {"name": "constant", "warmup": 0},
                "remat": arguments["remat"],
            },
        }
    )
    files = resolve_model(arguments["folder"])
    model = model_from_files(files)
    assert run.method.lora is not None
    description = attach(model.describe(dtype=jnp.dtype(arguments["precision"])), run.method.lora)
    mesh = build_mesh(run.mesh)
    weights = load_weights(model, description, files.tensors(), mesh, key=jax.random.key(0))
    geometry = Geometry(rows, row_tokens, accumulate=1, shards=1, steps_per_epoch=1, total_steps=1_000_000)
    program, trainable = make_program(run, model, description, weights=weights, mesh=mesh, geometry=geometry)
    del weights

    start = adapter_start(files.config)
    trainable = {name: jnp.asarray(_start(start, name).reshape(array.shape)) for name, array in trainable.items()}
    state = program.start(trainable)
    batch = on_mesh(_batch(fixed_batch(files.config, rows, row_tokens)), mesh)
    gradients_path: str | None = arguments.get("gradients")

    def step() -> dict[str, Any]:
        nonlocal state, gradients_path
        state, metrics = program.step(state, program.frozen, batch)
        loss, norm = (float(metrics[name]) for name in ("loss", "grad_norm"))
        if gradients_path:
            # After one step Adam's first moment is 0.1 x the clipped gradient: it is the step's own that is compared.
            moments = optax.tree_utils.tree_get(state.moments, "mu")
            np.savez(gradients_path, **_gradients(moments, start, 10 * max(1.0, norm)))
            gradients_path = None
        return {"loss": loss, "tokens": rows * row_tokens}

    serve_steps({"jax": jax.__version__}, step)


def _start(adapters: dict[str, np.ndarray], name: str) -> np.ndarray:
    *_, weight, half = name.split(".")
    return stacked_adapters(adapters, weight, half)


def _gradients(moments: dict[str, Any], start: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, moment in moments.items():
        *_, weight, half = name.split(".")
        stacked = np.asarray(moment).reshape(stacked_adapters(start, weight, half).shape)
        found |= unstacked_gradients(weight, half, stacked * scale)
    return found


def _batch(tokens: np.ndarray) -> Any:
    from podtune.data.loader import Batch

    targets = np.roll(tokens, -1, axis=1)
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    targets[:, -1] = 0
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape).copy()
    return Batch(tokens=tokens, targets=targets, weights=weights, segments=np.ones_like(tokens), positions=positions)


if __name__ == "__main__":
    main()
