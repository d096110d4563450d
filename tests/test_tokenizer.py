"""Tokenizers from GGUF files and folders: ids, templates, what ends a turn, saving, agreement with the originals."""

import itertools
import json
import re
import shutil

import pytest
from export_cases import tiny_tokenizer
from gguf_files import hugging_face_weights, llama_tensors, write_gguf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from podtune.config.errors import UserError
from podtune.hub.gguf_file import open_gguf
from podtune.hub.sources import resolve_model
from podtune.hub.tokenizer import load_tokenizer

TEXTS = [
    "Hello world",
    " leading and trailing ",
    "line\n\nbreaks\r\n\tand tabs \t ",
    "12345 3.14159 1,000,000 2024-01-01",
    "don't they'll WE'VE I'm",
    "naïve café Zürich ﬁ ½ …",
    "中文字符 日本語 한국어 ไทย العربية עברית",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "def f(x):\n    return x ** 2  # comment",
    "a" * 300,
    "   \n  \n      ",
    "e\u0301 combining, \u200b zero width, \ufeff mark",
    "<|im_start|>user\nspecial tokens as text<|im_end|>",
    "<|im_start|> <|im_end|>\n<|endoftext|>",
    "",
]


def with_config(folder, tmp_path, model_type):
    """A model folder with the files of a genuine tokenizer; there are no weights in it."""
    target = tmp_path / "model"
    shutil.copytree(folder, target)
    (target / "config.json").write_text(json.dumps({"model_type": model_type}))
    return resolve_model(str(target))


@pytest.fixture(scope="module")
def smollm2(real_input):
    return load_tokenizer(resolve_model(str(real_input("smollm2"))))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_genuine_gguf_tokenizer(smollm2, text):
    assert smollm2.decode(smollm2.encode(text, special=False)) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_it(smollm2, text):
    # The genuine vocabulary has no token for a few bytes (0xF1, …), which only unassigned characters need.
    words = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assume(all(smollm2.inner.convert_tokens_to_ids(byte) != 0 for word, _ in words for byte in word))
    assert smollm2.decode(smollm2.encode(text, special=False)) == text


def test_its_special_tokens_are_the_published_ones(smollm2):
    assert smollm2.encode("<|endoftext|><|im_start|><|im_end|>", special=False) == [0, 1, 2]
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.vocab_size) == (1, 2, 49152)
    assert smollm2.turn_end_ids == {2}
    assert smollm2.encode("x", special=True) == smollm2.encode("x", special=False), "no BOS of its own"


def test_digits_are_single_tokens_as_smollm2_was_trained(smollm2):
    assert [smollm2.decode([token]) for token in smollm2.encode("12345")] == list("12345")


def test_padding_is_none_of_the_ids_that_end_an_answer(smollm2):
    assert smollm2.inner.pad_token_id == smollm2.eos_id, "the file says so"
    assert smollm2.pad_id not in {smollm2.eos_id, smollm2.bos_id, *smollm2.turn_end_ids}


def test_the_chat_template_of_the_file_is_applied(smollm2):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = smollm2.inner.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_words_are_merged_in_the_order_of_the_files_list(smollm2, real_input):
    """An independent path: byte-level merging by hand, always the pair that stands first in the file's list."""
    metadata = open_gguf(real_input("smollm2")).metadata
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    numbers = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    for word in ["Hello", "Ġworld", "Ġtokenization", "Ġunbelievable", "ĠPodtune"]:
        parts = list(word)
        while candidates := [
            (ranks[pair], place) for place, pair in enumerate(itertools.pairwise(parts)) if pair in ranks
        ]:
            _, place = min(candidates)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        expected = [numbers[part] for part in parts]
        assert smollm2.encode(word.replace("Ġ", " "), special=False) == expected


def gguf_of(tokenizer_folder, path, *, pre, bos, eos):
    """A GGUF file that holds a byte-level tokenizer.json the way llama.cpp's converter writes it."""
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in content["added_tokens"]}
    tokens = {number: token for token, number in content["model"]["vocab"].items()}
    tokens |= {number: token["content"] for number, token in added.items()}
    kinds = [1 if number not in added else 3 if added[number]["special"] else 4 for number in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    extra = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens[number] for number in range(len(tokens))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.add_bos_token": False,
    }
    return write_gguf(path, llama_tensors(hugging_face_weights()), extra=extra)


@pytest.mark.parametrize(
    ("name", "pre", "bos", "eos"),
    [
        ("qwen3", "qwen2", 151643, 151645),
        pytest.param("llama3", "llama-bpe", 128000, 128009, marks=pytest.mark.slow),
    ],
)
def test_a_gguf_gives_the_ids_of_the_tokenizer_it_was_made_from(real_input, tmp_path, name, pre, bos, eos):
    from tokenizers import Tokenizer

    folder = real_input(f"tokenizer-{name}")
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rebuilt = load_tokenizer(resolve_model(str(gguf_of(folder, tmp_path / "model.gguf", pre=pre, bos=bos, eos=eos))))
    for text in TEXTS:
        assert rebuilt.encode(text) == original.encode(text).ids, text
    assert rebuilt.inner.get_vocab() == original.get_vocab()


@pytest.mark.slow
def test_the_genuine_gemma_3_gguf_tokenizer_agrees_with_its_tokenizer_json(real_input):
    from tokenizers import Tokenizer

    original = Tokenizer.from_file(str(real_input("tokenizer-gemma3") / "tokenizer.json"))
    rebuilt = load_tokenizer(resolve_model(str(real_input("gemma3"))))
    for text in TEXTS:
        assert rebuilt.encode(text) == original.encode(text).ids, text
        assert rebuilt.decode(rebuilt.encode(text, special=False)) == text


CASES = {"llama3": ("llama", {128001, 128009}), "qwen3": ("qwen3", {151645}), "gemma3": ("gemma3_text", {106})}


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3", "gemma3"))]
)
def test_a_folder_is_read_saved_and_read_alike_by_autotokenizer(real_input, tmp_path, name):
    from transformers import AutoTokenizer

    model_type, ends = CASES[name]
    files = with_config(real_input(f"tokenizer-{name}"), tmp_path, model_type)
    ours = load_tokenizer(files)
    assert ours.turn_end_ids == ends
    assert ours.pad_id not in {ours.eos_id, ours.bos_id, *ends}
    ours.save(tmp_path / "saved")
    shutil.copy(files.folder / "config.json", tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    again = load_tokenizer(resolve_model(str(tmp_path / "saved")))
    chat = [{"role": "user", "content": "Hi 123"}, {"role": "assistant", "content": "Hello!"}]
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text) == again.encode(text), text
    assert theirs.chat_template == ours.chat_template == again.chat_template
    assert again.fingerprint == ours.fingerprint
    ids = ours.inner.apply_chat_template(chat, return_dict=False)
    assert theirs.apply_chat_template(chat, return_dict=False) == ids
    if ours.bos_id is not None:
        assert ids.count(ours.bos_id) == 1


def test_the_saved_gguf_tokenizer_is_read_alike_by_autotokenizer(smollm2, tmp_path):
    from transformers import AutoTokenizer

    smollm2.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs.encode(text) == smollm2.encode(text)
    assert theirs.chat_template == smollm2.chat_template
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


def small_folder(tmp_path, **files):
    """A model folder with a tokenizer of a few words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<stop>", special=True)])
    tmp_path.mkdir(exist_ok=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<stop>"} | files.pop("config", {})))
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_text(content)
    return resolve_model(str(tmp_path))


TEMPLATE = "{% for m in messages %}{{ m.content }} <end>\n{% endfor %}"


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"chat_template": TEMPLATE}},
        {"chat_template__jinja": TEMPLATE},
        {"chat_template__json": json.dumps({"chat_template": TEMPLATE})},
    ],
)
def test_the_template_is_found_wherever_it_is_kept(tmp_path, files):
    tokenizer = load_tokenizer(small_folder(tmp_path, **files))
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.turn_end_ids == {3, 4}, "the template's <end> and the tokenizer's <stop>"


def test_eos_ids_of_the_generation_config_end_turns_too(tmp_path):
    files = small_folder(tmp_path, generation_config__json=json.dumps({"eos_token_id": [0, 3]}))
    assert load_tokenizer(files).turn_end_ids == {0, 3, 4}


@pytest.mark.parametrize("name", ["generation_config", "config"])
@pytest.mark.parametrize("ids", [{"a": 1}, "</s>", [2.5], [[1]], True, -1])
def test_eos_ids_of_another_kind_are_refused_by_file_and_key(tmp_path, name, ids):
    small_folder(tmp_path)
    (tmp_path / f"{name}.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": ids}))
    with pytest.raises(UserError, match=rf"{name}\.json: eos_token_id=.* must be a token id"):
        load_tokenizer(resolve_model(str(tmp_path)))


@pytest.mark.parametrize("text", ["{", "[]", '{"chat_template": 5}'])
def test_an_older_template_file_of_another_kind_is_refused(tmp_path, text):
    with pytest.raises(UserError, match=r"chat_template\.json"):
        load_tokenizer(small_folder(tmp_path, chat_template__json=text))


def test_a_given_template_takes_the_place_of_the_models(tmp_path):
    files = small_folder(tmp_path, chat_template__jinja="{{ messages[0].content }}")
    own, given = load_tokenizer(files), load_tokenizer(files, chat_template=TEMPLATE)
    assert own.turn_end_ids == {4}
    assert given.turn_end_ids == {3, 4}
    assert own.fingerprint != given.fingerprint


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ messages[0].content }} world"])
def test_without_a_turn_end_in_the_template_eos_ends_turns(tmp_path, template):
    files = small_folder(tmp_path)
    assert load_tokenizer(files, chat_template=template).turn_end_ids == {4}


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path):
    files = small_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(files)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"there is no tokenizer\.json"):
        load_tokenizer(files)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, r"no `tokenizer\.ggml\.tokens`"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, r"no `tokenizer\.ggml\.model`"),
        ({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.model": "bert"}, "'bert'; gpt2 .* and llama"),
        (
            {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd"},
            r"tokenizer\.ggml\.pre is 'odd', a way of cutting words that is not known",
        ),
    ],
)
def test_a_gguf_vocabulary_that_cannot_be_rebuilt_is_refused(tmp_path, extra, message):
    files = resolve_model(str(write_gguf(tmp_path / "m.gguf", llama_tensors(hugging_face_weights()), extra=extra)))
    with pytest.raises(UserError, match=message):
        load_tokenizer(files)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("chat_template.json", b"{", "chat_template.json: is not JSON"),
        ("chat_template.json", b"[]", "chat_template.json: holds a list, not a mapping"),
        ("chat_template.json", b"\xff", "chat_template.json: is not JSON"),
        ("chat_template.json", b'{"chat_template": 3}', "chat_template) is a int, not a text"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: is not UTF-8"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: is not JSON"),
        ("special_tokens_map.json", b"[]", "special_tokens_map.json: holds a list"),
        ("added_tokens.json", b"3", "added_tokens.json: holds a int"),
        ("tokenizer.json", b"[]", "tokenizer.json cannot be read"),
        (
            "generation_config.json",
            b'{"eos_token_id": "x"}',
            "generation_config.json: eos_token_id='x' must be a token id",
        ),
    ],
)
def test_a_damaged_file_beside_the_tokenizer_is_named(tmp_path, name, content, said):
    tiny_tokenizer(chat=False).save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(said)):
        load_tokenizer(resolve_model(str(tmp_path)))
