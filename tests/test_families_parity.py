"""Every family computes what transformers computes, reads its checkpoints, and is read back by it."""

import copy
import json

import numpy as np
import pytest
import tiny_models as tiny

from podtune.config.schema import LoRA
from podtune.families import FAMILIES, model_from_config
from podtune.families.loading import load_weights
from podtune.families.saving import hf_config, hf_tensors
from podtune.weights.adapters import attach

pytestmark = pytest.mark.usefixtures("quick_compiling")

LENGTH = 40  # beyond the original context (16) of every scaled rope, and beyond the windows (8)


MULTIMODAL = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": tiny.config("gemma3_text"),
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 95,
}


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_equal_those_of_transformers(name, torch):
    reference = tiny.torch_model(tiny.config(name))
    model = tiny.tiny_model(name)
    weights = load_weights(model, model.describe(), tiny.MemoryStore(tiny.tensors_of(reference)), tiny.mesh_of())
    tokens = tiny.random_tokens(2, LENGTH)
    logits = tiny.quick_jit(lambda w, t: model.unembed(w, model.hidden(w, t).states))(weights, tokens)
    with torch.no_grad():
        expected = reference(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_every_family_is_compared():
    assert {tiny.CONFIGS[name]["model_type"] for name in tiny.CONFIGS} | {"gemma3"} == set(FAMILIES)


@pytest.mark.parametrize("name", [*tiny.FAMILY_CONFIGS, "gemma3"])
def test_transformers_loads_what_is_saved_with_the_same_logits(name, torch, tmp_path):
    """With an adapter, merged into every linear weight; read back by our own reader too."""
    import transformers
    from safetensors.torch import save_file

    content = MULTIMODAL if name == "gemma3" else tiny.config(name)
    model = model_from_config(content)
    description = attach(model.describe(), LoRA(rank=2, alpha=2.0), aliases=model.aliases())
    weights = tiny.random_weights(model, description=description)
    saved = {tensor.name: torch.from_numpy(np.array(tensor.read())) for tensor in hf_tensors(model, weights)}
    own = hf_config(model)
    (tmp_path / "config.json").write_text(json.dumps(own))
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
    )
    assert type(loaded).__name__ == own["architectures"][0]
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    tokens = tiny.random_tokens(2, LENGTH)
    logits = tiny.quick_jit(lambda w, t: model.unembed(w, model.hidden(w, t).states))(weights, tokens)
    with torch.no_grad():
        expected = loaded.eval()(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_the_text_model_inside_a_multimodal_one_has_its_logits(torch):
    import transformers

    reference = transformers.Gemma3ForConditionalGeneration(
        transformers.AutoConfig.for_model(**copy.deepcopy(MULTIMODAL))
    ).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model = model_from_config(reference.config.to_dict())
    weights = load_weights(model, model.describe(), tiny.MemoryStore(tiny.tensors_of(reference)), tiny.mesh_of())
    tokens = tiny.random_tokens(1, LENGTH)
    logits = tiny.quick_jit(lambda w, t: model.unembed(w, model.hidden(w, t).states))(weights, tokens)
    with torch.no_grad():
        expected = reference(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)
