"""The Hopper kernel, compiled for an H200 without one."""

import jax
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.arrays.powers import power_of_2
from jaxops.ops.packed_attention import Plan, Tiles
from jaxops.ops.packed_attention.plan import hopper_bytes
from tests.gluon import check, compiled

pytestmark = pytest.mark.versions


def shape(*sizes: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("dim", "bk", "stages", "apart"),
    [
        (256, 64, 2, False),
        (192, 64, 2, False),
        (128, 128, 2, True),
        (128, 128, 3, False),
        (128, 64, 4, True),
        (96, 128, 2, True),
        (64, 128, 3, True),
        (16, 128, 3, True),
    ],
)
def test_forward(dim, bk, stages, apart, tmp_path):
    """Two consumers multiply for scores and for sums at a block's ends and in each of two loops."""
    plan = Plan("triton", fwd=Tiles(128, bk, 8, stages))
    call = lambda q, k, v, offsets: jaxops.packed_attention(q, k, v, offsets, causal=True, plan=plan)
    keys = shape(1000, 2, dim)
    (kernel,) = compiled(call, shape(1000, 4, dim), keys, keys, shape(5, dtype="int32"))
    width = power_of_2(dim)
    of_scores = [f"m64n{bk}k16.f32.bf16.bf16"] * (width // 16)
    of_sums = [f"m64n{width}k16.f32.bf16.bf16"] * (bk // 16)
    once = [*of_scores, *2 * (of_scores + of_sums), *of_sums]
    check(kernel, 2 * once, 2, hopper_bytes(plan.fwd, dim, apart=apart), tmp_path)
    assert kernel.shared > hopper_bytes(plan.fwd, dim, apart=apart) - 1024
