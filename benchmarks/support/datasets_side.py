"""The other side of `prepare.py`: the same text through `datasets.map` in batches and TRL's packing, with no cache.

Batched, because row by row is slower; the tokenizer's own threads are off, because there is a process for each core;
best-fit packing that splits what is too long, which is what ours does here.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

from support.pairs import all_core_seconds, serve_steps


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer
    from trl import pack_dataset

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(arguments["tokenizer"])
    eos = tokenizer.eos_token_id
    processes = arguments["processes"] if arguments["processes"] > 1 else None

    def tokenise(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*each, eos] for each in ids]}

    def step() -> dict[str, Any]:
        began, worked = time.perf_counter(), all_core_seconds()
        with tempfile.TemporaryDirectory(dir=arguments["scratch"]) as cache:
            rows = load_dataset("json", data_files=arguments["corpus"], split="train", cache_dir=cache)
            loaded = time.perf_counter()
            rows = rows.map(tokenise, batched=True, num_proc=processes, remove_columns=["text"])
            tokenised = time.perf_counter()
            packed = pack_dataset(rows, arguments["row_tokens"], "bfd_split", {"num_proc": processes})
            seconds = time.perf_counter() - began
            tokens = sum(map(len, packed["input_ids"]))
        return {
            "tokens": tokens,
            "rows": len(packed),
            "filled": tokens / (len(packed) * arguments["row_tokens"]),
            "seconds": seconds,
            "core_seconds": all_core_seconds() - worked,
            "stages": {"load": loaded - began, "map": tokenised - loaded, "pack": began + seconds - tokenised},
        }

    serve_steps({}, step)


if __name__ == "__main__":
    main()
