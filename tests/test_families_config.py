"""A config.json is read whole: every key is used, known to be harmless, or refused by name."""

from typing import Any

import pytest
import tiny_models as tiny

from podtune.config.errors import UserError
from podtune.families import FAMILIES, model_from_config
from podtune.families.saving import hf_config
from podtune.layers.positions import attention_factor
from podtune.models.decoder import LayerKind


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_both_styles_of_configuration_mean_the_same(name):
    """As on the Hub for transformers 4, and as transformers 5 writes it."""
    transformers = pytest.importorskip("transformers")
    content = tiny.config(name)
    written = transformers.AutoConfig.for_model(**tiny.config(name)).to_dict()
    assert "rope_parameters" in written
    assert model_from_config(written).config == model_from_config(content).config


@pytest.mark.parametrize("name", tiny.FAMILY_CONFIGS)
def test_an_unknown_key_is_refused_by_name_and_value(name):
    with pytest.raises(UserError, match=r"residual_multiplier=0\.22.*not known for model_type"):
        tiny.tiny_model(name, residual_multiplier=0.22)
    assert tiny.tiny_model(name, residual_multiplier=None) == tiny.tiny_model(name)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu6"}, r"hidden_act='relu6' must be one of silu"),
        ("gemma2", {"hidden_activation": "mish"}, "hidden_activation='mish' must be one of"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 is supported only as 1"),
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout=0\.1 is supported only as 0"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config=.*absent"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ("llama", {"head_dim": 7}, "head_dim=7 must be even"),
        ("llama", {"hidden_size": "32"}, "hidden_size='32' must be a positive whole number"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a positive number"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' must be one of default"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "beta_fast=1 is not known"),
        ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section=.* is not known"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "whole heads"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor='2' must be a number"),
        ("llama", {"rope_scaling": 2}, "rope_scaling=2 must be a mapping"),
        ("llama", {"rope_parameters": 2.5}, r"rope_parameters=2\.5 must be a mapping"),
        ("llama", {"rope_parameters": {"full_attention": 1}}, "must hold a mapping as full_attention"),
        ("llama", {"layer_types": 1}, "layer_types=1 must be 3 times one of"),
        ("llama", {"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] must be one of"),
        ("llama", {"rope_scaling": {"type": ["linear"]}}, "rope_type=.* must be one of"),
        ("llama", {"rope_theta": 10**400}, "rope_theta=1000.* must be a positive number"),
        ("llama", {"vocab_size": 10**12}, "vocab_size=.* at most 2147483647"),
        ("gemma3_text", {"rope_scaling": "gelu"}, "rope_scaling='gelu' must be a mapping"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be a positive whole number"),
        ("qwen2", {"max_window_layers": ""}, "max_window_layers='' must be a whole number of 0 or more"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types=.* must be 3 times"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types=.* is supported only as .*sliding"),
        ("gemma2", {"sliding_window": None}, "sliding_window=None is missing though layers"),
        ("mistral", {"attention_bias": True}, "attention_bias=True is supported only as False"),
        ("qwen2", {"attention_bias": False}, "attention_bias=False is supported only as True"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types=.*chunked"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "must hold full_attention"),
        ("gemma3_text", {"model_type": "gemma4"}, "model_type='gemma4' architectures=None is not supported. Known"),
    ],
)
def test_what_would_compute_something_else_is_refused(name, changes, message):
    with pytest.raises(UserError, match=message):
        tiny.tiny_model(name, **changes)


_READ_KEYS = (
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "original_max_position_embeddings",
    "layer_types", "hidden_act", "hidden_activation", "sliding_window", "sliding_window_pattern", "max_window_layers",
    "use_sliding_window", "head_dim", "query_pre_attn_scalar", "attn_logit_softcapping", "attention_bias", "mlp_bias",
    "architectures", "partial_rotary_factor", *tiny.FAMILY_CONFIGS["llama"],
)  # fmt: skip
_WRONG = (
    0, 1, -1, 2.5, True, False, "", "gelu", [], ["gelu"], [1], {}, {"a": 1}, {"type": 1}, {"type": {}},
    {"type": "yarn", "factor": 0}, {"rope_type": "yarn", "original_max_position_embeddings": 0}, 10**400,
    {"full_attention": 1}, {"sliding_attention": "x", "full_attention": {}}, {"rope_type": "linear", "factor": [1]},
)  # fmt: skip


def refusal_of(content: dict[str, Any]) -> str | None:
    """What is said of a configuration that is refused; None of one that is read."""
    try:
        model_from_config(content)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", tiny.FAMILY_CONFIGS)
def test_no_value_of_any_type_ends_in_anything_but_a_refusal(name):
    """Whatever stands under a key, the model is read or a sentence names the key."""
    for key in _READ_KEYS:
        for wrong in _WRONG:
            content = tiny.config(name, **{key: wrong})
            if key == "architectures":
                del content["model_type"]
            refusal = refusal_of(content)
            assert refusal is None or "config.json" in refusal, (key, wrong)


def test_a_model_without_model_type_is_known_by_its_architecture():
    content = tiny.config("qwen3", architectures=["Qwen3ForCausalLM"])
    del content["model_type"]
    assert model_from_config(content) == tiny.tiny_model("qwen3")


def test_real_configurations_of_the_hub_are_accepted():
    """SmolLM2's, with the keys that its trainer left in it."""
    content = tiny.config("llama") | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {}},
        "transformers_version": "4.42.3",
        "use_cache": True,
    }
    assert model_from_config(content) == tiny.tiny_model("llama")


def test_windows_and_ropes_of_layers():
    full, window = LayerKind(None, 0), 8
    assert tiny.tiny_model("mistral").config.layer_kinds == (LayerKind(window, 0),) * 3
    assert tiny.tiny_model("mistral-no-window").config.layer_kinds == (full,) * 3
    assert tiny.tiny_model("qwen2").config.layer_kinds == (full, LayerKind(window, 0), LayerKind(window, 0))
    assert tiny.tiny_model("qwen2", sliding_window=None).config.layer_kinds == (full,) * 3
    assert tiny.tiny_model("qwen2-no-window").config.layer_kinds == (full,) * 3
    assert tiny.tiny_model("gemma2").config.layer_kinds == (LayerKind(window, 0), full, LayerKind(window, 0))
    assert tiny.tiny_model("gemma3_text").config.layer_kinds == (LayerKind(window, 1), full, LayerKind(window, 1))
    ropes = tiny.tiny_model("gemma3_text").config.ropes
    assert (ropes[0].base, ropes[0].kind, ropes[0].factor) == (1e4, "linear", 8.0)
    assert (ropes[1].base, ropes[1].kind) == (100.0, "default")


def test_an_attention_factor_of_yarn_may_be_given():
    scaling = tiny.config("llama-yarn")["rope_scaling"] | {"attention_factor": 1.5}
    assert attention_factor(tiny.tiny_model("llama", rope_scaling=scaling).config.ropes[0]) == 1.5


def test_the_text_model_in_a_multimodal_configuration():
    text = tiny.config("gemma3_text")
    content = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "mm_tokens_per_image": 4,
        "image_token_index": 9,
    }
    model = model_from_config(content)
    assert model.config == tiny.tiny_model("gemma3_text").config
    saved = hf_config(model)
    assert saved["model_type"] == "gemma3_text"
    assert saved["architectures"] == ["Gemma3ForCausalLM"]
    assert model_from_config(saved).config == model.config
    with pytest.raises(UserError, match="audio_config"):
        model_from_config(content | {"audio_config": {}})
    with pytest.raises(UserError, match="text_config=None must be the configuration"):
        model_from_config({"model_type": "gemma3"})


def test_the_table_of_families_is_complete():
    for name, family in FAMILIES.items():
        assert family.name == name
        names = [row.ours for row in family.rows]
        assert len(set(names)) == len(names)
        assert len({row.theirs for row in family.rows}) == len(names)
