"""From rows to examples: the ids that the model will see, and which of them bear loss. `encode_rows` is what prepare
calls in its workers; `inspect` and tests call `encode_row`.

Ids of a chat are those of tokenizer.apply_chat_template, always. What is trained in it: see docs/data.md, "What is
trained". A plain prompt and its completion are tokenised as one text, with the special tokens that the tokenizer adds
by itself, and end with the end-of-text token, which is trained; so is a document, of which everything is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool

from podtune.config.rows import TrainOn
from podtune.data.rows import Completion, Conversation, Example, Message, Refused, RefusedKind, Row, Text, Tokens
from podtune.data.templates import ChatTemplate, TemplateRefusal, template_messages
from podtune.data.tokenise import Encoded, TextEncoder
from podtune.data.turns import CONTENT, FIRST_TOOL_NAME, REASONING, LostTurn, Span, TurnFinder, Turns
from podtune.hub.tokenizer import Tokenizer

NOTES = {  # after "1 row" and after "2 rows"
    "control_tokens": "with the text of a control token in a message, which the tokenizer reads as the token itself",
    "unusual_role": "with a role that is not a usual one (a slip?): its turn is given to the template, and not trained",
    "no_turn_end": "with a trained turn that no token ends, so the model does not learn to stop there",
    "content_left_out": "with text beside tool calls that the chat template leaves out",
    "content_changed": "with text that the chat template changes (reasoning taken out of an earlier answer, say)",
    "reasoning_left_out": "with reasoning that the chat template leaves out (of earlier turns alone, or of all)",
    "glued": "with no space or line break between prompt and completion, as all of this source; where one belongs "
    "there, begin each completion with it (or end each prompt so)",
    "border": "with a token that holds both the end of the prompt and the start of the completion; it is trained",
    "no_end_of_text": "without an end-of-text token, for the tokenizer has none",
}


# Those of OpenAI, Llama 3 (ipython), Cohere (chatbot), Gemma and Hugging Face's own templates.
_USUAL_ROLES = {
    "system", "developer", "user", "assistant", "tool", "function", "ipython", "chatbot", "model", "critic",
    "document", "documents", "context", "environment", "observation", "tool_response",
}  # fmt: skip


@dataclass(frozen=True)  # without slots: vars() of one goes to JSON
class Prompt:
    """What the model is asked in a row, and what the row answers. messages: up to there; empty when not a chat."""

    ids: list[int]
    text: str
    expected: str
    messages: list[dict[str, Any]]


def encode_row(row: Row, tokenizer: Tokenizer, train_on: TrainOn = "assistant") -> Example | Refused:
    """One row as tokens, with those that bear loss; Refused says why a row cannot be trained on."""
    return encode_rows([row], tokenizer, train_on)[0]


def encode_rows(rows: Sequence[Row], tokenizer: Tokenizer, train_on: TrainOn = "assistant") -> list[Example | Refused]:
    """Rows as tokens, in order. Much faster than one by one."""
    encoder = _encoder(tokenizer)
    drafts: list[_Draft | Example | Refused | None] = [None] * len(rows)
    chats: list[tuple[int, Conversation]] = []
    for index, row in enumerate(rows):
        if isinstance(row.value, Conversation):
            chats.append((index, row.value))
        else:
            drafts[index] = encoder.draft_plain(row, train_on)
    if chats and encoder.template.source is None:
        for index, _ in chats:
            drafts[index] = _refuse(rows[index], "template", _NO_TEMPLATE)
    elif chats:
        texts = encoder.template.render_all([conversation for _, conversation in chats])
        for (index, conversation), text in zip(chats, texts, strict=True):
            drafts[index] = encoder.draft_chat(rows[index], conversation, text, train_on)
    return encoder.finish(rows, drafts)


_NO_TEMPLATE = (
    "the tokenizer has no chat template, so a chat has no text. Give one (model: {source: ..., chat_template: FILE}) "
    "or use prompt/completion rows"
)


def is_glued(pair: Completion) -> bool:
    """Whether the prompt runs into its completion where the script would have a space between words."""
    border = pair.prompt[-1:] + pair.completion[:1]
    return len(border) == 2 and not any(letter.isspace() or letter >= _WITHOUT_SPACES for letter in border)


def prompt_of(row: Row, tokenizer: Tokenizer) -> Prompt | None:
    """The prompt of a row and its last answer, as at inference; None when there is nothing to ask or to answer."""
    encoder = _encoder(tokenizer)
    value = row.value
    if isinstance(value, Completion) and value.prompt and value.completion.strip():
        return Prompt(begun_ids(tokenizer, value.prompt), value.prompt, value.completion, [])
    if not isinstance(value, Conversation) or encoder.template.source is None:
        return None
    spoken = [i for i, m in enumerate(value.messages) if i and m.role == "assistant" and (m.content or "").strip()]
    if not spoken:
        return None
    messages = template_messages(value)[: spoken[-1]]
    try:
        text = encoder.template.render(messages, value.tools, prompt=True)
    except TemplateRefusal:
        return None
    ids = encoder.inner(text, add_special_tokens=False)["input_ids"]
    return Prompt(ids, text, value.messages[spoken[-1]].content or "", messages)


def begun_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that is to be gone on from, as rows of plain text begin: behind what the tokenizer puts before
    a text, and without what it puts after one."""
    texts = _encoder(tokenizer).texts
    return [*texts.special_prefix, *texts.encode([text], special=True)[0].ids.tolist()]


def trained_messages(conversation: Conversation, train_on: TrainOn) -> list[int]:
    """The messages whose turns are trained, `all` apart: by train_on, then by each message's own `train`."""
    messages = conversation.messages
    spoken = [i for i, m in enumerate(messages) if m.role == "assistant" and i >= conversation.prompt_messages]
    if train_on == "last":
        spoken = spoken[-1:]
    elif train_on == "completion" and spoken and not conversation.prompt_messages:
        asked = max((i for i in range(spoken[-1]) if messages[i].role == "user"), default=-1)
        spoken = [i for i in spoken if i > asked]
    chosen = {i for i in spoken if messages[i].train is not False} | {i for i, m in enumerate(messages) if m.train}
    return sorted(chosen)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A text to tokenise. trained: spans of characters that bear loss (None: all); but: spans that do not."""

    text: str
    chat: bool
    trained: Sequence[Span] | None
    but: Sequence[Span] = ()
    notes: tuple[str, ...] = ()
    border: int = -1


_WITHOUT_SPACES = "\u2e80"  # from here on stand the scripts of East Asia, which have none between words, and emoji
_NO_TOKEN = 2**62  # larger numbers do not fit where ids are held, and are no ids either

_ENCODERS: WeakKeyDictionary[Any, "_Encoder"] = WeakKeyDictionary()


def _encoder(tokenizer: Tokenizer) -> "_Encoder":
    """The encoder of this tokenizer, made anew when its template was changed."""
    encoder = _ENCODERS.get(tokenizer.inner)
    if encoder is None or encoder.template.source is not cast(Any, tokenizer.inner).chat_template:
        encoder = _ENCODERS[tokenizer.inner] = _Encoder(tokenizer)
    return encoder


class _Encoder:
    """What a tokenizer and its template need only once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.inner: Any = tokenizer.inner
        self.eos_id = tokenizer.eos_id
        self.template = ChatTemplate(tokenizer)
        self.finder = TurnFinder(self.template)
        self.texts = TextEncoder(self.inner)
        self.vocabulary = len(self.inner)

    def draft_chat(
        self, row: Row, conversation: Conversation, text: str | TemplateRefusal, train_on: TrainOn
    ) -> _Draft | Refused:
        if isinstance(text, TemplateRefusal):
            return _refuse(row, "template", f"the chat template refuses this conversation: {text}")
        chosen = trained_messages(conversation, train_on)
        if train_on != "all" and not chosen:
            return _refuse(row, "nothing_to_train", _why_nothing(conversation, train_on))
        try:
            turns = self.finder.find(conversation, text)
        except LostTurn as lost:
            return _refuse(row, "not_rendered", f"cannot tell which text is whose: {lost}")
        notes, refusal = self._look(row, conversation, turns)
        if refusal:
            return refusal
        if train_on == "all":
            but = [
                span
                for i, turn in turns.turns.items()
                if conversation.messages[i].train is False
                for span in turn.spans
            ]
            return _Draft(text, True, None, but, notes)
        said = [i for i in chosen if i in turns.turns]
        if all(_says_nothing(conversation, i) for i in said):
            return _refuse(row, "nothing_to_train", "what would be trained is empty")
        if not all(turns.turns[i].ended for i in said):
            notes = (*notes, "no_turn_end")
        return _Draft(text, True, [span for i in said for span in turns.turns[i].spans], (), notes)

    def _look(self, row: Row, conversation: Conversation, turns: Turns) -> tuple[tuple[str, ...], Refused | None]:
        """Notes on a conversation, and its refusal when the template loses what it should say."""
        notes: list[str] = []
        for index, part in turns.left_out:
            message = conversation.messages[index]
            if part == REASONING:
                if "reasoning_left_out" not in notes:
                    notes.append("reasoning_left_out")
            elif part == CONTENT and (not (message.content or "").strip() or message.tool_calls):
                if (message.content or "").strip() and "content_left_out" not in notes:
                    notes.append("content_left_out")
            else:
                what = "the tool calls" if part >= FIRST_TOOL_NAME else "the content"
                reason = (
                    f"the chat template leaves out {what} of message {index + 1} ({message.role}). "
                    "Use a template that renders it, or take it out of the data"
                )
                return (), _refuse(row, "not_rendered", reason)
        if lost := self.finder.lost_tools(conversation):
            tools = [
                cast(Any, conversation.tools[at].get("function") or {}).get("name") or f"tool {at + 1}" for at in lost
            ]
            reason = (
                f"the chat template leaves out what the row says of its tools ({', '.join(map(str, tools[:5]))}"
                f"{', ...' if len(tools) > 5 else ''}). Use a template that renders tools (model.chat_template), or "
                "leave the column out of the data"
            )
            return (), _refuse(row, "not_rendered", reason)
        if any(message.role not in _USUAL_ROLES for message in conversation.messages):
            notes.append("unusual_role")
        if turns.changed:
            notes.append("content_changed")
        if any(self._types_control_tokens(message) for message in conversation.messages):
            notes.append("control_tokens")
        return tuple(notes), None

    def _types_control_tokens(self, message: Message) -> bool:
        """An assistant may write control tokens, such as <think>, but not one that ends its turn."""
        if message.role == "assistant":
            return self.template.turn_ends.search(message.content or "") is not None
        return self._has_control_token(message.content)

    def _has_control_token(self, text: str | None) -> bool:
        return bool(text) and self.template.control_tokens.search(text) is not None

    def draft_plain(self, row: Row, train_on: TrainOn) -> _Draft | Example | Refused:
        value = row.value
        if isinstance(value, Tokens):
            return self._take_tokens(row, value)
        if isinstance(value, Completion):
            text = value.prompt + value.completion
            if not value.completion.strip():
                return _refuse(row, "nothing_to_train", "the completion is empty")
            spans, border = [(len(value.prompt), len(text))], len(value.prompt)
            spans = None if train_on == "all" else spans
        else:
            text = cast(Text, value).text
            if not text.strip():
                return _refuse(row, "nothing_to_train", "the text is empty")
            spans, border = None, -1
        notes = ("control_tokens",) if self._has_control_token(text) else ()
        if isinstance(value, Completion) and is_glued(value):
            notes = (*notes, "glued")
        return _Draft(text, False, spans, (), notes, border)

    def _take_tokens(self, row: Row, value: Tokens) -> Example | Refused:
        ids = np.array([min(number, _NO_TOKEN) for number in value.ids], np.int64)
        if not len(ids):
            return _refuse(row, "nothing_to_train", "it has no tokens")
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            wrong = int(ids[(ids < 0) | (ids >= self.vocabulary)][0])
            return _refuse(
                row, "invalid", f"token id {wrong} is not one of this tokenizer's {self.vocabulary}; "
                "the file was made with another tokenizer",
            )  # fmt: skip
        if value.mask is not None and len(value.mask) != len(ids):
            return _refuse(row, "invalid", f"it has {len(ids)} tokens and a mask of {len(value.mask)}")
        trained = np.ones(len(ids), np.bool_) if value.mask is None else np.array(value.mask, np.bool_)
        return _example(row, ids.astype(np.int32), trained, ())

    def finish(
        self, rows: Sequence[Row], drafts: Sequence[_Draft | Example | Refused | None]
    ) -> list[Example | Refused]:
        """Tokenises all drafts at once, chats and plain texts apart."""
        done: list[Example | Refused | None] = [None if isinstance(d, _Draft) else d for d in drafts]
        for chat in (True, False):
            batch = [(i, d) for i, d in enumerate(drafts) if isinstance(d, _Draft) and d.chat is chat]
            sound: list[tuple[int, _Draft]] = []
            for index, draft in batch:
                if (fault := _not_encodable(draft.text)) is not None:
                    done[index] = _refuse(rows[index], "invalid", fault)
                else:
                    sound.append((index, draft))
            if not sound:
                continue
            encodings = self.texts.encode([draft.text for _, draft in sound], special=not chat)
            for (index, draft), encoded in zip(sound, encodings, strict=True):
                finish = self._finish_chat if chat else self._finish_plain
                done[index] = finish(rows[index], draft, encoded)
        return cast(list[Example | Refused], done)

    def _finish_chat(self, row: Row, draft: _Draft, encoded: Encoded) -> Example | Refused:
        trained = ~encoded.mask(draft.but) if draft.trained is None else encoded.mask(draft.trained)
        return _example(row, encoded.ids, trained, draft.notes)

    def _finish_plain(self, row: Row, draft: _Draft, encoded: Encoded) -> Example | Refused:
        """With what the tokenizer puts round a text, and the end of the text where that does not hold it."""
        before, after, notes = self.texts.special_prefix, self.texts.special_suffix, draft.notes
        if self.eos_id is None:
            notes = (*notes, "no_end_of_text")
        elif not after or after[-1] != self.eos_id:
            ends_itself = not after and len(encoded.ids) and encoded.ids[-1] == self.eos_id
            after = after if ends_itself else [*after, self.eos_id]
        if draft.border >= 0 and encoded.straddles(draft.border):
            notes = (*notes, "border")
        ids = np.concatenate([np.array(before, np.int32), encoded.ids, np.array(after, np.int32)])
        trained = np.ones(len(ids), np.bool_)
        if draft.trained is not None:
            trained[: len(before)] = False
            trained[len(before) : len(ids) - len(after)] = encoded.mask(draft.trained)
        return _example(row, ids, trained, notes)


def _example(row: Row, ids: np.ndarray, trained: Bool[np.ndarray, "n"], notes: tuple[str, ...]) -> Example | Refused:
    trained[:1] = False  # nothing comes before it that could predict it
    if not trained.any():
        return _refuse(row, "nothing_to_train", "it has no trained token after its first token")
    return Example(ids, trained, row.source, row.number, notes)


def _refuse(row: Row, kind: RefusedKind, reason: str) -> Refused:
    return Refused(kind, reason, row.source, row.number)


def _says_nothing(conversation: Conversation, index: int) -> bool:
    message = conversation.messages[index]
    return not ((message.content or "").strip() or (message.reasoning or "").strip() or message.tool_calls)


def _why_nothing(conversation: Conversation, train_on: TrainOn) -> str:
    roles = ", ".join(dict.fromkeys(message.role for message in conversation.messages))
    if all(message.role != "assistant" for message in conversation.messages):
        lower = "; roles are written in lower case" if "assistant" in roles.lower() else ""
        return f"nothing to train: no message is the assistant's (roles: {roles}){lower}"
    return f"nothing to train: train_on is {train_on} and every turn that it names has train: false or is in the prompt"


def _not_encodable(text: str) -> str | None:
    """What keeps a text from being tokenised: half of a surrogate pair, as a cut emoji leaves behind."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate, \\u{ord(text[error.start]):04x}, which is no character (half an emoji, cut apart?)"
    return None
