"""Over a mesh, blocks of two kinds with most of the decoder's parts train as on one device."""

import dataclasses
import functools
import re

import jax
import pytest

from jaxops.nn import RouterBias
from models.decoder import Latent
from models.mesh import make_mesh, name_of, parts_of
from tests.devices import needs_four
from tests.models.test_decoder_parts import LATENT, MUCH
from tests.models.test_mesh import assert_same, experts, fraction, matrices, train

pytestmark = needs_four
SIZES = {"vocab": 256, "width": 16, "head_dim": 8, "hidden": 12, "dense_hidden": 20}
CONFIGS = {
    "much": dataclasses.replace(MUCH, **SIZES, layers=2, sliding=(0,), dense_layers=(1,)),
    "latent": dataclasses.replace(LATENT, **SIZES, layers=3, latent=Latent(4, 6, 4)),
}


OVER = {"much": "expert=2,tensor=2", "latent": "fsdp=2,tensor=2"}  # other meshes: test_mesh.py, test_tensor.py


# Evaluations over meshes: test_mesh.py.
train_only = functools.partial(train, evaluates=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mesh_trains_as_one_device(name):
    config, got = CONFIGS[name], train_only(CONFIGS[name], OVER[name])
    assert_same(got, train_only(config))
    assert {fraction(x) for x in experts(got.first.params)} == {1 / 4}
    assert {fraction(x) for x in matrices(got.first.params)} == {1 / 4, 1 / 2}, "routers over one axis of the two"
    assert f"f32[{64 // parts_of(make_mesh(OVER[name]))},128]" in got.program, "logits of a device's words"
    assert not re.search(r"f32\[(\d+,)+256\]", got.program), "no device has all words'"
    biases = [x for path, x in jax.tree.leaves_with_path(got.first.params) if "bias/gate" in name_of(path)]
    assert [fraction(x) for x in biases] == [0.25] * config.expert_bias


def test_the_bias_of_the_choice_stays():
    """No optimizer moves it, and it is not lost."""
    first = train_only(CONFIGS["latent"], OVER["latent"]).first
    kept = jax.tree.leaves(first.histories, is_leaf=lambda x: isinstance(x, RouterBias))
    assert [x.shape for x in kept] == [(2, 4)]
    assert "selection_bias" not in str(jax.tree.structure(first.params))
