"""Checkpoints by transformers (tests/parity.py): logits and gradients, tensors saved again, and errors."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
from flax import nnx, traverse_util

from models import hf
from models.decoder import Decoder
from models.hf.checkpoint import checkpoint_tensor, uses_of
from models.hf.names import table
from models.hf.tensors import INDEX, Tensor
from tests.models.hf_checkpoints import ALIKE, DATA, NAMES, changed, loaded, stored


@nnx.jit
def loss_and_gradients(model: Decoder, tokens: jax.Array):
    def loss(model: Decoder):
        logits, _ = model(tokens)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        return -jnp.mean(picked), logits

    (value, logits), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    return value, logits, gradients


def test_all_architectures_are_compared():
    assert {hf.read_config(DATA / name)[0] for name in NAMES} == set(hf.MODELS)


# Whose gradients others have.
LOGITS_ALONE = (*ALIKE, "mixtral_odd", "qwen3_moe_mixed", "deepseek_v3_fp8")


@pytest.mark.parametrize("name", LOGITS_ALONE)
def test_logits_are_those_of_transformers(name):
    expected = safetensors.flax.load_file(DATA / name / "expected.safetensors")
    _, model = loaded(name)
    logits, _ = nnx.jit(lambda model, tokens: model(tokens))(model, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LOGITS_ALONE])
def test_logits_and_gradients_are_those_of_transformers(name):
    expected = safetensors.flax.load_file(DATA / name / "expected.safetensors")
    architecture, model = loaded(name)
    value, logits, gradients = loss_and_gradients(model, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(value, expected["loss"][0], rtol=1e-5)
    found = jax.tree.map(np.asarray, traverse_util.flatten_dict(nnx.to_pure_dict(gradients)))
    entries = [entry for entry in table(architecture, model.config) if entry.path in found]  # not routers' buffers
    uses = uses_of(entries, found)
    assert {f"gradient:{name}" for name in uses} == {key for key in expected if key.startswith("gradient:")}
    for name, parts in uses.items():
        got = checkpoint_tensor(parts, found)
        np.testing.assert_allclose(got, expected[f"gradient:{name}"], atol=1e-5, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("max_bytes", [10**9, 4000], ids=["whole", "shards"])
@pytest.mark.parametrize("name", ["llama_odd_tied", "mixtral"])
def test_a_checkpoint_that_is_loaded_and_saved_is_the_same(name, max_bytes, tmp_path):
    architecture, model = hf.load(DATA / name)
    hf.save(tmp_path, architecture, model, max_bytes=max_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True)
    assert (len(files) > 3) == (max_bytes == 4000)
    before, after = stored(DATA / name), stored(tmp_path)
    assert set(before) == set(after)
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key], tensor, err_msg=key)
    if max_bytes == 4000:
        index = json.loads((tmp_path / INDEX).read_text())
        assert set(index["weight_map"]) == set(before)
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
        assert all(file.stat().st_size < 4000 + 4000 for file in files)
    assert hf.read_config(tmp_path) == hf.read_config(DATA / name)
    again, reloaded = hf.load(tmp_path)
    assert again == architecture
    jax.tree.map(np.testing.assert_array_equal, nnx.state(reloaded), nnx.state(model))


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


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf.load(tmp_path)
    folder = changed(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        hf.load(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"has no model-00001-of-00002\.safetensors"):
        hf.load(folder)


def test_saving_as_another_architecture(tmp_path):
    _, model = hf.load(DATA / "qwen3")
    with pytest.raises(
        ValueError,
        match=r"no LlamaForCausalLM: they differ in qk_norm",
    ):
        hf.save(tmp_path, "LlamaForCausalLM", model)
    with pytest.raises(ValueError, match="write one of LlamaForCausalLM"):
        hf.save(tmp_path, "Llama", model)
    assert not list(tmp_path.iterdir())


def lie(file: pathlib.Path) -> None:
    """A header whose length exceeds the file."""
    content = file.read_bytes()
    file.write_bytes((len(content) * 2).to_bytes(8, "little") + content[8:])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", lie),
        ("model.safetensors", lambda file: os.truncate(file, file.stat().st_size - 1)),
        ("model.safetensors", lambda file: os.truncate(file, 0)),
        ("config.json", lambda file: os.truncate(file, 0)),
        ("config.json", lambda file: file.write_text("[]")),
        ("config.json", lambda file: file.write_text("{}")),
        ("config.json", lambda file: file.write_bytes(b"\xff\xfe{}")),
        (INDEX, lambda file: file.write_text("{")),
        (INDEX, lambda file: file.write_text("{}")),
        (INDEX, lambda file: file.write_text('{"weight_map": {"a": "../model.safetensors"}}')),
        (INDEX, lambda file: file.write_text('{"weight_map": {"a": 3}}')),
    ],
)
def test_a_damaged_file_is_named(file, damage, tmp_path):
    folder = changed(tmp_path)
    damage(folder / file)
    with pytest.raises(ValueError, match=re.escape(str(folder / file))) as caught:
        hf.load(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_ends_while_it_is_read(tmp_path):
    (tmp_path / "x").write_bytes(bytes(7))
    with pytest.raises(ValueError, match="x cannot be read: it ends within weight"):
        Tensor(tmp_path / "x", "weight", "F32", (2,), 0, 8).read()


def put(name: str, value):
    return lambda found: found.update({name: value})


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (
            put("model.norm.weight", jnp.full(16, jnp.nan)),
            "model.norm.weight in model.safetensors has a NaN or an infinity",
        ),
        (
            put("model.norm.weight", jnp.ones(16).at[3].set(-jnp.inf)),
            "model.norm.weight in model.safetensors has a NaN or an infinity",
        ),
        (
            put("model.norm.weight", jnp.ones(16, jnp.float8_e4m3fn)),
            "model.norm.weight in model.safetensors is F8_E4M3; only F32, F16, BF16 are read",
        ),
        (put("model.norm.weight", jnp.ones(16, jnp.int8)), "model.norm.weight in model.safetensors is I8; only"),
    ],
    ids=["nan", "infinity", "float8", "int8"],
)
def test_weights_that_are_not_read(tensors, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        hf.load(changed(tmp_path, tensors=tensors))
    with pytest.raises(ValueError, match="quantization_config"):
        hf.read_config(changed(tmp_path / "again", quantization_config={"quant_method": "fp8"}))


def test_a_tensor_in_two_files(tmp_path):
    folder = changed(tmp_path)
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "model.safetensors"}}))
    with pytest.raises(ValueError, match=r"lm_head\.weight is in b\.safetensors and in model\.safetensors"):
        hf.load(folder)


def test_what_transformers_reads_beside_the_parameters(tmp_path):
    """Buffers of the rotary positions, and the head of a tied model if it equals the embedding."""
    wanted = nnx.state(hf.load(DATA / "llama_odd_tied")[1])
    frequencies = put("model.layers.0.self_attn.rotary_emb.inv_freq", jnp.ones(3))
    head = lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"]})
    for number, change in enumerate((frequencies, head)):
        _, model = hf.load(changed(tmp_path / str(number), "llama_odd_tied", change))
        jax.tree.map(np.testing.assert_array_equal, nnx.state(model), wanted)
    with pytest.raises(
        ValueError, match=r"lm_head\.weight is not model\.embed_tokens\.weight, and config\.json ties them"
    ):
        hf.load(changed(tmp_path / "other", "llama_odd_tied", put("lm_head.weight", jnp.ones((29, 15)))))


def test_a_save_that_is_killed_leaves_the_files_before_or_what_is_refused(tmp_path, monkeypatch):
    architecture, model = hf.load(DATA / "llama")
    hf.save(tmp_path, architecture, model)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    moved, replace = [], pathlib.Path.replace

    def fails_later(file, to):
        if len(moved) == stop:
            raise KeyboardInterrupt
        moved.append(to)
        return replace(file, to)

    other = jax.tree.map(lambda x: x + 1, nnx.state(model))
    nnx.update(model, other)
    monkeypatch.setattr(pathlib.Path, "replace", fails_later)
    for stop in (0, 1, 2):
        moved.clear()
        with pytest.raises(KeyboardInterrupt):
            hf.save(tmp_path, architecture, model)
        if stop == 0:
            assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
        else:
            with pytest.raises(ValueError, match="is not what was written"):
                hf.load(tmp_path)
