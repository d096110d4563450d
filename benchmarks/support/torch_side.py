"""The other side of `sft_cpu.py`: torch + transformers + peft, set as well as we know how.

sdpa attention; a base without gradients; fused AdamW over the adapters alone; gradient clipping at 1.0; no KV cache.
In bfloat16 there are three ways (`bfloat16`: autocast over float32 weights; `bfloat16-weights`: bfloat16 base, float32
adapters, no autocast; `bfloat16-both`: bfloat16 base under autocast).
`float64` is slow, and what gradients are held to.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from support.pairs import serve_steps
from support.sft_inputs import ALPHA, LEARNING_RATE, RANK, adapter_start, fixed_batch


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments["threads"])
    precision: str = arguments["precision"]
    dtypes = {"bfloat16-weights": torch.bfloat16, "bfloat16-both": torch.bfloat16, "float64": torch.float64}
    weights_dtype = dtypes.get(precision, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(arguments["folder"], dtype=weights_dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    config = json.loads((Path(arguments["folder"]) / "config.json").read_text())
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear"))
    if precision == "float64":
        model = model.double()
    if arguments["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    adapters = {short_name(name): weight for name, weight in model.named_parameters() if weight.requires_grad}
    start = adapter_start(config)
    assert start.keys() == adapters.keys()
    with torch.no_grad():
        for name, weight in adapters.items():
            assert weight.dtype == (torch.float64 if precision == "float64" else torch.float32)
            weight.copy_(torch.from_numpy(start[name]))
    optimizer = torch.optim.AdamW(adapters.values(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    ids = torch.from_numpy(fixed_batch(config, arguments["rows"], arguments["row_tokens"])).long()
    autocast = precision in ("bfloat16", "bfloat16-both")
    gradients_path: str | None = arguments.get("gradients")

    def step() -> dict[str, Any]:
        nonlocal gradients_path
        cast = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        if precision == "float64":
            loss = _row_by_row(model, ids)
        else:
            with cast:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        if gradients_path:
            np.savez(gradients_path, **{name: weight.grad.numpy() for name, weight in adapters.items()})
            gradients_path = None
        torch.nn.utils.clip_grad_norm_(adapters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.item(), "tokens": ids.numel()}

    serve_steps({"torch": torch.__version__}, step)


def _row_by_row(model: Any, ids: Any) -> Any:
    """The mean loss and its gradients in float64 to the end (transformers' own loss is in float32); a row at a time,
    for the memory it takes."""
    import torch

    total = torch.zeros((), dtype=torch.float64)
    for row in ids:
        logits = model(input_ids=row[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, row[1:]) / len(ids)
        loss.backward()
        total += loss.detach()
    return total


def short_name(name: str) -> str:
    """`base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight` as `layers.0.mlp.up_proj.a`."""
    at = name.removeprefix("base_model.model.model.").removesuffix(".default.weight")
    return at.replace(".lora_A", ".a").replace(".lora_B", ".b")


if __name__ == "__main__":
    main()
