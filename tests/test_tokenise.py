"""The quick way to ids is the tokenizer's own, on every kind of text, and masks hold what they should."""

import random

import pytest
from chat_tokenizers import FAMILIES, family_tokenizer, make_tokenizer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers

from podtune.config.errors import RunFailure
from podtune.data.tokenise import TextEncoder
from podtune.data.word_patterns import ascii_pattern

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str):
    splits = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "SmolLM": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "Llama 3": split_by(LLAMA3),
    "Qwen": split_by(LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
    "two splits": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,2}|\P{N}+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}
_ENCODERS: dict[str, TextEncoder] = {}


def encoder(name: str) -> TextEncoder:
    if name not in _ENCODERS:
        inner = make_tokenizer(FAMILIES["chatml"], None).inner
        inner.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
        if name == "Qwen":
            inner.backend_tokenizer.normalizer = normalizers.NFC()
        _ENCODERS[name] = TextEncoder(inner)
        assert _ENCODERS[name]._words is not None, "the quick way must be taken"
    return _ENCODERS[name]


parts = st.one_of(
    st.sampled_from(
        [" ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "'s", "'LL", "'ſ", "12", "1234", "don't", "I'M", " the", "the",
         "...", " -- ", "naïve", "東京", "привет", "🙂", "👩‍🚀", "e\u0301", "²", "½", "\xa0", "\u2028", "\x1c", "\x85",
         "_", "<|im_end|>", "<|im_", "<|endoftext|><|im_start|>", "(", ")\n", "\ud7ff", "\U0001f9ff", "𝐀", "١"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.text("ab '\n1.", max_size=8),
)  # fmt: skip
texts = st.lists(parts, max_size=12).map("".join)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=texts)
@example("a  5 b   \n c")
@example("'s 's's ' s")
def test_ids_are_those_of_the_library(name: str, text: str):
    ours = encoder(name)
    theirs = ours.backend.encode(text, add_special_tokens=False).ids
    assert ours.encode([text], special=False)[0].ids.tolist() == theirs


@pytest.mark.parametrize("name", ["smollm2", "tokenizer-llama3", "tokenizer-qwen3"])
def test_ids_are_those_of_the_library_on_genuine_tokenizers(name: str, real_input):
    from transformers import AutoTokenizer

    from podtune.hub.sources import resolve_model
    from podtune.hub.tokenizer import load_tokenizer

    path = real_input(name)
    inner = load_tokenizer(resolve_model(str(path))).inner if path.suffix else AutoTokenizer.from_pretrained(path)
    ours = TextEncoder(inner)
    assert ours._words is not None
    generator = random.Random(0)
    letters = [
        "a",
        "Be",
        " ",
        "  ",
        "\n",
        "1",
        "23",
        "'s",
        "'RE",
        "…",
        "“",
        "é",
        "京",
        "ж",
        "🙂",
        ".",
        "<|im_end|>",
        "_",
        "\t",
        "-",
    ]
    drawn = ["".join(generator.choices(letters, k=generator.randint(1, 60))) for _ in range(400)]
    assert sum(ours._from_words(text) is not None for text in drawn) > 300
    theirs = [encoding.ids for encoding in inner.backend_tokenizer.encode_batch(drawn, add_special_tokens=False)]
    assert [encoded.ids.tolist() for encoded in ours.encode(drawn, special=False)] == theirs


@pytest.mark.parametrize("name", ["Llama 3", "gemma"])
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=texts, places=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_a_mask_holds_the_tokens_of_which_a_character_is_in_the_span(name: str, text: str, places: tuple[int, int]):
    ours = TextEncoder(family_tokenizer(name).inner) if name in FAMILIES else encoder(name)
    start, end = (min(place, len(text)) for place in sorted(places))
    (encoded,) = ours.encode([text], special=False)
    offsets = ours.backend.encode(text, add_special_tokens=False).offsets
    slow = [start < end and a < end and b > start for a, b in offsets]
    if name != "gemma" and ours.backend.normalizer is None and encoded.ends is not None:
        # Bytes tell more than the library's offsets, which give a whole character to each token that has a part of it:
        # with spans of whole characters the two agree, but for white space that offsets leave out.
        ends = encoded.ends.tolist()
        begins = [0, *ends][:-1]
        low, high = len(text[:start].encode()), len(text[:end].encode())
        slow = [low < high and a < high and b > low for a, b in zip(begins, ends, strict=True)]
    assert encoded.mask([(start, end)]).tolist() == slow


@pytest.mark.parametrize("pattern", [
    r"\h+|[^0-9a-fA-F]+", r"[[:alpha:]]+|[^[:alpha:]]+", r"[\p{L}&&[^a]]+|.|\n", r"(\p{L}+)|[^\p{L}]+",
    r"^.|[^x]+|x", r"\p{N}{2}+|\P{N}+|\p{N}", r"(?m:.)", r"[a[bc]]+|[^abc]+", r"\R|.", r"a(?i)b|[^a]+|a",
    r"[!--a]+|[^a-]+", r"\p{Alpha}+|\P{Alpha}+",
])  # fmt: skip
def test_patterns_that_python_reads_otherwise_go_through_the_library(pattern: str):
    inner = make_tokenizer(FAMILIES["chatml"], None).inner
    inner.backend_tokenizer.pre_tokenizer = split_by(pattern)
    ours = TextEncoder(inner)
    assert ours._words is None
    for text in ("dead beef 12, the cat\nsat abc & x--", "naïve 東京 123"):
        assert (
            ours.encode([text], special=False)[0].ids.tolist()
            == ours.backend.encode(text, add_special_tokens=False).ids
        )


@pytest.mark.parametrize("pattern", [
    LLAMA3,
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"\p{N}{1,3}|\P{N}+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
])  # fmt: skip
def test_patterns_of_genuine_models_are_run_here(pattern: str):
    """Llama 3, DeepSeek V3 and GPT-4o."""
    inner = make_tokenizer(FAMILIES["chatml"], None).inner
    inner.backend_tokenizer.pre_tokenizer = split_by(pattern)
    assert TextEncoder(inner)._words is not None


def test_where_the_library_and_we_disagree_the_run_stops(monkeypatch: pytest.MonkeyPatch):
    ours = TextEncoder(make_tokenizer(FAMILIES["chatml"], None).inner)
    assert ours._words is not None
    ours._words["Hello"] = (1, 2, 3, 4, 5)  # as long in bytes as the true ids
    ours._seen = 0
    with pytest.raises(RunFailure, match="splits a text otherwise"):
        ours.encode(["Hello"], special=False)


def test_tokenizers_that_are_not_byte_level_go_through_the_library():
    ours = TextEncoder(family_tokenizer("mistral").inner)
    assert ours._words is None
    (encoded,) = ours.encode(["the cat"], special=False)
    assert encoded.ends is None
    assert encoded.offsets


@pytest.mark.parametrize(("flag"), ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_take_in_what_is_beside_them_go_through_the_library(flag: str):
    from tokenizers import AddedToken

    inner = make_tokenizer(FAMILIES["chatml"], None).inner
    inner.backend_tokenizer.add_tokens([AddedToken("<extra>", **{flag: True})])
    assert TextEncoder(inner)._words is None


def test_a_pattern_for_ascii_is_the_pattern_with_ascii_classes():
    assert (
        ascii_pattern(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\P{N}") == r"[^\r\na-zA-Z0-9]?[a-zA-Z]+|[0-9]{1,3}|[^0-9]"
    )
    assert ascii_pattern(r"[\p{Lu}\p{Lt}\p{M}]*\p{Ll}") == "[A-Z]*[a-z]"
    assert ascii_pattern(r"\[\p{L}\]") == r"\[[a-zA-Z]\]"
    assert ascii_pattern(r"\p{Han}+") is None
