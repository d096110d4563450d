"""Prompts as ids: a chat through the tokenizer's own template, or plain text. Used by `generate`, chat and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podtune.config.errors import UserError


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ids of a chat up to where the assistant answers."""
    if tokenizer.chat_template is None:
        raise UserError(
            "The tokenizer has no chat template, so it cannot hold a chat. "
            "Give one with model: {source: …, chat_template: FILE}, or complete plain text instead."
        )
    try:
        ids = tokenizer.inner.apply_chat_template(
            [dict(message) for message in messages], tokenize=True, add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # a template may raise anything, its own raise_exception above all
        raise UserError(f"The chat template refuses this chat: {error}") from error
    return [int(one) for one in ids]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of one question: as a user's message where there is a chat template, else as text to go on from."""
    if tokenizer.chat_template is not None:
        return chat_prompt(tokenizer, [{"role": "user", "content": text}])
    return tokenizer.encode(text, special=True)
