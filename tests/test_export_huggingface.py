"""Exported folders: transformers loads them, computes what we do, and stops where it should."""

import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from export_cases import VOCABULARY, adapted_model, our_logits, some_tokens, tiny_tokenizer
from param_trees import map_params

from podtune.config.schema import LoRA as LoRASettings
from podtune.export.config_files import exported_config, exported_generation_config
from podtune.export.huggingface import write_model
from podtune.families import model_from_files
from podtune.families.loading import load_weights
from podtune.families.saving import hf_tensors
from podtune.hub.sources import resolve_model
from podtune.hub.tokenizer import load_tokenizer
from podtune.serve.generate import Generator

TOKENS = some_tokens()
SETTINGS = LoRASettings(rank=4, alpha=8)


def torch_model(folder):
    import torch
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch and its parts deprecate
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return model


def torch_logits(model):
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(TOKENS, dtype=torch.long)).logits.numpy()


def torch_answer(model, prompt, count):
    import torch

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = model.generate(torch.as_tensor([prompt]), max_new_tokens=count, do_sample=False)
    return said[0, len(prompt) :].tolist()


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "llama-tied", "llama-biases"]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_base_and_adapter_and_continues_alike(family, tmp_path):
    model, weights = adapted_model(family, SETTINGS)
    tokenizer = tiny_tokenizer()
    write_model(tmp_path / "model", model, weights, tokenizer, dtype="float32")
    reloaded = torch_model(tmp_path / "model")
    assert np.abs(torch_logits(reloaded) - our_logits(model, weights, TOKENS)).max() < 1e-4
    prompt = TOKENS[0, :9].tolist()
    theirs = torch_answer(reloaded, prompt, 8)
    ends = [token in tokenizer.turn_end_ids for token in theirs]
    assert len(theirs) == 8 or ends[-1]
    said = list(prompt)
    for _ in theirs:
        padded = np.zeros_like(TOKENS)  # one shape, so one compilation; nothing sees what comes after it
        padded[0, : len(said)] = said
        said.append(int(our_logits(model, weights, padded)[0, len(said) - 1].argmax()))
    assert said[len(prompt) :] == theirs


def test_generation_from_the_folder_stops_at_the_turn_end_and_takes_the_template_with_it(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = tiny_tokenizer()
    (end,) = tokenizer.turn_end_ids - {tokenizer.eos_id}
    model, weights = adapted_model("llama-tied")
    prompt = tokenizer.inner.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    # The embedding of the turn end is made to win after any token, so that an answer ends at once where it is known.
    states = np.asarray(model.hidden(weights, jnp.asarray([prompt])).states)[0, -1]
    embedding = weights.embedding.at[end].set(10 * states / np.linalg.norm(states))
    weights = jax.tree.unflatten(
        jax.tree.structure(weights),
        [embedding if leaf is weights.embedding else leaf for leaf in jax.tree.leaves(weights)],
    )
    write_model(tmp_path / "model", model, weights, tokenizer, dtype="float32", generation_config={"eos_token_id": 2})
    assert torch_answer(torch_model(tmp_path / "model"), prompt, 8) == [end]
    assert json.loads((tmp_path / "model/generation_config.json").read_text())["eos_token_id"] == [2, end]
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert reloaded.chat_template == tokenizer.inner.chat_template
    assert reloaded.all_special_ids == tokenizer.inner.all_special_ids
    # transformers 4 knows neither the class nor the list that transformers 5 writes.
    stated = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    assert stated["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in stated
    assert list(Generator(model, weights, tokenizer).stream(prompt, max_new_tokens=8)) == []


def test_our_reader_takes_back_bit_for_bit_what_was_written(tmp_path):
    model, weights = adapted_model("gemma3_text", SETTINGS)
    write_model(tmp_path / "model", model, weights, tiny_tokenizer(), dtype="bfloat16", max_shard_bytes=20_000)
    assert (tmp_path / "model/model.safetensors.index.json").exists()
    files = resolve_model(str(tmp_path / "model"))
    again = model_from_files(files)
    assert again.config == model.config
    mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), devices=jax.devices()[:1])
    loaded = load_weights(again, again.describe(dtype="bfloat16"), files.tensors(), mesh)
    for one, other in zip(hf_tensors(again, loaded), hf_tensors(model, weights, dtype="bfloat16"), strict=True):
        np.testing.assert_array_equal(one.read(), other.read())
    assert load_tokenizer(files).turn_end_ids == tiny_tokenizer().turn_end_ids


def test_a_vocabulary_that_is_no_round_number_keeps_its_rows(tmp_path):
    from safetensors.numpy import load_file

    model, weights = adapted_model("llama")
    write_model(tmp_path / "model", model, weights, tiny_tokenizer(), dtype="float32")
    tensors = load_file(tmp_path / "model/model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape[0] == VOCABULARY
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], weights.embedding)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory cannot be reset here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory_peaks_at_no_more_than_the_largest_tensor_and_a_third(dtype, tmp_path):
    rows, width = 60_000, 512  # 123 MB in float32, far above what else a process may take meanwhile
    model = tiny.tiny_model("llama-tied", vocab_size=rows, hidden_size=width, num_hidden_layers=1)
    zeros = map_params(lambda name, param: jnp.zeros(param.shape), model.describe())
    write_model(tmp_path / "warm", model, zeros, tiny_tokenizer(), dtype=dtype)
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    write_model(tmp_path / "model", model, zeros, tiny_tokenizer(), dtype=dtype)
    assert _memory("VmHWM") - before < 1.3 * rows * width * 4


def _memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def test_a_killed_export_leaves_the_old_folder_whole(tmp_path):
    """The process dies with half of the tensors written; what was exported before is still there, and then replaced."""
    model, weights = adapted_model("llama")
    tokenizer = tiny_tokenizer()
    write_model(tmp_path / "model", model, weights, tokenizer, dtype="float32")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    script = textwrap.dedent(
        f"""
        import os, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from export_cases import adapted_model, tiny_tokenizer
        from podtune.export.huggingface import write_model
        from pathlib import Path
        model, weights = adapted_model("llama", seed=5)
        def progress(done, total):
            if done > total / 2:
                os._exit(9)
        folder = Path({str(tmp_path / "model")!r})
        write_model(folder, model, weights, tiny_tokenizer(), dtype="float32", progress=progress)
        """
    )
    environment = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 9, done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert [path for path in tmp_path.iterdir() if path.name != "model"] != []  # what the killed one left
    _, other = adapted_model("llama", seed=5)
    write_model(tmp_path / "model", model, other, tokenizer, dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model/model.safetensors").read_bytes() != before["model.safetensors"]


def test_both_generations_of_transformers_find_the_rotary_settings():
    new = {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
        "torch_dtype": "bfloat16",
        "quantization_config": {"bits": 4},
    }
    written = exported_config(new, dtype="float32", eos_ids={7})
    assert written["rope_theta"] == 5e5
    assert written["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    assert written["rope_parameters"] == new["rope_parameters"]
    assert (written["dtype"], written["torch_dtype"], written["eos_token_id"]) == ("float32", "float32", 7)
    assert "quantization_config" not in written
    gemma = {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    written = exported_config(gemma, dtype="float32", eos_ids=())
    assert (written["rope_theta"], written["rope_local_base_freq"], written["rope_scaling"]) == (1e6, 1e4, None)
    old = {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert {key: exported_config(old, dtype="float32", eos_ids=())[key] for key in old} == old


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"temperature": 0.9, "top_p": 0.6},  # as Llama 2 chat was published: refused by save_pretrained
        {"do_sample": True, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 106]},
        {"max_length": 4096, "pad_token_id": 0, "temperature": 1.0},
    ],
)
def test_no_generation_config_is_refused_later(source, tmp_path):
    from transformers import GenerationConfig

    written = exported_generation_config(source, eos_ids={4, 2}, bos_id=1, pad_id=0)
    config = GenerationConfig.from_dict(written)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.validate(strict=True)
        config.save_pretrained(tmp_path)
    assert {2, 4, *source.get("eos_token_id", [])} <= set(written["eos_token_id"])
