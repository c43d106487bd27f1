"""Which parameters AdamW decays: a list by hand of the names of every model's parameters."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder
from models.distributed.mesh import name_of
from models.dit.model import DiT, DiTConfig
from models.hf.config import read_config
from models.multimodal.model import Multimodal
from models.training.presets import MULTIMODAL_PRESETS, PRESETS
from models.training.schedule import make_optimizer
from tests.models.hf_checkpoints import DATA, NAMES

# By the end of a name. A new parameter needs an entry: matrices and embeddings are decayed; norms' scales, biases and
# logits of sinks are not.
DECAYED = {"kernel", "embedding"} | {
    f"{of}/{matrix}" for of, matrix in itertools.product(("moe", "text", "image"), ("gate", "up", "down"))
}
KEPT = {"scale", "bias", "sinks", "gate_bias", "up_bias", "down_bias"}
MODELS = {name: lambda name=name: Decoder(read_config(DATA / name)[1], rngs=nnx.Rngs(0)) for name in NAMES} | {
    "dit": lambda: DiT(DiTConfig(1, 8, 2, 4, 3, 6), rngs=nnx.Rngs(0)),
    "mm": lambda: Multimodal(
        dataclasses.replace(MULTIMODAL_PRESETS["demo"].model, qk_norm=True, tie_embeddings=False), rngs=nnx.Rngs(0)
    ),
}


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Of all parameters of all models."""
    found = [nnx.state(nnx.eval_shape(make), nnx.Param) for make in MODELS.values()]
    return {name_of(path).removesuffix("/value") for state in found for path, _ in jax.tree.leaves_with_path(state)}


def test_matrices_are_decayed_and_nothing_else(names):
    """By the update of parameters without a gradient. Their shapes say nothing: layers are stacked."""
    ends = {name: {name.split("/")[-1], "/".join(name.split("/")[-2:])} for name in names}
    for name, end in ends.items():
        assert len(end & DECAYED) + len(end & KEPT) == 1, f"{name}: write its end into DECAYED or KEPT."
    assert set.union(*ends.values()) >= DECAYED | KEPT, "an entry of no model"
    optimizer = make_optimizer(dataclasses.replace(PRESETS["demo"], warmup_steps=0, weight_decay=0.5))
    params = {name: np.ones(1, np.float32) for name in names}
    update = jax.jit(
        lambda params: optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]
    )
    rates = {name: float(change[0]) for name, change in update(params).items()}
    wanted = {name: -4e-3 * 0.5 if end & DECAYED else 0.0 for name, end in ends.items()}
    assert rates == pytest.approx(wanted, rel=1e-5)
