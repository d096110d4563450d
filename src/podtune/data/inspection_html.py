"""The page of `podtune inspect --html`: one file without outside parts. Everything from the data is escaped."""

from collections.abc import Sequence
from html import escape

from podtune.data.inspection import InspectedRow, Piece, Segment, visible
from podtune.data.prepared import Prepared, PreparedSplit

_STYLE = """
:root { color-scheme: light dark; --page: #fbfbf9; --ink: #1d1f21; --soft: #6d7378; --line: #dcdfe2; --card: #ffffff;
  --trained: #bfeac4; --trained-edge: #2f8f46; --special: #0b6fa8; }
@media (prefers-color-scheme: dark) { :root { --page: #16181b; --ink: #e4e6e8; --soft: #949ba3; --line: #31363c;
  --card: #1e2125; --trained: #1f4d2b; --trained-edge: #5cc878; --special: #6cc0f0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.5rem 6rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 0; }
.soft { color: var(--soft); } .num { font-variant-numeric: tabular-nums; }
.cards { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.2rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem; }
.card b { display: block; font-size: 1.15rem; font-weight: 600; }
.bar { position: sticky; top: 0; z-index: 2; background: var(--page); padding: .6rem 0; display: flex; gap: 1.4rem;
  align-items: center; flex-wrap: wrap; border-bottom: 1px solid var(--line); }
.row { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; margin: 1.4rem 0; overflow: clip; }
.row > header { padding: .7rem 1rem; display: flex; justify-content: space-between; gap: 1rem; flex-wrap: wrap; }
.strip { display: flex; height: .55rem;
  background: repeating-linear-gradient(45deg, var(--line) 0 3px, transparent 3px 7px); }
.strip i { display: flex; border-right: 1px solid var(--card); }
.strip u { background: var(--trained-edge); } .strip s { opacity: .35; }
.example { border-left: .35rem solid; padding: .6rem 1rem; }
.example + .example { border-top: 1px solid var(--line); }
.example small { color: var(--soft); display: block; margin-bottom: .2rem; }
.tokens { font: 13.5px/1.75 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.t { position: relative; border-radius: .15rem; }
.t:nth-child(odd) { box-shadow: inset 0 -1px var(--line); }
.t.y { background: var(--trained); box-shadow: inset 0 -2px var(--trained-edge); }
.t.c { color: var(--special); }
.t:hover { outline: 2px solid var(--trained-edge); z-index: 1; }
.t:hover::after { content: attr(data-tip); position: absolute; left: 0; top: 1.7em; background: var(--ink);
  color: var(--page); padding: .2rem .5rem; border-radius: .3rem; white-space: nowrap;
  font: 12px/1.4 system-ui, sans-serif; }
.t::before { display: none; content: attr(data-id); font-size: .65em; color: var(--soft); vertical-align: super; }
body:has(#ids:checked) .t::before { display: inline; }
body:has(#only:checked) .t:not(.y) { opacity: .25; }
"""
_HUES = (212, 32, 286, 158, 350, 60)


def page_of(rows: Sequence[InspectedRow], prepared: Prepared, split: PreparedSplit, *, title: str) -> str:
    """The page of these rows of a split."""
    share = split.trained_tokens / split.tokens if split.tokens else 0.0
    figures = [
        (f"{split.rows:,} × {split.row_tokens:,}", "rows × tokens"),
        (f"{split.examples:,}", "examples"),
        (f"{split.tokens:,}", "tokens"),
        (f"{share:.1%}", "trained"),
        (f"{split.efficiency:.1%}", "of the rows filled"),
        (f"{prepared.report.longest:,}", "longest example, tokens"),
        (f"{prepared.report.dropped:,}", "rows dropped"),
    ]
    cards = "".join(f'<div class="card num"><b>{escape(value)}</b>{escape(name)}</div>' for value, name in figures)
    notes = "".join(f'<div class="soft">{escape(note)}</div>' for note in prepared.report.notes)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f'<h1>{escape(title)}</h1><div class="soft">{escape(split.name)} split, {len(rows)} of {split.rows:,} rows; '
        f"data {escape(prepared.fingerprint[:12])}</div>"
        f'<div class="cards">{cards}</div>{notes}'
        '<div class="bar"><span class="t y" data-tip="bears loss"> trained </span>'
        '<span class="t c" data-tip="not text but a mark of the template"> control token </span>'
        '<label><input type="checkbox" id="only"> only what is trained</label>'
        '<label><input type="checkbox" id="ids"> token ids</label></div>'
        f"{''.join(map(_row, rows))}</body></html>\n"
    )


def _row(row: InspectedRow) -> str:
    padding = row.row_tokens - row.tokens
    facts = f"{row.tokens:,} of {row.row_tokens:,} tokens, {row.trained_tokens:,} trained, {padding:,} padding"
    strip = "".join(_strip(segment, row.row_tokens) for segment in row.segments)
    examples = "".join(map(_example, row.segments))
    return (
        f'<section class="row"><header><h2>Row {row.index}</h2><span class="soft num">{facts}</span></header>'
        f'<div class="strip">{strip}</div>{examples}</section>'
    )


def _strip(segment: Segment, row_tokens: int) -> str:
    """The example as a stretch of the row, its trained runs solid."""
    parts: list[str] = []
    run, inside = 0, False
    for piece in (*segment.pieces, None):
        if piece is None or piece.trained != inside:
            if run:
                parts.append(f'<{"u" if inside else "s"} style="flex:{run};background:{_hue(segment.number)}">'
                             f"</{'u' if inside else 's'}>")  # fmt: skip
            run, inside = 0, piece is not None and piece.trained
        run += len(piece.ids) if piece is not None else 0
    return f'<i style="width:{100 * segment.tokens / row_tokens:.3f}%">{"".join(parts)}</i>'


def _example(segment: Segment) -> str:
    pieces = "".join(_piece(piece, segment.number) for piece in segment.pieces)
    return (
        f'<div class="example" style="border-color:{_hue(segment.number)}">'
        f'<small class="num">example {segment.number}: '
        f"{segment.tokens:,} tokens, {segment.trained_tokens:,} trained</small>"
        f'<div class="tokens">{pieces}</div></div>'
    )


def _piece(piece: Piece, segment: int) -> str:
    kinds = "t" + (" y" if piece.trained else "") + (" c" if piece.special else "")
    ids = " ".join(map(str, piece.ids))
    tip = f"id {ids} · position {piece.position} · example {segment} · {'trained' if piece.trained else 'given'}"
    end = "\n" if piece.text.endswith("\n") else ""
    return f'<span class="{kinds}" data-id="{ids}" data-tip="{tip}">{escape(visible(piece.text))}</span>{end}'


def _hue(number: int) -> str:
    return f"hsl({_HUES[(number - 1) % len(_HUES)]} 60% 55%)"
