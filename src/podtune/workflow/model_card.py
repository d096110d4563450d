"""The model card: README.md of the output and of what is exported from it, with the front matter the Hub reads."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, Literal

from podtune import __version__
from podtune.config.loading import dump_run
from podtune.config.wording import counted
from podtune.hub.addresses import is_address
from podtune.workflow.beginning import base_name, export_dtype
from podtune.workflow.summary import run_name
from podtune.workflow.work import Work

Place = Literal["output", "model", "adapter"]


def model_card(work: Work, place: Place) -> str:
    """What it is made from and how, what it scored, and how to load it from where this file lies."""
    record = work.output.record
    title = run_name(work)
    results = record.get("results", {})
    parts = [_front_matter(work, place), f"# {title}", _about(work), _whose(results), _results(results)]
    parts += [_loading(work, place), _settings(work, record)]
    return "\n\n".join(part for part in parts if part) + "\n"


def base_licence(work: Work) -> str | None:
    """The licence the base model states: in its GGUF metadata, or in the front matter of its model card."""
    header = work.files.header
    if header is not None:
        stated = header.metadata.get("general.license")
        return stated if isinstance(stated, str) else None
    front = re.match(r"---\n(.*?)\n---", work.files.read_text("README.md") or "", re.DOTALL)
    found = re.search(r"^license:\s*(\S+)\s*$", front[1], re.MULTILINE) if front else None
    return found[1] if found else None


def _front_matter(work: Work, place: Place) -> str:
    name = base_name(work)[0]
    lines = ["---"]
    if not Path(name).is_absolute() and not is_address(name):  # the Hub takes no other names there
        lines.append(f"base_model: {json.dumps(name)}")
    lines.append(f"library_name: {'peft' if place == 'adapter' else 'transformers'}")
    lines.append("pipeline_tag: text-generation")
    licence = base_licence(work)
    if licence:
        lines.append(f"license: {json.dumps(licence)}")
    lines += ["tags:", "- podtune", *(["- lora"] if work.run.method.lora else []), "---"]
    return "\n".join(lines)


def _about(work: Work) -> str:
    lora = work.run.method.lora
    method = (
        f"LoRA (rank {lora.rank}, alpha {lora.alpha:g}{', rsLoRA' if lora.rslora else ''})"
        if lora
        else "full fine-tuning"
    )
    licence = base_licence(work)
    said = (
        f"The base model's licence is `{licence}`." if licence else "The base model states no licence that was found."
    )
    split = work.prepared.train
    return (
        f"`{work.run.model.source}`, trained by {method} with podtune {__version__} on "
        f"{counted(split.examples, 'example')} ({split.trained_tokens:,} trained tokens an epoch; "
        f"data fingerprint `{work.prepared.fingerprint}`). {said}"
    )


def _whose(results: dict[str, Any]) -> str:
    """Which weights these are, where they are not the last."""
    step, steps = results.get("weights_step"), results.get("steps")
    if step is None or step == steps:
        return ""
    said = f"The weights are those of step {step} of {steps}, whose loss on held-out rows was the lowest"
    return f"{said}: those before training." if step == 0 else f"{said}."


def _results(results: dict[str, Any]) -> str:
    before, after = results.get("before"), results.get("after")
    if not before or not after:
        return ""
    rows = [("loss (nats per token)", f"{before['loss']:.4f}", f"{after['loss']:.4f}")]
    rows += [("perplexity", f"{before['perplexity']:.2f}", f"{after['perplexity']:.2f}")]
    table = "\n".join(f"| {name} | {was} | {now} |" for name, was, now in rows)
    return f"## On held-out rows\n\n| | before | after |\n|---|---|---|\n{table}"


def _loading(work: Work, place: Place) -> str:
    has_adapter = work.run.exports_adapter
    folder = {"output": "model", "model": ".", "adapter": "../model"}[place]
    whole = (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{folder}")  # {export_dtype(work)}\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")\n'
        "```"
    )
    parts = ["## Use it"]
    if work.merged_too and place != "adapter":
        parts.append(whole)
    if has_adapter and place != "model":
        base, revision = base_name(work)
        named = base if work.files.gguf is None else "base"
        adapter = "adapter" if place == "output" else "."
        at = f', revision="{revision}"' if revision else ""
        parts.append(
            "The adapter alone, over its base model:\n\n"
            "```python\n"
            "from peft import PeftModel\n"
            "from transformers import AutoModelForCausalLM\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{named}"{at})\n'
            f'model = PeftModel.from_pretrained(base, "{adapter}")\n'
            "```"
        )
        if work.files.gguf is not None:
            parts.append(
                f"The base is a GGUF file, {Path(base).name}. `podtune export {shlex.quote(base)} --to base` writes it "
                "as that folder."
            )
    if place == "output":
        parts.append("`podtune chat .` talks to it.")
    return "\n\n".join(parts)


def _settings(work: Work, record: dict[str, Any]) -> str:
    steps = record.get("results", {}).get("steps")
    said = f" ({counted(steps, 'step')})" if steps else ""
    return f"## Settings{said}\n\n```yaml\n{dump_run(work.run, without_defaults=True).strip()}\n```"
