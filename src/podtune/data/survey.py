"""A look at a source without a tokenizer: what shape it has, how many rows, how long. Used by init."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal

from podtune.config.errors import UserError
from podtune.config.rows import Source
from podtune.config.wording import counted
from podtune.data.chat import is_glued
from podtune.data.column_names import meant_by
from podtune.data.rows import Completion, Conversation, Record, Refused, Row, Text, place
from podtune.data.shapes import SNIFFED_RECORDS, RowShape, has_usual_columns, sniff_shape, to_row
from podtune.data.sources import list_source, read_file

# English text has four to five characters a token in the vocabularies of today; used where no tokenizer is at hand.
CHARACTERS_PER_TOKEN = 4
FEW_DOCUMENTS = 20  # of fewer, the 5 % that are held out by default are less than one


@dataclass
class Survey:
    """What a source holds. longest is in characters; turns counts the messages of each role; columns is what has to
    stand in the run file for them to be found, and documents what a document of a text file is best taken for; glued
    counts prompts that run into their completions."""

    files: int
    shape: RowShape
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    rows: int = 0
    characters: int = 0
    longest: int = 0
    longest_at: str = ""
    turns: Counter[str] = field(default_factory=Counter[str])
    with_tools: int = 0
    documents: str = "file"
    glued: int = 0
    faulty: int = 0
    first_fault: str = ""
    left_out: str = ""

    def add_fault(self, fault: str) -> None:
        self.faulty += 1
        self.first_fault = self.first_fault or fault

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
        return [*said, f"besides  {self.left_out}"] if self.left_out else said


def survey_source(path: str, documents: Literal["file", "paragraph"] = "file") -> Survey:
    """Reads every row of a source once, and counts those with faults. Columns named otherwise than podtune looks for
    are taken for what such names usually mean, and few text files for one document a paragraph. Raises UserError where
    no row is sound."""
    source = Source(path=path, documents=documents)
    listing = list_source(source)
    files = listing.files
    records = chain.from_iterable(map(read_file, files))
    first = list(islice(records, SNIFFED_RECORDS))
    sound = [record for record in first if isinstance(record, Record)]
    if not first:
        raise UserError(f"{path}: there are no rows in {counted(len(files), 'file')}.")
    if not sound:
        raise UserError("\n".join(map(str, first)))
    texts = {name: value for row in reversed(sound) for name, value in row.value.items() if isinstance(value, str)}
    columns = {} if has_usual_columns(sound) else meant_by(texts) or {}  # the first row alone may have no context
    shape = sniff_shape(sound, columns=columns)
    survey = Survey(len(files), shape, columns, documents=documents, left_out=listing.left_out)
    for record in chain(first, records):
        try:
            if isinstance(record, Refused):
                raise UserError(str(record))
            row = to_row(record, survey.shape, chat=True)
        except UserError as error:
            survey.add_fault(str(error))
            continue
        survey.rows += 1
        length = row_characters(row)
        survey.characters += length
        if length > survey.longest:
            survey.longest, survey.longest_at = length, place(row.source, row.number)
        if isinstance(row.value, Conversation):
            survey.turns.update(message.role for message in row.value.messages)
            survey.with_tools += bool(row.value.tools)
        if isinstance(row.value, Completion):
            survey.glued += is_glued(row.value)
    if not survey.rows:
        raise UserError(f"{survey.first_fault} None of {counted(survey.faulty, 'row')} is sound.")
    if files[0].format == "text" and documents == "file" and survey.rows < FEW_DOCUMENTS:
        in_paragraphs = survey_source(path, "paragraph")
        return in_paragraphs if in_paragraphs.rows > survey.rows else survey
    return survey


def row_characters(row: Row) -> int:
    """The characters of a row's texts; of tokens, what they would about be."""
    value = row.value
    if isinstance(value, Conversation):
        return sum(len(message.content or "") + len(message.reasoning or "") for message in value.messages)
    if isinstance(value, Completion):
        return len(value.prompt) + len(value.completion)
    return len(value.text) if isinstance(value, Text) else len(value.ids) * CHARACTERS_PER_TOKEN
