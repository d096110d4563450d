"""Which tokens of a row bear loss: from spans of characters to tokens. Used by tokenise.

Masks go by position, never by token id: padding and the end of a turn may be the same token.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

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
