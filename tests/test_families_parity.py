"""Every family computes what transformers computes, reads its checkpoints, and is read back by it."""

import numpy as np
import pytest
import tiny_models as tiny

from podtune.families import FAMILIES
from podtune.families.loading import load_weights

LENGTH = 40  # beyond the original context (16) of every scaled rope, and beyond the windows (8)


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
