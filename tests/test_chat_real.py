"""The claims about chats once more, on genuine tokenizers and their own templates."""

from pathlib import Path

import numpy as np
import pytest
from golden_masks import _CALL, _TOOLS, marked

from podtune.data.chat import encode_row, prompt_of
from podtune.data.rows import Conversation, Example, Message, Row
from podtune.hub.sources import resolve_model
from podtune.hub.tokenizer import Tokenizer, load_tokenizer

TURNS = (
    Message("user", "What is the capital of France?"),
    Message("assistant", " Paris, naïve 東京 🙂.\n"),
    Message("user", "\nAnd of Italy? "),
    Message("assistant", "Rome.\n\n```python\nprint('<|im_end|>')\n```"),
)
PLAIN = Conversation(TURNS)
SYSTEM = Conversation((Message("system", "Be short."), *TURNS))
TOOLS = Conversation(
    (
        Message("user", "What is the weather in Oslo?"),
        Message("assistant", None, tool_calls=(_CALL,)),
        Message("tool", '{"rain": true}', name="weather"),
        Message("assistant", "Rain."),
    ),
    _TOOLS,
)
REASONING = Conversation(
    (
        TURNS[0],
        Message("assistant", "Paris.", reasoning="I know it."),
        TURNS[2],
        Message("assistant", "<think>\nIt is\n</think>\n\nRome."),
    )
)
ENDS = {
    "smollm2": "<|im_end|>",
    "tokenizer-llama3": "<|eot_id|>",
    "tokenizer-gemma3": "<end_of_turn>",
    "tokenizer-qwen3": "<|im_end|>",
}
STRIPS = ("tokenizer-llama3", "tokenizer-gemma3")
_LOADED: dict[str, Tokenizer] = {}


@pytest.fixture(params=ENDS)
def named(request: pytest.FixtureRequest, real_input) -> tuple[str, Tokenizer]:
    name = request.param
    if name not in _LOADED:
        path: Path = real_input(name)
        if path.suffix == ".gguf":
            _LOADED[name] = load_tokenizer(resolve_model(str(path)))
        else:
            from transformers import AutoTokenizer

            _LOADED[name] = Tokenizer(AutoTokenizer.from_pretrained(path))
    return name, _LOADED[name]


def encode(chat: Conversation, tokenizer: Tokenizer) -> Example:
    result = encode_row(Row("a.jsonl", 1, chat), tokenizer)
    assert isinstance(result, Example), result
    return result


def runs(result: Example, tokenizer: Tokenizer) -> list[str]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], result.trained, [False]]).astype(int))).reshape(-1, 2)
    return [tokenizer.decode(result.tokens[a:b].tolist()) for a, b in edges]


def test_ids_are_the_templates_and_what_is_trained_is_the_answers_and_their_ends(named: tuple[str, Tokenizer]):
    name, tokenizer = named
    for chat in (PLAIN, SYSTEM):
        result = encode(chat, tokenizer)
        messages = [message.for_template() for message in chat.messages]
        assert result.tokens.tolist() == tokenizer.inner.apply_chat_template(messages)["input_ids"]
        said = runs(result, tokenizer)
        if name == "tokenizer-qwen3":
            said[-1] = said[-1].removeprefix("<think>\n\n</think>\n\n")
        answers = [message.content or "" for message in TURNS if message.role == "assistant"]
        answers = [answer.strip() if name in STRIPS else answer for answer in answers]
        assert [text.lstrip() for text in said] == [(answer + ENDS[name]).lstrip() for answer in answers]
        bos = tokenizer.bos_id
        written = name in ("tokenizer-llama3", "tokenizer-gemma3")
        assert result.tokens.tolist().count(bos) == 1 if written else True


def test_calls_are_trained_and_results_are_not(named: tuple[str, Tokenizer]):
    name, tokenizer = named
    if name not in ("tokenizer-qwen3", "tokenizer-llama3"):
        pytest.skip("its template knows no tools")
    messages = [message.for_template() for message in TOOLS.messages]
    text = tokenizer.inner.apply_chat_template(messages, tools=list(TOOLS.tools), tokenize=False)
    if "weather" not in text.split("Oslo")[1]:
        pytest.skip("its template knows no tools")
    result = encode(TOOLS, tokenizer)
    assert result.tokens.tolist() == tokenizer.inner.apply_chat_template(messages, tools=list(TOOLS.tools))["input_ids"]
    call, answer = runs(result, tokenizer)
    assert '"weather"' in call
    assert '"days": 2' in call
    assert answer.endswith("Rain." + ENDS[name])
    assert "rain" not in call + answer


def test_reasoning_is_trained_where_the_template_writes_it(named: tuple[str, Tokenizer]):
    name, tokenizer = named
    if name != "tokenizer-qwen3":
        pytest.skip("its template writes no reasoning")
    first, second = runs(encode(REASONING, tokenizer), tokenizer)
    assert first == "Paris.<|im_end|>"
    assert second == "<think>\nIt is\n</think>\n\nRome.<|im_end|>"


def test_a_prompt_is_what_the_model_is_asked_at_inference(named: tuple[str, Tokenizer]):
    _, tokenizer = named
    prompt = prompt_of(Row("a", 1, PLAIN), tokenizer)
    assert prompt is not None
    whole = encode(PLAIN, tokenizer).tokens.tolist()
    # What is trained begins where the prompt ends (white space may join them in one token).
    assert whole[: len(prompt.ids) - 1] == prompt.ids[:-1]
    assert marked(encode(PLAIN, tokenizer), tokenizer).count("⟦") == 2
