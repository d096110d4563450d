"""The model's own tokenizer and chat template, whatever it came from. Used by data, serve and export.

transformers is imported when a tokenizer is loaded, not before, and only for its fast tokenizers.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.config.errors import UserError
from podtune.hub.gguf_tokenizer import tokenizer_arguments
from podtune.hub.sources import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Stands for an answer when a template is asked what it writes after one; no template rewrites plain letters.
_ANSWER = "podtuneanswer"
# Tokens that some vocabularies keep for padding or for nothing, best first.
_PADDING_NAMES = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|finetune_right_pad_id|>",
    "<|vision_pad|>",
    "<|endoftext|>",
    "<|reserved_special_token_0|>",
    "<unused0>",
    "<unk>",
)
_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class Tokenizer:
    """A fast tokenizer with what training needs to know of it. `inner` is transformers' own object, for all else."""

    def __init__(self, inner: "PreTrainedTokenizerFast", *, eos_ids: Sequence[int] = ()):
        self.inner = inner
        self._eos_ids = frozenset(eos_ids)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids. `special`: with the BOS or EOS that the tokenizer puts round a text. Special tokens written out in
        the text become those tokens either way, as in a rendered chat."""
        return self.inner.encode(text, add_special_tokens=special)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        return str(self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self.inner)

    @property
    def bos_id(self) -> int | None:
        return self._id_of(self.inner.bos_token)

    @property
    def eos_id(self) -> int | None:
        return self._id_of(self.inner.eos_token)

    def _id_of(self, token: object) -> int | None:
        found = None if token is None else self.inner.convert_tokens_to_ids(str(token))
        return found if isinstance(found, int) else None

    @cached_property
    def pad_id(self) -> int:
        """An id to fill rows with. Never one that ends a text or a turn while the vocabulary has another; what is
        trained is decided by position all the same."""
        taken = {self.eos_id, self.bos_id} | self.turn_end_ids
        own = self._id_of(self.inner.pad_token)
        if own is not None and own not in taken:
            return own
        vocabulary = self.inner.get_vocab()
        named = (vocabulary[name] for name in _PADDING_NAMES if name in vocabulary)
        specials = sorted(number for number, token in self.inner.added_tokens_decoder.items() if token.special)
        return next((number for number in (*named, *specials) if number not in taken), own or 0)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of a chat, or None for a base model."""
        template = self.inner.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @cached_property
    def turn_end_ids(self) -> frozenset[int]:
        """Ids that end an answer: what the template writes after an assistant's turn, and all eos ids."""
        ends = set(self._eos_ids)
        if self.eos_id is not None:
            ends.add(self.eos_id)
        end = self._end_of_turn()
        if end is not None:
            ends.add(end)
        return frozenset(ends)

    def _end_of_turn(self) -> int | None:
        """The special token that the template writes after an assistant's turn, or None where it writes none."""
        if self.chat_template is None:
            return None
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self.inner.apply_chat_template(chat, tokenize=False)
        except Exception:
            # A template may refuse a chat this plain (it wants tools, or a system turn); eos ids must do then.
            return None
        _, found, tail = str(text).rpartition(_ANSWER)
        if not found:
            return None
        specials = {number for number, token in self.inner.added_tokens_decoder.items() if token.special}
        for number in self.encode(tail, special=False):
            if number in specials:
                return number
            if self.decode([number]).strip():
                return None
        return None

    @cached_property
    def fingerprint(self) -> str:
        """A hash of vocabulary, rules, template and special ids: it changes whenever some text's ids might."""
        specials = [self.bos_id, self.eos_id, self.pad_id, sorted(self.turn_end_ids)]
        digest = hashlib.sha256(self.inner.backend_tokenizer.to_str().encode())
        digest.update(json.dumps([self.chat_template, specials]).encode())
        return digest.hexdigest()[:32]

    def save(self, folder: Path | str) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the template, for AutoTokenizer of transformers 4 and 5."""
        self.inner.save_pretrained(str(folder))
        path = Path(folder) / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        # What transformers 5 writes here, transformers 4 refuses; both know these names.
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(files: ModelFiles, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model. `chat_template`: the text of a template to use instead of the model's own.

    Raises UserError when the model has no tokenizer that can be read.
    """
    from transformers import PreTrainedTokenizerFast

    if files.header is not None:
        inner = PreTrainedTokenizerFast(**tokenizer_arguments(files.header))
    else:
        inner = _from_folder(files)
    if chat_template is not None:
        inner.chat_template = chat_template
    return Tokenizer(inner, eos_ids=_eos_ids(files))


def _from_folder(files: ModelFiles) -> "PreTrainedTokenizerFast":
    """The tokenizer of a model folder: its tokenizer.json, or what transformers converts from the older files."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    assert files.folder is not None
    for name in _SIDE_FILES:  # so that the one that is damaged is named
        files.read_json(name)
    older = files.read_json("chat_template.json")
    files.read_text("chat_template.jinja")
    has_json = (files.folder / "tokenizer.json").is_file()
    try:
        if has_json:
            # Not AutoTokenizer, which for some classes makes the pre-tokenizer anew instead of taking the file's.
            inner = PreTrainedTokenizerFast.from_pretrained(str(files.folder), local_files_only=True)
        else:
            inner = AutoTokenizer.from_pretrained(str(files.folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        found = "tokenizer.json" if has_json else "the tokenizer files (there is no tokenizer.json)"
        raise UserError(
            f"{files.folder}: {found} cannot be read: {reason}. Download the model's tokenizer.json and "
            "tokenizer_config.json again."
        ) from error
    if not isinstance(inner, PreTrainedTokenizerFast):
        raise UserError(
            f"{files.folder}: the tokenizer ({type(inner).__name__}) has no fast form, which masks need. "
            "Put the model's tokenizer.json into the folder."
        )
    if inner.chat_template is None and older is not None:
        inner.chat_template = older.get("chat_template")
    named = inner.chat_template if isinstance(inner.chat_template, dict) else {"default": inner.chat_template}
    if wrong := next((one for one in named.values() if not isinstance(one, str | None)), None):
        raise UserError(
            f"{files.folder}: the chat template ({'chat_template.json' if older else 'tokenizer_config.json'}: "
            f"chat_template) is a {type(wrong).__name__}, not a text. Download the model's files again, or name a "
            "Jinja file in model.chat_template."
        )
    return inner


def _eos_ids(files: ModelFiles) -> list[int]:
    """The ids that end a text by the model's configuration, which some models have apart from the tokenizer's."""
    for name, content in (("generation_config.json", files.generation_config), ("config.json", files.config)):
        told: Any = content.get("eos_token_id")
        ids: list[Any] = [] if told is None else told if isinstance(told, list) else [told]
        if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
            raise UserError(
                f"model: {files.source}: {name}: eos_token_id={told!r} must be a token id, or a list of them. Download "
                "or save the model again."
            )
        if ids:
            return ids
    return []
