"""What columns with names of their own probably are: offered to the user, never taken. Used by shapes and init."""

import difflib
from collections.abc import Collection, Mapping, Sequence

_QUESTIONS = ("question", "query", "prompt", "instruction", "input", "user")
_ANSWERS = ("answer", "answers", "response", "output", "completion", "reply", "assistant")
_CONTEXTS = ("context", "input", "passage")


def meant_by(names: Sequence[str]) -> Mapping[str, str] | None:
    """The mapping {instruction: ..., output: ...} for columns of questions and answers under names that data sets
    often use, such as question and answer; None where it is not clear which columns these are."""
    lower = {name.lower(): name for name in names}
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
