"""Texts to ids, quickly: exactly what the tokenizer gives, and which ids a span of characters touches. Used by chat.

The tokenizers library works through every word anew. Where a tokenizer is byte-level BPE (GPT-2, Llama 3, Qwen), a text
is split by the tokenizer's own pattern and each word's ids are looked up; a word that is new goes through the
tokenizer's own model. The pattern is run here by another regular expression engine, so a text is taken this way only
when all its characters are of kinds that every version of Unicode agrees on; all others go through the library. Tests
hold the two equal on genuine tokenizers, and one text in CHECK_EVERY is tokenised both ways while data is prepared.
"""

import re
import unicodedata
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Int32, Int64

from podtune.config.errors import RunFailure
from podtune.data.masks import mask_spans
from podtune.data.word_patterns import BYTE_LEVEL, DIGITS_BYTE_LEVEL, Splits, splits_of

CHECK_EVERY = 64
MAX_WORDS = 1 << 20
_KEPT_LETTERS = 64  # of longer ones, such as a whole text of a script without spaces, none is met again

# Patterns whose words hold a space at their start alone, unless white space stands beside it. Between two such spaces a
# text can be looked up whole, without the pattern.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_APART_AT_SPACES = {BYTE_LEVEL, DIGITS_BYTE_LEVEL, _LLAMA3, _QWEN}
_WHITE = " \n\t\r"  # of a settled text
_ASCII_TEXT = bytes([*b"\t\n\r", *range(32, 127)])
# Letters, digits, white space and signs that have been what they are since Unicode 3: Latin, Greek, Cyrillic, kana, Han
# and Hangul letters; quotes, dashes and other signs; emoji, which are neither letter nor number nor space to anyone.
_UNSETTLED = re.compile(
    "[^\t\n\r -~¡£§«°±·»¿À-ſ\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9ЁА-яё\u2010-\u2015‘-‟†-•…€™←-↓\u200d\ufe0f"
    "、。「」ぁ-ゖァ-ヺ一-龥가-힣！，．：？｜▁\U0001f300-\U0001f64f\U0001f680-\U0001f6ff\U0001f900-\U0001f9ff]|ſ"
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a text. ends: where each token ends in the UTF-8 bytes of the text; None where only the library's
    offsets, in characters, tell (tokenizers that are not byte-level)."""

    text: str
    ids: Int32[np.ndarray, "n"]
    ends: Int64[np.ndarray, "n"] | None
    offsets: Sequence[tuple[int, int]] = ()

    def mask(self, spans: Sequence[tuple[int, int]]) -> Bool[np.ndarray, "n"]:
        """The tokens that hold a character of any span of characters (or a part of one)."""
        if self.ends is None:
            return mask_spans(spans, self.offsets, len(self.ids))
        mask = np.zeros(len(self.ids), np.bool_)
        ascii_only = self.text.isascii()
        for start, end in spans:
            if end > start:
                first, last = (start, end) if ascii_only else (len(self.text[:at].encode()) for at in (start, end))
                from_token = int(self.ends.searchsorted(first, "right"))
                mask[from_token : int(self.ends.searchsorted(last, "left")) + 1] = True
        return mask

    def straddles(self, at: int) -> bool:
        """Whether a token holds the characters on both sides of a place."""
        if self.ends is None:
            return any(start < at < end for start, end in self.offsets)
        place = len(self.text[:at].encode())
        return 0 < place < len(self.text.encode()) and place not in self.ends


class TextEncoder:
    """Encodes texts with the ids of one tokenizer. inner: transformers' fast tokenizer."""

    def __init__(self, inner: Any) -> None:
        self.backend: Any = inner.backend_tokenizer
        self.byte_lengths = _byte_lengths(self.backend)
        self._words = _Words.of(self.backend) if self.byte_lengths is not None else None
        with_special, without = (self._library(["a"], special=special)[0].ids for special in (True, False))
        places = [at for at in range(len(with_special)) if with_special[at : at + len(without)] == without]
        self.special_prefix: list[int] = with_special[: places[0]] if places else []
        self.special_suffix: list[int] = with_special[places[0] + len(without) :] if places else []
        if not places:
            self._words = self.byte_lengths = None
        self._seen = 0

    def encode(self, texts: Sequence[str], *, special: bool) -> list[Encoded]:
        """The ids of each text. special: with the BOS or EOS that the tokenizer puts round a text; `ends` and `offsets`
        are of the text alone, and so is the mask: see around()."""
        done: list[Encoded | None] = [None] * len(texts)
        checked: list[int] = []
        for at, text in enumerate(texts):
            done[at] = self._from_words(text)
            if done[at] is not None:
                checked += [at] if self._seen % CHECK_EVERY == 0 else []
                self._seen += 1
        rest = [at for at, encoded in enumerate(done) if encoded is None]
        for at, encoding in zip(rest, self._library([texts[at] for at in rest], special=False), strict=True):
            done[at] = self._from_library(texts[at], encoding)
        for at, encoding in zip(checked, self._library([texts[at] for at in checked], special=False), strict=True):
            if encoding.ids != cast(Encoded, done[at]).ids.tolist():
                raise RunFailure(
                    f"podtune splits a text otherwise than its tokenizer does ({texts[at][:80]!r}...). This is a fault "
                    "of podtune: please report it with the name of the model."
                )
        return [cast(Encoded, encoded) for encoded in done]

    def _library(self, texts: Sequence[str], *, special: bool) -> list[Any]:
        """As the library encodes without padding, without truncation, and with control tokens read as such."""
        if not texts:
            return []
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = False
        encode = self.backend.encode_batch if self.byte_lengths is None else self.backend.encode_batch_fast
        return encode(list(texts), add_special_tokens=special)

    def _from_library(self, text: str, encoding: Any) -> Encoded:
        ids = np.array(encoding.ids, np.int32)
        if (ends := self._ends(text, ids)) is not None:
            return Encoded(text, ids, ends)
        if self.byte_lengths is not None:  # a normaliser has changed the text: only offsets tell
            encoding = self.backend.encode(text, add_special_tokens=False)
        return Encoded(text, ids, None, encoding.offsets)

    def _from_words(self, text: str) -> Encoded | None:
        if self._words is None or not _is_settled(text):
            return None
        ids = self._words.ids(text)
        ends = self._ends(text, ids)
        return None if ends is None else Encoded(text, ids, ends)

    def _ends(self, text: str, ids: Int32[np.ndarray, "n"]) -> Int64[np.ndarray, "n"] | None:
        """Where tokens end, by their lengths; None when these do not add up to the text."""
        if self.byte_lengths is None:
            return None
        ends: Int64[np.ndarray, "n"] = np.cumsum(self.byte_lengths[ids])
        total = int(ends[-1]) if len(ends) else 0
        return ends if total == (len(text) if text.isascii() else len(text.encode())) else None


def _is_settled(text: str) -> bool:
    """Whether every engine splits this text alike, and a normaliser to NFC leaves it as it is."""
    if text.isascii():
        return not text.encode().translate(None, _ASCII_TEXT)
    return not _UNSETTLED.search(text) and unicodedata.is_normalized("NFC", text)


class _Words(dict[str, tuple[int, ...]]):
    """The ids of words seen, and how a text is split into words."""

    def __init__(self, backend: Any, splits: Splits) -> None:
        super().__init__()
        self._model = backend.model
        self._splits, self._ascii_splits = splits.any_text, splits.ascii_text
        self._letters = _byte_letters()
        apart = len(splits.patterns) == 1 and splits.patterns[0] in _APART_AT_SPACES
        self._inner, self._outer = (_Inner(self.split), _Outer(self.split)) if apart else (None, None)
        added = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._control = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if added else None

    @classmethod
    def of(cls, backend: Any) -> "_Words | None":
        """None for tokenizers that have more to them than words looked up."""
        splits = splits_of(backend)
        flags = ("single_word", "lstrip", "rstrip")
        added = backend.get_added_tokens_decoder().values()
        plain = all(not any(getattr(token, flag) for flag in flags) for token in added)
        model = backend.model
        whole = type(model).__name__ == "BPE" and not model.dropout and not model.byte_fallback
        affixes = model.continuing_subword_prefix or model.end_of_word_suffix if whole else True
        one_kind = len({token.normalized for token in added}) <= 1
        return cls(backend, splits) if splits and plain and whole and not affixes and one_kind else None

    def ids(self, text: str) -> Int32[np.ndarray, "n"]:
        for cache in (self, self._inner, self._outer):
            if cache is not None and len(cache) > MAX_WORDS:
                cache.clear()
        found: list[bytes] = []
        pieces = self._control.split(text) if self._control else [text]
        for at, piece in enumerate(pieces):
            if at % 2:
                found.append(np.int32(self._added[piece]).tobytes())
            else:
                found += self._by_units(piece) or [self.split(piece)]
        return np.frombuffer(b"".join(found), np.int32).copy()

    def _by_units(self, text: str) -> list[bytes] | None:
        """The ids of a text, as int32, looked up from space to space; None where that is not how it splits."""
        if self._inner is None or self._outer is None:
            return None
        first, *units = text.split(" ")
        if not units:
            return [self._outer[text]]
        last = units.pop()
        if not last or last[0] in _WHITE or (first and first[-1] in _WHITE):
            return None
        try:
            return [self._outer[first], *map(self._inner.__getitem__, units), self._outer[f" {last}"]]
        except _SpacesTogether:
            return None

    def split(self, text: str) -> bytes:
        """The ids of a text without control tokens, word by word, as int32."""
        first, *others = self._ascii_splits if text.isascii() else self._splits
        words: list[str] = first.findall(text)
        for split in others:
            words = list(chain.from_iterable(map(split.findall, words)))
        return array("i", chain.from_iterable(map(self.__getitem__, words))).tobytes()

    def __missing__(self, word: str) -> tuple[int, ...]:
        letters = "".join([self._letters[byte] for byte in word.encode()])
        ids = tuple(token.id for token in self._model.tokenize(letters))
        if len(word) <= _KEPT_LETTERS:
            self[word] = ids
        return ids


class _Inner(dict[str, bytes]):
    """The ids, as int32, of a space and what follows it up to the next, the key."""

    def __init__(self, split: Callable[[str], bytes]) -> None:
        super().__init__()
        self._split = split

    def __missing__(self, unit: str) -> bytes:
        if not unit or unit[0] in _WHITE or unit[-1] in _WHITE:
            raise _SpacesTogether
        ids = self._split(f" {unit}")
        if len(unit) <= _KEPT_LETTERS:
            self[unit] = ids
        return ids


class _Outer(dict[str, bytes]):
    """The ids, as int32, of what a text begins or ends with: the key."""

    def __init__(self, split: Callable[[str], bytes]) -> None:
        super().__init__()
        self._split = split

    def __missing__(self, unit: str) -> bytes:
        ids = self._split(unit)
        if len(unit) <= _KEPT_LETTERS:
            self[unit] = ids
        return ids


class _SpacesTogether(Exception):
    """White space stands beside a space."""


def _byte_lengths(backend: Any) -> Int64[np.ndarray, "vocabulary"] | None:
    """The UTF-8 bytes of each token of a byte-level vocabulary, whose letters stand for a byte each; else None."""
    if backend.pre_tokenizer is None or '"ByteLevel"' not in backend.pre_tokenizer.__getstate__().decode():
        return None
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values(), default=-1) + 1, np.int64)
    for token, number in vocabulary.items():
        lengths[number] = len(token)
    for number, token in added.items():
        lengths[number] = len(token.content.encode())
    return lengths


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: printable bytes for themselves, the others for
    the letters from U+0100 on (GPT-2, encoder.py)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
