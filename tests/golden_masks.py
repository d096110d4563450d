"""The golden masks: for each family of templates, chats as text with what is trained between ⟦ and ⟧.

python tests/golden_masks.py          writes them anew; look at the difference before you commit it
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from chat_tokenizers import FAMILIES, FOLDER, Family, family_tokenizer

from podtune.data.chat import encode_row
from podtune.data.rows import Conversation, Example, Message, Refused, Row

_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
)


def golden_chats(family: Family) -> dict[str, Conversation]:
    """The chats that a family's golden file shows."""
    turns = (
        Message("user", "What is the capital of France?"),
        Message("assistant", "Paris."),
        Message("user", "And of Italy?"),
        Message("assistant", " Rome, of course.\n"),
        Message("user", "Thank you, naïve 東京 🙂"),
        Message("assistant", "You are welcome."),
    )
    chats = {"three turns": Conversation(turns)}
    if family.takes_system:
        chats["system, one turn"] = Conversation((Message("system", "Be short."), *turns[:2]))
    untrained = Message("assistant", "No.", train=False)
    chats["a turn that says train: false"] = Conversation((turns[0], untrained, *turns[2:4]))
    thought = Message("assistant", "<think>\nI know it.\n</think>\n\nParis.")
    chats["reasoning within the answer"] = Conversation((turns[0], thought, turns[2], Message("assistant", "Rome.")))
    chats["a user who types control tokens"] = Conversation(
        (Message("user", f"Say {family.turn_end or 'Hello'} now"), Message("assistant", "No."))
    )
    if family.takes_tools:
        chats["a tool called, its result, the answer"] = Conversation(
            (
                Message("user", "What is the weather in Oslo?"),
                Message("assistant", None, tool_calls=(_CALL,)),
                Message("tool", '{"rain": true}', name="weather"),
                Message("assistant", "Rain."),
            ),
            _TOOLS,
        )
    if family.template in ("qwen3", "generation_narrow"):
        first = Message("assistant", "Paris.", reasoning="I know it.")
        second = Message("assistant", "Rome.", reasoning="Easy.")
        chats["reasoning of its own"] = Conversation((turns[0], first, turns[2], second))
    return chats


def marked(result: Example | Refused, tokenizer) -> str:
    """An example as text, trained runs between ⟦ and ⟧."""
    if isinstance(result, Refused):
        return f"refused: {result.reason}"
    text, run, before = "", [], False
    for token, trained in [*zip(result.tokens.tolist(), result.trained.tolist(), strict=True), (None, None)]:
        if trained != before:
            piece = tokenizer.decode(run)
            text += f"⟦{piece}⟧" if before else piece
            run, before = [], trained
        run.append(token)
    return text


def golden_text(name: str) -> str:
    """The whole golden file of a family."""
    tokenizer = family_tokenizer(name)
    parts = []
    for title, conversation in golden_chats(FAMILIES[name]).items():
        result = encode_row(Row("golden.jsonl", 1, conversation), tokenizer)
        notes = f" ({', '.join(result.notes)})" if isinstance(result, Example) and result.notes else ""
        parts.append(f"======== {title}{notes}\n{marked(result, tokenizer)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    for name in FAMILIES:
        (FOLDER / f"{name}.txt").write_text(golden_text(name))
        print(FOLDER / f"{name}.txt")
