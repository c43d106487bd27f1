"""Outputs and gradients by the float32 reference: every dtype, odd sizes, all patterns of empty groups, NaN outside."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops.grouped_matmul import Plan, Tiles
from jaxops.ops.grouped_matmul.reference import grouped_wgrad_reference
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.grouped_matmul.cases import (
    HALF_RUNS,
    KERNELS,
    RUNS,
    check,
    check_sum,
    make_case,
    plan_of,
    reference_all,
    run_all,
)

WGRAD_REFERENCE = jax.jit(grouped_wgrad_reference)
ROUTINGS = [
    pytest.param([17, 30, 10, 13], 0, 0, id="all-rows"),
    pytest.param([9, 0, 12, 19], 11, 19, id="rows-outside-both-ends"),
    pytest.param([0, 70, 0, 0], 0, 0, id="one-group"),
    pytest.param([16, 32, 16, 0], 3, 3, id="whole-tiles-unaligned"),
    pytest.param([0, 0, 0, 0], 30, 40, id="no-rows"),
    pytest.param([1, 1, 1, 1], 65, 1, id="single-rows-at-the-end"),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["rhs", "transposed"])
@pytest.mark.parametrize(("sizes", "before", "after"), ROUTINGS)
def test_float32(run, transpose_rhs, sizes, before, after):
    check(make_case(sizes, 37, 53, before=before, after=after), run, transpose_rhs=transpose_rhs)


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        ("xla", "float16"),
        ("interpret", "bfloat16"),
        *(
            pytest.param(run, dtype, marks=pytest.mark.gpu)
            for run in ("gpu", "triton")
            for dtype in ("bfloat16", "float16")
        ),
    ],
)
@pytest.mark.parametrize(("sizes", "before", "after"), ROUTINGS[1:4:2])
def test_half(run, dtype, sizes, before, after):
    check(make_case(sizes, 64, 48, dtype=dtype, before=before, after=after), run, kind=dtype, precision=None)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "empty", list(itertools.product([False, True], repeat=4)), ids=lambda p: "".join("0" if e else "x" for e in p)
)
def test_every_pattern_of_empty_groups(run, empty):
    sizes = [0 if e else 5 + 7 * i for i, e in enumerate(empty)]
    check(make_case(sizes, 37, 53, after=70 - sum(sizes)), run)  # compiled already, for test_float32


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize(
    ("routings", "K", "N"),
    [([[3, 2]], 1, 97), ([[5, 31]], 101, 1), ([[127, 1], [64, 64]], 32, 64)],
)
def test_sizes(run, routings, K, N):
    """The last one is whole tiles of columns, and its groups are so once."""
    for sizes in routings:
        check(make_case(sizes, K, N), run)


@pytest.mark.parametrize("run", HALF_RUNS)
@hypothesis.given(data=st.data())
def test_random_routings(run, data):
    """The shape of the patterns above, or on Hopper a larger one: any sizes, anywhere."""
    M, K, N, kind = (700, 24, 40, "bfloat16") if run == "triton" else (70, 37, 53, "float32")
    ends = sorted(data.draw(st.lists(st.integers(0, M), min_size=5, max_size=5)))
    case = make_case(
        np.diff(ends), K, N, before=ends[0], after=M - ends[-1], seed=data.draw(st.integers(0, 9)), dtype=kind
    )
    check(case, run, kind=kind, precision="highest" if kind == "float32" else None)


@pytest.mark.parametrize("run", KERNELS)
def test_a_hundred_groups(run):
    """More than one program of the work list's kernel sorts."""
    check(make_case(np.random.default_rng(0).integers(0, 4, 100), 8, 16, before=1, after=2), run)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [[300, 0, 1, 723, 0, 512], [2048, 0, 0, 0, 0, 0]])
def test_heuristic_and_tuned_plans(dtype, sizes):
    """On the GPU, with the plans that users get; float32 by TF32, as x @ w."""
    case = make_case(sizes, 384, 640, dtype=dtype, before=7, after=5)
    arrays = tuple(vars(case).values())

    def f(lhs, rhs, bias):
        return jaxops.grouped_matmul(lhs, rhs, case.offsets, bias=bias)

    out, vjp = jax.vjp(f, case.lhs, case.rhs, case.bias)
    for name, got, want in zip(
        ("out", "dlhs", "drhs", "dbias"), (out, *vjp(case.dout)), reference_all(arrays), strict=True
    ):
        assert_close(got, want, "bfloat16" if dtype == "bfloat16" else "tf32", name)


@pytest.mark.parametrize("run", HALF_RUNS)
def test_compute_dtype(run):
    """A float32 rhs under bfloat16 products: its gradient is float32 and was never rounded to bfloat16."""
    case = make_case([20, 0, 25], 32, 48, after=3)
    x = np.asarray(case.lhs).astype(jnp.bfloat16)

    @jax.jit
    def results(x, w, dout):
        options = {"compute_dtype": jnp.bfloat16, "out_dtype": jnp.float32, "plan": plan_of(run)}
        out, vjp = jax.vjp(lambda x, w: jaxops.grouped_matmul(x, w, case.offsets, **options), x, w)
        return out, *vjp(dout)

    out, dx, dw = results(x, case.rhs, case.dout)
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    rounded = [np.where(case.outside, 0, a).astype(jnp.bfloat16) for a in (case.lhs, case.dout)]
    want = WGRAD_REFERENCE(*rounded, case.offsets)
    assert_close(dw, want, "float32", "drhs")
    assert np.any(np.asarray(dw) != np.asarray(dw).astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("accumulate", "dtype"), [(False, "float32"), (True, "bfloat16")], ids=["fresh", "accumulate"])
def test_wgrad(run, accumulate, dtype):
    """The sum of a group without rows is zero, or to the bit what it was."""
    K, N, case = 37, 53, make_case([17, 0, 40, 6], 37, 53, dtype=dtype, before=2, after=5)
    before = np.random.default_rng(1).normal(size=(4, K, N)).astype(np.float32)
    before[1, 0, 0] = -0.0
    options = {"accumulate_into": before} if accumulate else {"out_dtype": "float32"}
    wgrad = functools.partial(jaxops.grouped_wgrad, precision="highest", plan=plan_of(run))
    got = jax.jit(lambda lhs, dout: wgrad(lhs, dout, case.offsets, **options))(case.lhs, case.dout)
    assert got.dtype == jnp.float32
    into = before if accumulate else None
    assert_close(got, WGRAD_REFERENCE(case.lhs, case.dout, case.offsets, accumulate_into=into), "float32")
    assert np.asarray(got[1]).tobytes() == (before[1] if accumulate else np.zeros((K, N), np.float32)).tobytes()


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize("peel", [False, True], ids=["masked", "peeled"])
def test_wgrad_steps(run, peel):
    """Groups of less than a step, whole steps, steps and a rest, with NaN next door; not under jit."""
    case = make_case([5, 32, 0, 45, 1], 33, 50, before=3, after=6)
    lhs = np.array(case.lhs)
    lhs[3 + 5 + 32] = np.nan  # one row of group 3: no other group's gradient may see it
    tiles = Tiles(16 if run == "interpret" else 64, 32, 16, peel=peel)
    wgrad = functools.partial(jaxops.grouped_wgrad, precision="highest", plan=Plan(wgrad=tiles))
    got, want = (np.asarray(f(put(lhs), case.dout, case.offsets)) for f in (wgrad, WGRAD_REFERENCE))
    assert np.isnan(got[3]).all()
    others = np.array([0, 1, 2, 4])
    assert_close(got[others], want[others], "float32")


@pytest.mark.parametrize("run", RUNS)
def test_gradients_of_wgrad(run):
    case = make_case([17, 0, 25], 21, 35, before=2, after=4)
    ct = np.random.default_rng(1).normal(size=(3, 21, 35)).astype(np.float32)
    acc = np.ones((3, 21, 35), np.float32)
    ours = functools.partial(jaxops.grouped_wgrad, precision="highest", plan=plan_of(run))

    def gradients(wgrad, lhs, dout):
        _, vjp = jax.vjp(lambda a, b, c: wgrad(a, b, case.offsets, accumulate_into=c), lhs, dout, acc)
        return vjp(ct)

    got = jax.jit(functools.partial(gradients, ours))(case.lhs, case.dout)
    want = jax.jit(functools.partial(gradients, grouped_wgrad_reference))(
        *(np.where(case.outside, 0, x) for x in (case.lhs, case.dout))
    )
    for name, g, w in zip(("dlhs", "ddout", "daccumulator"), got, want, strict=True):
        assert_close(g, w, "float32", name)


@pytest.mark.parametrize("run", RUNS[::2])  # of grouped_matmul's own results, whose kernels are interpreted above
@pytest.mark.parametrize(
    ("pairs", "dtype", "transpose_rhs"),
    [(1, "float16", False), (2, "bfloat16", True), (2, "float32", False)],
)
def test_sum(run, pairs, dtype, transpose_rhs):
    check_sum(run, [17, 0, 40], 37, 53, dtype=dtype, transpose_rhs=transpose_rhs, pairs=pairs, before=2, after=5)


@pytest.mark.gpu
@pytest.mark.parametrize("transpose_rhs", [False, True], ids=["rhs", "transposed"])
@pytest.mark.parametrize(
    ("sizes", "K", "N"),
    [([300, 0, 1, 723, 0, 512], 712, 1032), ([5, 3, 0, 1], 72, 136), ([0, 0, 70], 64, 8)],
    ids=["ragged", "few", "last"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sum_on_hopper(dtype, sizes, K, N, transpose_rhs):
    """By the forward's tiles, or the gradient's: the plan's are those of another pass each."""
    check_sum("triton", sizes, K, N, dtype=dtype, transpose_rhs=transpose_rhs, before=7, after=5)


@pytest.mark.parametrize("run", RUNS)
def test_offsets_that_break_the_contract(run):
    """Below 0, past M, decreasing: some result of the right shape, no access out of bounds (sanitize.py, on a GPU)."""
    case = make_case([17, 30, 10, 13], 37, 53)  # compiled already, for test_float32
    for bad in ([-5, 10, 30, 40, 50], [0, 10, 30, 40, 10_000], [0, 30, 10, 40, 70], [2**31 - 1, -(2**31), 0, 7, 9]):
        arrays = vars(case) | {"offsets": jnp.array(bad, jnp.int32)}
        got = jax.block_until_ready(run_all(tuple(arrays.values()), run, transpose_rhs=False, precision="highest"))
        assert [x.shape for x in got] == [(70, 53), (70, 37), (4, 37, 53), (4, 53)]
