"""Opens what can be talked to: a run's output folder, an adapter, a Hugging Face folder, a GGUF file or a Hub id."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podtune.config.errors import UserError
from podtune.data.forms import Form
from podtune.export.adapter_config import CONFIG_FILE, read_adapter_config
from podtune.export.peft import load_adapter
from podtune.families import Model, model_from_files
from podtune.families.loading import load_weights
from podtune.hub.sources import ModelFiles, resolve_model
from podtune.hub.tokenizer import Tokenizer, load_tokenizer
from podtune.parallel.mesh import build_mesh, on_cpu

Say = Callable[[str], None]


@dataclass(frozen=True)
class Loaded:
    """A model ready to answer. about: what it is, in one line; mesh: where its weights lie; form: what it was trained
    on, where a run's record says so (data.forms.Form)."""

    model: Model
    weights: Any
    tokenizer: Tokenizer
    files: ModelFiles
    about: str
    mesh: Mesh
    form: Form | None = None


def load_for_serving(
    source: str, *, mesh: Mesh | None = None, cache: Path | None = None, say: Say | None = None
) -> Loaded:
    """The model that `source` names, on the mesh, its adapter beside its weights if it has one.

    mesh: None for every accelerator of this machine, with a copy on each or, where that would fill them, split.
    Raises UserError when there is nothing that could answer.
    """
    folder = Path(source).expanduser()
    if (folder / "run.json").is_file():
        loaded = _from_output(folder, mesh=mesh, cache=cache, say=say)
        return dataclasses.replace(loaded, form=recorded_form(folder))
    if (folder / CONFIG_FILE).is_file():
        loaded = _from_adapter(folder, mesh=mesh, cache=cache, say=say)
    else:
        loaded = _from_model(source, mesh=mesh, cache=cache, say=say)
    exported = folder.name in ("model", "adapter")  # of the run whose folder it lies in
    return dataclasses.replace(loaded, form=recorded_form(folder.parent) if exported else None)


def recorded_form(output: Path) -> Form | None:
    """What the run of this folder was trained on; None where its record does not tell, which keeps no model from being
    talked to."""
    try:
        form = json.loads((output / "run.json").read_text(encoding="utf-8"))["data"]["form"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None
    return form if form in get_args(Form) else None


def _from_output(folder: Path, *, mesh: Mesh | None, cache: Path | None, say: Say | None) -> Loaded:
    if (folder / "model" / "config.json").is_file():
        return _from_model(str(folder / "model"), mesh=mesh, cache=cache, say=say)
    if (folder / "adapter" / CONFIG_FILE).is_file():
        return _from_adapter(folder / "adapter", mesh=mesh, cache=cache, say=say)
    raise UserError(
        f"{folder}: this run has no exported model yet. `podtune export {folder}` writes one from its last checkpoint."
    )


def _from_adapter(folder: Path, *, mesh: Mesh | None, cache: Path | None, say: Say | None) -> Loaded:
    config = read_adapter_config(folder)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not base:
        raise UserError(f"{folder / CONFIG_FILE}: base_model_name_or_path is empty. Write the base model's name there.")
    name = f"{base}@{revision}" if revision else base
    loaded = _from_model(name, mesh=mesh, cache=cache, say=say)
    weights = load_adapter(loaded.model, loaded.weights, folder)
    tokenizer = loaded.tokenizer
    if (folder / "tokenizer.json").is_file():  # the adapter's own, whose chat template is the one trained with
        tokenizer = load_tokenizer(_with_folder(loaded.files, folder))
    return Loaded(
        loaded.model, weights, tokenizer, loaded.files, f"{loaded.about} with the adapter {folder}", loaded.mesh
    )


def _from_model(source: str, *, mesh: Mesh | None, cache: Path | None, say: Say | None) -> Loaded:
    files = resolve_model(source, cache=cache, progress=say)
    model = model_from_files(files)
    tokenizer = load_tokenizer(files)
    mesh = mesh or mesh_for(model)
    weights = load_weights(model, model.describe(dtype=serving_dtype(mesh)), files.tensors(), mesh, say=say)
    return Loaded(model, weights, tokenizer, files, source, mesh)


def serving_dtype(mesh: Mesh) -> Any:
    """float32 on a CPU, bfloat16 on accelerators."""
    return jnp.float32 if on_cpu(mesh) else jnp.bfloat16


def _with_folder(files: ModelFiles, folder: Path) -> ModelFiles:
    return ModelFiles(
        source=files.source,
        folder=folder,
        gguf=None,
        config=files.config,
        generation_config=files.generation_config,
        content=files.content,
    )


def mesh_for(model: Model) -> Mesh:
    """Every accelerator of this machine, or the first device where there are CPUs alone. The weights are copied to each
    accelerator if they are small beside its memory, else split over all."""
    from podtune.config.schema import Mesh as MeshSettings
    from podtune.weights.leaves import parameter_count

    here = build_mesh(MeshSettings(), jax.devices()[:1])
    if on_cpu(here):
        return here
    return build_mesh(MeshSettings(), weight_bytes=2 * parameter_count(model.describe()))
