"""What preparing did to the rows: read, kept, cut, dropped and why, with the first places. Printed, and kept in the
manifest so that a cache hit says the same.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from podtune.config.wording import counted
from podtune.data.chat import NOTES
from podtune.data.rows import place

PLACES = 5  # how many file:line a reason names

REASON_LONG = "longer than max_length"
REASON_ANSWER = "its answer would be cut away"
REASON_EQUAL = "equal to an earlier row"
DROPPED = {
    REASON_LONG: "dropped: longer than max_length",
    REASON_ANSWER: "dropped: max_length would cut the answer away entirely",
    REASON_EQUAL: "dropped: equal to an earlier row",
}


@dataclass
class Tally:
    """Counts by reason, with the first places of each."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    places: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def add(self, reason: str, *places: str, count: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + count
        named = self.places.setdefault(reason, [])
        named += places[: PLACES - len(named)]

    def merge(self, other: "Tally") -> None:
        for reason, count in other.counts.items():
            self.add(reason, *other.places.get(reason, []), count=count)

    def renamed(self, names: Mapping[str, str]) -> "Tally":
        """The same counts, with places in files of other names. names: old -> new."""
        places = {reason: [_renamed(place, names) for place in found] for reason, found in self.places.items()}
        return Tally({**self.counts}, places)

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass
class SourceReport:
    """One source. files: their names in messages, in the order read. kept counts rows that gave an example; changed,
    those of them that were cut or split; noted, those that hold something the user should know (codes of
    chat.NOTES)."""

    name: str
    weight: float = 1.0
    read: int = 0
    kept: int = 0
    dropped: Tally = field(default_factory=Tally)
    changed: Tally = field(default_factory=Tally)
    noted: Tally = field(default_factory=Tally)
    files: tuple[str, ...] = ()

    def told_of(self, name: str, files: Sequence[str]) -> "SourceReport":
        """The same report for the same rows by another name, in files of other names."""
        names = dict(zip(self.files, files, strict=True))
        dropped, changed, noted = (tally.renamed(names) for tally in (self.dropped, self.changed, self.noted))
        return replace(self, name=name, files=tuple(files), dropped=dropped, changed=changed, noted=noted)


@dataclass(frozen=True)
class SplitReport:
    """One split as it is trained on: an epoch's passes over weighted sources are counted."""

    name: str
    examples: int
    rows: int
    row_tokens: int
    tokens: int
    trained_tokens: int

    @property
    def efficiency(self) -> float:
        """The share of row positions that hold a token."""
        return self.tokens / (self.rows * self.row_tokens) if self.rows else 0.0


@dataclass(frozen=True)
class PrepareReport:
    """The whole preparation. longest counts the tokens of the longest example kept; notes are sentences to be read."""

    sources: tuple[SourceReport, ...]
    splits: tuple[SplitReport, ...]
    longest: int
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def dropped(self) -> int:
        return sum(source.dropped.total for source in self.sources)

    def told_of(self, sources: Sequence[tuple[str, Sequence[str]]], notes: Sequence[str] = ()) -> "PrepareReport":
        """The report for sources that hold the same rows under other names, with more notes. sources: the name of each,
        and those of its files."""
        left, told = list(zip(self.sources, sources, strict=True)), list(self.notes)
        for at, note in enumerate(told):
            pair = next((pair for pair in left if note.startswith(f"{pair[0].name}: ")), None)
            if pair is not None:
                left.remove(pair)
                told[at] = pair[1][0] + note.removeprefix(pair[0].name)
        named = [old.told_of(name, files) for old, (name, files) in zip(self.sources, sources, strict=True)]
        return replace(self, sources=tuple(named), notes=(*told, *notes))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "PrepareReport":
        sources = tuple(
            SourceReport(
                source["name"],
                source["weight"],
                source["read"],
                source["kept"],
                *(Tally(**source[name]) for name in ("dropped", "changed", "noted")),
                files=tuple(source["files"]),
            )
            for source in entry["sources"]
        )
        splits = tuple(SplitReport(**split) for split in entry["splits"])
        return cls(sources, splits, entry["longest"], tuple(entry["notes"]), entry["seconds"])

    def lines(self) -> list[RenderableType]:
        """Tables and sentences for a rich console."""
        parts: list[RenderableType] = [_source_table(self.sources)]
        for source in self.sources:
            for tally, words in ((source.dropped, DROPPED), (source.changed, {}), (source.noted, NOTES)):
                parts += [Text(_line(source.name, tally, code, words.get(code, code))) for code in tally.counts]
        parts.append(_split_table(self.splits, self.longest))
        parts += [Text(note) for note in self.notes]
        return parts

    def print(self, console: Console) -> None:
        for part in self.lines():
            console.print(part)


def _renamed(where: str, names: Mapping[str, str]) -> str:
    """A place such as a.jsonl:17 in the file of the other name."""
    found = re.fullmatch(r"(.*?):(?: record )?(\d+)", where, re.DOTALL)
    return place(names[found[1]], int(found[2])) if found and found[1] in names else where


def _line(source: str, tally: Tally, reason: str, words: str) -> str:
    count, places = tally.counts[reason], tally.places.get(reason, [])
    more = ", …" if count > len(places) else ""
    return f"{source}: {counted(count, 'row')} {words} ({', '.join(places)}{more})"


def _source_table(sources: tuple[SourceReport, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("source", overflow="fold")
    for heading in ("weight", "read", "kept", "dropped", "cut or split"):
        table.add_column(heading, justify="right")
    for source in sources:
        dropped = Text(f"{source.dropped.total:,}", style="yellow" if source.dropped.total else "")
        table.add_row(
            source.name,
            f"{source.weight:g}",
            f"{source.read:,}",
            f"{source.kept:,}",
            dropped,
            f"{source.changed.total:,}",
        )
    return table


def _split_table(splits: tuple[SplitReport, ...], longest: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", caption=f"longest example {longest:,} tokens")
    table.caption_justify = "left"
    for heading in ("split", "examples", "rows", "tokens", "trained", "filled"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for split in splits:
        share = split.trained_tokens / split.tokens if split.tokens else 0.0
        rows = f"{split.rows:,} x {split.row_tokens:,}"
        trained = f"{split.trained_tokens:,} ({share:.0%})"
        table.add_row(split.name, f"{split.examples:,}", rows, f"{split.tokens:,}", trained, f"{split.efficiency:.1%}")
    return table
