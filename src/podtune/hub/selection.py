"""Which files of a repository make up a model, and what to say when they do not. Used by download and remote."""

from collections.abc import Sequence
from typing import Literal

from podtune.hub.safetensors_store import INDEX_NAME, SINGLE_NAME

Amount = Literal["configuration", "tokenizer", "weights"]
"""How much of a model is fetched, each with what stands before it: the tokenizer is enough to prepare data."""

CONFIG_FILES = ("config.json", "generation_config.json", INDEX_NAME)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)


def model_files(names: Sequence[str], *, amount: Amount) -> list[str]:
    """Those of `names` that a model needs, but for the shards, which its index names. Weights come last.

    The index counts as configuration. Where there are both a single file and an index, the single file counts, as in
    transformers.
    """
    alone = SINGLE_NAME in names
    wanted = [name for name in CONFIG_FILES if name in names and not (alone and name == INDEX_NAME)]
    if amount == "configuration":
        return wanted
    wanted += [name for name in names if is_of_tokenizer(name)]
    return [*wanted, SINGLE_NAME] if amount == "weights" and alone else wanted


def is_of_tokenizer(name: str) -> bool:
    """Whether a file of a repository belongs to its tokenizer."""
    return name in _TOKENIZER_FILES or name.startswith("additional_chat_templates/")


def missing_file(names: Sequence[str], *, amount: Amount) -> str | None:
    """What keeps `names` from being a model, in words, or None."""
    if "config.json" not in names:
        return f"has no config.json. {what_it_holds(names)}"
    if amount == "weights" and SINGLE_NAME not in names and INDEX_NAME not in names:
        return f"has no {SINGLE_NAME} and no {INDEX_NAME}. {what_it_holds(names)}"
    return None


def what_it_holds(names: Sequence[str]) -> str:
    """What is there instead, and what can be done with it."""
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"It holds GGUF files ({ggufs[0]}): download one and name its path as the model."
    if "adapter_config.json" in names:
        return "It is a PEFT adapter: name the base model it was trained on."
    if pickles:
        return (
            f"It holds {pickles[0]}, a pickle, which can run any code when it is opened and is not read. Use "
            "one with safetensors, or convert it with transformers' save_pretrained where you trust it."
        )
    return f"It holds {', '.join(sorted(names)[:8]) or 'no files'}{', …' if len(names) > 8 else ''}."
