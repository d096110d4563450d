"""podtune's side of `sft_packed.py`: its own preparation, loader and step, as `podtune run` puts them together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.pairs import serve_steps
from support.sft_inputs import ALPHA, LEARNING_RATE, RANK


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    import jax
    import jax.numpy as jnp

    from podtune.config.schema import Run
    from podtune.data.prepare import prepare
    from podtune.families import model_from_files
    from podtune.families.loading import load_weights
    from podtune.hub.sources import resolve_model
    from podtune.hub.tokenizer import load_tokenizer
    from podtune.parallel.mesh import build_mesh
    from podtune.train.feed import Feed, loader_for
    from podtune.train.geometry import Geometry
    from podtune.train.program import make_program
    from podtune.weights.adapters import attach

    rows, row_tokens = arguments["rows"], arguments["row_tokens"]
    run = Run.model_validate(
        {
            "model": arguments["folder"],
            "data": {"train": arguments["chats"], "validation": "none", "train_on": "all", "workers": 0},
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
    tokenizer = load_tokenizer(resolve_model(arguments["tokenizer_model"]))
    scratch = Path(arguments["scratch"])
    prepared = prepare(run.data, tokenizer, max_length=row_tokens, cache=scratch / "prepared")
    files = resolve_model(arguments["folder"])
    model = model_from_files(files)
    assert run.method.lora is not None
    description = attach(model.describe(dtype=jnp.dtype(arguments["precision"])), run.method.lora)
    mesh = build_mesh(run.mesh)
    weights = load_weights(model, description, files.tensors(), mesh, key=jax.random.key(0))
    length = prepared.train.row_tokens
    geometry = Geometry(rows, length, accumulate=1, shards=1, steps_per_epoch=1, total_steps=1_000_000)
    program, trainable = make_program(run, model, description, weights=weights, mesh=mesh, geometry=geometry)
    del weights
    state = program.start(trainable)
    feed = Feed(loader_for(prepared.train, mesh, seed=0, batch_rows=rows), mesh, start_step=0)

    def step() -> dict[str, Any]:
        nonlocal state
        state, metrics = program.step(state, program.frozen, feed.next())
        return {"loss": float(metrics["loss"]), "tokens": float(metrics["positions"])}

    serve_steps({"jax": jax.__version__, "row_tokens": length, "filled": prepared.train.efficiency}, step)
    feed.close()


if __name__ == "__main__":
    main()
