"""The Hopper kernel, compiled for an H200 without one."""

import jax
import pytest

pytest.importorskip("jax_triton", reason="jax-triton needs Python >= 3.12")

import jaxops
from jaxops._lib.arrays.powers import power_of_2
from jaxops.ops.packed_attention import Plan, Problem, Tiles, make_plan
from jaxops.ops.packed_attention.plan import head_columns, hopper_memory
from tests.gluon import check, compiled
from tests.ops.packed_attention.cases import H200

pytestmark = pytest.mark.versions


def shape(*sizes: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("dim", "values", "tiles"),
    [
        (256, 256, Tiles(128, 64, 8, 2)),
        (192, 192, Tiles(128, 64, 8, 2)),
        (192, 128, Tiles(128, 64, 8, 2)),
        (128, 128, Tiles(128, 128, 8, 2)),
        (128, 128, Tiles(128, 64, 8, 4)),
        (96, 96, Tiles(128, 128, 8, 2)),
        (64, 64, Tiles(128, 128, 8, 2)),
        (16, 16, Tiles(128, 128, 8, 2)),
    ],
)
def test_forward(dim, values, tiles, tmp_path):
    """The consumers multiply for scores and for sums at a block's ends and in each of two loops."""
    plan = Plan("triton", fwd=tiles)
    call = lambda q, k, v, offsets: jaxops.packed_attention(q, k, v, offsets, causal=True, plan=plan)
    keys = shape(1000, 2, dim), shape(1000, 2, values)
    (kernel,) = compiled(call, shape(1000, 4, dim), *keys, shape(5, dtype="int32"))
    of_scores = [f"m64n{tiles.bk}k16.f32.bf16.bf16"] * (head_columns(dim)[0] // 16)
    of_sums = [f"m64n{power_of_2(values)}k16.f32.bf16.bf16"] * (tiles.bk // 16)
    once = [*of_scores, *2 * (of_scores + of_sums), *of_sums]
    memory = hopper_memory("fwd", tiles, (dim, values)).bytes
    check(kernel, 2 * once, 2, memory, tmp_path, 4 if dim == values == 192 else 0)
    assert kernel.shared > memory - 1024


@pytest.mark.parametrize(
    ("dim", "values", "options", "spilled"),
    [
        (128, 128, {}, [0, 0]),
        (64, 64, {}, [0, 0]),
        (128, 64, {}, [0, 0]),
        (96, 96, {}, [16, 32]),
        (128, 128, {"soft_cap": 50.0}, [0, 88]),
        (192, 64, {}, [16, 4]),
        (192, 128, {}, [0, 0, 0]),
        (192, 192, {}, [48, 20, 0]),
        (256, 256, {}, [92, 20, 0]),
    ],
)
def test_backward(dim, values, options, spilled, tmp_path):
    """dq multiplies for scores, for products of dout and for its sums in each of two loops; so does dkv, or a launch
    for dk and one for dv, which has no products of dout. Where sums take half of the registers, some are spilled;
    so are some of the producer's, which has 24, where heads have parts."""

    def gradients(q, k, v, offsets):
        call = lambda q, k, v: jaxops.packed_attention(q, k, v, offsets, plan=Plan("triton"), **options)
        out, vjp = jax.vjp(call, q, k, v)
        return vjp(out)

    keys = shape(1000, 2, dim), shape(1000, 2, values)
    _, *kernels = compiled(gradients, shape(1000, 4, dim), *keys, shape(5, dtype="int32"))
    problem = Problem(1000, 1000, 4, 2, dim, "bfloat16", value_dim=values, soft_cap="soft_cap" in options)
    plan = make_plan(problem, H200, backend="triton")
    of = lambda columns, depth: [f"m64n{columns}k16.f32.bf16.bf16"] * (depth // 16)
    (columns, part), (of_values, value_part) = head_columns(dim), head_columns(values)
    passes = ["dq", "dkv"] if len(spilled) == 2 else ["dq", "dk", "dv"]
    for kernel, name, most in zip(kernels, passes, spilled, strict=True):
        tiles, looped = (plan.dq, plan.dq.bk) if name == "dq" else (plan.dkv, plan.dkv.bq)
        loop = of(looped, columns)
        loop += [] if name == "dv" else of(looped, of_values)
        loop += of_values // value_part * of(value_part, looped) if "v" in name else []
        loop += [] if name == "dv" else columns // part * of(part, looped)
        limit = hopper_memory("dq" if name == "dq" else "dkv", tiles, (dim, values)).bytes
        check(kernel, 4 * loop, 2, limit, tmp_path, most)
