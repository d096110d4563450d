"""Where each turn of a conversation lies in the text that the chat template made of it. Used by chat.

A rendered prefix of a conversation is not always a prefix of the rendered whole (Qwen3 drops the reasoning of earlier
turns), templates strip contents, and a user can type what looks like a header. So the whole conversation is rendered a
second time with a private-use character in place of each content: what stands between them is the template's own text.
That skeleton serves every conversation of the same form; it is believed for a text only when the skeleton with the
contents put back is exactly that text. Where it is not (templates that look into contents), each turn is found as the
difference that replacing its content alone makes.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from podtune.data.rows import Conversation, Message
from podtune.data.templates import (
    FIRST_SENTINEL,
    SENTINELS,
    ChatTemplate,
    TemplateMessages,
    TemplateRefusal,
    template_messages,
)

CONTENT, REASONING, FIRST_TOOL_NAME = 0, 1, 2
MAX_SKELETONS = 4096

Span = tuple[int, int]
_Anchor = tuple[int, int]  # a piece of the skeleton and an offset in it


class LostTurn(Exception):
    """A turn cannot be found in the text."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model says in one message: spans of characters, from after the role header to the end of the token that
    ends the turn. ended: such a token is there."""

    message: int
    spans: tuple[Span, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns found, by message; the (message, part) that the template left out; the messages whose content it has
    changed by more than white space."""

    turns: dict[int, Turn]
    left_out: tuple[tuple[int, int], ...]
    changed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """pieces[k] stands before slot k; a slot is the part of a message; spans of turns are pairs of anchors."""

    pieces: tuple[str, ...]
    slots: tuple[tuple[int, int], ...]
    turns: dict[int, tuple[tuple[tuple[_Anchor, _Anchor], ...], bool]]
    left_out: tuple[tuple[int, int], ...]


class TurnFinder:
    """Finds turns in texts of one chat template; remembers the skeletons it has made."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._skeletons: dict[object, _Skeleton | None] = {}
        self._lost_tools: dict[object, tuple[int, ...]] = {}
        self._template_text = str(template.source)

    def find(self, conversation: Conversation, text: str) -> Turns:
        """The turns of the assistant, and of every message with a `train` of its own. Raises LostTurn."""
        key = self._form(conversation)
        known = key in self._skeletons
        skeleton = self._skeletons[key] if known else self._remember(key, conversation)
        starts = _match(skeleton, conversation, text) if skeleton else None
        if starts is None and known and skeleton and self.template.uses_clock:  # midnight may have passed
            skeleton = self._remember(key, conversation)
            starts = _match(skeleton, conversation, text) if skeleton else None
        if skeleton is None or starts is None:
            return self._find_by_difference(conversation, text)
        turns: dict[int, Turn] = {}
        for message, (spans, ended) in skeleton.turns.items():
            placed = tuple((starts[a] + b, starts[c] + d) for (a, b), (c, d) in spans)
            turns[message] = Turn(message, placed, ended)
        return Turns(turns, skeleton.left_out)

    def lost_tools(self, conversation: Conversation) -> tuple[int, ...]:
        """The tools, by place, that the template leaves out of this conversation."""
        if not conversation.tools:
            return ()
        key = self._form(conversation)
        if key not in self._lost_tools:
            if len(self._lost_tools) >= MAX_SKELETONS:
                self._lost_tools.pop(next(iter(self._lost_tools)))
            try:
                lost = self.template.lost_tools(template_messages(conversation), conversation.tools)
            except TemplateRefusal:  # without one of them the template writes nothing: it looks at that one
                lost = ()
            self._lost_tools[key] = lost
        return self._lost_tools[key]

    def _form(self, conversation: Conversation) -> object:
        """All that the skeleton may depend on, contents apart."""
        messages = tuple(
            (message.role, message.content is None, message.reasoning is None, message.train)
            if not (message.tool_calls or message.name or message.tool_call_id or message.extra)
            else (message.role, message.content is None, message.reasoning is None, message.train, self._rest(message))
            for message in conversation.messages
        )
        return (messages, json.dumps(conversation.tools)) if conversation.tools else messages

    def _rest(self, message: Message) -> str:
        extra = {key: value for key, value in message.extra.items() if key in self._template_text}
        return json.dumps([message.tool_calls, message.name, message.tool_call_id, extra], default=str)

    def _remember(self, key: object, conversation: Conversation) -> _Skeleton | None:
        if len(self._skeletons) >= MAX_SKELETONS:
            self._skeletons.pop(next(iter(self._skeletons)))
        try:
            skeleton = self._make_skeleton(conversation)
        except (TemplateRefusal, LostTurn):
            skeleton = None
        self._skeletons[key] = skeleton
        return skeleton

    def _make_skeleton(self, conversation: Conversation) -> _Skeleton:
        parts = [(index, part) for index, message in enumerate(conversation.messages) for part in _parts(message)]
        sentinels = {part: chr(FIRST_SENTINEL + at) for at, part in enumerate(parts)}
        messages = [
            _replaced(message.for_template(), {part: sentinels[index, part] for part in _parts(message)})
            for index, message in enumerate(conversation.messages)
        ]
        whole = self.template.render(messages, conversation.tools)
        found = [(match.start(), ord(match.group()) - FIRST_SENTINEL) for match in SENTINELS.finditer(whole)]
        if any(at >= len(parts) for _, at in found):
            raise LostTurn("a private-use character stands in the template or in a tool")
        slots = [parts[at] for _, at in found]
        regions = _regions([(position, position + 1, parts[at][0]) for position, at in found])
        edges = [0, *(edge for position, _ in found for edge in (position, position + 1)), len(whole)]
        pieces = [whole[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]

        def anchor(position: int) -> _Anchor:
            piece = sum(1 for slot, _ in found if slot < position)
            return piece, position - edges[2 * piece]

        turns: dict[int, tuple[tuple[tuple[_Anchor, _Anchor], ...], bool]] = {}
        for turn in self._turns(conversation, messages, whole, regions):
            turns[turn.message] = (tuple((anchor(start), anchor(end)) for start, end in turn.spans), turn.ended)
        left_out = tuple(part for part in parts if part not in slots)
        return _Skeleton(tuple(pieces), tuple(slots), turns, left_out)

    def _find_by_difference(self, conversation: Conversation, text: str) -> Turns:
        messages = template_messages(conversation)
        used = set(text)
        sentinel = next(chr(code) for code in range(FIRST_SENTINEL, 0xFFFFE) if chr(code) not in used)
        found: list[tuple[int, int, int]] = []
        left_out: list[tuple[int, int]] = []
        for index, message in enumerate(conversation.messages):
            regions = [
                self._difference(conversation, messages, (index, part), sentinel, text) for part in _parts(message)
            ]
            left_out += [(index, part) for part, region in zip(_parts(message), regions, strict=True) if region is None]
            there = [region for region in regions if region is not None]
            if there:
                found.append((min(start for start, _ in there), max(end for _, end in there), index))
        found.sort()
        if any(end > start for (_, end, _), (start, _, _) in pairwise(found)):
            raise LostTurn("the template mixes the contents of different messages")
        turns = self._turns(conversation, messages, text, {index: (start, end) for start, end, index in found})
        changed = tuple(
            index
            for start, end, index in found
            if not any(form in text[start:end] for form in _forms(conversation.messages[index], CONTENT))
        )
        return Turns({turn.message: turn for turn in turns}, tuple(left_out), changed)

    def _difference(
        self, conversation: Conversation, messages: TemplateMessages, at: tuple[int, int], sentinel: str, text: str
    ) -> Span | None:
        """The span of `text` that changes with one part of one message; None when the template leaves it out."""
        index, part = at
        changed = [*messages]
        changed[index] = _replaced(messages[index], {part: sentinel})
        try:
            other = self.template.render(changed, conversation.tools)
        except TemplateRefusal as refusal:
            raise LostTurn(f"the template depends on the content of message {index + 1}") from refusal
        if sentinel not in other:
            return None
        start = _common_prefix(text, other)
        tail = _common_prefix(text[start:][::-1], other[start:][::-1])
        return start, len(text) - tail

    def _turns(
        self, conversation: Conversation, messages: TemplateMessages, whole: str, regions: dict[int, Span]
    ) -> Iterator[Turn]:
        """The turns in `whole`, given where the contents of each message lie."""
        in_order = sorted(regions.items(), key=lambda item: item[1])
        marked: list[Span] | None = None
        for place, (index, (start, end)) in enumerate(in_order):
            message = conversation.messages[index]
            if message.role != "assistant" and message.train is None:
                continue
            before = in_order[place - 1][1][1] if place else 0
            after = in_order[place + 1][1][0] if place + 1 < len(in_order) else len(whole)
            if message.role == "assistant":
                start = self._start(conversation, messages, whole, (index, before, start))
            turn_end = self.template.turn_ends.search(whole, end, after)
            if turn_end:
                end = turn_end.end()
            elif message.role == "assistant":
                end = self._unmarked_end(conversation, messages, whole, (index, end, after))
            spans = ((start, end),)
            if message.role == "assistant" and self.template.has_generation(conversation.tools):
                if marked is None:
                    marked = self.template.generation_spans(messages, conversation.tools)
                spans = _within(marked, (start, end), regions[index])
            yield Turn(index, spans, turn_end is not None)

    def _start(
        self, conversation: Conversation, messages: TemplateMessages, whole: str, at: tuple[int, int, int]
    ) -> int:
        """Where the model begins to speak: after the text that asks it to. at: the message, where the contents before
        it end, where its own begin."""
        index, before, content = at
        asks, header = self.template.generation_prompt, self.template.answer_header
        for prompt, begin in self._prompts(conversation, messages, index, before):
            common = _common_prefix(prompt, whole[begin:content])
            asked = common > len(prompt) - len(asks) if asks else common == len(prompt)
            if asked and begin + common >= before:
                start = begin + common
                return min(start + (len(header) if whole.startswith(header, start) else 0), content)
        wanted = asks or header
        for length in range(len(wanted), 0, -1):
            found = whole.rfind(wanted[:length], before, content)
            if found >= 0 and wanted[:length].strip():
                return found + length
        return content

    def _prompts(
        self, conversation: Conversation, messages: TemplateMessages, index: int, before: int
    ) -> Iterator[tuple[str, int]]:
        """Texts that ask for message `index`, and where in the whole each should begin: the rendered messages before
        it; and, for templates whose whole does not begin with that, what they end with after the last content."""
        if not index:
            return
        with suppress(TemplateRefusal):
            yield self.template.render(messages[:index], conversation.tools, prompt=True), 0
        sentinel = chr(FIRST_SENTINEL)
        blank = [
            _replaced(message.for_template(), dict.fromkeys(_parts(message), sentinel))
            for message in conversation.messages[:index]
        ]
        with suppress(TemplateRefusal):
            prompt = self.template.render(blank, conversation.tools, prompt=True)
            yield prompt[prompt.rfind(sentinel) + 1 :], before

    def _unmarked_end(
        self, conversation: Conversation, messages: TemplateMessages, whole: str, at: tuple[int, int, int]
    ) -> int:
        """Where a turn ends that no token ends: with the last of its own text, as after a tool call."""
        index, end, after = at
        try:
            until = self.template.render(messages[: index + 1], conversation.tools)
        except TemplateRefusal:
            return end
        whole_until = len(until.rstrip())
        return whole_until if whole.startswith(until.rstrip()) and end <= whole_until <= after else end


def _parts(message: Message) -> list[int]:
    """The parts of a message that have a text of their own. Arguments of tool calls stay in the skeleton: templates
    write them in many ways, and the name stands right beside them."""
    parts = [] if message.content is None else [CONTENT]
    if message.reasoning is not None:
        parts.append(REASONING)
    return parts + [FIRST_TOOL_NAME + at for at in range(len(message.tool_calls))]


def _replaced(message: dict[str, Any], parts: dict[int, str]) -> dict[str, Any]:
    """The message with other texts for these parts."""
    message = {**message}
    calls = [*message.get("tool_calls", ())]
    for part, text in parts.items():
        if part == CONTENT:
            message["content"] = text
        elif part == REASONING:
            message["reasoning_content"] = text
        else:
            call = calls[part - FIRST_TOOL_NAME]
            calls[part - FIRST_TOOL_NAME] = {**call, "function": {**call["function"], "name": text}}
    if calls:
        message["tool_calls"] = calls
    return message


def _regions(found: Sequence[tuple[int, int, int]]) -> dict[int, Span]:
    """From the first to the last place of each message. Raises LostTurn when another message stands in between."""
    regions: dict[int, Span] = {}
    last: int | None = None
    for start, end, message in found:
        if message in regions and message != last:
            raise LostTurn("the template repeats a message")
        regions[message] = (regions[message][0], end) if message in regions else (start, end)
        last = message
    return regions


def _within(marked: Sequence[Span], turn: Span, content: Span) -> tuple[Span, ...]:
    """The {% generation %} spans that lie in a turn, without header and trailing newline, and with the token that ends
    the turn when the words before it are marked to their end."""
    spans = [(max(start, turn[0]), min(end, turn[1])) for start, end in marked if start < turn[1] and end > turn[0]]
    if spans and spans[-1][1] >= content[1]:
        spans[-1] = (spans[-1][0], turn[1])
    return tuple(spans)


def _match(skeleton: _Skeleton, conversation: Conversation, text: str) -> list[int] | None:
    """Where each piece of the skeleton begins in `text`; None when the text is not the skeleton with its contents."""
    pieces, slots = skeleton.pieces, skeleton.slots
    if not text.startswith(pieces[0]):
        return None
    starts = [0]
    at = len(pieces[0])
    for piece, (index, part) in zip(pieces[1:], slots, strict=True):
        for value in _forms(conversation.messages[index], part):
            end = at + len(value)
            if text.startswith(value, at) and text.startswith(piece, end):
                break
        else:
            return None
        starts.append(end)
        at = end + len(piece)
    return starts if at == len(text) else None


def _forms(message: Message, part: int) -> Iterator[str]:
    """The ways in which templates write a text: as it is, stripped, within JSON."""
    if part >= FIRST_TOOL_NAME:
        yield cast(str, message.tool_calls[part - FIRST_TOOL_NAME]["function"]["name"])
        return
    value = (message.content if part == CONTENT else message.reasoning) or ""
    yield value
    for stripped in (value.strip(), value.strip("\n"), value.rstrip(), value.lstrip(), value.rstrip("\n")):
        if stripped != value:
            yield stripped
    if (left := value.lstrip("\n")) != value:
        yield left
    if (escaped := json.dumps(value, ensure_ascii=False)[1:-1]) != value:
        yield escaped


def _common_prefix(one: str, other: str) -> int:
    """How many characters two texts share at their start, by halving: comparing slices is fast."""
    same, different = 0, min(len(one), len(other)) + 1
    while different - same > 1:
        middle = (same + different) // 2
        same, different = (middle, different) if one[same:middle] == other[same:middle] else (same, middle)
    return same
