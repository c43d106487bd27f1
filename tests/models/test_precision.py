"""`--precision`: the layers that it changes, and delayed scaling's state."""

import dataclasses
import functools
import io
from typing import Any

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
from models.dit.model import DiT
from models.dit.model import generate as generate_images
from models.generate.inference import for_inference
from models.precision import PRECISIONS
from models.training import dit as train_dit
from models.training import lm as train_lm
from models.training.loop import Run, init_state
from models.training.presets import DiTPreset, Preset, of_bytes

TINY_MOE = of_bytes(layers=1, width=16, heads=2, experts=2, top_k=1, hidden=8)
TINY = Preset(
    TINY_MOE, context=32, batch=4, steps=12, learning_rate=2e-2, warmup_steps=2, eval_every=12, eval_windows=8
)
TINY_DIT = DiTPreset(
    layers=1, width=16, heads=2, tokens=40, images=4, steps=8, learning_rate=1e-2, warmup_steps=2, eval_every=4, ema=0.9
)


def few_images(seed: int) -> DataSet:
    rng = np.random.default_rng(seed)
    images = Images([rng.integers(0, 256, (4, 6, 1), np.uint8) for _ in range(8)], np.arange(8, dtype=np.int32) % 2)
    return DataSet(images, images, ("one", "other"), 2, 1, 6, ((4, 6),))


def abstract(model: str, precision: str) -> Any:
    if model == "lm":
        return nnx.eval_shape(
            lambda: Decoder(train_lm.configure(TINY, None, "auto", PRECISIONS[precision]).model, rngs=nnx.Rngs(0))
        )
    return nnx.eval_shape(
        lambda: DiT(
            train_dit.configure(train_dit.with_precision(TINY_DIT, PRECISIONS[precision]), few_images(0)),
            rngs=nnx.Rngs(0),
        )
    )


def layers(model, *types) -> dict:
    return {".".join(map(str, path)): layer for path, layer in nnx.iter_modules(model) if isinstance(layer, types)}


def test_training_in_delayed_scaling(tmp_path):
    """Every step appends to each history, evaluations do not; the returned model is in evaluation mode."""
    text = Documents(np.tile(np.frombuffer(b"abcdefgh", np.uint8), 64), np.array([0, 512]))
    dense = dataclasses.replace(TINY, model=dataclasses.replace(TINY_MOE, experts=0, top_k=0))
    preset = train_lm.configure(dense, None, "auto", PRECISIONS["fp8-delayed"])
    model, history = train_lm.train(preset, Corpus(text, text), "nats", Run(tmp_path, Console(file=io.StringIO())))
    assert history.heldout[-1][1] < history.heldout[0][1] - 0.5
    histories = jax.tree.leaves(nnx.state(model, AmaxHistory))
    assert [(h.shape, np.count_nonzero(h[0]), np.count_nonzero(h[1])) for layers in histories for h in layers] == 7 * [
        ((2, 16), TINY.steps, TINY.steps)
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
    made, key = abstract(model, "fp8-delayed"), jax.random.key(0)
    graphdef, params, histories = nnx.split(made, nnx.Param, AmaxHistory)
    if model == "lm":
        preset = train_lm.configure(TINY, None, "auto", PRECISIONS["fp8-delayed"])
        text = Documents(np.tile(np.frombuffer(b"abcdefgh", np.uint8), 64), np.array([0, 512]))
        batch = train_lm.make_batches(preset, text, train_lm.make_rows(preset, text))(1)
        step, evaluate = train_lm.make_step(graphdef, preset), train_lm.make_evaluate(graphdef, preset)
    else:
        preset = train_dit.with_precision(TINY_DIT, PRECISIONS["fp8-delayed"])
        batch = train_dit.make_batches(preset, few_images(0))(1)
        step, evaluate = train_dit.make_step(graphdef, preset), train_dit.make_evaluate(graphdef)
    state = jax.eval_shape(functools.partial(init_state, preset), params, histories)
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
    model = train_lm.configure(TINY, None, "auto", PRECISIONS["fp8-blockwise"]).model
    chosen = {fp8: Decoder(dataclasses.replace(model, fp8_experts=fp8), rngs=nnx.Rngs(0)) for fp8 in (True, False)}
    plain = Decoder(dataclasses.replace(model, recipe=None), rngs=nnx.Rngs(0))
    products = {f"blocks.attention.{name}" for name in ("q", "k", "v", "out")}  # the experts' are no layers
    assert set(layers(chosen[False], Fp8Linear)) == set(layers(chosen[True], Fp8Linear)) == products
    x = jax.random.normal(jax.random.key(1), (1, 8, model.width), model.dtype)
    of = lambda made: np.asarray(made.layers()[0].mlp(x)[0], np.float32)
    np.testing.assert_array_equal(of(chosen[False]), of(plain))
    assert np.any(of(chosen[True]) != of(plain))
