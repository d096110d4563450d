"""Which tokens of a row bear loss: from spans of characters to tokens, and what cutting a row leaves. Used by chat and
prepare. Masks go by position, never by token id: padding and the end of a turn may be the same token."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from podtune.data.rows import Example, Refused

Offsets = Sequence[tuple[int, int]]


def mask_spans(spans: Sequence[tuple[int, int]], offsets: Offsets, tokens: int) -> Bool[np.ndarray, "tokens"]:
    """The tokens that hold a character of any span. A token that straddles the border of a span counts as inside: the
    model has to write its end. offsets: where each token begins and ends in the text, in order; tokens beyond them
    are not marked."""
    mask = np.zeros(tokens, np.bool_)
    for start, end in spans:
        if end > start:
            first, last = token_range((start, end), offsets)
            mask[first:last] = True
    return mask


def token_range(span: tuple[int, int], offsets: Offsets) -> tuple[int, int]:
    """The first token that holds a character of the span, and the one after the last."""
    start, end = span
    last = bisect_left(offsets, (end,))
    first = bisect_left(offsets, (start,), 0, last)
    while first and offsets[first - 1][1] > start:
        first -= 1
    while first < last and offsets[first][1] <= start:  # a BOS that is in no text
        first += 1
    return first, last


def truncate_example(example: Example, max_tokens: int) -> Example | Refused:
    """The first max_tokens tokens. Refused when nothing to train would be left, which is worse than no row."""
    if len(example.tokens) <= max_tokens:
        return example
    trained = example.trained[:max_tokens]
    if not trained.any():
        first = int(example.trained.argmax())
        reason = f"cut to {max_tokens} tokens, nothing is left to train: its first trained token is number {first + 1}"
        return Refused("nothing_to_train", reason, example.origin, example.number)
    return Example(example.tokens[:max_tokens], trained, example.origin, example.number, example.notes)
