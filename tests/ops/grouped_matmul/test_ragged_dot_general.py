"""ragged_dot_general against jax.lax.ragged_dot_general, in its three modes, with axes in any order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxops
from jaxops.ops.grouped_matmul.reference import ragged_dot_general_reference
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.grouped_matmul.cases import plan_of

G = 3
SIZES = np.array([3, 0, 5], np.int32)
EACH = np.random.default_rng(0).integers(0, 4, (2, 5, G)).astype(np.int32)  # of each batch and outer axis


def numbers(contracted: Any, batch: Any = ((), ()), ragged: Any = (0,), group: Any = (0,)):
    return lax.RaggedDotDimensionNumbers((contracted, batch), ragged, group)


WHOLE = (2, 5, 9, 7, 4, 2), (3, 2, 2, 6, 4), numbers(((4, 5), (4, 2)), ((0,), (1,)), (2,))
SUMMED = (2, 5, 9, 7, 4), (6, 9, 7, 5, 2), numbers(((1, 2, 3), (3, 1, 2)), ((0,), (4,)), (2,), ())
# Shapes of lhs and rhs, the numbers, group sizes.
CASES: dict[str, tuple] = {
    "rows": ((9, 4), (G, 4, 6), numbers(((1,), (1,))), SIZES),
    "rows, rhs transposed": ((9, 4), (G, 6, 4), numbers(((1,), (2,))), SIZES),
    "rows, groups last": ((4, 9), (6, 4, G), numbers(((0,), (1,)), ragged=(1,), group=(2,)), SIZES),
    "rows, a vector": ((9, 4), (G, 4), numbers(((1,), (1,))), SIZES),
    "rows, batch and outer and inner axes": (*WHOLE, SIZES),
    "rows, sizes of each": (*WHOLE, EACH),
    "contraction": ((9, 4), (9, 6), numbers(((0,), (0,)), group=()), SIZES),
    "contraction, batch and outer and inner axes": (*SUMMED, SIZES),
    "contraction, sizes of each": (*SUMMED, EACH),
    "batch": ((9, 4, 5), (9, 5, 6), numbers(((2,), (1,)), ((0,), (0,)), group=()), SIZES),
}


def operands(shapes, dtype: str = "float32") -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(1)
    return tuple(put(rng.normal(size=shape), dtype) for shape in shapes)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    """JAX has gradients of the first mode only: the reference has all."""
    *shapes, dimensions, sizes = CASES[case]
    lhs, rhs = operands(shapes)

    @jax.jit
    def results(lhs, rhs, sizes):
        ours = functools.partial(jaxops.ragged_dot_general, precision="highest")
        want, reference = jax.vjp(lambda *given: ragged_dot_general_reference(*given, sizes, dimensions), lhs, rhs)
        out, vjp = jax.vjp(lambda *given: ours(*given, sizes, dimensions), lhs, rhs)
        of_jax = lax.ragged_dot_general(lhs, rhs, sizes, dimensions, "highest")
        return of_jax, (out, *vjp(jnp.sin(want))), (want, *reference(jnp.sin(want)))

    of_jax, found, wanted = results(lhs, rhs, jnp.asarray(sizes))
    assert_close(found[0], of_jax, "float32")
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want, "float32")


@pytest.mark.parametrize("case", ["rows, sizes of each", "contraction, sizes of each"])
@pytest.mark.parametrize("run", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_in_the_kernels(run, case):
    """Batch and outer axes are vmaps of the kernels."""
    *shapes, dimensions, sizes = CASES[case]
    lhs, rhs = operands(shapes)
    plan = plan_of(run)
    got = jax.jit(lambda *given: jaxops.ragged_dot_general(*given, dimensions, "highest", plan=plan))(lhs, rhs, sizes)
    assert_close(got, ragged_dot_general_reference(lhs, rhs, jnp.asarray(sizes), dimensions), "float32")


@pytest.mark.parametrize("case", ["rows", "contraction, sizes of each", "batch"])
@pytest.mark.parametrize(("dtypes", "preferred"), [(("bfloat16", "bfloat16"), None), (("int8", "int8"), "int32")])
def test_dtypes(case, dtypes, preferred):
    """As JAX's."""
    *shapes, dimensions, sizes = CASES[case]
    lhs, rhs = (put(10 * x, dtype) for x, dtype in zip(operands(shapes), dtypes, strict=True))
    dots = jaxops.ragged_dot_general, lax.ragged_dot_general
    got, want = (f(lhs, rhs, jnp.asarray(sizes), dimensions, preferred_element_type=preferred) for f in dots)
    assert got.dtype == want.dtype
    assert_close(got, want, dtypes[0] if preferred is None else "float32", scale=0.5)


def test_sums_over_outer_axes_are_rounded_once():
    *shapes, dimensions, sizes = CASES["contraction, sizes of each"]
    lhs, rhs = operands(shapes, "bfloat16")
    got = jaxops.ragged_dot_general(lhs, rhs, jnp.asarray(sizes), dimensions)
    want = ragged_dot_general_reference(lhs, rhs, jnp.asarray(sizes), dimensions).astype(jnp.bfloat16)
    assert np.mean(np.asarray(got) != np.asarray(want)) < 0.02


@pytest.mark.parametrize("case", ["rows", "rows, rhs transposed"])
def test_rhs_is_read_in_place(case):
    *shapes, dimensions, sizes = CASES[case]
    call = lambda *given: jaxops.ragged_dot_general(*given, dimensions, backend="xla")
    assert "permutation=(0, 2, 1)" not in str(jax.make_jaxpr(call)(*operands(shapes), sizes))


def test_group_offset():
    """A shard's groups, with batch axes; not of sums."""
    *shapes, dimensions, sizes = CASES["rows, sizes of each"]
    lhs, rhs = operands(shapes)
    got = jaxops.ragged_dot_general(lhs, rhs[1:], jnp.asarray(sizes), dimensions, "highest", group_offset=1)
    want = ragged_dot_general_reference(lhs, rhs[1:], jnp.asarray(sizes), dimensions, 1)
    assert_close(got, want, "float32")
    *shapes, dimensions, sizes = CASES["contraction"]
    with pytest.raises(NotImplementedError, match=r"group_offset needs an rhs with a group axis.*grouped_wgrad"):
        jaxops.ragged_dot_general(*operands(shapes), jnp.asarray(sizes), dimensions, group_offset=1)


@pytest.mark.parametrize("run", ["xla", "interpret"])
@pytest.mark.parametrize("case", ["rows, sizes of each", "contraction"])
def test_empty_axes(case, run):
    """Each axis of lhs at a time, batch axes too."""
    lhs, rhs, dimensions, sizes = CASES[case]
    (left, right), batch = dimensions.dot_dimension_numbers
    other = dict(zip((*left, *batch[0]), (*right, *batch[1]), strict=True))
    for axis in range(len(lhs)):
        empty = (*lhs[:axis], 0, *lhs[axis + 1 :]), rhs
        if axis in other:
            empty = empty[0], (*rhs[: other[axis]], 0, *rhs[other[axis] + 1 :])
        each = jnp.asarray(sizes)[(0,) * (np.ndim(sizes) - 1)]
        x, w = operands(empty)
        got = jaxops.ragged_dot_general(x, w, 0 * each, dimensions, plan=plan_of(run))
        want = jax.eval_shape(lambda *a, n=dimensions: lax.ragged_dot_general(*a, n), x, w, 0 * each)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert not got.any()


def test_a_ragged_batch_axis_has_no_kernel():
    *shapes, dimensions, sizes = CASES["batch"]
    for how in ({"backend": "pallas"}, {"plan": plan_of("interpret")}):
        with pytest.raises(NotImplementedError, match="no kernel: use backend='auto' or 'xla'"):
            jaxops.ragged_dot_general(*operands(shapes), jnp.asarray(sizes), dimensions, **how)
    with pytest.raises(ValueError, match=r"group_sizes has shape \(7, 5, 3\); it must be \[g\]"):
        jaxops.ragged_dot_general(*operands(shapes), jnp.ones((7, 5, 3), jnp.int32), dimensions)
    with pytest.raises(TypeError, match="preferred_element_type"):
        jaxops.ragged_dot_general(*operands(shapes), jnp.asarray(sizes), dimensions, None, "many")
