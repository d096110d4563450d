"""How many rows make a step, and how they fall into micro-batches and devices: decided once, printed, then kept to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from podtune.config.errors import UserError
from podtune.config.training import USUAL_STEPS, Train
from podtune.config.wording import counted
from podtune.parallel.mesh import on_cpu
from podtune.parallel.sharding import data_shards

_FEW_STEPS = 30  # below these a model hardly learns
# "auto" wants USUAL_STEPS of the data, so that small sets still get enough updates, and no larger batch than this.
_LARGEST_AUTO_BATCH_TOKENS = 65_536
# Tokens one device takes at a time: activations of a few thousand fit beside small models.
_MICRO_TOKENS_ON_CPU = 2_048
_MICRO_TOKENS_ON_ACCELERATORS = 8_192


@dataclass(frozen=True)
class Geometry:
    """batch_rows are all rows of one step; micro_rows of them go through the model at a time, accumulate times."""

    batch_rows: int
    row_tokens: int
    accumulate: int
    shards: int
    steps_per_epoch: int
    total_steps: int

    @property
    def micro_rows(self) -> int:
        return self.batch_rows // self.accumulate

    @property
    def batch_tokens(self) -> int:
        return self.batch_rows * self.row_tokens

    def advice(self, *, max_length: int | None) -> str | None:
        """What to change where the data make so few steps that a model hardly learns from them. max_length: as it was
        asked for; without it rows are as short as they can be."""
        if self.total_steps >= _FEW_STEPS:
            return None
        ways = ["raise train.epochs"]
        if self.batch_rows > self.shards:
            ways.append(f"lower train.batch_tokens (now {self.batch_tokens:,})")
        if max_length is not None:
            ways.append(
                f"leave data.max_length out or lower it (now {max_length:,}, which makes rows of {self.row_tokens:,} "
                "tokens)"
            )
        return (
            f"warning: {counted(self.total_steps, 'step')}: few to learn from; {USUAL_STEPS} or more are usual. "
            f"To have more, {', or '.join(ways)}."
        )

    def __str__(self) -> str:
        micro = (
            f" in {self.accumulate} micro-batches of {counted(self.micro_rows, 'row')}" if self.accumulate > 1 else ""
        )
        over = f" over {self.shards} devices" if self.shards > 1 else ""
        return (
            f"{counted(self.total_steps, 'step')} of {counted(self.batch_rows, 'row')} x {self.row_tokens} tokens "
            f"({self.batch_tokens:,} tokens){micro}{over}; an epoch is {counted(self.steps_per_epoch, 'step')}"
        )


def plan_geometry(
    train: Train, *, rows: int, row_tokens: int, mesh: Mesh | AbstractMesh, batch_rows: int | None = None
) -> Geometry:
    """The geometry of a run over `rows` packed rows. batch_rows: decided before, by the run that is resumed.
    mesh: one of sizes alone is that of an accelerator.

    Raises UserError when what was asked does not divide.
    """
    shards = data_shards(mesh)
    if batch_rows is None:
        batch_rows = _batch_rows(train, rows, row_tokens, mesh)
    elif batch_rows % shards:
        raise UserError(
            f"batch_rows={batch_rows} of the run to resume does not divide over {shards} data shards "
            f"(data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']}). Use a mesh with a divisor of {batch_rows}."
        )
    steps_per_epoch = -(-rows // batch_rows)
    total = train.steps or max(1, math.ceil((train.epochs or 1.0) * rows / batch_rows - 1e-9))
    accumulate = _accumulate(train, batch_rows, row_tokens, shards, cpu=isinstance(mesh, Mesh) and on_cpu(mesh))
    return Geometry(batch_rows, row_tokens, accumulate, shards, steps_per_epoch, total)


def evaluation_geometry(*, rows: int, row_tokens: int, mesh: Mesh) -> Geometry:
    """One pass over `rows` packed rows, each device taking as many at a time as fit: what training asks for does not
    bear on it."""
    shards = data_shards(mesh)
    at_a_time = shards * _fitting(row_tokens, cpu=on_cpu(mesh))
    steps = -(-rows // at_a_time)
    return Geometry(at_a_time, row_tokens, 1, shards, steps, steps)


def _batch_rows(train: Train, rows: int, row_tokens: int, mesh: Mesh | AbstractMesh) -> int:
    shards = data_shards(mesh)
    if train.batch_tokens == "auto":
        passes = (train.epochs or 1.0) if train.steps is None else 1.0
        wanted = min(_LARGEST_AUTO_BATCH_TOKENS / row_tokens, passes * rows / USUAL_STEPS)
        group = shards * (1 if train.accumulate == "auto" else train.accumulate)
        return max(1, round(wanted / group)) * group
    batch_rows = max(1, train.batch_tokens // row_tokens)
    if batch_rows % shards:
        better = -(-batch_rows // shards) * shards
        raise UserError(
            f"batch_rows={batch_rows} (train.batch_tokens={train.batch_tokens} / rows of {row_tokens} tokens) does not "
            f"divide over {shards} data shards (data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']}). "
            f"Use a multiple of {shards}, e.g. train.batch_tokens: {better * row_tokens} for {better} rows."
        )
    return batch_rows


def _accumulate(train: Train, batch_rows: int, row_tokens: int, shards: int, *, cpu: bool) -> int:
    rows_here = batch_rows // shards
    if train.accumulate == "auto":
        fitting = _fitting(row_tokens, cpu=cpu)
        return next(ways for ways in range(1, rows_here + 1) if rows_here % ways == 0 and rows_here // ways <= fitting)
    if rows_here % train.accumulate:
        group = shards * train.accumulate
        better = -(-batch_rows // group) * group
        raise UserError(
            f"batch_rows={batch_rows} does not divide over {shards} data shards x train.accumulate={train.accumulate}. "
            f"Use a multiple of {group}, e.g. train.batch_tokens: {better * row_tokens} for {better} rows."
        )
    return train.accumulate


def _fitting(row_tokens: int, *, cpu: bool) -> int:
    """Rows that a device takes at a time."""
    return max(1, (_MICRO_TOKENS_ON_CPU if cpu else _MICRO_TOKENS_ON_ACCELERATORS) // row_tokens)
