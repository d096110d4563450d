"""LoRA fine-tuning of SmolLM2-135M on a CPU: podtune's step against torch + transformers + peft.

    python benchmarks/sft_cpu.py                        float32, then bfloat16; 5 pairs each
    python benchmarks/sft_cpu.py --precision bfloat16 --pairs 9
    python benchmarks/sft_cpu.py --quick                tiny random weights, one pair: does it run?

The same genuine weights, the same adapters (rank 16, alpha 32, all linear layers), the same 4 x 512 tokens. Each side
is a process of its own; they take turns, step by step, after one step each that is not counted. Prints the ratio of
tokens a second (median over the pairs) and of peak memory (resident, over the life of the process), and how far the
adapters' gradients of the first step are apart, and from torch's in float64.
torch runs with and without gradient checkpointing, and in bfloat16 in the ways `torch_side.py` lists. Speed is
compared with the fastest of them, memory with the leanest and the fastest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from support.pairs import TORCH_ENVIRONMENT, Side, core_ratios, paired_ratios, rate, spread
from support.sft_inputs import gradient_difference, smollm2_folder, tiny_folder

GIB = 2**30
_UNITS = ("seconds", "core_seconds")
TORCH_PRECISIONS = {"float32": ["float32"], "bfloat16": ["bfloat16-both", "bfloat16"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--precision", choices=("float32", "bfloat16", "both"), default="both")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--remat", default="auto", help="podtune's train.remat: auto, none, dots or full")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="tiny random weights, one pair")
    parser.add_argument("--torch-only", action="store_true", help="measure the torch side alone")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.rows, options.row_tokens = 1, 2, 32
    with tempfile.TemporaryDirectory(prefix="podtune-benchmark-") as scratch:
        folder = tiny_folder(Path(scratch) / "tiny") if options.quick else smollm2_folder()
        precisions = ("float32", "bfloat16") if options.precision == "both" else (options.precision,)
        for precision in precisions:
            measure(options, folder, precision, Path(scratch))


def measure(options: argparse.Namespace, folder: Path, precision: str, scratch: Path) -> None:
    """Measures one precision and prints what was found."""
    common: dict[str, Any] = {
        "folder": str(folder),
        "rows": options.rows,
        "row_tokens": options.row_tokens,
        "threads": options.threads,
    }
    exact: dict[str, np.ndarray] = {}
    if precision == "float32" and not options.torch_only:
        exact = exact_gradients(common, scratch / "exact.npz")
    fastest_way = TORCH_PRECISIONS[precision][0]
    settings = {f"torch {way}": (way, False) for way in TORCH_PRECISIONS[precision]}
    settings[f"torch {fastest_way}, checkpointing"] = (fastest_way, True)
    theirs: dict[str, Side] = {}
    for name, (way, checkpointing) in settings.items():
        kept = str(scratch / "torch.npz") if way == "float32" and not checkpointing else None
        arguments = {"precision": way, "checkpointing": checkpointing, "gradients": kept}
        theirs[name] = Side(name, "torch_side", common | arguments, TORCH_ENVIRONMENT)
    ours: Side | None = None
    if not options.torch_only:
        ours = Side(
            "podtune",
            "podtune_side",
            common | {"precision": precision, "remat": options.remat, "gradients": str(scratch / "podtune.npz")},
        )
    sides = ({"podtune": ours} if ours else {}) | theirs
    first_losses = {name: side.step()["loss"] for name, side in sides.items()}
    for side in sides.values():
        side.steps.clear()
    for _ in range(options.pairs):
        for side in sides.values():
            side.step()
    peaks = {name: side.finish()["peak_bytes"] for name, side in sides.items()}

    print(f"\n{precision}, {options.rows} x {options.row_tokens} tokens, {options.threads} threads")
    for name, side in sides.items():
        seconds, core_seconds = (statistics.median(step[unit] for step in side.steps) for unit in _UNITS)
        print(
            f"  {name:34} {statistics.median(map(rate, side.steps)):7.1f} tokens/s  {seconds:6.2f} s a step "
            f"({core_seconds:.2f} core-seconds)  peak {peaks[name] / GIB:5.2f} GiB  first loss {first_losses[name]:.4f}"
        )
    if ours is None:
        return
    fastest = max(theirs, key=lambda name: statistics.median(map(rate, theirs[name].steps)))
    leanest = min(theirs, key=lambda name: peaks[name])
    print(f"tokens/s, podtune over {fastest}: {spread(paired_ratios(ours, theirs[fastest]))}")
    print(f"tokens per core-second, podtune over {fastest}: {spread(core_ratios(ours, theirs[fastest]))}")
    print(f"peak memory, podtune over {fastest}: {peaks['podtune'] / peaks[fastest]:.2f}")
    if leanest != fastest:
        print(
            f"against the leanest, {leanest}: tokens/s {spread(paired_ratios(ours, theirs[leanest]))}, "
            f"peak memory {peaks['podtune'] / peaks[leanest]:.2f}"
        )
    if precision == "float32":
        found = {one: dict(np.load(scratch / f"{one}.npz")) for one in ("podtune", "torch")}
        print("first-step adapter gradients, relative differences: all together, and of the worst adapter")
        for name, one, other in (
            ("podtune and torch in float64", found["podtune"], exact),
            ("torch and torch in float64", found["torch"], exact),
            ("podtune and torch", found["podtune"], found["torch"]),
        ):
            apart = gradient_difference(one, other)
            print(f"  {name:30} {apart.whole:.1e}  {apart.worst:.1e} ({apart.where})")
    print(f"again: python benchmarks/sft_cpu.py --precision {precision} --pairs {options.pairs}")


def exact_gradients(common: dict[str, Any], path: Path) -> dict[str, np.ndarray]:
    """The first step's gradients by torch in float64: where two float32 programs differ, this says which is right."""
    arguments = {"precision": "float64", "checkpointing": True, "gradients": str(path)}
    side = Side("torch float64", "torch_side", common | arguments, TORCH_ENVIRONMENT)
    side.step()
    side.finish()
    return dict(np.load(path))


if __name__ == "__main__":
    main()
