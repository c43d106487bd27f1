"""Loaded checkpoints go on as transformers does, and train."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
from flax import nnx

from models import hf
from models.data.packing import Documents
from models.data.text import split
from models.data.tokenizer import Bytes
from models.decoder import Decoder
from models.generate.slots import Batching, generate
from models.training import lm as train_lm
from models.training import loop
from models.training.presets import Preset
from tests.arrays import put
from tests.models.hf_checkpoints import DATA, loaded, stored


# Sinks and windows, latent attention, norms over all heads, tied embeddings, norms of heads. With the other parts a
# token at a time is as all at once: test_decoder_parts.py.
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "olmoe", "llama_odd_tied", "qwen3_moe"])
def test_the_likeliest_tokens_are_those_of_transformers(name):
    """Of two prompts of 7 and 4 tokens at once, in pieces of 3, beyond windows and the texts of the first training."""
    expected = safetensors.flax.load_file(DATA / name / "expected.safetensors")
    _, model = loaded(name)
    tokens = np.asarray(expected["tokens"])
    got = generate(model, [tokens[0, :7].tolist(), tokens[1, :4].tolist()], 9, batching=Batching(piece=3))
    np.testing.assert_array_equal([completion.tokens for completion in got], expected["greedy"])


def saves_quantized(name: str, folder: Path, preset: Preset, trained: Decoder) -> None:
    """What is saved is as near as its format allows."""
    architecture = train_lm.save_checkpoint(folder, preset, trained, Bytes())
    again, read = hf.load(folder, backend="xla")
    assert architecture == again == hf.read_config(DATA / name)[0]
    assert {key: x.dtype for key, x in stored(folder).items()} == {
        key: x.dtype for key, x in stored(DATA / name).items()
    }
    params = lambda model: jax.tree.leaves(nnx.state(model, nnx.Param))
    for old, new in zip(params(trained), params(read), strict=True):
        assert np.linalg.norm(old - new) <= 0.1 * np.linalg.norm(old)


def started_from(name: str, rate: float) -> Preset:
    model = dataclasses.replace(hf.read_config(DATA / name)[1], backend="xla")
    return Preset(
        model,
        8,
        4,
        steps=1,
        learning_rate=rate,
        warmup_steps=0,
        eval_every=1,
        weight_decay=0.0,
        init_from=str(DATA / name),
    )


def test_a_quantized_checkpoint_is_trained_and_saved(tmp_path):
    """One step moves every parameter by the learning rate at most."""
    name, rate = "deepseek_v3_fp8", 1e-3
    preset = started_from(name, rate)
    tokens = np.random.default_rng(0).integers(0, 29, 400, dtype=np.uint8)
    corpus = split(Documents(tokens, np.arange(0, 401, 20)))
    preset = train_lm.with_room(preset, train_lm.make_rows(preset, corpus.train))
    graphdef, _, create = train_lm.LmTask(preset).start(None)
    state = create()
    before = jax.jit(lambda held: jax.tree.map(jnp.copy, held))((state.params, state.histories))
    batch = train_lm.make_batches(preset, corpus.train, train_lm.make_rows(preset, corpus.train))(0)
    state, metrics = loop.make_step(graphdef, train_lm.LmTask(preset))(state, jax.device_put(batch), jax.random.key(0))
    assert np.isfinite(metrics.loss)
    for old, new in zip(jax.tree.leaves(before[0]), jax.tree.leaves(state.params), strict=True):
        moved = np.abs(new - old).max()
        assert 0 < moved < 1.1 * rate
    jax.tree.map(np.testing.assert_array_equal, state.histories, before[1])
    saves_quantized(name, tmp_path, preset, nnx.merge(graphdef, state.params, state.histories))


def test_a_quantized_checkpoint_with_other_parameters_is_saved(tmp_path):
    """As far from the loaded ones as a training step moves them. Its gradients: test_hf.py, of gpt_oss."""
    name, rng = "gpt_oss_mxfp4", np.random.default_rng(0)
    graphdef, params, others = nnx.split(loaded(name)[1], nnx.Param, ...)
    moved = jax.tree.map(lambda x: put(np.asarray(x) + 1e-3 * rng.uniform(-1, 1, x.shape), x.dtype), params)
    saves_quantized(name, tmp_path, started_from(name, 1e-3), nnx.merge(graphdef, moved, others))
