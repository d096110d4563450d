"""The quickstart on the genuine model, cut to a few steps: transformers and peft load what it writes."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PROMPT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def quickstart(real_input, tmp_path_factory):
    """(output folder, what the command printed) of the recipe with two steps."""
    real_input("smollm2")
    folder = tmp_path_factory.mktemp("quickstart")
    command = [
        Path(sys.executable).with_name("podtune"), "run", "recipes/quickstart.yaml", f"output={folder / 'out'}",
        "train.steps=2", "train.epochs=none", "train.batch_tokens=256", "eval.samples=1", "eval.max_new_tokens=8",
        "eval.every=none", "export.dtype=float32", f"data.cache={folder / 'prepared'}",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out", done.stdout


def test_it_says_what_it_does_and_shows_both_answers(quickstart):
    output, said = quickstart
    assert "134.5M parameters" in said
    assert re.search(r"held-out loss 4\.\d+ before, \d\.\d+ after", said)
    assert re.search(r"before: \S.*\n\s*after: \S.*\n\s*expected: \S", said)
    results = json.loads((output / "run.json").read_text())["results"]
    assert results["after"]["loss"] < results["before"]["loss"]


def test_transformers_and_peft_give_the_same_logits_as_we_do(quickstart):
    """Merged, and as an adapter over the base that was written from the GGUF file, against our own forward pass."""
    import jax
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from podtune.serve.loading import load_for_serving

    output, _ = quickstart
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    ids = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), devices=jax.devices()[:1])
    loaded = load_for_serving(str(output / "adapter"), mesh=mesh)
    tokens = jax.numpy.asarray([ids])
    forward = jax.jit(lambda w, t: loaded.model.unembed(w, loaded.model.hidden(w, t).states))
    ours = np.asarray(forward(loaded.weights, tokens))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = AutoModelForCausalLM.from_pretrained(output / "model")
        theirs = merged(torch.as_tensor([ids])).logits.numpy()
        assert np.abs(theirs - ours).max() < 1e-4 * np.abs(ours).max()
        base = _base(output.parent / "base")
        plain = base(torch.as_tensor([ids])).logits.numpy()
        adapted = PeftModel.from_pretrained(base, output / "adapter")(torch.as_tensor([ids])).logits.numpy()
    assert np.abs(adapted - ours).max() < 1e-4 * np.abs(ours).max()
    assert np.abs(plain - ours).max() > 0.1
    assert merged.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def _base(folder):
    """The GGUF file as `podtune export FILE --to FOLDER` writes it, in transformers."""
    from transformers import AutoModelForCausalLM

    from podtune.cli.main import main

    sys.path.insert(0, str(ROOT / "tools"))
    import real_inputs

    with pytest.raises(SystemExit) as leaving:
        main(["export", str(real_inputs.fetch("smollm2")), "--to", str(folder), "--quiet"])
    assert leaving.value.code == 0
    return AutoModelForCausalLM.from_pretrained(folder)
