"""A look at a source without a tokenizer: what shape it has, how many rows, how long. Used by init."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from podtune.config.errors import UserError
from podtune.config.rows import Source
from podtune.config.wording import counted
from podtune.data.column_names import meant_by
from podtune.data.rows import Completion, Conversation, Row, Text, place
from podtune.data.shapes import SNIFFED_RECORDS, RowShape, has_usual_columns, sniff_shape, to_row
from podtune.data.sources import list_files, read_records

# English text has four to five characters a token in the vocabularies of today; used where no tokenizer is at hand.
CHARACTERS_PER_TOKEN = 4


@dataclass
class Survey:
    """What a source holds. longest is in characters; turns counts the messages of each role; columns is what has to
    stand in the run file for them to be found."""

    files: int
    shape: RowShape
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    rows: int = 0
    characters: int = 0
    longest: int = 0
    longest_at: str = ""
    turns: Counter[str] = field(default_factory=Counter[str])
    with_tools: int = 0

    def lines(self) -> list[str]:
        """The survey for people."""
        files = counted(self.files, "file")
        said = [
            f"shape    {self.shape.describe()}",
            f"rows     {self.rows:,} in {files}, about {self.characters // CHARACTERS_PER_TOKEN:,} tokens",
            f"longest  {self.longest:,} characters, about {self.longest // CHARACTERS_PER_TOKEN:,} tokens "
            f"({self.longest_at})",
        ]
        if self.turns:
            tools = f"; {self.with_tools:,} rows with tools" if self.with_tools else ""
            said.append(
                "turns    " + ", ".join(f"{count:,} {role}" for role, count in self.turns.most_common()) + tools
            )
        return said


def survey_source(path: str) -> Survey:
    """Reads every row of a source once. Columns named otherwise than podtune looks for are taken for what such names
    usually mean. Raises UserError for the first fault, as training would."""
    source = Source(path=path)
    files = list_files(source)
    records = read_records(source)
    first = list(islice(records, SNIFFED_RECORDS))
    if not first:
        raise UserError(f"{path}: there are no rows in {counted(len(files), 'file')}.")
    columns = {} if has_usual_columns(first) else meant_by(first[0].value) or {}
    survey = Survey(len(files), sniff_shape(first, columns=columns), columns)
    for record in chain(first, records):
        row = to_row(record, survey.shape, chat=True)
        survey.rows += 1
        length = characters_in(row)
        survey.characters += length
        if length > survey.longest:
            survey.longest, survey.longest_at = length, place(row.source, row.number)
        if isinstance(row.value, Conversation):
            survey.turns.update(message.role for message in row.value.messages)
            survey.with_tools += bool(row.value.tools)
    return survey


def characters_in(row: Row) -> int:
    """The characters of a row's texts; of tokens, what they would about be."""
    value = row.value
    if isinstance(value, Conversation):
        return sum(len(message.content or "") + len(message.reasoning or "") for message in value.messages)
    if isinstance(value, Completion):
        return len(value.prompt) + len(value.completion)
    return len(value.text) if isinstance(value, Text) else len(value.ids) * CHARACTERS_PER_TOKEN
