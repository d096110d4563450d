"""Random chats on every template: ids are the template's own, and what is trained is what the assistant says."""

import numpy as np
import pytest
from chat_tokenizers import FAMILIES, family_tokenizer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from podtune.data.chat import encode_row, encode_rows
from podtune.data.rows import Conversation, Example, Message, Refused, Row

LOOKALIKES = (
    "<|im_end|>", "<|im_start|>assistant\n", "</s>", "[INST]", "[/INST]", "<end_of_turn>", "<start_of_turn>model\n",
    "<|eot_id|>", "<s>", "### assistant\n", "ASSISTANT: ", "<|end|>", "{{ messages }}", "{% generation %}",
    "<|endoftext|>", "\U000f1000", "\u2028", "\r\n", "\ufeff", "▁",
)  # fmt: skip
texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
        st.sampled_from(["Hello ", "Paris.", "\n", "  ", " the", *LOOKALIKES]),
    ),
    max_size=4,
).map("".join)


@st.composite
def chats(draw, thinking: bool = False):
    """Roles and contents."""
    turns = draw(st.integers(1, 3))
    messages = [("system", draw(texts))] if draw(st.booleans()) else []
    for _ in range(turns):
        answer = draw(texts)
        if thinking and draw(st.booleans()):
            answer = f"<think>{draw(texts)}</think>{answer}"
        messages += [("user", draw(texts)), ("assistant", answer)]
    return messages


def as_conversation(chat: list[tuple[str, str]]) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in chat))


def trained_texts(conversation: Conversation, result: Example, tokenizer) -> list[str]:
    """The texts of the runs of trained tokens, found anew from the offsets that the tokenizer gives."""
    messages = [message.for_template() for message in conversation.messages]
    text = tokenizer.inner.apply_chat_template(messages, tokenize=False)
    offsets = tokenizer.inner(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], result.trained, [False]]).astype(int)))
    return [text[offsets[a][0] : offsets[b - 1][1]] for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(chat=chats(thinking=True))
@example([("user", "a"), ("assistant", "<think>b</think>c")])
def test_ids_are_always_those_of_apply_chat_template(name: str, chat: list[tuple[str, str]]):
    tokenizer, conversation = family_tokenizer(name), as_conversation(chat)
    result = encode_row(Row("x.jsonl", 1, conversation), tokenizer)
    messages = [message.for_template() for message in conversation.messages]
    try:
        ids = tokenizer.inner.apply_chat_template(messages)["input_ids"]
    except Exception:
        assert isinstance(result, Refused)
        assert result.kind == "template"
        return
    if isinstance(result, Refused):
        assert result.kind in ("nothing_to_train", "not_rendered")
        return
    assert result.tokens.tolist() == ids
    assert not result.trained[0]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(chat=chats())
@example([("user", ""), ("assistant", " \n"), ("user", ""), ("assistant", "b")])
@example([("user", "<|im_end|>"), ("assistant", "<|im_end|>\n<|im_start|>assistant\n")])
@example([("user", "x"), ("assistant", "\n\nHello\n\n"), ("user", "Hello"), ("assistant", "x")])
def test_what_is_trained_is_every_answer_and_its_end_and_nothing_else(name: str, chat: list[tuple[str, str]]):
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    conversation = as_conversation([turn for turn in chat if family.takes_system or turn[0] != "system"])
    result = encode_row(Row("x.jsonl", 1, conversation), tokenizer)
    answers = [content for role, content in chat if role == "assistant"]
    if not any(answer.strip() for answer in answers):
        assert isinstance(result, Refused)
        return
    assert isinstance(result, Example), result
    said = trained_texts(conversation, result, tokenizer)
    if name == "qwen3":  # it opens the last answer with an empty think block, which the model has to write
        assert said[-1].startswith("<think>\n\n</think>\n\n")
        said[-1] = said[-1].removeprefix("<think>\n\n</think>\n\n")
    if family.turn_end is None:
        # What follows an answer may share a token with it, and a blank one leaves no run; nothing else may be trained.
        assert [text.strip() for text in said if text.strip()] == [text.strip() for text in answers if text.strip()]
        return
    written = [answer.strip() if family.strips else answer for answer in answers]
    # White space at the start may share a token with the header before it, which then is in the run as well.
    assert [text.lstrip() for text in said] == [(answer + family.turn_end).lstrip() for answer in written]


@settings(max_examples=20, deadline=None)
@given(drawn=st.lists(chats(thinking=True), min_size=1, max_size=8), name=st.sampled_from(list(FAMILIES)))
def test_a_batch_gives_what_its_rows_give_one_by_one(drawn: list[list[tuple[str, str]]], name: str):
    tokenizer = family_tokenizer(name)
    rows = [Row("x.jsonl", at, as_conversation(chat)) for at, chat in enumerate(drawn, 1)]
    together = encode_rows(rows, tokenizer)
    for row, result in zip(rows, together, strict=True):
        alone = encode_row(row, tokenizer)
        assert type(result) is type(alone)
        if isinstance(result, Example) and isinstance(alone, Example):
            assert result.tokens.tolist() == alone.tokens.tolist()
            assert result.trained.tolist() == alone.trained.tolist()
        else:
            assert result == alone
