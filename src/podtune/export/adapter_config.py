"""adapter_config.json of a PEFT adapter: read and looked over, and which modules it names. Used by export and serve."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podtune.config.errors import UserError

CONFIG_FILE = "adapter_config.json"
_WAY_OUT = "Download or export the adapter again."


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The configuration of the adapter in that folder. Raises UserError for what is none, or none of a plain LoRA."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}). {_WAY_OUT}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds a {type(config).__name__}, not a mapping. {_WAY_OUT}")
    refused = {
        "peft_type": config.get("peft_type") != "LORA",
        "use_dora": bool(config.get("use_dora")),
        "bias": config.get("bias", "none") != "none",
        "rank_pattern": bool(config.get("rank_pattern")),
        "alpha_pattern": bool(config.get("alpha_pattern")),
        "modules_to_save": bool(config.get("modules_to_save")),
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise UserError(f"{path}: {key}={config.get(key)!r} is not supported; podtune reads plain LoRA adapters.")
    wrong = {
        "r": not _is_number(config.get("r"), int),
        "lora_alpha": not _is_number(config.get("lora_alpha"), int | float),
        "use_rslora": not isinstance(config.get("use_rslora", False), bool),
        **{key: not isinstance(config.get(key), str | None) for key in ("base_model_name_or_path", "revision")},
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(f"{path}: {key}={config.get(key)!r} is not what PEFT writes there. {_WAY_OUT}")
    return config


def is_target(module: str, targets: str | Sequence[str]) -> bool:
    """Whether PEFT gives the module an adapter: a pattern must match its whole name, a name in a list its end."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in targets)


def modules_without_adapter(config: Mapping[str, Any], modules: Sequence[str]) -> list[str]:
    """Those of the modules that PEFT would pass over, and drop what was trained for them without a word."""
    return [module for module in modules if not is_target(module, config["target_modules"])]


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < float("inf")
