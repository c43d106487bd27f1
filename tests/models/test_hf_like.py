"""Saving a checkpoint as the one that it was loaded from, byte for byte; and quantized tensors."""

import dataclasses
import json
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
from flax import nnx, traverse_util

from models import hf
from models.hf import quantized as hf_quantized
from models.hf.tensors import INDEX
from tests.models.hf_checkpoints import DATA, NAMES, changed, stored


def bytes_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "SHA256SUMS"}


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_did_not_change_are_saved_as_the_same_bytes(name, tmp_path):
    source = changed(tmp_path, name)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    architecture, model = hf.load(source)
    hf.save(tmp_path / "saved", architecture, model, like=source)
    assert bytes_of(tmp_path / "saved") == bytes_of(source)


def in_files(folder: pathlib.Path, dtypes: tuple[str, ...]) -> None:
    """The tensors in as many files as there are dtypes, one after another of each, with an index."""
    found = safetensors.flax.load_file(folder / "model.safetensors")
    names = [name for name in sorted(found) if not name.endswith("bias")] + [n for n in found if n.endswith("bias")]
    weight_map, count = {}, len(dtypes)
    for number, dtype in enumerate(dtypes):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        own = {name: found[name].astype(dtype) for name in names[number::count]}
        safetensors.flax.save_file(own, folder / file, metadata={"format": "pt", "of": str(number)})
        weight_map |= dict.fromkeys(own, file)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map, "metadata": {"total_size": 7}}))


def test_files_dtypes_and_what_is_not_loaded_stay(tmp_path):
    """A layer after the last one, buffers, and each file's own metadata."""

    def more(found):
        found["model.layers.2.eh_proj.weight"] = jnp.full((3, 2), jnp.nan)
        found["model.layers.0.self_attn.rotary_emb.inv_freq"] = jnp.ones(3)

    source = changed(tmp_path, "deepseek_v3", more, num_nextn_predict_layers=1, _name_or_path="x")
    in_files(source, ("bfloat16", "float32", "float16"))
    architecture, model = hf.load(source)
    hf.save(tmp_path / "saved", architecture, model, like=source, beside={"tokenizer.json": "{}"})
    assert bytes_of(tmp_path / "saved") == bytes_of(source) | {"tokenizer.json": b"{}"}

    path = ("blocks", "mlp", "moe", "down")
    state = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    nnx.update(model, traverse_util.unflatten_dict({path: state[path].at[0, 4].multiply(-1.5)}))
    hf.save(tmp_path / "other", architecture, model, like=source)
    before, after = stored(source), stored(tmp_path / "other")
    assert set(before) == set(after)
    for name, tensor in before.items():
        factor = -1.5 if "1.mlp.experts.4.down_proj" in name else 1
        np.testing.assert_array_equal(after[name], (factor * tensor).astype(tensor.dtype), err_msg=name)


def test_a_checkpoint_that_is_not_the_models(tmp_path):
    architecture, model = hf.load(DATA / "llama")
    with pytest.raises(ValueError, match="is a LlamaForCausalLM of other settings"):
        hf.save(tmp_path, architecture, model, like=changed(tmp_path / "a", "llama", rms_norm_eps=0.1))
    with pytest.raises(ValueError, match="is a Qwen3ForCausalLM of other settings"):
        hf.save(tmp_path, architecture, model, like=DATA / "qwen3")


@pytest.mark.parametrize("shape", [(1, 1), (129, 257)], ids=str)
def test_fp8_blocks(shape):
    """A block keeps its scale while its values fit: values and scales of a matrix 10,000 times as large are others."""
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    scales = np.random.default_rng(1).uniform(1, 3, hf_quantized.fp8_scales(shape)).astype(np.float32) / 50
    values, same = hf_quantized.to_fp8(matrix, scales)
    assert same.tobytes() == scales.tobytes()
    read = hf_quantized.from_fp8(values, scales)
    for i, j in {(0, 0), (shape[0] - 1, 0), (0, shape[1] - 1), (shape[0] - 1, shape[1] - 1)}:
        assert read[i, j] == np.float32(values[i, j]) * scales[i // 128, j // 128]
    for factor in (1, 10_000):
        error = np.abs(hf_quantized.from_fp8(*hf_quantized.to_fp8(factor * matrix, scales)) - factor * matrix)
        assert (error <= factor * (np.abs(matrix) / 16 + np.abs(matrix).max() / 448 / 512) + scales.max() / 1024).all()
    zeros, _ = hf_quantized.to_fp8(np.zeros(shape, np.float32), np.zeros_like(scales))
    assert not zeros.astype(np.float32).any()


def test_every_code_of_mxfp4():
    """In both places of a byte, with small and large exponents; middles go to even codes."""
    codes = np.tile(np.arange(16, dtype=np.uint8), 7 * 2 * 2).reshape(7, 2, 32)
    codes[:, 1] = codes[:, 1, ::-1]
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    scales = np.random.default_rng(0).integers(90, 160, (7, 2)).astype(np.uint8)
    read = hf_quantized.from_mxfp4(blocks, scales)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    wanted = np.where(codes & 8, -1, 1) * magnitudes[codes & 7] * 2.0 ** (scales.astype(int) - 127)[..., None]
    np.testing.assert_array_equal(read, wanted.reshape(7, 64).T)
    again, same = hf_quantized.to_mxfp4(read, scales)
    assert (again.tobytes(), same.tobytes()) == (blocks.tobytes(), scales.tobytes())

    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 4, np.float32)[:, None]
    made = hf_quantized.to_mxfp4(np.concatenate([middles, -middles]), np.full((1, 2), 127, np.uint8))
    rounded = hf_quantized.from_mxfp4(*made)[:, 0]
    np.testing.assert_array_equal(rounded[:8], [0, 1, 1, 2, 2, 4, 4, 6])
    np.testing.assert_array_equal(rounded[32:40], [-0.0, -1, -1, -2, -2, -4, -4, -6])

    matrix = np.random.default_rng(0).normal(size=(96, 5)).astype(np.float32)
    made, exponents = hf_quantized.to_mxfp4(matrix, np.zeros((5, 3), np.uint8))
    error = np.abs(hf_quantized.from_mxfp4(made, exponents) - matrix).T.reshape(5, 3, 32)
    assert (error <= 2.0 ** (exponents.astype(int) - 127)[..., None]).all()
    assert (exponents < 130).all()


def test_matrices_that_stay_in_fp8(tmp_path):
    source = DATA / "deepseek_v3_fp8"
    architecture, model = hf.load(source, stored_fp8=True, backend="xla")
    _, whole = hf.load(source, backend="xla")
    dtypes = {path: x.dtype for path, x in traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model))).items()}
    kept = [path for path, dtype in dtypes.items() if dtype == jnp.float8_e4m3fn]
    assert ("blocks", "mlp", "moe", "down", "weight") in kept
    assert len(kept) == 4 + 3 + 3 + 4 + 3  # attention, experts and shared; attention and the dense unit
    tokens = safetensors.flax.load_file(source / "expected.safetensors")["tokens"]
    run = nnx.jit(lambda model: model(tokens)[0])
    logits, wanted = run(model), run(whole)
    assert 1e-4 < np.linalg.norm(logits - wanted) / np.linalg.norm(wanted) < 0.2
    hf.save(tmp_path, architecture, model, like=source)
    assert (tmp_path / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="give like"):
        hf.save(tmp_path, architecture, model)
    with pytest.raises(ValueError, match=r"q_proj\.weight is F32, and stored_fp8 needs float8"):
        hf.load(DATA / "llama", stored_fp8=True)
    with pytest.raises(ValueError, match="stored float8 weights no recipe"):
        dataclasses.replace(model.config, recipe="blockwise")


def test_quantized_tensors_that_are_not_read(tmp_path):
    def misshapen(found):
        found["model.layers.0.self_attn.o_proj.weight_scale_inv"] = jnp.ones((2, 1))

    with pytest.raises(ValueError, match=r"o_proj\.weight_scale_inv is F32 \[2, 1\], and needs \[1, 1\]"):
        hf.load(changed(tmp_path, "deepseek_v3_fp8", misshapen))
    name = "model.layers.0.mlp.experts.down_proj"

    def shorter(found):
        found[f"{name}_scales"] = found[f"{name}_scales"][:, 1:]

    with pytest.raises(ValueError, match=re.escape(f"{name}_blocks is [2, 32, 1, 16], and its scales are [2, 31, 1]")):
        hf.load(changed(tmp_path, "gpt_oss_mxfp4", shorter))
