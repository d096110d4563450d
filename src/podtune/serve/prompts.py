"""Prompts as ids: a chat through the tokenizer's own template, or a text to go on from. Used by `generate`, chat and
samples. Prompts take the form that was trained: one in another form is answered as if nothing had been learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from podtune.config.errors import UserError
from podtune.data.chat import begun_ids


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


def takes_chats(tokenizer: Any, form: str | None) -> bool:
    """Whether prompts go through the chat template. form: what was trained (data.forms.Form); None where that is not
    known, and the template is taken where there is one."""
    return tokenizer.chat_template is not None and form in ("chat", None)


def prompt_ids(tokenizer: Any, text: str, form: str | None) -> list[int]:
    """The ids of one prompt in the form that was trained: a user's message, or a text to go on from."""
    if takes_chats(tokenizer, form):
        return chat_prompt(tokenizer, [{"role": "user", "content": text}])
    return begun_ids(tokenizer, text)
