"""LoRA adapters as PEFT keeps them, both ways: written from what was trained, and read back over a base model.

Our pair is base + scale * a b, with a (in…, rank) and b (rank, out…). PEFT holds one pair for each layer: of a linear
module lora_A (rank, in) and lora_B (out, rank), of an embedding lora_embedding_A (rank, vocab) and lora_embedding_B
(embed, rank).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podtune.config.errors import UserError
from podtune.config.schema import LoRA as LoRASettings
from podtune.export.adapter_config import CONFIG_FILE, read_adapter_config
from podtune.export.folders import new_folder, write_json
from podtune.families.family import LAYER, Model
from podtune.families.saving import SavedTensor
from podtune.hub.safetensors_store import SINGLE_NAME, SafetensorsStore
from podtune.hub.safetensors_writer import StreamedWriter
from podtune.hub.tensors import TensorInfo
from podtune.hub.tokenizer import Tokenizer
from podtune.parallel.sharding import sharding_for
from podtune.weights.adapters import attach
from podtune.weights.leaves import LoRA, is_weight
from podtune.weights.param import Param, is_param
from podtune.weights.tree import map_named, named_leaves

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # that PEFT puts before the name of a module
_HEAD = "lm_head"
_FLOAT32 = np.dtype(np.float32)


class _Place(NamedTuple):
    """Where half of a pair lies in an adapter file: name, with {layer} for stacked weights, and which half, how."""

    name: str
    part: str
    transposed: bool


def write_adapter(
    folder: Path,
    model: Model,
    weights: Any,
    settings: LoRASettings,
    tokenizer: Tokenizer | None,
    *,
    base: str,
    revision: str | None = None,
    extra_files: Mapping[str, str] | None = None,
) -> None:
    """The adapters of these weights as a PEFT folder, in float32 as they were trained.

    settings: those they were trained with. base: the model they belong to, a Hub id or a path.
    With several processes all call it, and the first writes.
    """
    tensors = list(adapter_tensors(model, weights))
    if jax.process_index() > 0:
        for tensor in tensors:
            tensor.read()
        return
    with new_folder(folder) as scratch:
        with StreamedWriter(scratch / "part", {one.name: one.info for one in tensors}, max_shard_bytes=1 << 62) as file:
            for tensor in tensors:
                file.write(tensor.name, tensor.read())
        (scratch / "part" / SINGLE_NAME).rename(scratch / WEIGHTS_FILE)
        (scratch / "part").rmdir()
        write_json(scratch / CONFIG_FILE, adapter_config(model, weights, settings, base=base, revision=revision))
        if tokenizer is not None:
            tokenizer.save(scratch)
        for name, text in (extra_files or {}).items():
            (scratch / name).write_text(text, encoding="utf-8")


def adapter_config(
    model: Model, weights: Any, settings: LoRASettings, *, base: str, revision: str | None = None
) -> dict[str, Any]:
    """The adapter_config.json of what was trained. Nothing is asked again: the weights must agree with the settings."""
    scale = settings.scale
    for name, leaf in adapted_leaves(weights).items():
        assert abs(leaf.scale - scale) <= 1e-9 * scale, f"{name} was trained at scale {leaf.scale}, not {scale}"
        assert leaf.a.shape[-1] == settings.rank, f"{name} was trained at rank {leaf.a.shape[-1]}, not {settings.rank}"
    whole = settings.alpha == int(settings.alpha)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if whole else settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "target_modules": _target_modules(model, weights),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def serving_warnings(model: Model, description: Any) -> tuple[str, ...]:
    """What servers of adapters cannot do with this one, for the user. description: with the adapters attached."""
    words = {"embedding": "the embedding", "head": "the output head"}
    told = [words[name] for name in adapted_leaves(description) if name in words]
    if not told:
        return ()
    tied = " As both ends of the model share one weight, PEFT gets a pair for each." if model.config.tied else ""
    return (
        f"method.lora.targets include {' and '.join(told)}, and vLLM does not serve such adapters: serve the merged "
        f"model, which is exported beside the adapter. PEFT loads the adapter.{tied}",
    )


def adapter_tensors(model: Model, weights: Any) -> Iterator[SavedTensor]:
    """Every tensor of the adapter file, weight by weight and layer by layer."""
    params: dict[str, Param] = named_leaves(model.describe(), is_leaf=is_param)
    for weight, leaf in adapted_leaves(weights).items():
        layers = range(model.config.layers) if params[weight].is_stacked else (None,)
        for layer in layers:
            for place in _places(model, weight, params[weight]):
                array = getattr(leaf, place.part)
                shape = _flat_shape(array.shape if layer is None else array.shape[1:], place)
                name = place.name if layer is None else place.name.replace(LAYER, str(layer))
                yield SavedTensor(name, TensorInfo(shape, _FLOAT32), partial(_read, array, layer, shape, place))


def adapter_modules(names: Iterable[str]) -> list[str]:
    """The modules of the base model that tensors of these names are for, each once."""
    return list(dict.fromkeys(name.removeprefix(_PREFIX).partition(".lora_")[0] for name in names))


def load_adapter(model: Model, weights: Any, folder: Path) -> Any:
    """The weights with the PEFT adapter of that folder beside them.

    Raises UserError when it is an adapter of another kind or of another model, naming what does not fit.
    """
    config = read_adapter_config(folder)
    store = SafetensorsStore(folder, only=WEIGHTS_FILE)
    held = store.names()
    params: dict[str, Param] = named_leaves(model.describe(), is_leaf=is_param)
    places = {weight: _places(model, weight, param) for weight, param in params.items() if param.kind != "vector"}
    targets = tuple(weight for weight, at in places.items() if at[0].name.replace(LAYER, "0") in held)
    if not targets:
        raise UserError(
            f"{folder}: none of its {len(held)} tensors belongs to this model (they are named like "
            f"{next(iter(held), 'nothing')}). It is the adapter of another model."
        )
    settings = LoRASettings(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        rslora=config.get("use_rslora", False),
        targets=targets,
    )
    used: set[str] = set()

    def half(weight: str, place: _Place, described: Param) -> Any:
        layers = range(model.config.layers) if params[weight].is_stacked else (None,)
        parts = []
        for layer in layers:
            name = place.name if layer is None else place.name.replace(LAYER, str(layer))
            shape = _flat_shape(described.shape if layer is None else described.shape[1:], place)
            if name not in held or held[name].shape != shape:
                found = f"of shape {held[name].shape}" if name in held else "absent"
                raise UserError(f"{folder}: {name} is {found}; rank {settings.rank} of this model needs {shape}.")
            used.add(name)
            array = np.asarray(store.read(name), _FLOAT32)
            parts.append(array.T if place.transposed else array)
        return np.stack(parts).reshape(described.shape)

    def one(weight: str, array: Any, described: Any) -> Any:
        if not isinstance(described, LoRA):
            return array
        halves: dict[str, Any] = {}
        for place in places[weight]:
            value = half(weight, place, getattr(described, place.part))
            if place.part in halves and not np.array_equal(value, halves[place.part]):
                raise UserError(
                    f"{folder}: the embedding and the output head share one weight in this model and have different "
                    "adapters, which podtune cannot hold."
                )
            halves[place.part] = value
        placed = {part: _put(halves[part], getattr(described, part), array) for part in ("a", "b")}
        return LoRA(base=array, a=placed["a"], b=placed["b"], scale=described.scale)

    description = attach(model.describe(), settings)
    adapted = map_named(one, weights, description, is_leaf=lambda leaf: is_weight(leaf) or is_param(leaf))
    left = sorted(set(held) - used)
    if left:
        raise UserError(f"{folder}: {len(left)} tensors belong to no weight of this model: {', '.join(left[:5])}.")
    return adapted


def adapted_leaves(tree: Any) -> dict[str, Any]:
    """The LoRA leaves of weights, or of their description, by name."""
    leaves = named_leaves(tree, is_leaf=lambda leaf: is_weight(leaf) or is_param(leaf))
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, LoRA)}


def _places(model: Model, weight: str, param: Param) -> list[_Place]:
    module = f"{_PREFIX}{_module(model, weight)}"
    if param.kind != "lookup":
        return [_Place(f"{module}.lora_A.weight", "a", True), _Place(f"{module}.lora_B.weight", "b", True)]
    places = [_Place(f"{module}.lora_embedding_A", "a", True), _Place(f"{module}.lora_embedding_B", "b", True)]
    if model.config.tied:
        # The head multiplies by the transpose of the embedding, so the halves change places.
        head = f"{_PREFIX}{_HEAD}"
        places += [_Place(f"{head}.lora_A.weight", "b", False), _Place(f"{head}.lora_B.weight", "a", False)]
    return places


def _module(model: Model, weight: str) -> str:
    """The module of the base model, such as model.layers.{layer}.self_attn.q_proj."""
    theirs = next(row.theirs for row in model.rows() if row.ours == weight).removesuffix(".weight")
    if model.family.text_config is not None and theirs.startswith("model."):
        return theirs.replace("model.", "model.language_model.", 1)
    return theirs


def _target_modules(model: Model, weights: Any) -> list[str] | str:
    modules = {_module(model, weight) for weight in adapted_leaves(weights)}
    if "embedding" in adapted_leaves(weights) and model.config.tied:
        modules.add(_HEAD)
    if model.family.text_config is None:
        return sorted({module.rsplit(".", 1)[-1] for module in modules})
    # A pattern, for the towers beside the text model have modules of the same names. The head lies beside it too.
    inside = sorted({module.rsplit(".", 1)[-1] for module in modules - {_HEAD}})
    patterns = [rf".*language_model\.(.*\.)?({'|'.join(inside)})"] if inside else []
    return f"({'|'.join([*patterns, *({_HEAD} & modules)])})"


def _flat_shape(shape: tuple[int, ...], place: _Place) -> tuple[int, int]:
    """The two dimensions in the file of one layer's half: a is (in…, rank), b is (rank, out…)."""
    rank, whole = (shape[-1] if place.part == "a" else shape[0]), int(np.prod(shape))
    rows, columns = (whole // rank, rank) if place.part == "a" else (rank, whole // rank)
    return (columns, rows) if place.transposed else (rows, columns)


def _read(array: jax.Array, layer: int | None, shape: tuple[int, int], place: _Place) -> np.ndarray:
    if array.is_fully_addressable:
        whole = np.asarray(array)  # kept with the array: to read all its layers moves it once
        part = whole if layer is None else whole[layer]
    else:
        part = array if layer is None else array[layer]
        assert isinstance(part.sharding, NamedSharding)
        everywhere = NamedSharding(part.sharding.mesh, PartitionSpec())
        part = jax.jit(lambda x: x, out_shardings=everywhere)(part).addressable_data(0)
    half = np.asarray(part, _FLOAT32)
    return half.reshape(shape[::-1]).T if place.transposed else half.reshape(shape)


def _put(value: np.ndarray, described: Param, base: jax.Array) -> jax.Array:
    """On the devices of the base, split as the description says."""
    if isinstance(base.sharding, NamedSharding) and isinstance(base.sharding.mesh, Mesh):
        return jax.device_put(value, sharding_for(base.sharding.mesh, described.axes, described.shape))
    return jax.device_put(value, base.sharding)
