"""Packing: which examples share a row of fixed length, and what such a row looks like. Used by prepare and the loader.

Best-fit decreasing (Fewer Truncations Improve Language Modeling, arXiv 2404.10830): longest examples first, each into
the fullest row that still has room. Because lengths are small integers, all examples of one length are placed at once:
the work is O(n) in numpy plus one step per (length, free space) met, so millions of examples pack in about a second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer


@dataclass(frozen=True)
class Packing:
    """Rows as lists of examples: row i holds examples order[starts[i]:starts[i + 1]], in that order."""

    order: Int64[np.ndarray, "examples"]
    starts: Int64[np.ndarray, "rows_and_one"]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> list[int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a packing of {len(self)} rows")
        return self.order[self.starts[row] : self.starts[row + 1]].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True)
class PackedRow:
    """One row without padding. segments number its examples 1, 2, …; trained marks tokens that are targets."""

    tokens: Int32[np.ndarray, "used"]
    trained: Bool[np.ndarray, "used"]
    segments: Int32[np.ndarray, "used"]


def pack_examples(lengths: Integer[np.ndarray, "examples"] | Sequence[int], row_tokens: int) -> Packing:
    """Packs examples of these lengths into rows of row_tokens, best fit decreasing; equal lengths keep their order.

    Raises ValueError when a length is not within 1..row_tokens: over-long examples are settled before packing.
    """
    sizes = np.asarray(lengths, np.int64)
    if len(sizes) and (sizes.min() < 1 or sizes.max() > row_tokens):
        raise ValueError(f"lengths run from {sizes.min()} to {sizes.max()}, rows hold 1 to {row_tokens} tokens")
    by_length = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), np.int64)  # in the order of by_length
    spaces = _Spaces(row_tokens)
    distinct, first = np.unique(-sizes[by_length], return_index=True)
    ends = np.append(first, len(sizes))[1:]
    for length, at, end in zip((-distinct).tolist(), first.tolist(), ends.tolist(), strict=True):
        while at < end:
            space = spaces.smallest_at_least(length)
            # A row that takes one example of this length stays the best fit for the next as long as it has room.
            each = space // length
            rows = spaces.take(space, -(-(end - at) // each))
            placed = min(end - at, len(rows) * each)
            row_of[at : at + placed] = np.repeat(rows, each)[:placed]
            full, rest = divmod(placed, each)
            spaces.put(space - each * length, rows[:full])
            if rest:
                spaces.put(space - rest * length, rows[full:])
            at += placed
    by_row = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of, minlength=spaces.opened)
    return Packing(by_length[by_row], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def one_example_a_row(examples: int) -> Packing:
    """The packing of `packing: false`."""
    return Packing(np.arange(examples, dtype=np.int64), np.arange(examples + 1, dtype=np.int64))


def packing_efficiency(tokens: int, rows: int, row_tokens: int) -> float:
    """The share of row positions that hold a token, 0 to 1."""
    return tokens / (rows * row_tokens) if rows else 0.0


def assemble_row(examples: Sequence[tuple[Int32[np.ndarray, "_"], Bool[np.ndarray, "_"]]]) -> PackedRow:
    """Joins (tokens, trained) pairs into one row."""
    lengths = [len(tokens) for tokens, _ in examples]
    return PackedRow(
        tokens=np.concatenate([tokens for tokens, _ in examples]).astype(np.int32, copy=False),
        trained=np.concatenate([trained for _, trained in examples]).astype(np.bool_, copy=False),
        segments=np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths),
    )


def positions_of(segments: Int32[np.ndarray, "*batch tokens"]) -> Int32[np.ndarray, "*batch tokens"]:
    """Positions that restart at 0 wherever the segment changes (padding, segment 0, counts as a segment)."""
    index = np.arange(segments.shape[-1], dtype=np.int32)
    starts = np.zeros(segments.shape, np.int32)
    changed = segments[..., 1:] != segments[..., :-1]
    starts[..., 1:] = np.where(changed, index[1:], 0)
    return index - np.maximum.accumulate(starts, axis=-1)


class _Spaces:
    """Rows by free space. Full rows are forgotten; an unopened row has all its space."""

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self.opened = 0
        self._rows: dict[int, list[np.ndarray]] = {}
        self._present = 0  # bit s is set when some open row has s free

    def smallest_at_least(self, length: int) -> int:
        fitting = self._present >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else self.row_tokens

    def take(self, space: int, wanted: int) -> np.ndarray:
        """Up to `wanted` rows with this much space, at least one; oldest entry first."""
        if space == self.row_tokens:
            self.opened += wanted
            return np.arange(self.opened - wanted, self.opened, dtype=np.int64)
        parts = self._rows.pop(space)
        rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if len(rows) > wanted:
            self._rows[space] = [rows[wanted:]]
        else:
            self._present &= ~(1 << space)
        return rows[:wanted]

    def put(self, space: int, rows: np.ndarray) -> None:
        if space and len(rows):
            self._rows.setdefault(space, []).append(rows)
            self._present |= 1 << space
