"""What columns with names of their own probably are: offered in messages, and written by init for the user to see."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_QUESTIONS = ("question", "query", "prompt", "instruction", "input", "user")
_ANSWERS = ("answer", "answers", "response", "output", "completion", "reply", "assistant")
_CONTEXTS = ("context", "input", "passage")


def meant_by(row: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The mapping {instruction: ..., output: ...} for columns of questions and answers under names that data sets
    often use, such as question and answer; None where it is not clear which columns these are, or they hold no text."""
    lower = {name.lower(): name for name, value in row.items() if isinstance(value, str)}
    question = next((lower[name] for name in _QUESTIONS if name in lower), None)
    answer = next((lower[name] for name in _ANSWERS if name in lower), None)
    if question is None or answer is None:
        return None
    context = next((lower[name] for name in _CONTEXTS if name in lower and lower[name] != question), None)
    return {"instruction": question, **({"input": context} if context else {}), "output": answer}


def slip_in(names: Sequence[str], known: Collection[str]) -> tuple[str, str] | None:
    """A column that is written almost like one that shapes know, and that one."""
    for name in names:
        near = [] if name in known else difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
        if near:
            return name, near[0]
    return None
