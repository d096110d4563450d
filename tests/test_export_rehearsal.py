"""The rehearsal finds before training whatever would make the export fail after it."""

import dataclasses
import shutil

import jax.numpy as jnp
import pytest
from export_cases import adapted_model, model_folder, tiny_tokenizer
from workflow_cases import a_console, a_run, chats, write_jsonl

from podtune.config.errors import RunFailure, UserError
from podtune.config.schema import LoRA as LoRASettings
from podtune.export import rehearsal
from podtune.export.huggingface import write_model
from podtune.export.rehearsal import check_reloads, rehearse, rehearse_small_files
from podtune.workflow.checking import faults_of
from podtune.workflow.run import run_workflow

SETTINGS = LoRASettings(rank=4, alpha=8)


def a_rehearsal(folder, model, weights, tokenizer=None, **changes):
    arguments = {
        "dtype": "float32",
        "generation_config": {},
        "adapter": SETTINGS,
        "merged": True,
        "base": "owner/model",
        "checkpoint_bytes": 1000,
        **changes,
    }
    return rehearse(folder, model, weights, tokenizer or tiny_tokenizer(), **arguments)


def test_a_sound_export_passes_and_leaves_nothing_behind(tmp_path):
    model, weights = adapted_model("llama", SETTINGS)
    rehearsed = a_rehearsal(tmp_path, model, weights)
    assert list(tmp_path.iterdir()) == []
    write_model(tmp_path / "model", model, weights, tiny_tokenizer(), dtype="float32")
    written = (tmp_path / "model/model.safetensors").stat().st_size
    assert 0 < written - rehearsed.bytes + sum(leaf.nbytes for leaf in _adapters(weights)) < 10_000  # the header
    assert rehearsed.warnings == ()


def with_value(weights, place, value):
    """The weights with one value of the second layer's MLP in the place of what was there."""
    down = weights.layers.mlp.down
    base = getattr(down, "base", down)
    base = base.at[(1, *place)].set(value)
    down = dataclasses.replace(down, base=base) if base is not down and hasattr(down, "base") else base
    return dataclasses.replace(
        weights, layers=dataclasses.replace(weights.layers, mlp=dataclasses.replace(weights.layers.mlp, down=down))
    )


@pytest.mark.parametrize("settings", [SETTINGS, None])
@pytest.mark.parametrize(
    ("dtype", "value", "is_refused"),
    [
        ("float16", 65519.0, False), ("float16", -65521.0, True), ("float16", 7e4, True), ("float16", 1e38, True),
        ("bfloat16", 7e4, False), ("bfloat16", 3.4e38, True), ("float32", 3.4e38, False),
    ],
)  # fmt: skip
def test_a_value_that_would_become_infinite_is_refused_before_training_and_before_it_is_written(
    tmp_path, settings, dtype, value, is_refused
):
    model, weights = adapted_model("llama", settings)
    weights = with_value(weights, (3, 5), value)
    arguments = {"dtype": dtype, "adapter": settings}
    if not is_refused:
        a_rehearsal(tmp_path, model, weights, **arguments)
        write_model(tmp_path / "model", model, weights, tiny_tokenizer(), dtype=dtype)
        return
    said = rf"export\.dtype: {dtype} ends at .*layers\.1\.mlp\.down_proj\.weight holds a value of .* Use .*float32"
    with pytest.raises(UserError, match=said):
        a_rehearsal(tmp_path, model, weights, **arguments)
    with pytest.raises(UserError, match=said):
        write_model(tmp_path / "model", model, weights, tiny_tokenizer(), dtype=dtype)
    assert not (tmp_path / "model").exists()


def test_values_that_become_zero_are_told_where_they_are_more_than_a_trifle(tmp_path):
    model, weights = adapted_model("llama")
    one = with_value(weights, (3, 5), 1e-9)
    assert a_rehearsal(tmp_path, model, one, dtype="float16", adapter=None).lost is None
    many = with_value(weights, (), 2.0**-26)
    count = weights.layers.mlp.down[1].size
    lost = a_rehearsal(tmp_path, model, many, dtype="float16", adapter=None).lost
    assert f"{count:,} of" in (lost or "")
    assert write_model(tmp_path / "model", model, many, tiny_tokenizer(), dtype="float16").lost == lost
    kept = with_value(weights, (), 2.0**-24)  # the smallest number that float16 has
    assert a_rehearsal(tmp_path, model, kept, dtype="float16", adapter=None).lost is None


def _adapters(weights):
    from podtune.export.peft import adapted_leaves

    return [half for leaf in adapted_leaves(weights).values() for half in (leaf.a, leaf.b)]


def test_a_full_disk_is_found(tmp_path, monkeypatch):
    model, weights = adapted_model("llama", SETTINGS)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(rehearsal.shutil, "disk_usage", lambda _: usage._replace(free=50_000))
    with pytest.raises(UserError, match=r"50\.0 kB free.*export: {merged: false}"):
        a_rehearsal(tmp_path, model, weights)
    # Room for weights and checkpoints alone is too little: logs, report and tokenizers are written too.
    monkeypatch.setattr(rehearsal.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(UserError, match=r"1\.0 MB free; checkpoints and exports need about 2\.\d+ MB"):
        a_rehearsal(tmp_path, model, weights)


def test_a_folder_that_cannot_be_written_is_found(tmp_path, monkeypatch):
    model, weights = adapted_model("llama", SETTINGS)

    def refused(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refused)
    with pytest.raises(UserError, match="Permission denied"):
        a_rehearsal(tmp_path, model, weights)


def test_a_generation_config_that_transformers_refuses_is_found():
    model, _ = adapted_model("llama", SETTINGS)
    wrong = {"num_beams": 1, "num_return_sequences": 4}
    with pytest.raises(UserError, match="would not load in transformers"):
        rehearse_small_files(model, tiny_tokenizer(), dtype="float32", generation_config=wrong)


def test_a_tokenizer_larger_than_the_embedding_is_found():
    model, _ = adapted_model("llama", SETTINGS)
    tokenizer = tiny_tokenizer()
    tokenizer.inner.add_tokens([f"<extra{number}>" for number in range(40)])
    said = r"tokenizer\.json has \d+ ids, the embedding .* 112 rows.*Give the model the tokenizer"
    with pytest.raises(UserError, match=said):
        rehearse_small_files(model, tokenizer, dtype="float32", generation_config={})


def test_a_tokenizer_that_transformers_takes_for_another_kind_is_found_by_check(tmp_path):
    """The tokenizer of these tests under qwen2, for which transformers makes the pre-tokenizer anew."""
    model_folder("qwen2", tmp_path / "base")
    write_jsonl(tmp_path / "chats.jsonl", chats())
    run = a_run(tmp_path)
    with pytest.raises(UserError, match=r"tokenizer of a qwen2 as \w+, which splits text otherwise.*tokenizer\.json"):
        run_workflow(run, a_console())
    assert any("splits text otherwise" in fault for fault in faults_of(run, a_console()))


def test_a_config_that_gives_another_model_is_found(tmp_path):
    model, weights = adapted_model("llama", SETTINGS)
    model = dataclasses.replace(model, hf_config={**model.hf_config, "rope_theta": 123.0})
    with pytest.raises(RunFailure, match=r"config\.json"):
        a_rehearsal(tmp_path, model, weights)


def test_an_adapter_that_no_server_takes_is_said(tmp_path):
    settings = LoRASettings(rank=4, targets=("embedding",))
    model, weights = adapted_model("llama", settings)
    rehearsed = a_rehearsal(tmp_path, model, weights, adapter=settings, merged=False)
    assert "vLLM" in rehearsed.warnings[0]
    assert rehearsed.bytes > 4 * 112 * 32  # the merged model is counted: it will be written


@pytest.mark.parametrize("named", [["k_proj"], r".*\.k_proj"])
def test_an_adapter_that_peft_would_drop_a_part_of_is_found(named, tmp_path, monkeypatch):
    settings = LoRASettings(rank=4, targets=("k_proj", "q_proj"))
    model, weights = adapted_model("llama", settings)
    monkeypatch.setattr("podtune.export.peft._target_modules", lambda *_: named)
    with pytest.raises(RunFailure, match=r"leave out model\.layers\.0\.self_attn\.q_proj"):
        a_rehearsal(tmp_path, model, weights, adapter=settings)


def test_the_check_after_export_sees_a_changed_tensor_and_a_missing_file(tmp_path):
    model, weights = adapted_model("llama", SETTINGS)
    write_model(tmp_path / "model", model, weights, tiny_tokenizer(), dtype="float32")
    check_reloads(tmp_path / "model", model, weights, tiny_tokenizer(), dtype="float32")
    changed = dataclasses.replace(weights, norm=weights.norm + jnp.float32(1e-3))
    with pytest.raises(RunFailure, match=r"model\.norm\.weight does not read back"):
        check_reloads(tmp_path / "model", model, changed, tiny_tokenizer(), dtype="float32")
    (tmp_path / "model/tokenizer.json").unlink()
    with pytest.raises(RunFailure):
        check_reloads(tmp_path / "model", model, weights, tiny_tokenizer(), dtype="float32")
