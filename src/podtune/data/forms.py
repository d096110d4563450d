"""The form in which rows reach the model: as chats, as prompts with what follows them, or as texts. Prompts take the
form that was trained. Used by the workflow, for eval.prompts and the record that `podtune chat` reads."""

from collections import Counter
from itertools import islice
from typing import Literal

from podtune.config.errors import UserError
from podtune.config.rows import Data, Source
from podtune.data.prepare_inputs import open_input
from podtune.data.rows import Completion, Conversation, Record, Text
from podtune.data.shapes import SNIFFED_RECORDS, to_row
from podtune.hub.addresses import is_address

Form = Literal["chat", "completion", "text"]
_MOST_TELLING: tuple[Form, ...] = ("chat", "completion", "text")


def trained_form(data: Data, *, chat: bool, offline: bool = False) -> Form | None:
    """The form of the training rows: chat where any source is one. chat: the tokenizer has a chat template;
    offline: open nothing at an address.

    None where it cannot be told: ids that others made, and rows with faults, which preparing them tells of.
    """
    sources = [source for source in data.train if not (offline and is_address(source.path))]
    found = {_form_of(data, source, chat=chat) for source in sources}
    return next((form for form in _MOST_TELLING if form in found), None)


def _form_of(data: Data, source: Source, *, chat: bool) -> Form | None:
    """The form of most of the first records of a source."""
    forms: Counter[Form] = Counter()
    try:
        shape, records = open_input(data, source).read()
        for record in islice(records, SNIFFED_RECORDS):
            if shape is None or not isinstance(record, Record):
                continue
            value = to_row(record, shape, chat=chat).value
            if isinstance(value, Conversation):
                forms["chat"] += 1
            elif isinstance(value, Completion):
                forms["completion"] += 1
            elif isinstance(value, Text):
                forms["text"] += 1
    except UserError:
        pass
    return forms.most_common(1)[0][0] if forms else None
