"""Prompts from held-out rows, for samples before, during and after training."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from podtune.data.prepare_encode import CANDIDATES, Chunk
from podtune.data.prepare_select import Examples
from podtune.data.prepare_write import read_example
from podtune.data.prepared import HeldOut
from podtune.hub.tokenizer import Tokenizer

_ANSWER_TOKENS = 64  # of a document


def held_out_prompts(
    validation: Examples, chunks_folder: Path, chunks: Sequence[Chunk], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The fields of HeldOut for some rows, one of each set of equal rows, in an order that the seed decides."""
    first = np.flatnonzero(validation.piece == 0)
    _, unique = np.unique(validation.digest[first, 0], return_index=True)  # sorted by digest, as chunks keep prompts
    prompts: list[dict[str, Any]] = []
    of_chunk: dict[int, dict[str, dict[str, Any]]] = {}
    for at in first[unique].tolist():
        chunk = int(validation.chunk[at])
        if chunk not in of_chunk:
            of_chunk[chunk] = chunks[chunk].prompts()
        entry = of_chunk[chunk].get(f"{int(validation.digest[at, 0]):x}")
        if entry is None:
            continue
        held_out = HeldOut(entry["ids"], entry["text"], entry["expected"], entry["messages"])
        if not held_out.prompt_text:  # the beginning of a document
            tokens = read_example(chunks_folder, validation, at)[0].tolist()
            begun = len(held_out.prompt_ids)
            text, rest = tokenizer.decode(tokens[:begun]), tokenizer.decode(tokens[begun : begun + _ANSWER_TOKENS])
            held_out = HeldOut(held_out.prompt_ids, text, rest, [])
        prompts.append(asdict(held_out))
        if len(prompts) == CANDIDATES:
            break
    return prompts
