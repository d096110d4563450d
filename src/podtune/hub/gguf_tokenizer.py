"""Builds a fast tokenizer from a GGUF file's metadata: vocabulary, merges, pre-tokenizer, special tokens, template.

Used by tokenizer.py. transformers has a conversion too, but it gives every byte-level vocabulary the pre-tokenizer of
its architecture; the file names its own in `tokenizer.ggml.pre`: SmolLM2's splits digits where Llama 3's does not.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from podtune.config.errors import UserError
from podtune.hub.gguf_config import token_id
from podtune.hub.gguf_file import GgufFile

if TYPE_CHECKING:
    import tokenizers

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


class _PreTokenizer(NamedTuple):
    """How text is cut before byte-level merges apply. `pattern` None: GPT-2's own, which the library has built in."""

    pattern: str | None
    single_digits: bool = False
    unicode_form: str | None = None
    # Whole words that are in the vocabulary are taken without merging (the tiktoken way).
    ignore_merges: bool = False
    adds_bos: bool = False


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_GPT2 = _PreTokenizer(None)
_SMOLLM = _PreTokenizer(None, single_digits=True)
_LLAMA3 = _PreTokenizer(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignore_merges=True, adds_bos=True)
_QWEN2 = _PreTokenizer(rf"{_WORDS}|\p{{N}}|{_REST}", unicode_form="NFC")
_TEKKEN = _PreTokenizer(
    rf"{_TEKKEN_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    adds_bos=True,
)

# By `tokenizer.ggml.pre`: the names that llama.cpp's converter writes for the families read here.
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def tokenizer_arguments(file: GgufFile) -> dict[str, Any]:
    """Keyword arguments that make the file's tokenizer out of transformers' PreTrainedTokenizerFast.

    Raises UserError when the vocabulary is of a kind that cannot be rebuilt exactly.
    """
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    backend = _backend(file, tokens)
    arguments: dict[str, Any] = {
        "tokenizer_object": backend,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.require(f"{file.require('general.architecture')}.context_length")),
        "chat_template": file.metadata.get("tokenizer.chat_template"),
    }
    for argument, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = token_id(file, key)
        if token is None:
            continue
        if not 0 <= token < len(tokens):
            raise UserError(
                f"{file.path}: tokenizer.ggml.{key}_token_id is {token}, but the vocabulary has {len(tokens)} tokens. "
                "The file is damaged; convert the model again."
            )
        arguments[f"{argument}_token"] = tokens[token]
    return arguments


def _backend(file: GgufFile, tokens: list[str]) -> "tokenizers.Tokenizer":
    kind = file.require("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(file, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentence_piece(file, tokens), True
    else:
        raise UserError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; gpt2 (byte-level BPE) and llama (SentencePiece BPE) can "
            "be rebuilt. Use the model's safetensors folder, which holds its tokenizer.json."
        )
    _add_special_tokens(file, backend, tokens)
    _add_boundaries(file, backend, tokens, adds_bos=adds_bos)
    return backend


def _byte_level(file: GgufFile, tokens: list[str]) -> "tuple[tokenizers.Tokenizer, bool]":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.require("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"{file.path}: tokenizer.ggml.pre is {name!r}, a way of cutting words that is not known here, so text "
            f"would be cut into other tokens than it was trained on. Known: {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Use the model's safetensors folder, which holds its tokenizer.json."
        )
    style = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=style.ignore_merges))
    if style.unicode_form == "NFC":
        backend.normalizer = normalizers.NFC()
    steps = []
    if style.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if style.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(style.pattern), "isolated"))
    add_space = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=style.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, style.adds_bos


def _sentence_piece(file: GgufFile, tokens: list[str]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = token_id(file, "unknown")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_by_score(vocabulary, file.require("tokenizer.ggml.scores")),
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", "▁")
    end = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        end.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = space
        # Spaces are ▁ by now, so this cuts nothing; it stands in Gemma's own tokenizer.json.
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(end)
    return backend


def _merges_by_score(vocabulary: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores stand for: every way to make a token of two others, best token first.

    SentencePiece joins the neighbours whose joined token has the highest score; merges are tried in list order.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, number in vocabulary.items():
        for cut in range(1, len(token)):
            left = vocabulary.get(token[:cut])
            if left is not None and (right := vocabulary.get(token[cut:])) is not None:
                ranked.append((-float(scores[number]), left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _add_special_tokens(file: GgufFile, backend: "tokenizers.Tokenizer", tokens: list[str]) -> None:
    """Control tokens become special, user-defined ones are matched whole in text but are ordinary words."""
    from tokenizers import AddedToken

    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = [0] * len(tokens)
    named = {token_id(file, key) for key in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    added = []
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        special = kind in (_UNKNOWN, _CONTROL) or number in named
        if special or kind == _USER_DEFINED:
            added.append(AddedToken(token, normalized=False, special=special))
    backend.add_tokens(added)


def _add_boundaries(file: GgufFile, backend: "tokenizers.Tokenizer", tokens: list[str], *, adds_bos: bool) -> None:
    """BOS before and EOS after each text, where the file asks for them or its kind of vocabulary has it by default."""
    from tokenizers import processors

    before = after = None
    if file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        before = token_id(file, "bos")
    if file.metadata.get("tokenizer.ggml.add_eos_token", False):
        after = token_id(file, "eos")
    if before is None and after is None:
        return
    first = [tokens[before]] if before is not None else []
    last = [tokens[after]] if after is not None else []
    pairs = [(tokens[number], number) for number in (before, after) if number is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)],
        special_tokens=pairs,
    )
