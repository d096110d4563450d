"""Rows, micro-batches and steps: decided once, divided evenly, or refused with a way out."""

from __future__ import annotations

import jax
import pytest

from podtune.config.errors import UserError
from podtune.config.schema import Mesh
from podtune.config.training import Train
from podtune.parallel.mesh import build_mesh
from podtune.train.geometry import evaluation_geometry, plan_geometry


def plan(train=None, *, rows=100, row_tokens=512, devices=1, batch_rows=None):
    mesh = build_mesh(Mesh(data="auto", fsdp=2 if devices == 8 else 1), jax.devices()[:devices])
    return plan_geometry(Train(**(train or {})), rows=rows, row_tokens=row_tokens, mesh=mesh, batch_rows=batch_rows)


def test_batch_tokens_become_rows_and_epochs_become_steps():
    geometry = plan({"batch_tokens": 4096, "epochs": 3.0})
    assert (geometry.batch_rows, geometry.batch_tokens, geometry.steps_per_epoch) == (8, 4096, 13)
    assert geometry.total_steps == 38  # 300 rows in batches of 8
    assert plan({"batch_tokens": 4096, "steps": 5}).total_steps == 5
    assert plan({"batch_tokens": 4096, "epochs": 0.08}).total_steps == 1


def test_auto_gives_small_data_many_steps_and_large_data_large_batches():
    small, large = plan(rows=100), plan(rows=100_000)
    assert small.total_steps >= 60
    assert large.batch_tokens == 65_536


def test_few_steps_are_advised_against_with_the_length_that_was_asked_for():
    few = plan({"epochs": 1.0}, rows=3, row_tokens=448)
    assert "leave data.max_length out or lower it (now 1,024, which makes rows of 448 tokens)" in str(
        few.advice(max_length=1024)
    )
    assert "data.max_length" not in str(few.advice(max_length=None))
    assert plan().advice(max_length=1024) is None


def test_auto_always_divides_over_the_devices():
    for rows in (1, 2, 3, 7, 100, 1234):
        geometry = plan(rows=rows, devices=8)
        assert geometry.batch_rows % 8 == 0
        assert geometry.batch_rows % (8 * geometry.accumulate) == 0


def test_auto_accumulation_keeps_micro_batches_within_what_a_cpu_takes_at_a_time():
    geometry = plan({"batch_tokens": 16 * 512})
    assert (geometry.accumulate, geometry.micro_rows) == (4, 4)
    assert plan({"batch_tokens": 512}, row_tokens=4096).accumulate == 1
    assert plan({"batch_tokens": 7 * 512}).accumulate == 7  # 7 rows do not halve


def test_rows_that_do_not_divide_over_the_devices_are_refused_with_the_next_that_do():
    with pytest.raises(UserError) as refused:
        plan({"batch_tokens": 12 * 512}, devices=8)
    assert str(refused.value) == (
        "batch_rows=12 (train.batch_tokens=6144 / rows of 512 tokens) does not divide over 8 data shards (data=4 x "
        "fsdp=2). Use a multiple of 8, e.g. train.batch_tokens: 8192 for 16 rows."
    )
    with pytest.raises(UserError) as refused:
        plan({"batch_tokens": 8 * 512, "accumulate": 3})
    assert str(refused.value) == (
        "batch_rows=8 does not divide over 1 data shards x train.accumulate=3. Use a multiple of 3, e.g. "
        "train.batch_tokens: 4608 for 9 rows."
    )


def test_a_resumed_run_keeps_its_batch_or_says_why_it_cannot():
    assert plan(batch_rows=24, devices=8).batch_rows == 24
    with pytest.raises(UserError, match=r"batch_rows=12 of the run to resume does not divide over 8 data shards"):
        plan(batch_rows=12, devices=8)


def test_it_reads_as_one_line():
    assert str(plan({"batch_tokens": 16 * 512, "steps": 9})) == (
        "9 steps of 16 rows x 512 tokens (8,192 tokens) in 4 micro-batches of 4 rows; an epoch is 7 steps"
    )


@pytest.mark.parametrize("devices", [1, 8])
def test_an_evaluation_takes_what_fits_whatever_batches_training_had(devices):
    mesh = build_mesh(Mesh(data="auto", fsdp=2 if devices == 8 else 1), jax.devices()[:devices])
    geometry = evaluation_geometry(rows=21, row_tokens=512, mesh=mesh)
    assert (geometry.micro_rows, geometry.total_steps) == ((4, 6) if devices == 1 else (32, 1))
