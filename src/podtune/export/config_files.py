"""The small files beside exported weights, config.json and generation_config.json, for transformers 4 and 5 alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# What transformers takes as greedy; any other value needs do_sample, or GenerationConfig refuses to be saved.
_SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "typical_p": 1.0}


def exported_config(source: Mapping[str, Any], *, dtype: str, eos_ids: Iterable[int]) -> dict[str, Any]:
    """The source's own config.json with what changed: dtype and end ids; quantisation left out.

    The rotary settings are written in both forms, since transformers 4 knows no `rope_parameters`: a model whose config
    has only those would run there on the default base of 10000, and nothing would say so.
    """
    config = {key: value for key, value in source.items() if key not in ("quantization_config", "_name_or_path")}
    config["dtype"] = config["torch_dtype"] = dtype
    config["eos_token_id"] = _one_or_many(eos_ids, before=source.get("eos_token_id"))
    config.update(_older_rope(config))
    return config


def _older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling and rope_local_base_freq from a config that has only `rope_parameters`."""
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, Mapping) or "rope_theta" in config:
        return {}
    whole = parameters.get("full_attention", parameters)
    if not isinstance(whole, Mapping):
        return {}
    older: dict[str, Any] = {}
    if "rope_theta" in whole:
        older["rope_theta"] = whole["rope_theta"]
    scaling = {key: value for key, value in whole.items() if key != "rope_theta"}
    older["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    local = parameters.get("sliding_attention")
    if isinstance(local, Mapping) and "rope_theta" in local:
        older["rope_local_base_freq"] = local["rope_theta"]
    return older


def exported_generation_config(
    source: Mapping[str, Any], *, eos_ids: Iterable[int], bos_id: int | None, pad_id: int | None
) -> dict[str, Any]:
    """The source's generation_config.json with every id that ends an answer, and nothing to be refused later."""
    config = {key: value for key, value in source.items() if value is not None and key != "_from_model_config"}
    config["eos_token_id"] = _one_or_many(eos_ids, before=source.get("eos_token_id"))
    if bos_id is not None:
        config.setdefault("bos_token_id", bos_id)
    if pad_id is not None:
        config.setdefault("pad_token_id", pad_id)
    sampled = [key for key, default in _SAMPLING_DEFAULTS.items() if key in config and config[key] != default]
    if sampled and not config.get("do_sample"):
        # The authors gave sampling settings, so they meant sampling.
        config["do_sample"] = True
    return config


def _one_or_many(ids: Iterable[int], *, before: Any) -> int | list[int] | None:
    """The ids that were there, in their order, then the new ones; a single one as a number."""
    kept = [before] if isinstance(before, int) else [one for one in before or () if isinstance(one, int)]
    every = list(dict.fromkeys([*kept, *sorted(ids)]))
    return None if not every else every[0] if len(every) == 1 else every
