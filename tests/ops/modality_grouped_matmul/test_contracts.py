"""The contracts of every op: transformations, determinism, no host work, no recompilation."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxops
from jaxops.ops.grouped_matmul import Plan, Tiles
from tests.hopper import lower_for_h200

pytestmark = pytest.mark.versions

SHAPES = ((2, 16, 24), (1, 24, 8))


def test_the_result_is_written_in_place():
    """Launches after the first write to its result: nothing is put together afterwards."""
    s, wide, high = jax.ShapeDtypeStruct, Tiles(64, 64, 32), Tiles(128, 64, 32)
    plan = tuple(Plan("pallas", tiles) for tiles in (wide, high, wide))
    shapes = ((2, 64, 128), (1, 32, 64), (3, 64, 64))
    text = lower_for_h200(
        lambda lhs, rhs, offsets: jaxops.modality_grouped_matmul(lhs, rhs, offsets, plan=plan),
        s((256, 64), jnp.bfloat16), tuple(s(shape, jnp.bfloat16) for shape in shapes), s((7,), jnp.int32),
    )  # fmt: skip
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert len(calls) == 4  # of each launch the work list, and the product
    assert [("operand_index = 3" in call or "operand_index = 4" in call) for call in calls] == [
        False,
        False,
        False,
        True,
    ]
    others = [line for line in text.splitlines() if " stablehlo." in line and "custom_call" not in line]
    assert not others, others


def test_dgrad_has_tiles_of_its_own():
    """Whichever way the matrices lie: the forward of one is the other's dgrad."""
    s, (fwd, dgrad, wgrad) = jax.ShapeDtypeStruct, (Tiles(64, 64, 32, warps) for warps in (2, 4, 8))
    plan = Plan("pallas", fwd, dgrad, wgrad)
    for transpose_rhs in (False, True):
        shapes = tuple((G, n, k) if transpose_rhs else (G, k, n) for G, k, n in SHAPES)

        def gradients(lhs, rhs, offsets, transpose_rhs=transpose_rhs):
            f = lambda lhs, rhs: jnp.sum(
                jnp.sin(jaxops.modality_grouped_matmul(lhs, rhs, offsets, transpose_rhs=transpose_rhs, plan=plan))
            )
            return jax.grad(f, argnums=(0, 1))(lhs, rhs)

        text = lower_for_h200(
            gradients, s((64, 24), jnp.float32), tuple(s(shape, jnp.float32) for shape in shapes), s((4,), jnp.int32)
        )
        found = dict(re.findall(r'name = "modality_grouped_matmul_(\w+)".*?num_warps = (\d)', text))
        assert found == {
            "dgrad" if transpose_rhs else "fwd": "2",
            "fwd" if transpose_rhs else "dgrad": "4",
            "wgrad": "8",
        }
