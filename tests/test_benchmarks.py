"""The benchmarks run, and what they compare is the same on both sides."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.chat_mix import LONGEST, SHORTEST, write_chats
from support.pairs import Side, paired_ratios
from support.sft_inputs import (
    TINY,
    adapter_start,
    gradient_difference,
    stacked_adapters,
    tiny_folder,
    unstacked_gradients,
)

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py"))


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = os.environ | {"XLA_FLAGS": ""}  # on the one CPU device there is, not the eight of the tests
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_benchmark_stands_in_the_table() -> None:
    table = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert {name for name in re.findall(r"`(\w+\.py)`", table) if (BENCHMARKS / name).exists()} == set(SCRIPTS)


def test_adapters_are_the_same_on_both_sides() -> None:
    adapters = adapter_start(TINY)
    for name in ("q", "o", "down"):
        for half in ("a", "b"):
            stacked = stacked_adapters(adapters, name, half)
            assert stacked.shape[0] == TINY["num_hidden_layers"]
            for key, array in unstacked_gradients(name, half, stacked).items():
                np.testing.assert_array_equal(array, adapters[key])


def test_gradient_difference_names_the_worst_adapter() -> None:
    theirs = adapter_start(TINY)
    ours = {name: array.copy() for name, array in theirs.items()}
    assert gradient_difference(ours, theirs).worst == 0
    ours["layers.1.mlp.down_proj.b"] *= 1.01
    apart = gradient_difference(ours, theirs)
    assert apart.where == "layers.1.mlp.down_proj.b"
    assert apart.worst == pytest.approx(0.01, rel=1e-3)
    assert 0 < apart.whole < apart.worst


def test_chat_mix_is_the_same_every_time_and_varies_in_length(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_chats(tmp_path / name, count=200)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    words = [len(line.split()) for line in (tmp_path / "one").read_text().splitlines()]
    assert min(words) < SHORTEST
    assert max(words) > 2 * LONGEST // 3


def test_podtune_and_torch_have_equal_losses_and_gradients_in_the_first_step(tmp_path: Path) -> None:
    """The very sides that `sft_cpu.py` measures, on tiny weights, without its turns of torch with checkpointing."""
    common = {"folder": str(tiny_folder(tmp_path / "tiny")), "rows": 2, "row_tokens": 32, "threads": 1}
    found = {}
    for name, own in (("podtune", {"remat": "auto"}), ("torch", {"checkpointing": False})):
        path = tmp_path / f"{name}.npz"
        arguments = common | own | {"precision": "float32", "gradients": str(path)}
        side = Side(
            name,
            f"{name}_side",
            arguments,
            {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"},
        )
        side.step()
        side.finish()
        found[name] = (side, dict(np.load(path)))
    assert found["podtune"][0].steps[0]["loss"] == pytest.approx(found["torch"][0].steps[0]["loss"], rel=1e-5)
    assert gradient_difference(found["podtune"][1], found["torch"][1]).worst < 1e-4
    assert len(paired_ratios(found["podtune"][0], found["torch"][0])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sft_cpu.py", "sft_packed.py", "start_time.py"])
def test_benchmark_runs_and_prints_how_to_repeat_it(script: str) -> None:
    assert f"again: python benchmarks/{script}" in _run(script, "--quick")
