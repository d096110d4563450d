"""Checkpoints in and out: every tensor accounted for, read in parts, held once, and saved as it was."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models as tiny

from podtune.config.errors import UserError
from podtune.config.schema import LoRA as LoRASettings
from podtune.families.loading import load_weights, plan_loading
from podtune.families.saving import hf_tensors
from podtune.families.tensors import checkpoint_tensors
from podtune.parallel.sharding import sharding_for
from podtune.weights.adapters import attach
from podtune.weights.leaves import LoRA
from podtune.weights.param import is_param
from podtune.weights.tree import named_leaves

pytestmark = pytest.mark.usefixtures("quick_compiling")


def checkpoint(model, *, dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    return {t.name: random.normal(size=t.shape).astype(dtype) for t in checkpoint_tensors(model)}


def load(model, tensors, *, mesh=None, **settings):
    return load_weights(model, model.describe(), tiny.MemoryStore(tensors), mesh or tiny.mesh_of(), **settings)


def test_a_linear_weight_is_turned_to_in_out():
    model = tiny.tiny_model("llama")
    tensors = checkpoint(model)
    weights = load(model, tensors)
    q = tensors["model.layers.1.self_attn.q_proj.weight"]
    o = tensors["model.layers.2.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(weights.layers.attention.q[1], q.T.reshape(32, 4, 8))
    np.testing.assert_array_equal(weights.layers.attention.o[2], o.T.reshape(4, 8, 32))
    np.testing.assert_array_equal(weights.head, tensors["lm_head.weight"].T)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, np.float32) for name in tiny.CONFIGS), *((name, ml_dtypes.bfloat16) for name in tiny.FAMILY_CONFIGS)],
)
def test_what_is_loaded_and_saved_is_bit_equal(name, dtype):
    model = tiny.tiny_model(name)
    tensors = checkpoint(model, dtype=dtype)
    saved = {t.name: t for t in hf_tensors(model, load(model, tensors, dtype=dtype))}
    assert list(saved) == list(tensors)
    for name, tensor in tensors.items():
        read = saved[name].read()
        assert (saved[name].info.shape, saved[name].info.dtype) == (tensor.shape, tensor.dtype)
        assert read.dtype == tensor.dtype
        assert read.tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)])
def test_every_mesh_holds_the_same_weights_where_the_rules_say(shape):
    model, mesh = tiny.tiny_model("qwen2"), tiny.mesh_of(*shape)
    tensors = checkpoint(model)
    alone, split = load(model, tensors), load(model, tensors, mesh=mesh)
    for name, param in named_leaves(model.describe(), is_leaf=is_param).items():
        array = named_leaves(split)[name]
        assert array.sharding.is_equivalent_to(sharding_for(mesh, param.axes, param.shape), array.ndim), name
        np.testing.assert_array_equal(array, named_leaves(alone)[name])
    for tensor in hf_tensors(model, split):
        np.testing.assert_array_equal(tensor.read(), tensors[tensor.name])


def test_a_device_reads_its_own_part_and_equal_parts_are_read_once():
    model = tiny.tiny_model("llama")
    tensors = checkpoint(model)
    for shape in [(8, 1, 1), (1, 4, 2)]:
        store = tiny.MemoryStore(tensors)
        load_weights(model, model.describe(), store, tiny.mesh_of(*shape))
        assert store.bytes_read == {name: tensor.nbytes for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"missing: 1 \(model\.layers\.1\.mlp\.up_proj\.weight\)",
        ),
        (lambda t: t.update({"model.extra": np.zeros(2)}), r"left over: 1 \(model\.extra\)"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(3)}),
            r"model\.norm\.weight is \(3,\), config.json says \(32",
        ),
        (lambda t: t.pop("lm_head.weight"), r"missing: 1 \(lm_head\.weight\)"),
        (lambda t: t.clear(), r"missing: 30 \(model\.embed_tokens.* and 10 more"),
    ],
)
def test_tensors_that_do_not_account_for_the_model_are_listed_before_any_is_read(change, message):
    model = tiny.tiny_model("llama")
    tensors = checkpoint(model)
    change(tensors)
    store = tiny.MemoryStore(tensors)
    with pytest.raises(UserError, match=message):
        load_weights(model, model.describe(), store, tiny.mesh_of())
    assert store.bytes_read == {}


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_tensor_that_is_not_finite_is_named(name, value):
    model = tiny.tiny_model("llama")
    tensors = checkpoint(model, dtype=ml_dtypes.bfloat16)
    tensors[name].flat[-1] = value
    with pytest.raises(UserError, match=f"tensor {name} holds NaN or infinity"):
        load(model, tensors)


def test_weights_of_whole_numbers_are_refused():
    model = tiny.tiny_model("llama")
    tensors = checkpoint(model)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    with pytest.raises(UserError, match=r"of another kind of number: 1 \(model\.norm\.weight is int32\)"):
        load(model, tensors)


def test_a_model_with_biases_is_not_read_as_one_without():
    tensors = checkpoint(tiny.tiny_model("llama-biases"))
    with pytest.raises(UserError, match=r"left over: 21 \(.*q_proj\.bias"):
        load(tiny.tiny_model("llama"), tensors)


def test_buffers_that_follow_from_the_configuration_are_left_unread():
    model = tiny.tiny_model("llama")
    tensors = checkpoint(model) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    store = tiny.MemoryStore(tensors)
    plan_loading(model, store)
    assert store.bytes_read == {}


def test_a_head_beside_a_tied_embedding_must_be_its_copy():
    model = tiny.tiny_model("llama-tied")
    tensors = checkpoint(model)
    copy = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    assert load(model, copy).head is None
    copy["lm_head.weight"][-1, 3] += 1
    with pytest.raises(UserError, match=r"tie_word_embeddings=true, yet lm_head\.weight differs"):
        load(model, copy)


def test_checkpoints_of_the_bare_model_and_of_the_multimodal_one_are_read():
    model = tiny.tiny_model("llama-tied")
    tensors = checkpoint(model)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    np.testing.assert_array_equal(load(model, bare).embedding, tensors["model.embed_tokens.weight"])

    text = tiny.config("gemma3_text")
    both = tiny.model_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    tensors = checkpoint(both)
    for prefix in ("language_model.model.", "model.language_model."):
        held = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        held["model.vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
        weights = load(both, held)
        np.testing.assert_array_equal(weights.norm, tensors["model.norm.weight"])


def test_conversions_and_tensors_left_unread_are_said():
    model = tiny.tiny_model("llama")
    tensors = checkpoint(model, dtype=ml_dtypes.bfloat16)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    said = []
    weights = load(model, tensors, say=said.append)
    assert said == [
        "tensors left unread: 1 (rotary frequencies, which follow from the configuration)",
        "tensors stored as bfloat16 and held as float32: 30",
    ]
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype(jnp.float32)}


def test_adapters_start_from_the_key_beside_a_frozen_base():
    model = tiny.tiny_model("llama")
    tensors = checkpoint(model)
    description = attach(
        model.describe(), LoRASettings(rank=4, targets=("q_proj", "layers.mlp.*")), aliases=model.aliases()
    )

    def loaded(mesh, seed):
        store = tiny.MemoryStore(tensors)
        return load_weights(model, description, store, mesh, dtype=jnp.bfloat16, key=jax.random.key(seed))

    one, same, other = loaded(tiny.mesh_of(), 0), loaded(tiny.mesh_of(1, 2, 4), 0), loaded(tiny.mesh_of(), 1)
    q = one.layers.attention.q
    assert isinstance(q, LoRA)
    assert (q.base.dtype, q.a.dtype, q.b.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    assert not jnp.any(q.b)
    np.testing.assert_array_equal(q.a, same.layers.attention.q.a)
    assert jnp.any(q.a != other.layers.attention.q.a)
    assert not isinstance(one.layers.attention.k, LoRA)
    with pytest.raises(ValueError, match="needs a key"):
        load_weights(model, description, tiny.MemoryStore(tensors), tiny.mesh_of())


def test_an_adapter_is_added_to_its_weight_when_saved():
    model = tiny.tiny_model("llama")
    description = attach(model.describe(), LoRASettings(rank=4, alpha=8.0), aliases=model.aliases())
    weights = tiny.random_weights(model, description=description)
    saved = {t.name: t.read() for t in hf_tensors(model, weights)}
    for layer in range(3):
        q, o = weights.layers.attention.q, weights.layers.attention.o
        merged = q.base[layer] + 2.0 * jnp.einsum("er,rhd->ehd", q.a[layer], q.b[layer])
        np.testing.assert_allclose(
            saved[f"model.layers.{layer}.self_attn.q_proj.weight"], merged.reshape(32, 32).T, atol=1e-5
        )
        merged = o.base[layer] + 2.0 * jnp.einsum("hdr,re->hde", o.a[layer], o.b[layer])
        np.testing.assert_allclose(
            saved[f"model.layers.{layer}.self_attn.o_proj.weight"], merged.reshape(32, 32).T, atol=1e-5
        )


def test_a_bfloat16_base_is_merged_in_float32_when_saved_so():
    model = tiny.tiny_model("llama")
    description = attach(model.describe(dtype=jnp.bfloat16), LoRASettings(rank=4), aliases=model.aliases())
    weights = tiny.random_weights(model, description=description)
    q = weights.layers.attention.q
    exact = q.base.astype(jnp.float32)[0] + 8.0 * jnp.einsum("er,rhd->ehd", q.a[0], q.b[0])
    saved = {t.name: t for t in hf_tensors(model, weights, dtype=jnp.float32)}
    assert {t.info.dtype.name for t in saved.values()} == {"float32"}
    np.testing.assert_allclose(
        saved["model.layers.0.self_attn.q_proj.weight"].read(), exact.reshape(32, 32).T, atol=1e-4
    )


MEMORY = """
import json, resource, sys, threading, time
import numpy as np, jax
import tiny_models as tiny
from podtune.families.loading import load_weights
from podtune.families.tensors import checkpoint_tensors
from podtune.families.saving import hf_tensors

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

class FileStore(tiny.MemoryStore):
    '''Makes each tensor when it is asked for, as a file would give it.'''
    def __init__(self, infos): self.infos = infos
    def names(self): return self.infos
    def read(self, name, index=None):
        shape = self.infos[name].shape if index is None else np.empty(self.infos[name].shape, np.int8)[index].shape
        return np.full(shape, 0.5, self.infos[name].dtype)

model = tiny.tiny_model("llama-tied", hidden_size=512, intermediate_size=2048, num_hidden_layers=16, vocab_size=24000)
infos = {t.name: tiny.TensorInfo(t.shape, np.dtype(np.float32)) for t in checkpoint_tensors(model)}
small = tiny.tiny_model("llama-tied")
warm = tiny.random_weights(small)
store = tiny.MemoryStore({t.name: t.read() for t in hf_tensors(small, warm)})
load_weights(small, small.describe(), store, tiny.mesh_of())
before, peak, stop = resident(), 0, False

def watch():
    global peak
    while not stop:
        peak = max(peak, resident())
        time.sleep(0.002)

thread = threading.Thread(target=watch); thread.start()
weights = jax.block_until_ready(load_weights(model, model.describe(), FileStore(infos), tiny.mesh_of()))
loaded = peak - before
for tensor in hf_tensors(model, weights):
    tensor.read()
saved = peak - before
stop = True; thread.join()
held = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
largest = max(info.bytes for info in infos.values())
print(json.dumps({"loaded": loaded, "saved": saved, "held": held, "largest": largest}))
"""


def test_the_host_holds_no_more_than_one_tensor_beside_the_mesh():
    """On a CPU the mesh's memory is the host's: 300 MB of weights and the largest tensor, 49 MB."""
    folder = Path(__file__).parent
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", MEMORY], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["held"] > 250e6
    room = 12e6  # compiled programs and threads
    assert measured["loaded"] < measured["held"] + 1.3 * measured["largest"] + room, measured
    assert measured["saved"] < measured["held"] + 1.3 * measured["largest"] + room, measured


PROCESSES = """
import sys, zlib
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
import numpy as np
import tiny_models as tiny
from podtune.config.schema import LoRA
from podtune.families.loading import load_weights
from podtune.families.saving import hf_tensors
from podtune.families.tensors import checkpoint_tensors
from podtune.weights.adapters import attach

model = tiny.tiny_model("llama-tied")
random = np.random.default_rng(0)
store = tiny.MemoryStore({t.name: random.normal(size=t.shape).astype(np.float32) for t in checkpoint_tensors(model)})
mesh = tiny.mesh_of(1, 2, 2)
assert not all(device.process_index == 0 for device in mesh.devices.flat)
description = attach(model.describe(), LoRA(rank=2), aliases=model.aliases())
weights = load_weights(model, description, store, mesh, key=jax.random.key(0))
for tensor in hf_tensors(model, weights):
    np.testing.assert_array_equal(tensor.read(), store.tensors[tensor.name], err_msg=tensor.name)
whole = sum(tensor.nbytes for tensor in store.tensors.values())
print("read", sum(store.bytes_read.values()) / whole)
"""


def test_two_processes_read_their_parts_and_both_gather_every_tensor():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parent)}
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESSES, address, str(process)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        for process in pair:
            said, faults = process.communicate(timeout=200)
            assert process.returncode == 0, faults
            assert float(said.split()[-1]) < 0.55  # the mesh splits every large tensor between the two
    finally:
        for process in pair:
            process.kill()
