"""`--precision`: the layers that it changes, and delayed scaling's state."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jaxops.nn import AmaxHistory, Fp8Linear
from models.data.images import DataSet, Images
from models.data.packing import Documents
from models.data.text import Corpus
from models.decoder import Decoder
from models.dit.model import generate as generate_images
from models.generate.inference import for_inference
from models.precision import PRECISIONS
from models.training import dit as train_dit
from models.training import lm as train_lm
from models.training import loop
from models.training.config import with_model
from models.training.loop import Run
from models.training.presets import DiTPreset, Preset, of_bytes, rates

TINY_MOE = of_bytes(layers=1, width=16, heads=2, experts=2, top_k=1, hidden=8)
LM = Preset(TINY_MOE, context=32, batch=4, eval_windows=8, **rates(12, 2e-2, 2, 12))
DIT = DiTPreset(layers=1, width=16, heads=2, tokens=40, images=4, ema=0.9, **rates(8, 1e-2, 2, 4))


def in_fp8(preset, name: str):
    return with_model(preset, **PRECISIONS[name]._asdict())


def few_images(seed: int) -> DataSet:
    rng = np.random.default_rng(seed)
    images = Images([rng.integers(0, 256, (4, 6, 1), np.uint8) for _ in range(8)], np.arange(8, dtype=np.int32) % 2)
    return DataSet(images, images, ("one", "other"), 2, 1, 6, ((4, 6),))


def layers(model, *types) -> dict:
    return {".".join(map(str, path)): layer for path, layer in nnx.iter_modules(model) if isinstance(layer, types)}


def test_training_in_delayed_scaling(tmp_path):
    """Every step appends to each history, evaluations do not; the returned model is in evaluation mode."""
    text = Documents(np.tile(np.frombuffer(b"abcdefgh", np.uint8), 64), np.array([0, 512]))
    preset = with_model(in_fp8(LM, "fp8-delayed"), experts=0, top_k=0)
    model, history = train_lm.train(preset, Corpus(text, text), "nats", Run(tmp_path, Console(file=io.StringIO())))
    assert history.heldout[-1][1] < history.heldout[0][1] - 0.5
    histories = jax.tree.leaves(nnx.state(model, AmaxHistory))
    assert [(h.shape, np.count_nonzero(h[0]), np.count_nonzero(h[1])) for layers in histories for h in layers] == 7 * [
        ((2, 16), LM.steps, LM.steps)
    ]
    assert model.blocks.attention.q.use_running_average


def draw_two(model):
    model = for_inference(model)

    def step(carry, _):
        logits, cache = model.extend(carry[0], carry[1], jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (token[None], cache), token[0]

    return jax.lax.scan(step, (jnp.zeros((1, 1), jnp.int32), model.empty_cache(1, 8)), length=2)[1]


@pytest.mark.parametrize("model", ["lm", "dit"])
def test_every_program_in_delayed_scaling(model):
    """Traced only: a loop over the model raises if the model changes a history, as in evaluation and sampling."""
    key = jax.random.key(0)
    if model == "lm":
        task = train_lm.LmTask(in_fp8(LM, "fp8-delayed"))
        text = Documents(np.tile(np.frombuffer(b"abcdefgh", np.uint8), 64), np.array([0, 512]))
        batch = train_lm.make_batches(task.preset, text, train_lm.make_rows(task.preset, text))(1)
    else:
        preset, images = in_fp8(DIT, "fp8-delayed"), few_images(0)
        task = train_dit.DitTask(preset, train_dit.configure(preset, images))
        batch = train_dit.make_batches(preset, images)(1)
    made = nnx.eval_shape(lambda: task.model(nnx.Rngs(0)))
    graphdef, params, histories = nnx.split(made, nnx.Param, AmaxHistory)
    step, evaluate = loop.make_step(graphdef, task), loop.make_evaluate(graphdef, task)
    state = jax.eval_shape(functools.partial(loop.init_state, task.preset), params, histories)
    after, metrics = jax.eval_shape(step, state, batch, key)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert metrics.loss.shape == ()

    made.eval()
    sampled, whole = nnx.split(made)
    images = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)  # of the DiT
    if model == "lm":
        draw = lambda whole: draw_two(nnx.merge(sampled, whole))
    else:
        draw = lambda whole: generate_images(nnx.merge(sampled, whole), images, jax.random.key(0), 2)
    assert jax.eval_shape(evaluate, params, histories, batch, key).shape == ()
    assert jax.eval_shape(draw, whole).shape == ((2,) if model == "lm" else images.tokens.shape)


def test_dense_layers_alone_in_fp8():
    """The experts of a model without fp8_experts compute as those of one without a recipe."""
    model = in_fp8(LM, "fp8-blockwise").model
    chosen = {fp8: Decoder(dataclasses.replace(model, fp8_experts=fp8), rngs=nnx.Rngs(0)) for fp8 in (True, False)}
    plain = Decoder(dataclasses.replace(model, recipe=None), rngs=nnx.Rngs(0))
    products = {f"blocks.attention.{name}" for name in ("q", "k", "v", "out")}  # the experts' are no layers
    assert set(layers(chosen[False], Fp8Linear)) == set(layers(chosen[True], Fp8Linear)) == products
    x = jax.random.normal(jax.random.key(1), (1, 8, model.width), model.dtype)
    of = lambda made: np.asarray(made.layers()[0].mlp(x)[0], np.float32)
    np.testing.assert_array_equal(of(chosen[False]), of(plain))
    assert np.any(of(chosen[True]) != of(plain))
