"""Training with the mesh axis `tensor`, alone and beside the others, is training on one device."""

import dataclasses

import jax
import pytest

from models.decoder import DecoderConfig
from tests.models.test_mesh import assert_as_alone, train

pytestmark = pytest.mark.skipif(jax.device_count() != 4, reason="needs four devices")
MIXED = DecoderConfig(
    256, 16, 2, 8, 4, 4, 24, experts=4, top_k=2, dense_layers=(0,), dense_hidden=20, tie_embeddings=True, backend="xla"
)
UNTIED = dataclasses.replace(
    MIXED, tie_embeddings=False, qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True, sinks=True
)


@pytest.mark.parametrize(
    ("shape", "config"),
    [("tensor=4", MIXED), ("data=2,tensor=2", UNTIED), ("fsdp=2,tensor=2", UNTIED), ("expert=2,tensor=2", MIXED)],
)
def test_as_on_one_device(shape, config):
    got = train(config, shape)
    assert_as_alone(config, got)
