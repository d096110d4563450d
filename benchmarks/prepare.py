"""Preparing text: podtune's tokenise + pack + write against `datasets.map` + TRL's packing, from the same JSONL.

    python benchmarks/prepare.py                        5 pairs, 48 MB of English, a process for each core
    python benchmarks/prepare.py --quick                one pair on 6 MB: does it run?

The Brown corpus (several copies, cut into rows of 1 to 12 paragraphs), SmolLM2's tokenizer, rows of 2,048 tokens. Each
side is a process of its own with as many workers as the other; they take turns, each time from the file on disk into
an empty folder, everything included: reading, hashing, starting workers, writing. Prints the ratio of MB of text a
second, median over the pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from support.brown import write_corpus
from support.pairs import Side, core_ratios, paired_ratios, spread
from support.sft_inputs import smollm2_gguf, tokenizer_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--copies", type=int, default=8, help="of the corpus, 6 MB each")
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="one pair on one copy")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.copies = 1, 1
    with tempfile.TemporaryDirectory(prefix="podtune-benchmark-") as scratch:
        corpus = Path(scratch) / "brown.jsonl"
        megabytes = write_corpus(corpus, copies=options.copies) / 1e6
        measure(options, corpus, megabytes, scratch)


def measure(options: argparse.Namespace, corpus: Path, megabytes: float, scratch: str) -> None:
    """Measures and prints what was found."""
    common = {
        "corpus": str(corpus),
        "row_tokens": options.row_tokens,
        "processes": options.processes,
        "scratch": scratch,
    }
    ours = Side("podtune", "prepare_side", common | {"model": str(smollm2_gguf())})
    theirs = Side("datasets + TRL", "datasets_side", common | {"tokenizer": str(tokenizer_folder())})
    for _ in range(options.pairs):
        ours.step()
        theirs.step()
    for side in (ours, theirs):
        side.finish()
    print(f"\n{megabytes:.1f} MB of text, rows of {options.row_tokens} tokens, {options.processes} processes")
    for side in (ours, theirs):
        seconds = statistics.median(step["seconds"] for step in side.steps)
        worked = statistics.median(step["core_seconds"] for step in side.steps)
        last = side.steps[-1]
        print(
            f"  {side.name:15} {megabytes / seconds:6.2f} MB/s ({seconds:.1f} s, {worked:.1f} core-s), "
            f"{last['tokens']:,} tokens in "
            f"{last['rows']:,} rows, {last['filled']:.1%} filled"
        )
    stages = {
        name: statistics.median(step["stages"][name] for step in theirs.steps) for name in ("load", "map", "pack")
    }
    print("  theirs by stage: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items()))
    print(f"MB per core-second, podtune over datasets + TRL: {spread(core_ratios(ours, theirs))}")
    print(f"MB/s, podtune over datasets + TRL: {spread(paired_ratios(ours, theirs))}")
    print(f"again: python benchmarks/prepare.py --pairs {options.pairs} --copies {options.copies}")


if __name__ == "__main__":
    main()
