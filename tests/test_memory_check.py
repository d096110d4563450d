"""What training holds on a device, as the check before a run counts it."""

from types import SimpleNamespace

import pytest
import tiny_models as tiny
from workflow_cases import a_console, a_run

from podtune.serve.loading import mesh_for
from podtune.weights.adapters import attach
from podtune.workflow.beginning import checkpoint_bytes, held_bytes, parameters, trained_parameters
from podtune.workflow.output import OutputFolder
from podtune.workflow.work import Work


@pytest.mark.parametrize(
    ("train", "bytes_a_weight"),
    [({}, 16), ({"ema": 0.9}, 20), ({"optimizer": "sgd", "learning_rate": 0.1}, 12), ({"optimizer": "lion"}, 12)],
)
def test_memory_is_counted_once_for_weights_gradients_moments_and_average(train, bytes_a_weight, tmp_path):
    model = tiny.tiny_model("llama")
    description = model.describe(dtype="float32")
    run = a_run(tmp_path, method="full", train=train)
    work = Work(run, a_console(), OutputFolder(tmp_path))
    work.description, work.mesh = description, tiny.mesh_of()
    assert held_bytes(work) == pytest.approx(bytes_a_weight * parameters(model), rel=1e-3)
    work.mesh = tiny.mesh_of(1, 8, 1)  # split over devices that share one memory: what is not split is held by each
    assert bytes_a_weight <= held_bytes(work) / parameters(model) < 1.2 * bytes_a_weight


@pytest.mark.parametrize(
    ("train", "bytes_a_weight"),
    [({}, 12), ({"ema": 0.9}, 16), ({"optimizer": "sgd", "learning_rate": 0.1}, 8), ({"optimizer": "lion"}, 8)],
)
def test_disk_for_checkpoints_is_counted_for_what_the_optimizer_keeps(train, bytes_a_weight, tmp_path):
    model = tiny.tiny_model("llama")
    run = a_run(tmp_path, method="full", train=train, output={"path": str(tmp_path / "out"), "keep_checkpoints": 3})
    work = Work(run, a_console(), OutputFolder(tmp_path))
    work.description = model.describe(dtype="float32")
    assert checkpoint_bytes(work) == pytest.approx(5 * bytes_a_weight * parameters(model), rel=1e-3)
    work.run = a_run(tmp_path, method="full", output="gs://bucket/run")
    assert checkpoint_bytes(work) == 0  # they lie in the bucket


def test_memory_of_a_frozen_model_is_that_of_its_own_dtype(tmp_path):
    model = tiny.tiny_model("llama")
    run = a_run(tmp_path)
    description = attach(model.describe(dtype="bfloat16"), run.method.lora, aliases=model.aliases())
    work = Work(run, a_console(), OutputFolder(tmp_path))
    work.description, work.mesh = description, tiny.mesh_of()
    assert held_bytes(work) == pytest.approx(2 * parameters(model) + 16 * trained_parameters(work), rel=1e-3)


@pytest.mark.parametrize(("share", "axis"), [(0.1, "data"), (0.5, "fsdp")])
def test_a_model_to_talk_to_is_split_when_copies_of_it_would_fill_the_accelerators(share, axis, monkeypatch):
    model = tiny.tiny_model("llama")
    memory = int(2 * parameters(model) / share)  # bfloat16
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": memory})
    monkeypatch.setattr("podtune.parallel.mesh.own_device", lambda _: device)
    monkeypatch.setattr("podtune.serve.loading.on_cpu", lambda _: False)
    assert mesh_for(model).shape[axis] == 8


def test_a_model_to_talk_to_is_on_one_device_where_there_are_cpus_alone():
    assert mesh_for(tiny.tiny_model("llama")).size == 1
