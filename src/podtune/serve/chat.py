"""A conversation: its turns, the commands that change it, and the loop over lines that are typed or piped in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from podtune.config.errors import Interrupted, UserError
from podtune.serve.generate import Generator
from podtune.serve.prompts import chat_prompt, prompt_ids, takes_chats
from podtune.serve.sampling import Sampling

HELP = """\
/reset          forget the conversation
/system TEXT    say how to behave, and forget the conversation; without TEXT: no system message
/quit           leave (so does Ctrl-D)
Ctrl-C          stop the answer; twice: leave"""


@runtime_checkable
class Reader(Protocol):
    """Where lines come from, such as sys.stdin."""

    def readline(self) -> str: ...
    def isatty(self) -> bool: ...


@runtime_checkable
class Writer(Protocol):
    """Where answers go, such as sys.stdout."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


@dataclass
class Conversation:
    """What has been said. form: what the model was trained on (serve.prompts.takes_chats). Where that is no chat, each
    text is one to go on from, and nothing is remembered."""

    generator: Generator
    max_new_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None
    form: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def is_chat(self) -> bool:
        return takes_chats(self.generator.tokenizer, self.form)

    def reset(self) -> None:
        self.turns.clear()

    def reply(self, text: str) -> Iterator[str]:
        """The answer, piece by piece; remembered as far as it was taken. Raises UserError when there is no room."""
        asked = {"role": "user", "content": text}
        if self.is_chat:
            system = [{"role": "system", "content": self.system}] if self.system else []
            ids = chat_prompt(self.generator.tokenizer, [*system, *self.turns, asked])
        else:
            ids = prompt_ids(self.generator.tokenizer, text, self.form)
        context = self.generator.config.context_length
        room = min(self.max_new_tokens, context - len(ids))
        if room < 1:
            raise UserError(
                f"The conversation has {len(ids):,} tokens, and the model's context is {context:,}. /reset begins anew."
            )
        return self._take(asked, ids, room)

    def _take(self, asked: dict[str, str], ids: list[int], room: int) -> Iterator[str]:
        said: list[str] = []
        try:
            for piece in self.generator.pieces(ids, max_new_tokens=room, sampling=self.sampling):
                said.append(piece)
                yield piece
        finally:
            if self.is_chat:
                self.turns += [asked, {"role": "assistant", "content": "".join(said)}]


def talk(conversation: Conversation, *, source: Reader, out: Writer) -> None:
    """Answers line after line until there are no more. On a terminal it prompts, and Ctrl-C stops an answer.

    Raises Interrupted when Ctrl-C is pressed twice.
    """
    interactive = source.isatty() and out.isatty()
    if interactive:
        import readline  # noqa: F401  gives input() editing and history

        print(f"{HELP}\n", file=out)
    stopped = False
    while True:
        try:
            line = input("> ") if interactive else source.readline()
            if not interactive and not line:
                return
        except EOFError:
            print(file=out)
            return
        except KeyboardInterrupt:
            if stopped or not interactive:
                raise Interrupted("interrupted") from None
            stopped = True
            print("\n(Ctrl-C again leaves)", file=out)
            continue
        if not line.strip():
            continue
        if line.startswith("/"):
            if not _command(conversation, line.strip(), out):
                return
            continue
        stopped = not _say_reply(conversation, line.rstrip("\n"), out, interactive=interactive)


def _command(conversation: Conversation, line: str, out: Writer) -> bool:
    """Does what a line beginning with / says. False: leave."""
    name, _, text = line.partition(" ")
    if name in ("/quit", "/exit"):
        return False
    if name == "/reset":
        conversation.reset()
        print("(forgotten)", file=out)
    elif name == "/system" and not conversation.is_chat:
        print("(plain text is continued, which has no system message)", file=out)
    elif name == "/system":
        conversation.system = text.strip() or None
        conversation.reset()
        print(f"(system: {conversation.system or 'none'})", file=out)
    else:
        print(HELP, file=out)
    return True


def _say_reply(conversation: Conversation, text: str, out: Writer, *, interactive: bool) -> bool:
    """Streams the answer. False when it was stopped by Ctrl-C."""
    try:
        pieces = conversation.reply(text)
        try:
            for piece in pieces:
                out.write(piece)
                out.flush()
        except KeyboardInterrupt:
            if not interactive:
                raise Interrupted("interrupted") from None
            print(" (stopped; Ctrl-C again leaves)", file=out, flush=True)
            return False
        finally:
            pieces.close()  # type: ignore[attr-defined]
        print(file=out, flush=True)
    except UserError as error:
        if not interactive:
            raise
        print(f"({error})", file=out)
    return True
