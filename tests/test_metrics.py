"""The metrics file: plain JSON lines, safe to append to after a crash."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from train_cases import make_run, tiny_model

from podtune.train.flops import PEAK_FLOPS, peak_flops, token_cost
from podtune.train.geometry import Geometry
from podtune.train.metrics import MetricsLog, Stopwatch, read_metrics
from podtune.train.pace import Pace
from podtune.weights.adapters import attach


def write(folder, steps, *, after=0, evaluated=False, evals=()):
    log = MetricsLog(folder, after_step=after, evaluated=evaluated, tensorboard=False)
    for step in steps:
        log.write(step, {"loss": float(step)})
        if step in evals:
            log.write(step, {"eval_loss": float(step)})
    log.close()


def test_a_resumed_run_drops_the_lines_after_the_step_it_goes_on_from(tmp_path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 9), after=4)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 9))


@pytest.mark.parametrize(("evaluated", "evals"), [(True, [2, 4]), (False, [2])])
def test_an_evaluation_at_the_very_step_is_kept_only_if_the_checkpoint_knows_of_it(tmp_path, evaluated, evals):
    write(tmp_path, range(1, 6), evals=(2, 4))
    write(tmp_path, (), after=4, evaluated=evaluated)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval_loss" in line] == evals
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    write(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    write(tmp_path, [4], after=3)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_numbers_that_are_none_become_null(tmp_path):
    log = MetricsLog(tmp_path, after_step=0)
    log.write(1, {"loss": math.nan, "grad_norm": math.inf, "skipped": 1})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "loss": None, "grad_norm": None, "skipped": 1}


def test_tensorboard_reads_the_same_values(tmp_path):
    from tensorboardX.proto import event_pb2

    log = MetricsLog(tmp_path, after_step=0)
    log.write(3, {"loss": 1.5})
    log.write(3, {"eval_loss": 2.5})
    log.close()
    data = next((tmp_path / "tensorboard").glob("events.*")).read_bytes()
    found, at = {}, 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        at += 16 + length
    assert found["train/loss"] == (3, 1.5)
    assert found["eval/loss"] == (3, 2.5)


def test_a_token_of_lora_costs_4_and_of_full_fine_tuning_6_times_the_weights_that_multiply_it():
    model = tiny_model(tied=True)
    layer = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24  # q and o, k and v, gate, up and down
    full = token_cost(model.describe(), "full")
    assert (full.weights, full.head, full.times_weights) == (2 * layer, 97 * 16, 6)
    assert token_cost(tiny_model(tied=False).describe(), "full") == full
    lora = token_cost(attach(model.describe(), make_run().method.lora), "lora")
    assert lora.times_weights == 4
    assert full.weights < lora.weights < 1.5 * full.weights  # the adapters count too
    assert str(full) == f"6 x {full.weights:,} weights and, where it bears loss, 6 x {full.head:,}"
    assert full.flops(10, 4) == 6 * (10 * 2 * layer + 4 * 97 * 16)


def test_no_mfu_is_made_up_for_a_cpu():
    assert math.isnan(peak_flops(jax.devices()[0]))


@pytest.mark.parametrize("kind", PEAK_FLOPS)
def test_a_device_gets_its_own_row_of_the_table_and_not_that_of_a_shorter_name(kind):
    for name in (kind, f"{kind} 80GB"):
        assert peak_flops(SimpleNamespace(device_kind=name, platform="gpu")) == PEAK_FLOPS[kind]


@pytest.mark.parametrize("name", ["NVIDIA L400", "NVIDIA L4X", "NVIDIA H1000", "TPU v50"])
def test_a_device_whose_name_only_begins_alike_has_no_row(name):
    assert math.isnan(peak_flops(SimpleNamespace(device_kind=name, platform="gpu")))


def test_pace_counts_neither_the_first_step_nor_pauses():
    mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), devices=jax.devices()[:1])
    pace = Pace(mesh, Geometry(8, 24, 1, 1, 2, 10), token_cost(tiny_model().describe(), "full"))
    import time

    time.sleep(0.2)
    pace.after(1, positions=100.0, trained=50.0, waited=0.0, logged=True)
    assert pace.first_step_seconds >= 0.2
    with pace.paused():
        time.sleep(0.5)
    time.sleep(0.1)
    shown = pace.after(2, positions=100.0, trained=50.0, waited=0.0, logged=True)
    assert 300 < shown["tokens_per_second"] <= 1000  # a tenth of a second, and what a busy machine adds
    assert shown["seconds_left"] == pytest.approx(8 * shown["seconds_a_step"])
    assert 0 <= shown["cpu_share"] <= 1
    assert "mfu" not in shown


def test_mfu_counts_the_unembedding_for_tokens_that_bear_loss_alone(monkeypatch):
    monkeypatch.setattr("podtune.train.pace.peak_flops", lambda device: 1e9)
    mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), devices=jax.devices()[:1])
    cost = token_cost(tiny_model().describe(), "full")
    pace = Pace(mesh, Geometry(8, 24, 1, 1, 2, 10), cost)
    pace.after(1, positions=50.0, trained=50.0, waited=0.0, logged=True)
    shown = pace.after(2, positions=100.0, trained=30.0, waited=0.0, logged=True)
    needed = 6 * (100 * cost.weights + 30 * cost.head)
    assert shown["mfu"] == pytest.approx(needed / shown["seconds_a_step"] / 1e9)


def test_a_stopwatch_measures_its_own_processor_time():
    watch = Stopwatch()
    np.sort(np.random.default_rng(0).random(300_000))
    seconds, share = watch.lap()
    assert seconds > 0
    assert 0 < share <= 1


def test_separators_within_an_answer_end_no_line_and_what_is_no_record_ends_the_reading(tmp_path):
    path = tmp_path / "samples.jsonl"
    rows = [{"step": 0, "answer": "a\u2028b\u2029c\x85d"}, {"step": 1, "answer": "e"}]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert read_metrics(path) == rows
    for broken in (b"5\n", b"[]\n", b'{"cut', b"\xff\xfe\n"):
        path.write_bytes(json.dumps(rows[0]).encode() + b"\n" + broken)
        assert read_metrics(path) == rows[:1]
