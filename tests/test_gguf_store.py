"""GGUF files read as the Hugging Face checkpoint they were made from: names, row order, parts, configuration."""

import tracemalloc

import gguf
import numpy as np
import pytest
from gguf_files import hugging_face_weights, interleave, llama_metadata, llama_tensors, write_gguf

from podtune.config.errors import UserError
from podtune.hub.gguf_file import open_gguf
from podtune.hub.gguf_rope import llama3_factors
from podtune.hub.gguf_store import GgufStore
from podtune.hub.sources import resolve_model


def opened(tmp_path, tensors=None, **written):
    tensors = llama_tensors(hugging_face_weights()) if tensors is None else tensors
    return resolve_model(str(write_gguf(tmp_path / "model.gguf", tensors, **written)))


def test_every_tensor_comes_back_under_its_hugging_face_name_and_in_its_row_order(tmp_path):
    weights = hugging_face_weights()
    store = opened(tmp_path, llama_tensors(weights)).tensors()
    assert set(store.names()) == set(weights)
    for name, values in weights.items():
        assert store.names()[name].shape == values.shape
        np.testing.assert_array_equal(store.read(name), values, err_msg=name)


def test_interleaving_really_changes_rows(tmp_path):
    rows = np.arange(16)
    assert interleave(rows, 2).tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


@pytest.mark.parametrize(
    "index",
    [
        (slice(3, 11),),
        (slice(None), slice(5, 20)),
        (slice(2, 3), slice(0, 32)),
        (slice(31, 32), slice(31, 32)),
        (slice(4, 4),),
        (slice(-2, None),),
    ],
)
@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"])
def test_a_part_is_the_part_of_the_whole(tmp_path, index, kind, part):
    name = f"model.layers.1.{part}.weight"
    tensors = llama_tensors(hugging_face_weights())
    quantisation = {} if kind is None else {key: kind for key in tensors if "blk" in key and "norm" not in key}
    store = opened(tmp_path, tensors, quantisation=quantisation).tensors()
    np.testing.assert_array_equal(store.read(name, index), store.read(name)[index])


def test_biases_of_interleaved_rows_are_put_in_order_too(tmp_path):
    weights = hugging_face_weights()
    bias = np.arange(32, dtype=np.float32)
    tensors = llama_tensors(weights) | {"blk.0.attn_q.bias": interleave(bias, 4)}
    files = opened(tmp_path, tensors)
    assert files.config["attention_bias"]
    store = files.tensors()
    np.testing.assert_array_equal(store.read("model.layers.0.self_attn.q_proj.bias"), bias)
    np.testing.assert_array_equal(store.read("model.layers.0.self_attn.q_proj.bias", (slice(3, 9),)), bias[3:9])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma2", "gemma3"])
def test_other_architectures_keep_their_rows(tmp_path, architecture):
    values = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    norm = np.linspace(0.5, 1.5, 32, dtype=np.float32)
    extra = {"token_embd.weight": np.zeros((16, 32), np.float32), "output_norm.weight": norm + 1}
    metadata = llama_metadata(**{"attention.sliding_window": 16, "attention.key_length": 8})
    store = opened(
        tmp_path, {"blk.0.attn_q.weight": values, **extra}, architecture=architecture, metadata=metadata
    ).tensors()
    np.testing.assert_array_equal(store.read("model.layers.0.self_attn.q_proj.weight"), values)
    # Gemma's norms are stored as 1 + w.
    expected = norm if architecture.startswith("gemma") else norm + 1
    np.testing.assert_allclose(store.read("model.norm.weight"), expected, atol=1e-6)


def test_half_precision_tensors_are_not_widened(tmp_path):
    tensors = llama_tensors(hugging_face_weights())
    tensors["output.weight"] = tensors["output.weight"].astype(np.float16)
    store = opened(tmp_path, tensors).tensors()
    assert store.names()["lm_head.weight"].dtype == np.float16
    np.testing.assert_array_equal(store.read("lm_head.weight"), tensors["output.weight"])


def test_reading_one_row_costs_one_row_of_memory(tmp_path):
    weights = hugging_face_weights(vocab=20_000, tied=True)
    tensors = llama_tensors(weights)
    kind = {"token_embd.weight": gguf.GGMLQuantizationType.Q8_0}
    store = opened(tmp_path, tensors, quantisation=kind).tensors()
    store.read("model.embed_tokens.weight", (slice(0, 1),))
    tracemalloc.start()
    store.read("model.embed_tokens.weight", (slice(7_000, 7_010),))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000, "10 rows of 32 float32 are 1,280 bytes; the whole is 2.5 MB"


def test_the_configuration_is_that_of_the_hub(tmp_path):
    weights = hugging_face_weights(tied=True)
    extra = {f"tokenizer.ggml.{key}_token_id": number for key, number in (("bos", 1), ("eos", 2), ("eot", 5))}
    files = opened(tmp_path, llama_tensors(weights), extra=extra)
    assert files.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert files.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 5]}


def test_a_sliding_window_makes_a_mistral(tmp_path):
    config = opened(tmp_path, metadata=llama_metadata(**{"attention.sliding_window": 64})).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_gemma_gets_what_its_file_does_not_say(tmp_path):
    tensors = {"token_embd.weight": np.zeros((16, 32), np.float32)}
    metadata = llama_metadata(**{"attention.sliding_window": 512, "attention.key_length": 8, "block_count": 18})
    config = opened(tmp_path, tensors, architecture="gemma3", metadata=metadata).config
    assert config["rope_local_base_freq"] == 10000.0
    assert config["query_pre_attn_scalar"] == 8
    assert [n for n, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    metadata["block_count"] = 46
    second = opened(tmp_path, tensors, architecture="gemma2", metadata=metadata).config
    assert (second["attn_logit_softcapping"], second["final_logit_softcapping"]) == (50.0, 30.0)
    assert second["query_pre_attn_scalar"] == 32 // 4, "the 27B model scales by embed / heads"
    assert second["layer_types"][:2] == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_is_read_from_the_metadata(tmp_path, keys, expected):
    assert opened(tmp_path, metadata=llama_metadata(**keys)).config.get("rope_scaling") == expected


@pytest.mark.parametrize(
    "wanted",
    [
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 4096},
    ],
)
def test_llama_3_scaling_is_recovered_from_the_frequency_factors(tmp_path, wanted):
    factors = llama3_factors(wanted, theta=500_000.0, head_dim=128).astype(np.float32)
    tensors = {"token_embd.weight": np.zeros((16, 512), np.float32), "rope_freqs.weight": factors}
    metadata = llama_metadata(
        **{"rope.freq_base": 500_000.0, "rope.dimension_count": 128, "embedding_length": 512, "context_length": 131072}
    )
    files = opened(tmp_path, tensors, metadata=metadata)
    assert files.config["rope_scaling"] == {"rope_type": "llama3"} | wanted
    assert set(files.tensors().names()) == {"model.embed_tokens.weight"}


def test_llama3_factors_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_theta=500_000.0,
        rope_scaling=scaling,
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(
        plain / llama3_factors(scaling, theta=500_000.0, head_dim=128), frequencies.numpy(), rtol=1e-5
    )


def test_factors_that_are_not_llama_3s_are_refused(tmp_path):
    factors = np.linspace(1, 40, 4, dtype=np.float32)
    with pytest.raises(UserError, match=r"rope_freqs\.weight are not those of Llama 3"):
        opened(tmp_path, llama_tensors(hugging_face_weights()) | {"rope_freqs.weight": factors})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.head_count": None}, r"no `llama\.attention\.head_count`.*convert the model again"),
        ({"attention.layer_norm_rms_epsilon": None}, r"no `llama\.attention\.layer_norm_rms_epsilon`"),
        ({"expert_count": 8}, r"mixture of experts \(8 experts\)"),
        ({"rope.dimension_count": 4}, r"rope\.dimension_count is 4 but a head has 8"),
        ({"rope.scaling.type": "longrope"}, r"'longrope'; none, linear, yarn"),
        ({"attention.head_count_kv": [1, 2]}, "differs between layers"),
    ],
)
def test_metadata_that_cannot_be_followed_is_named(tmp_path, keys, message):
    with pytest.raises(UserError, match=rf"model\.gguf: .*{message}"):
        opened(tmp_path, metadata=llama_metadata(**keys))


def test_an_unknown_architecture_lists_the_known_ones(tmp_path):
    with pytest.raises(
        UserError, match=r"general\.architecture is 'mamba'.*Known: gemma2, gemma3, llama, qwen2, qwen3"
    ):
        opened(tmp_path, architecture="mamba")


def test_one_of_several_parts_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is one of 3 parts of a model.*--merge"):
        opened(tmp_path, extra={"split.count": 3})


def test_tensors_without_a_place_are_listed(tmp_path):
    tensors = llama_tensors(hugging_face_weights()) | {"blk.0.ssm_a.weight": np.zeros(32, np.float32)}
    with pytest.raises(UserError, match=r"1 tensors have no place in a llama model: blk\.0\.ssm_a\.weight"):
        opened(tmp_path, tensors).tensors()


def test_an_unknown_kind_of_block_is_named_with_the_tensor(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", {"token_embd.weight": np.zeros((16, 32), np.float32)})
    content = path.read_bytes()
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    for kind, name in ((10, "Q2_K"), (77, "number 77")):
        path.write_bytes(content[:at] + kind.to_bytes(4, "little") + content[at + 4 :])
        with pytest.raises(UserError, match=rf"token_embd\.weight is stored as {name}, which cannot be decoded.*Q4_K"):
            open_gguf(path)


def test_a_truncated_file_is_found_wherever_it_ends(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", llama_tensors(hugging_face_weights()), extra={"x.y": ["a", "bc"]})
    content = path.read_bytes()
    assert GgufStore(open_gguf(path)).names()
    for length in [0, 3, 10, 23, 24, *range(25, 1500, 37), len(content) // 2, len(content) - 33]:
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"model\.gguf: .*(too short|truncated).*[Dd]ownload it again"):
            open_gguf(path)


def test_what_is_not_gguf_is_told_apart(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UserError, match="is not a GGUF file: it begins with"):
        open_gguf(path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    with pytest.raises(UserError, match="is big-endian GGUF"):
        open_gguf(path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16 + bytes(100))
    with pytest.raises(UserError, match="header is damaged"):
        open_gguf(path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        open_gguf(tmp_path / "absent.gguf")


@pytest.mark.slow
def test_the_header_of_the_genuine_file_is_what_the_gguf_library_reads(real_input):
    file = open_gguf(real_input("smollm2"))
    reference = gguf.GGUFReader(real_input("smollm2"))
    assert [t.name for t in reference.tensors] == list(file.tensors)
    for tensor in reference.tensors:
        mine = file.tensors[tensor.name]
        assert (mine.offset, mine.bytes, mine.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert list(mine.shape) == [int(length) for length in tensor.shape[::-1]]
    for key in ("llama.rope.freq_base", "tokenizer.ggml.pre", "tokenizer.chat_template", "llama.block_count"):
        assert file.metadata[key] == reference.fields[key].contents()
    assert file.metadata["tokenizer.ggml.merges"][-1] == reference.fields["tokenizer.ggml.merges"].contents(-1)
