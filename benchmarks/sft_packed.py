"""LoRA fine-tuning on chats of 20 to 400 tokens, packed: podtune against TRL's SFTTrainer with packing.

    python benchmarks/sft_packed.py                     float32, then bfloat16; 5 pairs each
    python benchmarks/sft_packed.py --quick             tiny random weights, one pair: does it run?

Rows of 512 tokens, 4 to a step, both from the same chats. Each side is a process of its own; they take turns, step by
step, after one step each that is not counted. Prints the ratio of useful tokens a second, padding left out (median over
the pairs), against both ways of packing that TRL has: best fit, which keeps chats apart as podtune does, and wrapped,
which does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from support.chat_mix import write_chats
from support.pairs import TORCH_ENVIRONMENT, Side, core_ratios, paired_ratios, rate, spread
from support.sft_inputs import SMOLLM2, TINY, smollm2_folder, smollm2_gguf, tiny_folder, tokenizer_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--precision", choices=("float32", "bfloat16", "both"), default="both")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=512)
    parser.add_argument("--chats", type=int, default=600)
    parser.add_argument("--remat", default="auto", help="podtune's train.remat: auto, none, dots or full")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="tiny random weights, one pair")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.chats = 1, 60
    with tempfile.TemporaryDirectory(prefix="podtune-benchmark-") as scratch:
        # The genuine tokenizer either way, so the tiny model too has the whole vocabulary.
        tiny = TINY | {"vocab_size": SMOLLM2["vocab_size"]}
        folder = tiny_folder(Path(scratch) / "tiny", tiny) if options.quick else smollm2_folder()
        chats = Path(scratch) / "chats.jsonl"
        write_chats(chats, count=options.chats)
        for precision in ("float32", "bfloat16") if options.precision == "both" else (options.precision,):
            measure(options, folder, chats, precision, Path(scratch))


def measure(options: argparse.Namespace, folder: Path, chats: Path, precision: str, scratch: Path) -> None:
    """Measures one precision and prints what was found."""
    common: dict[str, Any] = {
        "folder": str(folder),
        "chats": str(chats),
        "rows": options.rows,
        "row_tokens": options.row_tokens,
        "threads": options.threads,
        "precision": precision,
        "scratch": str(scratch),
    }
    ours = Side(
        "podtune", "podtune_packed_side", common | {"remat": options.remat, "tokenizer_model": str(smollm2_gguf())}
    )
    theirs = {
        f"TRL, {packing}": Side(
            f"TRL, {packing}",
            "trl_side",
            common | {"packing": packing, "tokenizer": str(tokenizer_folder())},
            TORCH_ENVIRONMENT,
        )
        for packing in ("bfd", "wrapped")
    }
    sides = {"podtune": ours} | theirs
    for side in sides.values():
        side.step()
        side.steps.clear()
    for _ in range(options.pairs):
        for side in sides.values():
            side.step()
    for side in sides.values():
        side.finish()
    print(f"\n{precision}, {options.rows} rows of {options.row_tokens} tokens, {options.threads} threads")
    print(f"podtune's rows: {ours.ready['row_tokens']} tokens, {ours.ready['filled']:.1%} filled")
    for name, side in sides.items():
        seconds = statistics.median(step["seconds"] for step in side.steps)
        tokens = statistics.median(step["tokens"] for step in side.steps)
        speed = statistics.median(map(rate, side.steps))
        print(f"  {name:14} {speed:7.1f} useful tokens/s  {tokens:.0f} in {seconds:.2f} s")
    for name, side in theirs.items():
        print(f"useful tokens/s, podtune over {name}: {spread(paired_ratios(ours, side))}")
        print(f"useful tokens per core-second, podtune over {name}: {spread(core_ratios(ours, side))}")
    print(f"again: python benchmarks/sft_packed.py --precision {precision} --pairs {options.pairs}")


if __name__ == "__main__":
    main()
