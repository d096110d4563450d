"""Writes a model as a Hugging Face folder: merged weights, configuration, tokenizer, chat template, generation config.

Used by the workflow's export stage and by its rehearsal, which runs the same code on the first tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from podtune.export.config_files import exported_config, exported_generation_config
from podtune.export.folders import write_json
from podtune.export.narrowing import check_narrowing
from podtune.families.family import Model
from podtune.families.saving import SavedTensor, hf_config, hf_tensors
from podtune.hub.safetensors_writer import DEFAULT_SHARD_BYTES, StreamedWriter
from podtune.hub.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
"""Called with the bytes written and the bytes in all."""


@dataclass(frozen=True)
class Written:
    """What was written: where, how many tensors, how many bytes of weights, in which dtype. lost: what to tell the user
    of values that became 0 in it."""

    folder: Path
    tensors: int
    bytes: int
    dtype: str
    lost: str | None = None


def write_model(
    folder: Path,
    model: Model,
    weights: Any,
    tokenizer: Tokenizer,
    *,
    dtype: DTypeLike,
    generation_config: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, str] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> Written:
    """The whole model, adapters merged, in the place of `folder` when all of it is written.

    Holds one tensor at a time. With several processes all call it, and the first writes. Raises UserError, before
    anything is written, for a dtype that cannot hold the values.
    """
    tensors = list(hf_tensors(model, weights, dtype=dtype))
    lost = check_narrowing(tensors, dtype)
    written = write_tensors(
        folder,
        model,
        tensors,
        tokenizer,
        dtype=dtype,
        generation_config=generation_config,
        extra_files=extra_files,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )
    return replace(written, lost=lost)


def write_tensors(
    folder: Path,
    model: Model,
    tensors: Iterable[SavedTensor],
    tokenizer: Tokenizer,
    *,
    dtype: DTypeLike,
    generation_config: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, str] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> Written:
    """As `write_model`, with the tensors given: all of them, or the few of a rehearsal."""
    tensors = list(tensors)
    total = sum(tensor.info.bytes for tensor in tensors)
    written = Written(folder, len(tensors), total, jnp.dtype(dtype).name)
    if jax.process_index() > 0:
        for tensor in tensors:
            tensor.read()
        return written
    plan = {tensor.name: tensor.info for tensor in tensors}
    with StreamedWriter(folder, plan, max_shard_bytes=max_shard_bytes) as writer:
        write_small_files(writer.scratch, model, tokenizer, dtype=dtype, generation_config=generation_config)
        for name, text in (extra_files or {}).items():
            (writer.scratch / name).write_text(text, encoding="utf-8")
        done = 0
        for tensor in tensors:
            writer.write(tensor.name, tensor.read())
            done += tensor.info.bytes
            if progress is not None:
                progress(done, total)
    return written


def write_small_files(
    folder: Path,
    model: Model,
    tokenizer: Tokenizer,
    *,
    dtype: DTypeLike,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """config.json, generation_config.json, the tokenizer and its chat template."""
    config = hf_config(model)
    eos_ids = tokenizer.turn_end_ids
    write_json(folder / "config.json", exported_config(config, dtype=jnp.dtype(dtype).name, eos_ids=eos_ids))
    generation = exported_generation_config(
        generation_config or {}, eos_ids=eos_ids, bos_id=tokenizer.bos_id, pad_id=tokenizer.pad_id
    )
    write_json(folder / "generation_config.json", generation)
    tokenizer.save(folder)
