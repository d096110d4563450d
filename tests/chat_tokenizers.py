"""Small tokenizers for tests of chats: trained here on a few sentences, each with a template from golden/masks that
behaves as those of a real family do. Used by test_chat, test_masks and test_masks_properties."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from podtune.hub.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "golden" / "masks"
_SENTENCES = (
    "Hello there, how are you today? I am fine, thank you.",
    "The capital of France is Paris. What is the capital of Italy?",
    "system user assistant model tool\nYou are a careful assistant.",
    '{"name": "weather", "arguments": {"city": "Oslo"}}\n\n<think>\nLet me see.\n</think>\n\n',
    "## Ünïcödé: naïve café, 東京, привет, 🙂\n  indented\ttabs\r\n",
)


@dataclass(frozen=True)
class Family:
    """A template and the tokenizer it goes with. pieces: SentencePiece-like, with a mark for each space; adds_bos: the
    tokenizer puts a BOS before a text by itself, so that a template which writes one invites two; strips: the template
    strips answers."""

    template: str
    specials: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str | None = None
    pieces: bool = False
    adds_bos: bool = False
    turn_end: str | None = ""
    strips: bool = False
    takes_system: bool = True
    takes_tools: bool = False


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip
_QWEN = (*_CHATML, "<tool_call>", "</tool_call>", "<think>", "</think>")

FAMILIES: dict[str, Family] = {
    # pad and end of turn are one token, as people set it: the end of turn is trained all the same
    "chatml": Family("chatml", _CHATML, None, "<|im_end|>", pad="<|im_end|>", turn_end="<|im_end|>"),
    "llama3": Family("llama3", _LLAMA3, "<|begin_of_text|>", "<|eot_id|>", adds_bos=True, turn_end="<|eot_id|>",
                     strips=True, takes_tools=True),
    "mistral": Family("mistral", _MISTRAL, "<s>", "</s>", pad="</s>", pieces=True, adds_bos=True, turn_end="</s>",
                      takes_tools=True),
    "gemma": Family("gemma", ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>",
                    pad="<pad>", pieces=True, adds_bos=True, turn_end="<end_of_turn>", strips=True),
    "qwen3": Family("qwen3", _QWEN, None, "<|im_end|>", pad="<|endoftext|>", turn_end="<|im_end|>", takes_tools=True),
    "generation": Family("generation", _CHATML, None, "<|im_end|>", turn_end="<|im_end|>"),
    "generation_wide": Family("generation_wide", _CHATML, None, "<|im_end|>", turn_end="<|im_end|>", strips=True),
    "generation_narrow": Family("generation_narrow", _CHATML, None, "<|im_end|>", turn_end="<|im_end|>"),
    "no_system": Family("no_system", ("<s>", "</s>"), "<s>", "</s>", adds_bos=True, turn_end="</s>",
                        takes_system=False),
    "trims": Family("trims", ("<s>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), "<s>",
                    "<|endoftext|>", adds_bos=True, turn_end="<|end|>", strips=True),
    "no_prompt": Family("no_prompt", ("<s>", "</s>"), "<s>", "</s>", pieces=True, turn_end="</s>"),
    "reasoner": Family("reasoner", ("<|begin|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>", "<think>",
                                    "</think>"), "<|begin|>", "<|end_of_sentence|>", turn_end="<|end_of_sentence|>"),
    "no_turn_end": Family("no_turn_end", ("<|endoftext|>",), None, "<|endoftext|>", turn_end=None),
}  # fmt: skip


@cache
def family_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a family, with its template."""
    family = FAMILIES[name]
    return make_tokenizer(family, (FOLDER / f"{family.template}.jinja").read_text())


def make_tokenizer(family: Family, template: str | None) -> Tokenizer:
    """A tokenizer of this kind with any template."""
    backend = _pieces(family) if family.pieces else _bytes(family)
    if family.adds_bos:
        bos = (family.bos, backend.token_to_id(family.bos))
        adds = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[bos])
        own = backend.post_processor
        backend.post_processor = processors.Sequence([own, adds]) if own else adds
    names: dict[str, Any] = {"bos_token": family.bos, "eos_token": family.eos, "pad_token": family.pad}
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, **{key: name for key, name in names.items() if name})
    inner.chat_template = template
    return Tokenizer(inner)


def _specials(family: Family) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in family.specials]


def _bytes(family: Family) -> Backend:
    """Byte-level pairs, as in GPT-2, Llama 3 and Qwen."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_SENTENCES * 2, trainer)
    backend.add_special_tokens(_specials(family))
    return backend


def _pieces(family: Family) -> Backend:
    """Pieces with a mark for each space and bytes for what is unknown, as in Llama 2, Mistral and Gemma."""
    letters = sorted({letter for sentence in _SENTENCES for letter in sentence.replace(" ", "▁") if letter.isascii()})
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *(x for x in letters if x != "▁")]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "n"), ("▁", "P"), ("i", "s"), ("▁", "is"), ("e", "r")]
    tokens += [one + other for one, other in merges]
    vocabulary = {token: at for at, token in enumerate(dict.fromkeys(tokens))}
    merges = [pair for pair in merges if pair[0] in vocabulary and pair[1] in vocabulary]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(_specials(family))
    return backend
