"""The compiled parts of a run, put together from its settings. The loop runs exactly this, and planning lowers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from podtune.config.schema import Run
from podtune.objectives import OBJECTIVES
from podtune.objectives.language import LanguageSettings
from podtune.parallel.mesh import on_cpu, platform_of
from podtune.train.geometry import Geometry
from podtune.train.optimizers import make_optimizer
from podtune.train.schedules import make_schedule, scaled_peak
from podtune.train.state import (
    TrainState,
    abstract_state,
    divide_weights,
    make_state,
    state_shardings,
    whole_weights,
    with_shardings,
)
from podtune.train.step import StepSettings, make_eval_step, make_train_step
from podtune.weights.leaves import LoRA, is_weight
from podtune.weights.param import is_param


@dataclass(frozen=True)
class Program:
    """step: (state, frozen, batch) -> (state, metrics); eval_step: (trainable, frozen, batch) -> (loss sum, tokens)."""

    step: Any
    eval_step: Any
    frozen: Any
    abstract: TrainState
    shardings: TrainState
    optimizer: Any
    settings: StepSettings
    peak_learning_rate: float

    def start(self, trainable: dict[str, Array]) -> TrainState:
        """The state before the first step; takes over the arrays."""
        return make_state(trainable, self.optimizer, self.shardings, window=self.settings.window)

    @property
    def restorable(self) -> TrainState:
        """Shapes and places to restore a checkpoint into."""
        return with_shardings(self.abstract, self.shardings)

    def weights(self, state: TrainState) -> Any:
        """The whole tree at this state, with the average of the trained weights where one is kept."""
        return self.with_trained(self.shown(state))

    def with_trained(self, trained: dict[str, Array]) -> Any:
        """The whole tree with these trained weights in it."""
        return whole_weights(trained, self.frozen)

    def shown(self, state: TrainState) -> dict[str, Array]:
        """What is evaluated and exported: the average where one is kept, else the trained weights."""
        return state.trainable if state.average is None else state.average


def make_program(
    run: Run, model: Any, description: Any, *, weights: Any, mesh: Mesh, geometry: Geometry, objective: str = "sft"
) -> tuple[Program, dict[str, Array]]:
    """The program of a run, and the trained leaves of `weights` to start it from."""
    params, _ = divide_weights(description, run.method.name)
    trainable, frozen = divide_weights(weights, run.method.name)
    train = run.train
    optimizer = make_optimizer(train.optimizer, params, weight_decay=train.weight_decay)
    peak = peak_learning_rate(run, geometry)
    schedule = make_schedule(train.schedule, peak=peak, total_steps=geometry.total_steps)
    leaves = jax.tree.leaves(description, is_leaf=lambda leaf: is_weight(leaf) or is_param(leaf))
    settings = StepSettings(
        language=LanguageSettings(
            label_smoothing=train.label_smoothing,
            remat=chosen_remat(train.remat, mesh),
            compute_dtype=chosen_dtype(train.compute_dtype, platform_of(mesh)),
            mesh=mesh,
        ),
        seed=run.seed,
        accumulate=geometry.accumulate,
        clip_norm=train.clip_norm,
        neftune=train.neftune,
        dropout=any(isinstance(leaf, LoRA) and leaf.dropout > 0 for leaf in leaves),
        ema=train.ema,
        spike=train.spike_guard,
    )
    abstract = abstract_state(params, optimizer, averaged=train.ema is not None, window=settings.window)
    shardings = state_shardings(mesh, abstract, params)
    step = make_train_step(
        model,
        OBJECTIVES[objective],
        optimizer=optimizer,
        schedule=schedule,
        settings=settings,
        mesh=mesh,
        shardings=shardings,
        frozen_shardings=jax.tree.map(lambda array: array.sharding, frozen),
    )
    eval_step = make_eval_step(model, OBJECTIVES[objective], settings=settings)
    program = Program(step, eval_step, frozen, abstract, shardings, optimizer, settings, peak)
    return program, trainable


def peak_learning_rate(run: Run, geometry: Geometry) -> float:
    """The learning rate of the run file, or the usual one of the method; grown with the batch when asked."""
    reference = run.train.scale_learning_rate_from
    return scaled_peak(run.learning_rate, batch_tokens=geometry.batch_tokens, reference_batch_tokens=reference)


def chosen_dtype(asked: str, platform: str) -> Any:
    """auto: bfloat16 on accelerators; float32 on a CPU, where only some are faster in bfloat16."""
    if asked == "auto":
        asked = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(asked)


def chosen_remat(asked: str, mesh: Mesh) -> str:
    """auto: recompute all on accelerators, whose memory is the narrow place; on a CPU, whose arithmetic is, only what
    costs less to make again than to write and read."""
    return asked if asked != "auto" else "dots" if on_cpu(mesh) else "full"
