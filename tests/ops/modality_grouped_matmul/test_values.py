"""Results and gradients by the float32 reference: all kinds of groups, NaN outside of a modality's rows and columns."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.modality_grouped_matmul.reference import modality_grouped_matmul_reference
from tests.compare import assert_close
from tests.ops.modality_grouped_matmul.cases import (
    EIGHTS,
    HALF_RUNS,
    HOPPER,
    RUNS,
    SHAPES,
    check,
    make_case,
    plan_of,
    run_all,
)

# Groups of SHAPES: two, three, one. Every routing has 80 rows: one compilation.
ROUTINGS = [
    pytest.param([17, 10, 13, 20, 5, 15], 0, 0, id="all-rows"),
    pytest.param([9, 0, 31, 0, 3, 7], 11, 19, id="rows-outside-both-ends"),
    pytest.param([0, 0, 50, 0, 30, 0], 0, 0, id="one-modality"),
    pytest.param([40, 8, 0, 0, 0, 32], 0, 0, id="none-in-the-middle"),
    pytest.param([16, 16, 16, 0, 16, 10], 3, 3, id="whole-tiles-unaligned"),
    pytest.param([0, 0, 0, 0, 0, 0], 30, 50, id="no-rows"),
    pytest.param([1, 1, 1, 1, 1, 1], 73, 1, id="single-rows-at-the-end"),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("sizes", "before", "after"), ROUTINGS)
def test_float32(run, sizes, before, after):
    check(make_case(sizes, before=before, after=after), run)


@pytest.mark.parametrize("run", ["xla", *HALF_RUNS[2:]])
def test_transposed(run):
    """The kernels are those of test_float32, for every gradient reads the matrices the other way."""
    shapes, kind = (HOPPER, "bfloat16") if run == "triton" else (SHAPES, "float32")
    case = make_case([9, 0, 31, 0, 3, 7], shapes, before=11, after=19, dtype=kind)
    check(case, run, kind=kind, precision="highest" if kind == "float32" else None, transpose_rhs=True)


@pytest.mark.parametrize("run", ["xla", *HALF_RUNS[2:]])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("sizes", "before", "after"), ROUTINGS[1:2])
def test_half(run, dtype, sizes, before, after):
    check(make_case(sizes, EIGHTS, dtype=dtype, before=before, after=after), run, kind=dtype, precision=None)


@pytest.mark.parametrize("run", HALF_RUNS)
@hypothesis.given(data=st.data())
def test_random_routings(run, data):
    """The shape of test_float32: any sizes, anywhere. On Hopper more rows and wider matrices."""
    M, shapes, kind = (700, HOPPER, "bfloat16") if run == "triton" else (80, SHAPES, "float32")
    ends = sorted(data.draw(st.lists(st.integers(0, M), min_size=7, max_size=7)))
    case = make_case(
        np.diff(ends), shapes, before=ends[0], after=M - ends[-1], seed=data.draw(st.integers(0, 9)), dtype=kind
    )
    check(case, run, kind=kind, precision="highest" if kind == "float32" else None)


@pytest.mark.parametrize("run", HALF_RUNS)
def test_a_row_that_is_nan_stays_in_its_group_and_columns(run):
    """Result and gradient are NaN in the modality's columns of that row, zero past them, finite in all other rows."""
    shapes, kind = (HOPPER, "bfloat16") if run == "triton" else (SHAPES, "float32")
    case = make_case([17, 10, 13, 20, 5, 15], shapes, dtype=kind)
    (_, _, n), (_, k, _) = shapes[:2]
    row, other = 17 + 4, 17 + 10 + 2  # of modality 0's last group; of modality 1's first
    lhs, dout = case.lhs.at[row, : shapes[0][1]].set(jnp.nan), case.dout.at[other, : shapes[1][2]].set(jnp.nan)
    out, dlhs, drhs = run_all(
        (lhs, case.rhs, dout, case.offsets), run, precision="highest" if kind == "float32" else None
    )
    for result, broken, width in ((out, row, n), (dlhs, other, k)):
        result = np.asarray(result, np.float32)
        assert np.isnan(result[broken, :width]).all()
        assert not result[broken, width:].any()
        assert np.isfinite(np.delete(result, broken, axis=0)).all()
    nan = [[bool(np.isnan(np.asarray(matrix, np.float32)).any()) for matrix in d] for d in drhs]
    assert nan == [[False, True], [True, False, False], [False]]


@pytest.mark.parametrize("run", RUNS)
def test_modalities_of_size_zero(run):
    """Their rows are zeros, wherever they stand among the others, and nothing is missing from their neighbours'."""
    shapes = ((0, 20, 24), (2, 0, 24), (2, 16, 32), (1, 20, 0), (0, 8, 8), (1, 24, 16), (2, 8, 0))
    case = make_case([7, 1, 9, 20, 5, 11, 3, 6], shapes, before=3, after=2)
    one, other, _ = plan_of("interpret")
    check(case, run, plan=None if run == "xla" else (one,) * 3 + (other,) * 4)


@pytest.mark.parametrize("run", HALF_RUNS)
def test_compute_dtype(run):
    """float32 matrices under bfloat16 products: their gradients are float32 and were never rounded to bfloat16."""
    case = make_case([17, 10, 13, 20, 5, 15], EIGHTS)

    @jax.jit
    def results(x, rhs, dout):
        options = {"compute_dtype": jnp.bfloat16, "out_dtype": jnp.float32, "plan": plan_of(run)}
        out, vjp = jax.vjp(lambda x, rhs: jaxops.modality_grouped_matmul(x, rhs, case.offsets, **options), x, rhs)
        return out, *vjp(dout)

    out, dx, drhs = results(case.lhs.astype(jnp.bfloat16), case.rhs, case.dout)
    assert (out.dtype, dx.dtype, [d.dtype for d in drhs]) == (jnp.float32, jnp.bfloat16, [jnp.float32] * 3)
    rounded = [
        np.where(case.there(axis), x, 0).astype(jnp.bfloat16).astype(np.float32)
        for axis, x in ((1, case.lhs), (2, case.dout))
    ]

    @jax.jit
    def gradient(x, rhs, dout):
        return jax.vjp(lambda rhs: modality_grouped_matmul_reference(x, rhs, case.offsets), rhs)[1](dout)

    (want,) = gradient(rounded[0], case.rhs, rounded[1])
    for got, wanted in zip(drhs, want, strict=True):
        assert_close(got, wanted, "float32", "drhs")
    assert np.any(np.asarray(drhs[0]) != np.asarray(drhs[0]).astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("run", HALF_RUNS)
def test_offsets_that_break_the_contract(run):
    """Below 0, past M, decreasing: some result of the right shape, no access out of bounds (sanitize.py, on a GPU)."""
    shapes, kind = (
        (HOPPER, "bfloat16") if run == "triton" else (SHAPES, "float32")
    )  # compiled already, for test_float32
    case = make_case([17, 10, 13, 20, 5, 15], shapes, dtype=kind)
    for bad in (
        [-5, 10, 30, 40, 50, 60, 70],
        [0, 10, 30, 9, 10_000, 3, 80],
        [0, 80, 0, 80, 0, 80, 0],
        [2**31 - 1, -(2**31), 0, 7, 9, -1, 80],
    ):
        out, dlhs, drhs = run_all(
            (*case.arrays()[:3], jnp.array(bad, jnp.int32)), run, precision="highest" if kind == "float32" else None
        )
        assert (out.shape, dlhs.shape, [d.shape for d in drhs]) == (
            case.dout.shape,
            case.lhs.shape,
            [w.shape for w in case.rhs],
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_heuristic_plans(dtype):
    """On the GPU, with the plans that users get; float32 by TF32, as x @ w."""
    case = make_case(
        [300, 0, 1, 723, 0, 512, 65, 40], ((3, 384, 640), (4, 640, 128), (1, 256, 256)), dtype=dtype, before=7, after=5
    )
    lhs, rhs, dout, offsets = case.arrays()
    out, vjp = jax.vjp(lambda lhs, rhs: jaxops.modality_grouped_matmul(lhs, rhs, offsets), lhs, rhs)
    lhs, dout = (jnp.where(case.there(axis), x, 0).astype(jnp.float32) for axis, x in ((1, lhs), (2, dout)))
    want, want_vjp = jax.vjp(
        lambda lhs, rhs: modality_grouped_matmul_reference(lhs, rhs, offsets),
        lhs,
        tuple(w.astype(jnp.float32) for w in rhs),
    )
    for got, wanted in zip(
        jax.tree.leaves((out, vjp(case.dout))), jax.tree.leaves((want, want_vjp(dout))), strict=True
    ):
        assert_close(got, wanted, "bfloat16" if dtype == "bfloat16" else "tf32")
