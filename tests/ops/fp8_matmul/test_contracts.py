"""The contracts of every op: transformations, determinism, what is cast and kept, no host work, no recompilation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxops
from tests.arrays import put
from tests.compare import assert_close
from tests.jaxprs import equations
from tests.ops.fp8_matmul.cases import FEW, Case, apply, kind_of, make_case, options_of, reference

pytestmark = pytest.mark.versions

DENSE = make_case(21, 32, 48)
GROUPS = make_case(40, 32, 48, sizes=(9, 0, 21, 2), before=3)


def results(run, recipe, case, x, w, dy):
    y, vjp = jax.vjp(lambda x, w: apply(case, x, w, recipe, run), x, w)
    return y, *vjp(dy)


@pytest.mark.parametrize("run", FEW)
def test_microbatches_share_a_cast(run):
    """The loop of gradient accumulation: w is cast once outside the scan, each microbatch adds its gradient."""

    def step(x, w, dy):
        w8 = jaxops.quantize(w, scaling="block_128x128", layouts="both")

        def microbatch(total, x_dy):
            _, vjp = jax.vjp(lambda w: jaxops.fp8_matmul(x_dy[0], w, rhs_quantized=w8, **options_of(run)), w)
            return total + vjp(x_dy[1])[0], None

        return jax.lax.scan(microbatch, jnp.zeros_like(w), (x.reshape(3, 7, -1), dy.reshape(3, 7, -1)))[0]

    got = jax.jit(step)(DENSE.x, DENSE.w, DENSE.dy)
    parts = [Case(DENSE.x[i : i + 7], DENSE.w, DENSE.dy[i : i + 7]) for i in (0, 7, 14)]
    assert_close(got, sum(reference(part, "blockwise")[2] for part in parts), **kind_of(run, "float32"))


def casts(function, *args) -> list[tuple]:
    """Shapes of the FP8 arrays that a traced function has from a cast to FP8, in the order in which they come."""
    made = [
        equation.outvars[0].aval
        for equation in equations(jax.make_jaxpr(function)(*args).jaxpr)
        if equation.primitive.name == "convert_element_type"
    ]
    return [aval.shape for aval in made if aval.dtype.itemsize == 1]


@pytest.mark.parametrize(
    ("argnums", "recipe", "count"),
    [
        (None, "blockwise", 2),
        (0, "blockwise", 4),
        (1, "blockwise", 4),
        ((0, 1), "blockwise", 6),
        ((0, 1), "blockwise_with_gw_hp", 4),
    ],
)
def test_what_no_gradient_needs_is_not_cast(argnums, recipe, count):
    """Forward: lhs row, rhs column. dlhs: rhs row, dout row. drhs: lhs column, dout column; none in half precision."""

    def loss(x, w):
        return jnp.sum(jaxops.fp8_matmul(x, w, recipe=recipe, backend="xla"))

    assert len(casts(loss if argnums is None else jax.grad(loss, argnums), DENSE.x, DENSE.w)) == count


def test_residuals(capsys):
    """The residuals are x's column layout and w's row layout: one byte per number, and the scales."""
    s = jax.ShapeDtypeStruct
    print_saved_residuals(
        lambda x, w: jaxops.fp8_matmul(x, w, backend="xla"), s((256, 384), jnp.bfloat16), s((384, 512), jnp.float32)
    )
    saved = re.findall(r"^(\w+)\[([\d,]*)\] (?!from the argument)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(saved) == sorted(
        [("f8_e4m3fn", "384,256"), ("f32", "2,384"), ("f8_e4m3fn", "384,512"), ("f32", "3,4")]
    )


@pytest.mark.parametrize("case", [DENSE, GROUPS], ids=["dense", "groups"])
def test_shard_map_over_weights(case):
    """Weight columns (or experts) over two devices: JAX's own transpose sums the tokens' gradient over them."""
    if jax.device_count() < 2:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((2,), ("e",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    x, dy = (put(np.nan_to_num(v)) for v in (case.x, case.dy))

    def dense(x, w):
        return jaxops.fp8_matmul(x, w, recipe="rowwise", backend="xla")

    def groups(x, w, offsets):
        mine = jax.lax.dynamic_slice_in_dim(offsets, jax.lax.axis_index("e") * 2, 3)
        return jax.lax.psum(jaxops.fp8_grouped_matmul(x, w, mine, recipe="rowwise", backend="xla"), "e")

    if case is DENSE:
        f = jax.shard_map(dense, mesh=mesh, in_specs=(P(), P(None, "e")), out_specs=P(None, "e"))
    else:
        sharded = jax.shard_map(groups, mesh=mesh, in_specs=(P(), P("e"), P()), out_specs=P())
        f = lambda x, w: sharded(x, w, case.offsets)

    def results(x, w, dy):
        y, vjp = jax.vjp(f, x, w)
        return y, *vjp(dy)

    y, dx, dw = jax.jit(results)(x, case.w, dy)
    want = reference(case, "rowwise")
    assert_close(y, want[0], "float32")
    # A scale is a shard's own: of half of dy's columns (dx, dense), of some of the rows (dw, groups). The other
    # gradient is exact.
    exact, near = ((dw, want[2]), (dx, want[1])) if case is DENSE else ((dx, want[1]), (dw, want[2]))
    assert_close(*exact, "float32")
    assert np.sqrt(np.mean((near[0] - near[1]) ** 2) / np.mean(near[1] ** 2)) < 0.05


def test_second_order_is_an_error():
    loss = lambda x: jnp.sum(jaxops.fp8_matmul(x, DENSE.w, backend="xla") ** 2)
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))), DENSE.x)
