"""Tokens into text as they come, cut only between whole characters. Used by `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "�"


class TextStream:
    """Turns ids into text piece by piece: the pieces joined are the text of all ids together.

    A token may end in the middle of a character (UTF-8 bytes of byte-level vocabularies), so what decodes to an
    unfinished character waits for the next tokens. Decoding starts a little before the new tokens, for vocabularies in
    which a token's leading space depends on what stands before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # where decoding begins
        self._said = 0  # ids before this one have been given out

    def add(self, token: int) -> str:
        """What can be said now that this token has come; may be empty."""
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith(_BROKEN):
            return ""
        self._start, self._said = self._said, len(self._ids)
        return text

    def end(self) -> str:
        """What was held back, as it is."""
        text = self._new_text()
        self._start = self._said = len(self._ids)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._start : self._said])
        return self._decode(self._ids[self._start :])[len(before) :]
