"""How long `podtune train` takes to its first step, against the time that loading and compiling take by themselves.

    python benchmarks/start_time.py                     3 pairs, with an empty compile cache, then with a full one
    python benchmarks/start_time.py --quick             tiny random weights, one pair: does it run?

The run is the quickstart's, without samples and evaluation before the first step; its data is prepared anew each time.
Each measurement is a process of its own, from its start until the first step begins (or, for loading and compiling
alone, until the process has ended). It begins as long before it stands in metrics.jsonl as the second step, which
compiles nothing, takes. The second run of a pair finds the first one's compile cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.sft_inputs import BENCHMARKS, ROOT, SMOLLM2, TINY, smollm2_gguf, tiny_folder, tokenizer_folder

ROW_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny random weights, one pair")
    options = parser.parse_args()
    if options.quick:
        options.pairs = 1
    cold: list[tuple[float, float]] = []
    warm: list[tuple[float, float]] = []
    new_programs: list[int] = []
    for _ in range(options.pairs):
        with tempfile.TemporaryDirectory(prefix="podtune-benchmark-") as scratch:
            folder = Path(scratch)
            run_file = write_run(folder, quick=options.quick)
            alone_cold = load_and_compile(run_file, folder / "cache-alone")
            alone_warm = load_and_compile(run_file, folder / "cache-alone")
            cold.append((first_step(run_file, folder, 1), alone_cold))
            before = compiled_steps(folder / "cache-run")
            assert before, "the first run left no compiled step in its cache"
            warm.append((first_step(run_file, folder, 2), alone_warm))
            new_programs.append(len(compiled_steps(folder / "cache-run") - before))
    for name, pairs in (("nothing compiled before", cold), ("compiled before", warm)):
        ours, alone = (statistics.median(one) for one in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"{name}: first step begins after {ours:.1f} s, loading and compiling alone {alone:.1f} s: {ratio:.2f}x")
    print(f"steps that the second run compiled again: {max(new_programs)}")
    print(f"again: python benchmarks/start_time.py --pairs {options.pairs}")


def compiled_steps(cache: Path) -> set[str]:
    """The training and evaluation steps in JAX's persistent cache, by the names of their files."""
    return {path.name for path in cache.glob("jit_step-*-cache")}


def write_run(folder: Path, *, quick: bool) -> Path:
    """The run file: the quickstart's, with two steps and everything in `folder`."""
    model = smollm2_gguf()
    if quick:
        model = tiny_folder(folder / "tiny", TINY | {"vocab_size": SMOLLM2["vocab_size"]})
        for file in tokenizer_folder().iterdir():
            (model / file.name).write_bytes(file.read_bytes())
    run = {
        "model": str(model),
        "data": {
            "train": str(ROOT / "recipes/quickstart/train.jsonl"),
            "validation": "none",
            "max_length": ROW_TOKENS,
            "cache": str(folder / "prepared"),
        },
        "method": "lora",
        "output": str(folder / "run"),
        "train": {"steps": 2, "log_every": 1, "batch_tokens": 2 * ROW_TOKENS},
        "eval": {"samples": 0},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(run))  # JSON is YAML
    return path


def load_and_compile(run_file: Path, cache: Path) -> float:
    """Seconds from the start of a process that only loads and compiles to its end."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "support.load_and_compile", str(run_file), str(ROW_TOKENS)]
    subprocess.run(command, check=True, cwd=BENCHMARKS, env=os.environ | {"PODTUNE_COMPILE_CACHE": str(cache)})
    return time.perf_counter() - started


def first_step(run_file: Path, folder: Path, number: int) -> float:
    """Seconds from the start of `podtune train` until its first step begins."""
    output, prepared = folder / f"run-{number}", folder / f"prepared-{number}"
    podtune = str(Path(sys.executable).with_name("podtune"))
    command = [podtune, "train", str(run_file), f"output={output}", f"data.cache={prepared}"]
    environment = os.environ | {"PODTUNE_COMPILE_CACHE": str(folder / "cache-run")}
    started = time.perf_counter()
    with subprocess.Popen([*command, "--quiet"], env=environment) as process:
        while not _steps(output / "metrics.jsonl"):
            if process.poll() is not None and not _steps(output / "metrics.jsonl"):
                raise RuntimeError(f"podtune train ended with status {process.returncode} before its first step")
            time.sleep(0.02)
        seconds = time.perf_counter() - started
    _, second = _steps(output / "metrics.jsonl")
    return seconds - second["seconds_a_step"]


def _steps(metrics: Path) -> list[dict[str, float]]:
    """The training steps that are written down whole."""
    text = metrics.read_text() if metrics.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "learning_rate" in line]


if __name__ == "__main__":
    main()
