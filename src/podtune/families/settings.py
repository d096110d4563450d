"""Reads a Hugging Face configuration so that no key is ignored: each is used, known to be harmless, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from podtune.config.errors import UserError
from podtune.layers.feedforward import ACTIVATIONS
from podtune.layers.positions import ROPES, Rope
from podtune.models.decoder import LayerKind

# Keys that change nothing in what a forward pass computes. A key that does must never stand here.
_HARMLESS = """
    model_type architectures transformers_version torch_dtype dtype _name_or_path name_or_path initializer_range
    use_cache bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id
    tokenizer_class prefix output_attentions output_hidden_states return_dict return_dict_in_generate
    use_return_dict output_scores torchscript use_bfloat16 chunk_size_feed_forward id2label label2id num_labels
    problem_type finetuning_task task_specific_params auto_map pretraining_tp is_llama_config attn_implementation
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal experts_implementation
    _experts_implementation cache_implementation transformers.js_config unsloth_version unsloth_fixed
    transformers_weights tf_legacy_loss pruned_heads max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    tie_encoder_decoder cross_attention_hidden_size
"""
HARMLESS = frozenset(_HARMLESS.split())
# Keys of every family that may be there with these values only.
FIXED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "hidden_dropout": (0, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_decoder": (True, False, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, None),
}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_POSITIVE_ROPE_KEYS = (
    "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow",
)  # fmt: skip
_LARGEST = 2**31 - 1  # of the sizes that XLA indexes with 32 bits
_REQUIRED_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class Settings:
    """One config.json being read. Call `finish` at the end: it refuses every key that nothing has asked for."""

    def __init__(self, content: Mapping[str, Any]):
        self._content = content
        self._unread = set(content)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default where it is absent or null."""
        self._unread.discard(key)
        value = self._content.get(key)
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        """True where the key is there and null, which may mean something else than its absence."""
        self._unread.discard(key)
        return key in self._content and self._content[key] is None

    def whole(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A positive whole number. Raises UserError where it is absent without a default, or something else."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= _LARGEST:
            rule = "a positive whole number" if at_least == 1 else f"a whole number of {at_least} or more"
            raise self.refused(key, f"must be {rule}" + (f", at most {_LARGEST}" if _is_huge(value) else ""))
        return value

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """A mapping, or None where it is absent or null."""
        value = self.take(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.refused(key, "must be a mapping")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, "must be true or false")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or None where neither the file nor the default has one."""
        value = self.take(key, default)
        if not _is_number_or_none(value) or (value is not None and value <= 0):
            raise self.refused(key, "must be a positive number")
        return None if value is None else float(value)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses a key that is there with another value than these."""
        self._unread.discard(key)
        if key in self._content and self._content[key] not in allowed:
            rule = " or ".join(repr(value) for value in allowed if value is not None) or "absent"
            raise self.refused(key, f"is supported only as {rule}")

    def activation(self, key: str, default: str, *, also: str | None = None) -> str:
        """The name of an activation. also: a second key, which counts where the first is absent or null."""
        second = self.take(also) if also else None
        name = self.take(key, default if second is None else second)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            asked = also if also and self._content.get(key) is None else key
            raise self.refused(asked, f"must be one of {', '.join(ACTIVATIONS)}")
        return name

    def head_dim(self, *, embed: int, heads: int, default: int | None = None) -> int:
        head_dim = self.whole("head_dim", default or embed // heads)
        if head_dim % 2:
            raise self.refused("head_dim", "must be even, for rotary embeddings turn pairs")
        return head_dim

    def kv_heads(self, heads: int, default: int | None = None) -> int:
        kv_heads = self.whole("num_key_value_heads", default or heads)
        if heads % kv_heads:
            raise self.refused("num_key_value_heads", f"must divide num_attention_heads={heads}")
        return kv_heads

    def rope(self, *, context_length: int, default_base: float, nested: str | None = None) -> Rope:
        """Rotary settings, in the style of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

        nested: the layer type whose parameters to take where rope_parameters holds some for each.
        """
        base = self.number("rope_theta", default_base)
        scaling, parameters = self.mapping("rope_scaling"), self.mapping("rope_parameters")
        name = "rope_parameters" if parameters else "rope_scaling"
        if parameters is not None and nested is not None and nested in parameters:
            name = f"rope_parameters.{nested}"
            parameters = parameters[nested] or {}
            if not isinstance(parameters, Mapping):
                raise self.refused("rope_parameters", f"must hold a mapping as {nested}")
        if scaling and parameters and dict(scaling) != dict(parameters):
            raise self.refused("rope_scaling", "differs from rope_parameters; keep one of the two")
        original = None
        if self.take("original_max_position_embeddings") is not None:
            original = self.whole("original_max_position_embeddings")
        return self.rope_from(
            name, parameters or scaling or {}, base=base, context_length=context_length, original_length=original
        )

    def rope_from(
        self, name: str, content: Any, *, base: float | None, context_length: int, original_length: int | None = None
    ) -> Rope:
        """One mapping of rotary settings. name: the key it stands under, for errors."""
        if not isinstance(content, Mapping):
            raise UserError(f"config.json: {name}={content!r} must be a mapping.")
        kind = content.get("rope_type") or content.get("type") or "default"
        if not isinstance(kind, str) or kind not in ROPES:
            raise UserError(f"config.json: {name}.rope_type={kind!r} must be one of {', '.join(ROPES)}.")
        always = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}
        for key, value in content.items():
            if key not in always and key not in _ROPE_KEYS[kind] and not (key == "factor" and value in (1, None)):
                raise UserError(f"config.json: {name}.{key}={value!r} is not known for rope_type {kind!r}.")
            if key not in ("rope_type", "type", "truncate") and not _is_number_or_none(value):
                raise UserError(f"config.json: {name}.{key}={value!r} must be a number.")
            if key in _POSITIVE_ROPE_KEYS and isinstance(value, int | float) and value <= 0:
                raise UserError(f"config.json: {name}.{key}={value!r} must be positive.")
        for key in _REQUIRED_ROPE_KEYS.get(kind, ()):
            if content.get(key) is None:
                raise UserError(f"config.json: {name}.{key} is missing; rope_type {kind!r} needs it.")
        if content.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UserError(
                f"config.json: {name}.partial_rotary_factor={content['partial_rotary_factor']!r} is not supported; "
                "only models that rotate whole heads are (1.0)."
            )

        def value(key: str, default: Any) -> Any:
            found = content.get(key)
            return default if found is None else found

        trained = original_length or value("original_max_position_embeddings", context_length)
        if kind == "dynamic":  # transformers grows its base beyond max_position_embeddings, whatever else is given
            trained = context_length
        return Rope(
            base=float(value("rope_theta", base)),
            kind=kind,
            factor=float(value("factor", context_length / trained if kind == "yarn" else 1.0)),
            original_length=int(trained),
            low_frequency_factor=float(value("low_freq_factor", 1.0)),
            high_frequency_factor=float(value("high_freq_factor", 4.0)),
            beta_fast=float(content.get("beta_fast") or 32),
            beta_slow=float(content.get("beta_slow") or 1),
            truncate=bool(value("truncate", True)),
            attention_factor=content.get("attention_factor"),
            mscale=content.get("mscale"),
            mscale_all_dim=content.get("mscale_all_dim"),
        )

    def layer_kinds(
        self,
        layers: int,
        *,
        window: int | None,
        is_sliding: Callable[[int], bool],
        sliding_rope: int = 0,
    ) -> tuple[LayerKind, ...]:
        """What each layer sees. `layer_types` decides; where it is absent, is_sliding(layer).

        window: of the sliding layers; sliding_rope: which rope they use.
        """
        types = self.take("layer_types")
        if types is None:
            sliding = [is_sliding(layer) for layer in range(layers)]
        else:
            known = {"full_attention": False, "sliding_attention": True}
            is_list = isinstance(types, list) and len(types) == layers
            if not is_list or not all(isinstance(one, str) and one in known for one in types):
                raise self.refused("layer_types", f"must be {layers} times one of {', '.join(known)}")
            sliding = [known[one] for one in types]
        if any(sliding) and window is None:
            raise self.refused("sliding_window", "is missing though layers are of sliding attention")
        return tuple(LayerKind(window, sliding_rope) if slides else LayerKind() for slides in sliding)

    def finish(self) -> None:
        """Raises UserError naming every key that was neither asked for nor is known to be harmless."""
        for key, allowed in FIXED.items():
            if key in self._unread:
                self.only(key, *allowed)
        unknown = sorted(key for key in self._unread if key not in HARMLESS and self._content[key] is not None)
        if unknown:
            listed = ", ".join(f"{key}={self._content[key]!r}" for key in unknown)
            raise UserError(
                f"config.json: {listed}: not known for model_type {self._content.get('model_type')!r}, so this model "
                "may compute something else than podtune would. If the key has no effect, remove it from config.json."
            )

    def refused(self, key: str, rule: str) -> UserError:
        shown = f"{key}={self._content[key]!r}" if key in self._content else f"{key} (absent)"
        return UserError(f"config.json: {shown} {rule}. model_type: {self._content.get('model_type')!r}.")


def _is_number_or_none(value: Any) -> bool:
    if value is None:
        return True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not _is_huge(value) and math.isfinite(value)


def _is_huge(value: Any) -> bool:
    """A whole number that no array has for a size, and that may be beyond what a float can hold."""
    return isinstance(value, int) and abs(value) > _LARGEST
