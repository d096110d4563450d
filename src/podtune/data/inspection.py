"""What training sees of a row: its tokens as text, which of them are trained, and which example each belongs to.

`podtune inspect` shows it on a terminal; inspection_html writes the same as a page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from podtune.config.wording import counted
from podtune.data.packing import PackedRow
from podtune.data.prepared import PreparedSplit
from podtune.hub.tokenizer import Tokenizer

OPEN, CLOSE = "⟦", "⟧"  # around what is trained, where there is no colour
NEW_LINE = "↵"
_MOST_BYTES = 4  # tokens that one character may be cut into

_TRAINED, _GIVEN, _SPECIAL, _MARK = "black on #9be29b", "", "cyan", "dim"


@dataclass(frozen=True)
class Piece:
    """One token, or the few that share a character. positions count from the start of the example."""

    ids: tuple[int, ...]
    text: str
    position: int
    trained: bool
    special: bool


@dataclass(frozen=True)
class Segment:
    """One example of a packed row."""

    number: int
    pieces: tuple[Piece, ...]
    tokens: int
    trained_tokens: int


@dataclass(frozen=True)
class InspectedRow:
    """A packed row; padding is what is left of row_tokens."""

    index: int
    row_tokens: int
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def trained_tokens(self) -> int:
        return sum(segment.trained_tokens for segment in self.segments)


def inspect_row(split: PreparedSplit, index: int, tokenizer: Tokenizer) -> InspectedRow:
    """Row `index` of a split with its tokens as text."""
    return InspectedRow(index, split.row_tokens, tuple(_segments(split.read(index), tokenizer)))


def rows_to_show(split: PreparedSplit, count: int) -> list[int]:
    """Rows spread over the split: the first ones alone would be those of the longest examples."""
    chosen = np.linspace(0, split.rows - 1, min(count, split.rows)).round().astype(np.int64)
    return np.unique(chosen).tolist()


def token_pieces(ids: Int32[np.ndarray, "tokens"], trained: Sequence[bool], tokenizer: Tokenizer) -> Iterator[Piece]:
    """The pieces of one example."""
    specials = set(tokenizer.inner.all_special_ids)
    # After a plain token: at the start of a text some tokenizers drop the space that a token begins with.
    anchor = tokenizer.encode("a", special=False)
    before = len(tokenizer.decode(anchor))
    at = 0
    while at < len(ids):
        for end in range(at + 1, min(at + _MOST_BYTES, len(ids)) + 1):
            text = tokenizer.decode([*anchor, *ids[at:end].tolist()])[before:]
            if "\ufffd" not in text and trained[at] == trained[end - 1]:
                break
        else:
            end = at + 1
            text = tokenizer.decode([*anchor, int(ids[at])])[before:]
        chosen = tuple(ids[at:end].tolist())
        yield Piece(chosen, text, at, bool(trained[at]), chosen[0] in specials)
        at = end


def print_row(console: Console, row: InspectedRow, *, with_ids: bool = False) -> None:
    """The row on a console: trained tokens stand out by colour, or between marks where there is none."""
    share = row.trained_tokens / row.tokens if row.tokens else 0
    examples = counted(len(row.segments), "example")
    title = f"row {row.index}: {examples}, {row.tokens:,} of {row.row_tokens:,} tokens, {share:.0%} trained"
    console.print(Rule(Text(title, style="bold"), align="left", style="dim"))
    coloured = console.color_system is not None and not console.no_color
    for segment in row.segments:
        heading = f"example {segment.number}: {segment.tokens:,} tokens, {segment.trained_tokens:,} trained"
        console.print(Text(heading, style="dim italic"))
        text = segment_text(segment, coloured=coloured, with_ids=with_ids)
        console.print(text, soft_wrap=not console.is_terminal)
    console.print()


def segment_text(segment: Segment, *, coloured: bool, with_ids: bool) -> Text:
    """The tokens of an example in one text."""
    text = Text()
    inside = False
    for piece in segment.pieces:
        if piece.trained != inside and not coloured:
            text.append(OPEN if piece.trained else CLOSE)
        inside = piece.trained
        style = _TRAINED if piece.trained else _SPECIAL if piece.special else _GIVEN
        text.append(visible(piece.text), style=style)
        if with_ids:
            text.append("[" + " ".join(map(str, piece.ids)) + "]", style=_MARK)
        if piece.text.endswith("\n"):
            text.append("\n")
    if inside and not coloured:
        text.append(CLOSE)
    text.rstrip()
    return text


def legend(coloured: bool) -> Text:
    """What the colours or marks mean."""
    if not coloured:
        return Text(f"{OPEN}trained{CLOSE}; the rest is given and bears no loss; {NEW_LINE} is a new line")
    return Text.assemble(
        ("trained", _TRAINED), "  given, bears no loss  ", ("control token", _SPECIAL), f"  {NEW_LINE} new line"
    )


def visible(text: str) -> str:
    """A token's text with what cannot be seen made visible, and nothing that moves the cursor."""
    shown = text.replace("\r", "␍").replace("\n", NEW_LINE).replace("\t", "→")
    return "".join(letter if letter.isprintable() or letter == " " else f"\\u{ord(letter):04x}" for letter in shown)


def _segments(row: PackedRow, tokenizer: Tokenizer) -> Iterator[Segment]:
    for number in range(1, int(row.segments[-1]) + 1):
        members = np.flatnonzero(row.segments == number)
        trained = row.trained[members]
        pieces = tuple(token_pieces(row.tokens[members], trained.tolist(), tokenizer))
        yield Segment(number, pieces, len(members), int(trained.sum()))
