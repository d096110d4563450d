"""The tokenizer's chat template: rendered, and questioned once about how it marks turns. Used by turns and chat."""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

from podtune.config.errors import UserError
from podtune.data.rows import Conversation
from podtune.hub.tokenizer import Tokenizer

TemplateMessages = list[dict[str, Any]]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Private-use characters stand for contents when a template is questioned: no template strips, escapes or alters them.
FIRST_SENTINEL = 0xF1000
SENTINELS = re.compile("[\U000f1000-\U000ffffd]")


class TemplateRefusal(Exception):
    """The template does not take these messages; the message is the template's own."""


class ChatTemplate:
    """The chat template of a tokenizer. Rendering goes through the tokenizer's own apply_chat_template, so that texts
    are equal to its by construction."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.inner: Any = tokenizer.inner
        self.source = self.inner.chat_template

    def text_of(self, tools: Sequence[dict[str, Any]] = ()) -> str:
        """The template that is used when these tools are given (some tokenizers hold several)."""
        return str(self.inner.get_chat_template(tools=list(tools) or None))

    def render(self, messages: TemplateMessages, tools: Sequence[dict[str, Any]] = (), *, prompt: bool = False) -> str:
        """The text of a conversation; prompt: with what asks for the next answer. Raises TemplateRefusal."""
        try:
            return self.inner.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # templates are programs: whatever they raise is their word on these messages
            raise TemplateRefusal(_words(error)) from error

    def render_all(self, conversations: Sequence[Conversation]) -> list[str | TemplateRefusal]:
        """The text of each conversation, or the template's refusal."""
        rendered: list[str | TemplateRefusal | None] = [None] * len(conversations)
        plain = [index for index, conversation in enumerate(conversations) if not conversation.tools]
        if plain:
            batch = [template_messages(conversations[index]) for index in plain]
            try:
                texts = cast(list[str], self.inner.apply_chat_template(batch, tokenize=False))
                for index, text in zip(plain, texts, strict=True):
                    rendered[index] = text
            except Exception:  # one of them is refused: each on its own says which
                pass
        for index, conversation in enumerate(conversations):
            if rendered[index] is None:
                try:
                    rendered[index] = self.render(template_messages(conversation), conversation.tools)
                except TemplateRefusal as refusal:
                    rendered[index] = refusal
        return cast(list[str | TemplateRefusal], rendered)

    def has_generation(self, tools: Sequence[dict[str, Any]] = ()) -> bool:
        """Whether the template marks the assistant's words itself, by {% generation %}."""
        return _GENERATION.search(self.text_of(tools)) is not None

    def generation_spans(
        self, messages: TemplateMessages, tools: Sequence[dict[str, Any]] = ()
    ) -> list[tuple[int, int]]:
        """The character spans that the template marks by {% generation %}, in the text that render gives."""
        from transformers.utils import chat_template_utils

        _, spans = cast(Any, chat_template_utils).render_jinja_template(
            conversations=[messages],
            tools=list(tools) or None,
            chat_template=self.text_of(tools),
            return_assistant_tokens_mask=True,
            **self.inner.special_tokens_map,
        )
        return [(int(start), int(end)) for start, end in cast(list[list[tuple[int, int]]], spans)[0]]

    def lost_tools(self, messages: TemplateMessages, tools: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """The tools without which the text is the same: the template leaves them out. Raises TemplateRefusal."""
        marked = [
            {**tool, "function": {**tool["function"], "name": chr(FIRST_SENTINEL + at)}}
            if isinstance(tool.get("function"), dict)
            else tool
            for at, tool in enumerate(tools)
        ]
        try:
            shown = set(SENTINELS.findall(self.render(messages, marked)))
        except TemplateRefusal:  # as by a template that knows only tools of some names
            shown = set[str]()
        doubtful = [at for at in range(len(tools)) if chr(FIRST_SENTINEL + at) not in shown]
        whole = self.render(messages, tools) if doubtful else ""
        return tuple(at for at in doubtful if self.render(messages, [*tools[:at], *tools[at + 1 :]]) == whole)

    @property
    def uses_clock(self) -> bool:
        """Whether texts depend on the day they are rendered."""
        return "strftime_now" in str(self.source)

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts that the tokenizer turns into one token wherever they stand (blank ones apart)."""
        return tuple(
            token.content
            for token in self.inner.added_tokens_decoder.values()
            if token.content.strip() and (token.special or token.content in str(self.source))
        )

    @cached_property
    def control_tokens(self) -> re.Pattern[str]:
        """Matches any of added_tokens, longest first."""
        longest_first = sorted(self.added_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _probe(self) -> tuple[str, str, str]:
        """How the template treats one question and its answer: the generation prompt it adds; the role header of the
        answer when it adds none; and what follows the answer."""
        ask, answer = chr(FIRST_SENTINEL), chr(FIRST_SENTINEL + 1)
        question = {"role": "user", "content": ask}
        try:
            without = self.render([question])
            asked = self.render([question], prompt=True)
            whole = self.render([question, {"role": "assistant", "content": answer}])
        except TemplateRefusal:
            return "", "", ""
        added = asked[len(without) :] if asked.startswith(without) else ""
        before, _, after = whole.partition(answer)
        header = before[len(without) :] if not added and before.startswith(without) else ""
        return added, header if header.strip() else "", after

    @property
    def generation_prompt(self) -> str:
        """What the template adds to ask for an answer, such as the assistant's header; empty where it adds nothing."""
        return self._probe[0]

    @property
    def answer_header(self) -> str:
        """The header of an answer, for templates that have no generation prompt although answers have a header."""
        return self._probe[1]

    @cached_property
    def turn_ends(self) -> re.Pattern[str]:
        """Matches a token that ends a turn: those the tokenizer names, and the first added token after an answer."""
        added = self.inner.added_tokens_decoder
        ends = {added[token].content for token in self.tokenizer.turn_end_ids if token in added}
        if found := self.control_tokens.search(self._probe[2]):
            ends.add(found.group())
        longest_first = sorted(ends, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def require_readable(tokenizer: Tokenizer, source: str) -> None:
    """Raises UserError when the chat template has a fault of syntax. source: where it comes from, for the message."""
    from jinja2 import TemplateSyntaxError

    if tokenizer.chat_template is None:
        return
    try:
        ChatTemplate(tokenizer).render([{"role": "user", "content": "Who?"}])
    except TemplateRefusal as refusal:
        fault = refusal.__cause__
        if isinstance(fault, TemplateSyntaxError):
            raise UserError(
                f"model.chat_template: {source}, line {fault.lineno} of the template: {fault.message}. Mend it, or "
                "name another Jinja file."
            ) from refusal


def template_messages(conversation: Conversation) -> TemplateMessages:
    """The messages as the template gets them."""
    return [message.for_template() for message in conversation.messages]


def _words(error: Exception) -> str:
    words = str(error).strip() or type(error).__name__
    return words if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: {words}"
