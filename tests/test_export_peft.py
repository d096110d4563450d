"""PEFT adapters: loaded by peft over the base they give our logits, and nothing was asked twice."""

import dataclasses
import json
import warnings

import jax
import numpy as np
import pytest
from export_cases import adapted_model, base_weights, our_logits, some_tokens, transformers_folder

from podtune.config.errors import UserError
from podtune.config.schema import LoRA as LoRASettings
from podtune.export.peft import adapter_config, load_adapter, serving_warnings, write_adapter
from podtune.serve.loading import load_for_serving
from podtune.weights.adapters import attach, merge
from podtune.weights.leaves import LoRA, is_weight

TOKENS = some_tokens()


def peft_logits(base_folder, adapter_folder):
    """(logits of the base, logits with the adapter) by transformers and peft."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch and its parts deprecate
        base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32, attn_implementation="eager")
        before = base(torch.as_tensor(TOKENS)).logits.numpy()
        warnings.filterwarnings("error", message=".*missing.*keys.*")
        warnings.filterwarnings("error", message=".*unexpected.*")
        model = PeftModel.from_pretrained(base, adapter_folder)
        return before, model(torch.as_tensor(TOKENS)).logits.numpy()


CASES = {
    "llama": LoRASettings(rank=4, alpha=8),
    "mistral": LoRASettings(rank=2, alpha=3.5),
    "qwen2": LoRASettings(rank=4, rslora=True),
    "qwen3": LoRASettings(rank=4, targets=("q_proj", "layers.mlp.*")),
    "gemma2": LoRASettings(rank=4, dropout=0.1),
    "gemma3_text": LoRASettings(rank=4),
    "llama-tied": LoRASettings(rank=4, targets=("embedding", "layers.attention.q")),
}


@pytest.mark.parametrize("family", CASES)
def test_peft_gives_our_logits_over_the_base(family, tmp_path):
    model, weights = adapted_model(family, CASES[family])
    base = transformers_folder(model, weights, tmp_path / "base")
    write_adapter(tmp_path / "adapter", model, weights, CASES[family], None, base=str(base))
    before, after = peft_logits(base, tmp_path / "adapter")
    ours = our_logits(model, weights, TOKENS)
    assert np.abs(after - ours).max() < 1e-4
    assert np.abs(after - before).max() > 1e-2


def test_an_untied_head_and_embedding_load_too(tmp_path):
    settings = LoRASettings(rank=4, targets=("embedding", "head"))
    model, weights = adapted_model("llama", settings)
    base = transformers_folder(model, weights, tmp_path / "base")
    write_adapter(tmp_path / "adapter", model, weights, settings, None, base=str(base))
    _, after = peft_logits(base, tmp_path / "adapter")
    assert np.abs(after - our_logits(model, weights, TOKENS)).max() < 1e-4


def test_the_configuration_is_what_was_trained():
    settings = LoRASettings(rank=4, alpha=24, dropout=0.05, rslora=True, targets=("q_proj", "down_proj"))
    model, weights = adapted_model("llama", settings)
    config = adapter_config(model, weights, settings, base="owner/model", revision="abc")
    expected = {
        "r": 4,
        "lora_alpha": 24,
        "lora_dropout": 0.05,
        "use_rslora": True,
        "target_modules": ["down_proj", "q_proj"],
        "base_model_name_or_path": "owner/model",
        "revision": "abc",
        "task_type": "CAUSAL_LM",
        "peft_type": "LORA",
    }
    assert {key: config[key] for key in expected} == expected
    with pytest.raises(AssertionError, match="scale"):
        adapter_config(model, weights, LoRASettings(rank=4, alpha=8), base="owner/model")


@pytest.mark.parametrize(("family", "targets"), [("llama", ("q_proj", "head")), ("llama-tied", ("embedding",))])
def test_what_is_written_reads_back_bit_for_bit(family, targets, tmp_path):
    settings = LoRASettings(rank=4, alpha=7, targets=targets)
    model, weights = adapted_model(family, settings)
    write_adapter(tmp_path / "adapter", model, weights, settings, None, base="base")
    again = load_adapter(model, base_weights(weights), tmp_path / "adapter")
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    assert all(jax.tree.leaves(jax.tree.map(lambda one, other: bool((one == other).all()), again, weights)))


def test_adapters_that_no_server_takes_are_said_and_others_not():
    model, _ = adapted_model("llama", LoRASettings(rank=4))
    description = model.describe()
    assert serving_warnings(model, attach(description, LoRASettings(targets="all-linear"))) == ()
    (said,) = serving_warnings(model, attach(description, LoRASettings(targets=("embedding", "head"))))
    assert "the embedding and the output head" in said
    assert "vLLM" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 5}, "rank 5"),
    ],
)
def test_adapters_of_another_kind_are_refused_by_name(change, words, tmp_path):
    settings = LoRASettings(rank=4, targets=("q_proj",))
    model, weights = adapted_model("llama", settings)
    write_adapter(tmp_path / "adapter", model, weights, settings, None, base="base")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=words):
        load_adapter(model, weights, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "holds a list"),
        ("[" * 100_000, "cannot be read"),
        ('{"peft_type": "LORA", "lora_alpha": 8}', "r=None"),
        ('{"peft_type": "LORA", "r": 4, "lora_alpha": "8"}', "lora_alpha='8'"),
        ('{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": 3}', "base_model_name_or_path=3"),
    ],
)
def test_a_configuration_that_is_none_is_refused_wherever_an_adapter_is_opened(text, words, tmp_path):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match=rf"adapter_config\.json: {words}"):
        load_for_serving(str(tmp_path))


def test_the_adapter_of_another_model_is_refused(tmp_path):
    settings = LoRASettings(rank=4, targets=("q_proj",))
    model, weights = adapted_model("llama", settings)
    write_adapter(tmp_path / "adapter", model, weights, settings, None, base="base")
    other, other_weights = adapted_model("qwen3", settings)
    with pytest.raises(UserError, match="needs"):
        load_adapter(other, merge(other_weights), tmp_path / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", ("embedding", "layers.attention.q"), ("embedding",)])
def test_the_text_model_inside_a_multimodal_gemma_gets_its_adapter_and_the_tower_none(targets, tmp_path):
    import tiny_models as tiny
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

    from podtune.families import model_from_files
    from podtune.families.loading import load_weights
    from podtune.hub.sources import resolve_model

    text = tiny.config("gemma3_text", vocab_size=112)
    text = {key: value for key, value in text.items() if key not in ("model_type", "sliding_window_pattern")}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    settings = LoRASettings(rank=4, targets=targets)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
        files = resolve_model(str(tmp_path / "base"))
        model = model_from_files(files)
        description = attach(model.describe(), settings)
        weights = load_weights(model, description, files.tensors(), tiny.mesh_of(), key=jax.random.key(0))
        weights = jax.tree.map(  # b starts at zero, which would test nothing
            lambda leaf: dataclasses.replace(leaf, b=leaf.b + 0.05) if isinstance(leaf, LoRA) else leaf,
            weights,
            is_leaf=is_weight,
        )
        write_adapter(tmp_path / "adapter", model, weights, settings, None, base=str(tmp_path / "base"))
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
        tokens = torch.as_tensor(TOKENS, dtype=torch.long)
        before = base(tokens).logits.numpy()
        warnings.filterwarnings("error", message=".*missing.*keys.*")
        warnings.filterwarnings("error", message=".*unexpected.*")
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
        after = adapted(tokens).logits.numpy()
    assert np.abs(after - our_logits(model, weights, TOKENS)).max() < 1e-4
    assert np.abs(after - before).max() > 1e-2
    assert not [name for name, _ in adapted.named_parameters() if "lora" in name and "vision" in name]
