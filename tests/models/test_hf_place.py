"""Checkpoints on their way to devices: what the host holds, and how a mesh splits them."""

import dataclasses
import functools
import gc
import pathlib
import tracemalloc

import jax
import numpy as np
import pytest
from flax import nnx

from models import hf
from models.decoder import Decoder, DecoderConfig
from models.distributed.mesh import make_mesh, shardings
from models.generate.inference import for_inference
from models.hf import place as hf_place
from models.training import lm as train_lm
from models.training import loop
from models.training.presets import Preset
from tests.devices import needs_four
from tests.models.test_decoder_parts import model_of

CONFIG = DecoderConfig(
    64, 32, 3, 4, 2, 8, 24, experts=4, top_k=2, normalize=True, qk_norm=True, dense_layers=(1,), dense_hidden=40
)


@pytest.fixture(scope="module")
def saved() -> Decoder:
    return model_of(CONFIG)


@pytest.fixture(scope="module")
def folder(saved, tmp_path_factory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("checkpoint")
    hf.save(made, "Qwen3MoeForCausalLM", saved, dtype="bfloat16", max_bytes=10_000)
    assert len(list(made.glob("*.safetensors"))) > 3
    return made


@pytest.fixture(scope="module")
def on_one_device(folder) -> nnx.State:
    return nnx.state(hf.load(folder)[1])


def check_split(state, wanted, mesh) -> None:
    """The arrays are those wanted, split as the mesh splits parameters."""
    for (path, ours), whole, split in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(wanted), jax.tree.leaves(shardings(state, mesh)), strict=True
    ):
        assert ours.sharding.is_equivalent_to(split, ours.ndim), path
        np.testing.assert_array_equal(ours, whole, err_msg=str(path))


@needs_four
@pytest.mark.parametrize(
    ("shape", "small"),
    [("fsdp=2,expert=2", 0), ("data=2,tensor=2", 1 << 24)],
    ids=["expert-updates", "tensor-whole"],
)
def test_parameters_are_split_as_they_are_read(shape, small, folder, on_one_device, monkeypatch):
    monkeypatch.setattr(hf_place, "SMALL", small)
    mesh, wanted = make_mesh(shape), on_one_device
    check_split(nnx.state(hf.load(folder, mesh=mesh)[1]), wanted, mesh)


@needs_four
def test_a_training_state_from_a_checkpoint_is_split_from_the_start(folder, monkeypatch):
    model = dataclasses.replace(CONFIG, backend="xla")
    preset = Preset(model, 8, 8, steps=2, learning_rate=1e-3, warmup_steps=1, eval_every=2, init_from=str(folder))
    mesh = make_mesh("fsdp=2,expert=2")
    wanted = train_lm.LmTask(preset).start(None)[2]()
    whole = functools.partial(pytest.fail, "the whole state was put together")
    monkeypatch.setattr(loop, "first_state", whole)
    _, shapes, create = train_lm.LmTask(preset).start(mesh)
    state = create()
    assert jax.tree.map(lambda x: x.sharding, shapes) == jax.tree.map(lambda x: x.sharding, state)
    check_split(state, wanted, mesh)


@pytest.mark.parametrize(("dtype", "small"), [("bfloat16", 0), ("float16", 1 << 24)], ids=["updates", "whole"])
def test_matrices_in_the_dtype_of_inference(dtype, small, saved, tmp_path, monkeypatch):
    """The bits of those that are loaded in float32 and cast, from float32 tensors; the same arrays are float32."""
    hf.save(tmp_path, "Qwen3MoeForCausalLM", saved)
    wanted = for_inference(hf.load(tmp_path, dtype=dtype)[1])
    monkeypatch.setattr(hf_place, "SMALL", small)
    _, model = hf.load(tmp_path, dtype=dtype, param_dtype=dtype)
    stored = {x.dtype.name for x in jax.tree.leaves(nnx.state(model)) if x.ndim == 4 or x.size == 64 * 32}
    assert stored == {dtype}  # experts, embedding, head
    model = for_inference(model)
    for (path, ours), cast in zip(
        jax.tree.leaves_with_path(nnx.state(model)), jax.tree.leaves(nnx.state(wanted)), strict=True
    ):
        assert ours.dtype == cast.dtype, path
        np.testing.assert_array_equal(ours, cast, err_msg=str(path))


def test_which_dtypes_matrices_may_have(folder):
    with pytest.raises(ValueError, match="param_dtype is 'int8'; write one of float32, bfloat16, float16"):
        hf.load(folder, param_dtype="int8")
    with pytest.raises(ValueError, match="param_dtype is 'bfloat16', and recipe 'tensorwise' casts float32"):
        hf.load(folder, param_dtype="bfloat16", recipe="tensorwise")


def test_the_host_holds_a_tensor_and_never_the_model(tmp_path, monkeypatch):
    """numpy's memory while a checkpoint of 12 MB is read and saved, whose largest tensor in float32 has 0.5 MB."""
    config = dataclasses.replace(CONFIG, width=256, hidden=512, experts=8, layers=2, dense_layers=(), dense_hidden=None)
    architecture, model = "Qwen3MoeForCausalLM", model_of(config)
    hf.save(tmp_path, architecture, model, dtype="bfloat16")
    total, largest = (tmp_path / "model.safetensors").stat().st_size, 512 * 256 * 4
    assert total > 12_500_000
    monkeypatch.setattr(hf_place, "SMALL", 0)
    for run in (
        lambda name: hf.load(tmp_path, param_dtype="bfloat16"),
        lambda name: hf.save(tmp_path / name, architecture, model, like=tmp_path),
    ):
        run("before")  # what JAX compiles and keeps of it is not the checkpoint's
        gc.collect(1)  # what that left; to look at all objects of a long run takes seconds
        tracemalloc.start()
        try:
            run("again")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 4 * largest < total / 5
