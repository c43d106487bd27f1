"""The multimodal model's configuration: what it refuses, and FP8 recipes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxops.nn import AmaxHistory
from models.multimodal.loss import loss_fn
from models.multimodal.model import Multimodal
from tests.models.test_multimodal import BATCH, CONFIG, model_of


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"top_k": 3}, "top_k is 3, of 3 experts for text and 2 for images; it must be at most the smaller one"),
        ({"width": 20}, "width is 20; the embedding of a patch's place needs a multiple of 8"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"head_dim": 7}, "rotary positions need an even number"),
    ],
)
def test_a_configuration_that_is_none(change, error):
    with pytest.raises(ValueError, match=error):
        dataclasses.replace(CONFIG, **change)


def test_fp8():
    """Near the same model in bfloat16: experts, which are tensorwise, in one product a modality. The loss of three
    patches of a random model scatters: it is 4 to 6 % off, either way."""
    config = dataclasses.replace(CONFIG, width=32, dtype="bfloat16", text_hidden=32, image_hidden=48, layers=1)
    model, key = model_of(config), jax.random.key(0)
    in_fp8 = nnx.eval_shape(lambda: Multimodal(dataclasses.replace(config, recipe="delayed"), rngs=nnx.Rngs(0)))
    nnx.update(in_fp8, jax.tree.map(lambda h: jnp.zeros(h.shape, h.dtype), nnx.state(in_fp8, AmaxHistory)))
    nnx.update(in_fp8, nnx.state(model, nnx.Param))
    run = nnx.jit(lambda model: loss_fn(model, BATCH, key, image_weight=1.0, time_shift=1.0, reading_noise=0.0)[0])
    assert float(run(in_fp8)) == pytest.approx(float(run(model)), rel=0.1)
    assert float(run(in_fp8)) != float(run(model))
