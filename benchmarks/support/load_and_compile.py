"""Only what has to happen before a first step: read the weights and compile the step. Used by `start_time.py`.

Run as `python -m support.load_and_compile RUN_FILE ROW_TOKENS [key=value …]`. Ends when the step is compiled.
"""

from __future__ import annotations

import sys


def main() -> None:
    file, row_tokens, *overrides = sys.argv[1:]
    import jax

    from podtune.config.loading import load_run
    from podtune.families import model_from_files
    from podtune.families.loading import load_weights
    from podtune.hub.sources import resolve_model
    from podtune.parallel.mesh import build_mesh, platform_of
    from podtune.train.cache import enable_compile_cache
    from podtune.train.geometry import plan_geometry
    from podtune.train.program import chosen_dtype, make_program
    from podtune.weights.adapters import attach

    enable_compile_cache()
    run = load_run(file, overrides)
    files = resolve_model(run.model.source)
    model = model_from_files(files)
    mesh = build_mesh(run.mesh)
    assert run.method.lora is not None, "this measures a LoRA run"
    description = attach(
        model.describe(dtype=chosen_dtype(run.train.compute_dtype, platform_of(mesh))), run.method.lora
    )
    weights = load_weights(model, description, files.tensors(), mesh, key=jax.random.key(run.seed))
    geometry = plan_geometry(run.train, rows=1000, row_tokens=int(row_tokens), mesh=mesh)
    program, trainable = make_program(run, model, description, weights=weights, mesh=mesh, geometry=geometry)
    state = program.start(trainable)
    batch = {
        name: jax.ShapeDtypeStruct((geometry.batch_rows, int(row_tokens)), dtype)
        for name, dtype in (
            ("tokens", "int32"),
            ("targets", "int32"),
            ("weights", "float32"),
            ("segments", "int32"),
            ("positions", "int32"),
        )
    }
    batch["requests"] = jax.ShapeDtypeStruct((geometry.batch_rows,), "int32")
    program.step.lower(state, program.frozen, batch).compile()


if __name__ == "__main__":
    main()
