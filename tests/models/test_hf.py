"""Checkpoints that transformers made (tests/parity.py): the same logits and gradients, the same tensors when saved again, and what is wrong is named."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
from flax import nnx, traverse_util

from models import hf
from models.decoder import Decoder

DATA = pathlib.Path(__file__).parents[1] / "data" / "hf"
NAMES = sorted(folder.name for folder in DATA.iterdir())


@nnx.jit
def loss_and_gradients(model: Decoder, tokens: jax.Array):
    def loss(model: Decoder):
        logits, _ = model(tokens)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        return -jnp.mean(picked), logits

    (value, logits), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    return value, logits, gradients


def stored(folder: pathlib.Path) -> dict[str, jax.Array]:
    return {name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in safetensors.flax.load_file(file).items()}


def test_all_architectures_are_compared():
    assert {hf.read_config(DATA / name)[0] for name in NAMES} == set(hf.MODELS)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_transformers(name):
    expected = safetensors.flax.load_file(DATA / name / "expected.safetensors")
    architecture, model = hf.load(DATA / name, backend="xla")
    value, logits, gradients = loss_and_gradients(model, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(value, expected["loss"][0], rtol=1e-5)
    found = traverse_util.flatten_dict(nnx.to_pure_dict(gradients))
    compared = set()
    for entry in hf.table(architecture, model.config):
        whole = found[entry.path]
        for tensor, index in hf.tensors(entry, whole.shape):
            got = whole[index].T if entry.transposed else whole[index]
            np.testing.assert_allclose(got, expected[f"gradient:{tensor}"], atol=1e-5, rtol=1e-4, err_msg=tensor)
            compared.add(f"gradient:{tensor}")
    assert compared == {key for key in expected if key.startswith("gradient:")}


@pytest.mark.parametrize("max_bytes", [10**9, 4000], ids=["whole", "shards"])
@pytest.mark.parametrize("name", ["llama_odd_tied", "mixtral", "qwen3_moe"])
def test_a_checkpoint_that_is_loaded_and_saved_is_the_same(name, max_bytes, tmp_path):
    architecture, model = hf.load(DATA / name)
    hf.save(tmp_path, architecture, model, max_bytes=max_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 3) == (max_bytes == 4000)
    before, after = stored(DATA / name), stored(tmp_path)
    assert set(before) == set(after)
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key], tensor, err_msg=key)
    if max_bytes == 4000:
        index = json.loads((tmp_path / hf.INDEX).read_text())
        assert set(index["weight_map"]) == set(before)
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
        assert all(file.stat().st_size < 4000 + 4000 for file in files)
    assert hf.read_config(tmp_path) == hf.read_config(DATA / name)
    again, reloaded = hf.load(tmp_path)
    assert again == architecture
    jax.tree.map(np.testing.assert_array_equal, nnx.state(reloaded), nnx.state(model))


def test_bfloat16(tmp_path):
    """Parameters are float32, from whatever dtype; and saved in the one that is asked for."""
    architecture, model = hf.load(DATA / "mixtral_odd")
    hf.save(tmp_path, architecture, model, dtype="bfloat16")
    assert {tensor.dtype for tensor in stored(tmp_path).values()} == {jnp.dtype("bfloat16")}
    _, rounded = hf.load(tmp_path, dtype="bfloat16")
    assert rounded.config.dtype == "bfloat16"
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16).astype(jnp.float32)), nnx.state(rounded), nnx.state(model))


def changed(tmp_path: pathlib.Path, name: str = "mixtral", tensors=lambda found: None, **config) -> pathlib.Path:
    folder = tmp_path / name
    shutil.copytree(DATA / name, folder)
    found = stored(folder)
    tensors(found)
    safetensors.flax.save_file(found, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_tensors_that_are_missing_extra_or_misshapen_are_all_named(tmp_path):
    def spoil(found):
        found["model.layers.0.block_sparse_moe.experts.1.w3.weight"] = jnp.zeros((20, 15))
        found["model.layers.1.extra.weight"] = jnp.zeros(3)
        del found["model.norm.weight"], found["model.layers.1.block_sparse_moe.experts.3.w2.weight"]

    with pytest.raises(ValueError) as caught:  # all of its parts are looked at
        hf.load(changed(tmp_path, tensors=spoil))
    for part in (
        "model.layers.0.block_sparse_moe.experts.1.w3.weight is [20, 15], and config.json says [20, 16]",
        "model.layers.1.extra.weight is not a part of the model",
        "model.layers.1.block_sparse_moe.experts.3.w2.weight is missing",
        "model.norm.weight is missing",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel; these are known: LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"attention_bias": True}, "attention_bias"),
    ],
    ids=["architecture", "rope", "activation", "window", "bias"],
)
def test_what_the_decoder_has_not(config, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        hf.load(changed(tmp_path, **config))


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf.load(tmp_path)
    folder = changed(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        hf.load(folder)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"has no model-00001-of-00002\.safetensors"):
        hf.load(folder)


def test_saving_as_another_architecture(tmp_path):
    _, model = hf.load(DATA / "qwen3")
    with pytest.raises(ValueError, match=r"no LlamaForCausalLM: they differ in blocks\.attention\.k_norm\.scale, blocks\.attention\.q_norm\.scale"):
        hf.save(tmp_path, "LlamaForCausalLM", model)
    with pytest.raises(ValueError, match="write one of LlamaForCausalLM"):
        hf.save(tmp_path, "Llama", model)
    assert not list(tmp_path.iterdir())
