"""Our side of `prepare.py`: one whole `prepare` a step, into an empty cache."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.pairs import all_core_seconds, serve_steps


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    from podtune.config.rows import Data
    from podtune.data.prepare import prepare
    from podtune.hub.sources import resolve_model
    from podtune.hub.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(arguments["model"]))
    settings = {"train": arguments["corpus"], "validation": "none", "too_long": "truncate"}
    data = Data.model_validate(settings | {"workers": arguments["processes"]})

    def step() -> dict[str, Any]:
        began, worked = time.perf_counter(), all_core_seconds()
        with tempfile.TemporaryDirectory(dir=arguments["scratch"]) as cache:
            train = prepare(data, tokenizer, max_length=arguments["row_tokens"], cache=Path(cache)).train
            seconds = time.perf_counter() - began
        return {
            "tokens": train.tokens,
            "rows": train.rows,
            "filled": train.efficiency,
            "seconds": seconds,
            "core_seconds": all_core_seconds() - worked,
        }

    serve_steps({}, step)


if __name__ == "__main__":
    main()
