"""How a byte-level tokenizer splits a text into words, as patterns that Python's engines run. Used by tokenise.

The patterns are written for Oniguruma, as Ruby reads them. One that means another thing to Python, or nothing (`\\h`,
`[[:alpha:]]`, `&&`, `^`), is not run here: the library splits the texts of such a tokenizer.
"""

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import regex

# What ByteLevel splits by when it brings its own pattern (tokenizers, pre_tokenizers/byte_level.rs).
BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same behind Digits: a digit stands alone, and ends white space as the end of a text does.
DIGITS_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_DIGITS_THEN_BYTE_LEVEL = [("Digits", True, None), ("ByteLevel", None, True)]
_ASCII_CLASSES = {
    "L": "a-zA-Z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
    "N": "0-9",
    "Nd": "0-9",
}

# All that a pattern may be made of to mean one thing to Oniguruma and to Python, for texts that tokenise settles. Left
# out: groups that capture (findall gives them alone), sets within sets, anchors, which Ruby takes line by line, and
# what follows {2}: ? and + are other things there.
_ESCAPE = (
    r"\\(?:[pP]\{(?:L[ulmot]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|Han|Hiragana|Katakana|Hangul)\}"
    r"|[sSdDrnt]|[!-/:-@\[-`{-~])"
)
_SET = rf"\[\^?(?:{_ESCAPE}|(?!--|~~|&&|\|\|)[^\\\[\]])+\]"
_GROUP = r"\((?:\?(?:i:|:|=|!|<=|<!|>))"
_TIMES = r"[*+?][?+]?|\{\d+(?:,\d*)?\}(?![?+*{])"
_LITERAL = r"[^\\\[\](){}*+?^$]|\)"
_COMMON = re.compile(rf"(?:{_ESCAPE}|{_SET}|{_GROUP}|{_TIMES}|{_LITERAL})*")


@dataclass(frozen=True)
class Splits:
    """Patterns whose matches, one after the other, are the words; compiled for any text, and for one of ASCII alone."""

    patterns: tuple[str, ...]
    any_text: Sequence[Any]
    ascii_text: Sequence[Any]


def splits_of(backend: Any) -> Splits | None:
    """How this tokenizer splits; None where only the library knows."""
    patterns = word_patterns(backend)
    if not patterns or not all(map(_COMMON.fullmatch, patterns)):
        return None
    ascii_only = [ascii_pattern(pattern) for pattern in patterns]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an engine warns of what it may one day read otherwise
        try:
            any_text = [regex.compile(pattern) for pattern in patterns]
            ascii_text = any_text if None in ascii_only else [re.compile(cast(str, part)) for part in ascii_only]
        except (regex.error, re.error, Warning):
            return None
    return Splits(tuple(patterns), any_text, ascii_text)


def ascii_pattern(pattern: str) -> str | None:
    """The pattern for texts of ASCII alone, in the language of `re`, which is several times as fast as `regex`; None
    where it names classes that are not known here."""
    out: list[str] = []
    within = False
    at = 0
    while at < len(pattern):
        if (found := re.compile(r"\\([pP])\{(\w+)\}").match(pattern, at)) is not None:
            letters = _ASCII_CLASSES.get(found[2])
            if letters is None or (within and found[1] == "P"):
                return None
            outside = f"[^{letters}]" if found[1] == "P" else f"[{letters}]" if letters else "(?!)"
            out.append(letters if within else outside)
            at = found.end()
            continue
        step = 2 if pattern[at] == "\\" else 1
        out.append(pattern[at : at + step])
        within = pattern[at] == "[" or (within and pattern[at] != "]")
        at += step
    return "".join(out)


def word_patterns(backend: Any) -> list[str] | None:
    """The patterns whose matches, one after the other, are the words; None for a tokenizer that splits otherwise.
    Every pattern must match all of a text, which the lengths of the tokens bear out."""
    normalizer = None if backend.normalizer is None else json.loads(backend.normalizer.__getstate__())
    if normalizer is not None and normalizer != {"type": "NFC"}:
        return None
    state = json.loads(backend.pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    if [
        (step["type"], step.get("individual_digits"), step.get("use_regex")) for step in steps
    ] == _DIGITS_THEN_BYTE_LEVEL:
        return None if steps[1]["add_prefix_space"] else [DIGITS_BYTE_LEVEL]
    patterns: list[str] = []
    for step in steps:
        if (
            step["type"] == "Split"
            and step["behavior"] == "Isolated"
            and not step["invert"]
            and "Regex" in step["pattern"]
        ):
            patterns.append(step["pattern"]["Regex"])
        elif step["type"] == "Digits" and step["individual_digits"]:
            patterns.append(r"\p{N}|\P{N}+")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"] and step is steps[-1]:
            patterns += [BYTE_LEVEL] if step["use_regex"] else []
        else:
            return None
    return patterns or None
