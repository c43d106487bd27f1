"""Over a mesh, blocks of two kinds with most of the decoder's parts train as on one device."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from jaxops.nn import RouterBias
from models.decoder import Latent
from models.distributed.mesh import make_mesh, name_of, parts_of, replicate, shard_state
from models.training import lm as train_lm
from models.training import loop
from tests.compare import assert_close
from tests.devices import needs_four
from tests.jaxprs import equations
from tests.models.test_decoder_parts import LATENT, MUCH, model_of
from tests.models.test_mesh import batches_of, experts, fraction, matrices, preset_of

pytestmark = needs_four
SIZES = {"vocab": 256, "width": 16, "head_dim": 8, "hidden": 12, "dense_hidden": 20}
CONFIGS = {
    "much": dataclasses.replace(MUCH, **SIZES, layers=2, sliding=(0,), dense_layers=(1,)),
    "latent": dataclasses.replace(LATENT, **SIZES, layers=3, latent=Latent(4, 6, 4)),
}


OVER = {"much": "expert=2,tensor=2", "latent": "fsdp=2,tensor=2"}  # other meshes: test_mesh.py, test_tensor.py


class Gradient(NamedTuple):
    """Of the first batch, and its program."""

    loss: jax.Array
    grads: nnx.State
    histories: nnx.State
    program: str


def value_of(name: str, shape: str | None) -> tuple[Callable, tuple]:
    """The loss of a batch with what comes beside it, and its arguments."""
    config, mesh = CONFIGS[name], None if shape is None else make_mesh(shape)
    preset = preset_of(config)
    graphdef, *given = nnx.split(model_of(config), nnx.Param, ...)
    if mesh is not None:
        graphdef, given = train_lm.sharded_graphdef(preset, mesh), shard_state(given, mesh)
    objective = functools.partial(train_lm.objective, preset, preset.pack)
    batch = jax.tree.map(lambda x: x[0], loop.place(batches_of(preset)(0), mesh))
    value = loop.make_value(graphdef, objective, mesh, training=True)
    return value, (*given, batch, replicate(jax.random.key(0), mesh))


@functools.cache
def gradient(name: str, shape: str | None) -> Gradient:
    """Steps of the optimizer, and evaluations: test_mesh.py, test_tensor.py."""
    value, given = value_of(name, shape)
    program = jax.jit(jax.value_and_grad(value, has_aux=True)).lower(*given).compile()
    (loss, (_, histories)), grads = program(*given)
    return Gradient(loss, grads, histories, program.as_text())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gradient_over_a_mesh_is_that_of_one_device(name):
    config, got, want = CONFIGS[name], gradient(name, OVER[name]), gradient(name, None)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    for (path, ours), wanted in zip(jax.tree.leaves_with_path(got.grads), jax.tree.leaves(want.grads), strict=True):
        assert_close(ours, wanted, "float32", name_of(path), scale=10)
    jax.tree.map(np.testing.assert_array_equal, got.histories, want.histories)
    assert {fraction(x) for x in experts(got.grads)} == {1 / 4}
    assert {fraction(x) for x in matrices(got.grads)} == {1 / 4, 1 / 2}, "routers over one axis of the two"
    assert f"f32[{64 // parts_of(make_mesh(OVER[name]))},128]" in got.program, "logits of a device's words"
    assert not re.search(r"f32\[(\d+,)+256\]", got.program), "no device has all words'"
    biases = [x for path, x in jax.tree.leaves_with_path(got.grads) if "bias/gate" in name_of(path)]
    assert [fraction(x) for x in biases] == [0.25] * config.expert_bias


def test_no_layer_sums_its_routing_over_the_mesh():
    """One sum of all layers' comes after their scan."""
    value, given = value_of("latent", OVER["latent"])
    (layers,) = [
        found for found in equations(jax.make_jaxpr(value)(*given).jaxpr)
        if found.primitive.name == "scan" and "top_k" in str(found.params["jaxpr"])
    ]  # fmt: skip
    names = {inner.primitive.name for inner in equations(layers.params["jaxpr"].jaxpr)}
    assert "ppermute" in names, "parameters are gathered in it"
    assert not [name for name in names if name.startswith(("psum", "all_reduce"))]


def test_the_bias_of_the_choice_stays():
    """No optimizer moves it, and it is not lost."""
    got = gradient("latent", OVER["latent"])
    kept = jax.tree.leaves(got.histories, is_leaf=lambda x: isinstance(x, RouterBias))
    assert [x.shape for x in kept] == [(2, 4)]
    assert "selection_bias" not in str(jax.tree.structure(got.grads))
