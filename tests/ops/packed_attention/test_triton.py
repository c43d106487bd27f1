"""The Hopper kernel, compiled for an H200 without one."""

import jax
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops.ops.packed_attention import Plan, Tiles
from tests.gluon import check, compiled

pytestmark = pytest.mark.versions


def shape(*sizes: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("dim", "bk", "stages"), [(128, 128, 2), (128, 64, 4), (64, 128, 3), (64, 64, 4), (32, 128, 3), (16, 128, 3)]
)
def test_forward(dim, bk, stages, tmp_path):
    """Two consumers multiply for scores and for sums at a block's ends and in each of two loops."""
    plan = Plan("triton", fwd=Tiles(128, bk, 8, stages))
    call = lambda q, k, v, offsets: jaxops.packed_attention(q, k, v, offsets, causal=True, plan=plan)
    keys = shape(1000, 2, dim)
    (kernel,) = compiled(call, shape(1000, 4, dim), keys, keys, shape(5, dtype="int32"))
    scores, sums = (f"m64n{n}k16.f32.bf16.bf16" for n in (bk, dim))
    of_scores, of_sums = [scores] * (dim // 16), [sums] * (bk // 16)
    once = [*of_scores, *2 * (of_scores + of_sums), *of_sums]
    check(kernel, 2 * once, 2, 4 * dim * (128 + stages * bk) + 1024, tmp_path)
