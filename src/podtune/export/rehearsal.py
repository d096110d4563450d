"""The whole export, exercised before training: what would fail after hours fails now. Used by the workflow.

The same code writes the same files, with one tensor of each kind in place of all; transformers' own classes, which need
no torch for it, read the small files back.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from podtune.config.errors import PodtuneError, RunFailure, UserError
from podtune.config.schema import LoRA as LoRASettings
from podtune.config.wording import readable_bytes
from podtune.export.adapter_config import modules_without_adapter, read_adapter_config
from podtune.export.huggingface import write_small_files, write_tensors
from podtune.export.narrowing import check_narrowing
from podtune.export.peft import WEIGHTS_FILE, adapter_modules, adapter_tensors, serving_warnings, write_adapter
from podtune.families import model_from_config, model_from_files
from podtune.families.family import Model
from podtune.families.loading import plan_loading
from podtune.families.saving import SavedTensor, hf_config, hf_tensors
from podtune.families.tensors import checkpoint_tensors
from podtune.hub.atomic import new_scratch_folder
from podtune.hub.safetensors_store import SafetensorsStore
from podtune.hub.sources import resolve_model
from podtune.hub.tokenizer import Tokenizer

_LAYER_NUMBER = re.compile(r"\.\d+\.")
_SPARE = 1.1  # of the free space: other things are written too
# metrics.jsonl, TensorBoard's events, answers, report, records and what orbax notes beside the arrays of a checkpoint:
# 350 kB for a run of 6 steps of 30k parameters, and some hundred bytes a logged step.
_LOG_BYTES = 2_000_000


@dataclass(frozen=True)
class Rehearsed:
    """What the export will write. warnings: sentences for the user on what serves an adapter; lost: one on values that
    become 0 in the dtype."""

    bytes: int
    tensors: int
    warnings: tuple[str, ...]
    lost: str | None = None


def rehearse(
    folder: Path,
    model: Model,
    weights: Any,
    tokenizer: Tokenizer,
    *,
    dtype: DTypeLike,
    generation_config: dict[str, Any],
    adapter: LoRASettings | None,
    merged: bool,
    base: str,
    checkpoint_bytes: int,
) -> Rehearsed:
    """Writes and reads back a small export in `folder`, and removes it again. Whether configuration and tokenizer will
    do is known before, from `rehearse_small_files`.

    checkpoint_bytes: what training will write besides. Raises UserError when the export could not be written there or
    would not load, naming why and the way out.
    """
    every = list(hf_tensors(model, weights, dtype=dtype))
    _check_names(model, every)
    warnings = serving_warnings(model, weights)
    total = sum(tensor.info.bytes for tensor in every) if merged or warnings else 0
    if adapter is not None:
        total += sum(tensor.info.bytes for tensor in adapter_tensors(model, weights))
    copies = (merged or bool(warnings)) + (adapter is not None)  # each folder has the tokenizer beside its weights
    small_bytes = _LOG_BYTES + copies * len(tokenizer.inner.backend_tokenizer.to_str().encode())
    _check_space(folder, total + checkpoint_bytes + small_bytes)
    lost = check_narrowing(every, dtype) if merged or warnings else None
    few = _one_of_each(every)
    if jax.process_index() > 0:
        # Reading gathers from all processes, so all must read what the first writes and then compares.
        for tensor in [*few, *few, *(2 * list(adapter_tensors(model, weights)) if adapter is not None else [])]:
            tensor.read()
    else:
        with _scratch(folder) as scratch:
            write_tensors(scratch / "model", model, few, tokenizer, dtype=dtype, generation_config=generation_config)
            _check_tensors(scratch / "model", few)
            if adapter is not None:
                write_adapter(scratch / "adapter", model, weights, adapter, None, base=base)
                _check_adapter(scratch / "adapter", model, weights)
    return Rehearsed(total, len(every), warnings, lost)


def check_reloads(folder: Path, model: Model, weights: Any, tokenizer: Tokenizer, *, dtype: DTypeLike) -> None:
    """The exported folder as our own reader and transformers' see it: every tensor there, one of each kind compared.

    Raises RunFailure naming what differs.
    """
    if jax.process_index() > 0:
        for tensor in _one_of_each(list(hf_tensors(model, weights, dtype=dtype))):
            tensor.read()
        return
    files = resolve_model(str(folder))
    again = model_from_files(files)
    if again.config != model.config:
        raise RunFailure(f"{folder}: config.json does not give the model that was trained.")
    plan_loading(again, files.tensors())
    _check_tensors(folder, _one_of_each(list(hf_tensors(model, weights, dtype=dtype))))
    if faults := _small_file_faults(folder, model, tokenizer):
        raise RunFailure(f"{folder} is not right: {'; '.join(faults)}.")


def rehearse_small_files(
    model: Model, tokenizer: Tokenizer, *, dtype: DTypeLike, generation_config: dict[str, Any]
) -> None:
    """The part of the rehearsal that needs no weights, in a temporary folder: configuration and tokenizer, as they
    will be written and as transformers reads them. Raises UserError for what was given and would not do."""
    with tempfile.TemporaryDirectory(prefix="podtune-") as folder:
        write_small_files(Path(folder), model, tokenizer, dtype=dtype, generation_config=generation_config)
        faults = _small_file_faults(Path(folder), model, tokenizer)
    if faults:
        raise UserError(f"model: its export would not be right: {'; '.join(faults)}.")


def _check_names(model: Model, tensors: list[SavedTensor]) -> None:
    """What would be written is what a model with this config.json reads, name for name and shape for shape."""
    again = model_from_config(hf_config(model))
    expected = {one.name: one.shape for one in checkpoint_tensors(again)}
    planned = {one.name: one.info.shape for one in tensors}
    wrong = sorted(name for name in {*expected, *planned} if expected.get(name) != planned.get(name))
    if wrong or again.config != model.config:
        raise RunFailure(
            f"the export would not fit its own config.json: {', '.join(wrong[:5]) or 'the configurations differ'}."
        )


def _check_space(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if wanted * _SPARE > free:
        raise UserError(
            f"output: {folder} has {readable_bytes(free)} free; checkpoints and exports need about "
            f"{readable_bytes(wanted * _SPARE)}. Free some, name a folder on a larger disk, or write less "
            "(export: {merged: false}, output: {keep_checkpoints: 1})."
        )


class _scratch:  # noqa: N801  used as a statement
    """A hidden folder that goes away again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Path:
        try:
            self._scratch = new_scratch_folder(self._folder / "rehearsal")  # clears those of killed processes away
        except OSError as error:
            raise UserError(
                f"output: {self._folder} cannot be written ({error.strerror}). Name another folder."
            ) from error
        return self._scratch

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"output: {self._folder} cannot be written ({error.strerror or error}).") from error


def _one_of_each(tensors: list[SavedTensor]) -> list[SavedTensor]:
    """The first tensor of each kind: names that differ in the layer alone are one kind."""
    kinds: dict[str, SavedTensor] = {}
    for tensor in tensors:
        kinds.setdefault(_LAYER_NUMBER.sub(".", tensor.name), tensor)
    return list(kinds.values())


def _check_tensors(folder: Path, written: list[SavedTensor]) -> None:
    store = SafetensorsStore(folder)
    for tensor in written:
        if not np.array_equal(store.read(tensor.name), tensor.read(), equal_nan=True):
            raise RunFailure(f"{folder}: {tensor.name} does not read back as it was written. Is the disk sound?")


def _small_file_faults(folder: Path, model: Model, tokenizer: Tokenizer) -> list[str]:
    """What is wrong with config.json, generation_config.json and the tokenizer as transformers reads them."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(folder)
        generation = GenerationConfig.from_pretrained(folder)
        generation.validate(strict=True)
        reloaded = AutoTokenizer.from_pretrained(folder)
    except PodtuneError:
        raise
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).rstrip(".")
        return [f"it would not load in transformers ({said}). Correct that in the model's own file of this name"]
    faults = []
    if config.vocab_size != model.config.vocab:
        faults.append(f"config.json says vocab_size={config.vocab_size}, the weights have {model.config.vocab}")
    if tokenizer.vocab_size > model.config.vocab:
        faults.append(
            f"tokenizer.json has {tokenizer.vocab_size} ids, the embedding (config.json: vocab_size) "
            f"{model.config.vocab} rows, so some text could not be read. Give the model the tokenizer it was made with"
        )
    ends = generation.eos_token_id
    if not tokenizer.turn_end_ids <= set(ends if isinstance(ends, list) else [ends]):
        faults.append(f"generation_config.json ends at {ends}, answers end with {sorted(tokenizer.turn_end_ids)}")
    if reloaded.chat_template != tokenizer.inner.chat_template:
        faults.append("the chat template does not come back as it is")
    text = "Does this come back? Ünïcode, 数字 12345\n"
    if reloaded.encode(text, add_special_tokens=False) != tokenizer.encode(text, special=False):
        faults.append(
            f"transformers reads the tokenizer of a {config.model_type} as {type(reloaded).__name__}, which splits "
            "text otherwise than the model's tokenizer.json. Give the model the tokenizer.json and "
            "tokenizer_config.json it was made with"
        )
    return faults


def _check_adapter(folder: Path, model: Model, weights: Any) -> None:
    names = [tensor.name for tensor in adapter_tensors(model, weights)]
    if lost := modules_without_adapter(read_adapter_config(folder), adapter_modules(names)):
        raise RunFailure(
            f"the adapter would not load whole in PEFT: target_modules of its configuration leave out "
            f"{', '.join(lost[:3])}. This is a fault of podtune: take them out of method.lora.targets, and report it."
        )
    store = SafetensorsStore(folder, only=WEIGHTS_FILE)
    for tensor in adapter_tensors(model, weights):
        if not np.array_equal(store.read(tensor.name), tensor.read()):
            raise RunFailure(f"{folder}: {tensor.name} does not read back as it was written. Is the disk sound?")
