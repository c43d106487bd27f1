"""What tests/contracts/test_groups.py does not vary: dtypes, transposes, sizes of tiles and groups, accumulation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning.device import current_device
from jaxops.ops.grouped_matmul import Plan, Tiles, grouped_matmul_sum
from jaxops.ops.grouped_matmul.reference import grouped_matmul_reference, grouped_wgrad_reference
from tests.arrays import put
from tests.compare import assert_close
from tests.contracts.run import compare
from tests.ops.grouped_matmul.cases import HALF_RUNS, KERNELS, RUNS, make_case, plan_of, reference_all

WGRAD_REFERENCE = jax.jit(grouped_wgrad_reference)


def check(run: str, sizes, K: int, N: int, *, kind: str = "float32", **options) -> None:
    """With some rows outside, before the groups and behind."""
    case = make_case(sizes, K, N, dtype=kind, before=2, after=5)
    rhs = jnp.swapaxes(case.rhs, 1, 2) if options.get("transpose_rhs") else case.rhs
    arguments = {"lhs": jnp.nan_to_num(case.lhs), "rhs": rhs, "bias": case.rhs[:, 0]}
    arguments = jax.tree.map(np.asarray, arguments | {"group_offsets": case.offsets})
    precision = "highest" if kind == "float32" else None
    compare("grouped_matmul", "xla", arguments, kind, plan=plan_of(run), precision=precision, **options)


@pytest.mark.parametrize("run", RUNS)
def test_transposed(run):
    check(run, [9, 0, 12, 19], 37, 53, transpose_rhs=True)


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
def test_half(run, dtype):
    check(run, [9, 0, 31, 0, 30], 64, 48, kind=dtype)


@pytest.mark.parametrize("run", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "K", "N"),
    [
        ([3, 2], 1, 97),
        ([5, 31], 101, 1),
        ([127, 1], 32, 64),
        ([64, 64], 32, 64),
        (np.random.default_rng(0).integers(0, 4, 100), 8, 16),
    ],
    ids=["one-column", "one-result", "a-row", "whole-tiles", "a-hundred-groups"],
)
def test_sizes(run, sizes, K, N):
    """More groups than one program of the work list's kernel sorts."""
    check(run, sizes, K, N)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [[300, 0, 1, 723, 0, 512], [2048, 0, 0, 0, 0, 0]])
def test_heuristic_and_tuned_plans(dtype, sizes):
    """On the GPU, with the plans that users get; float32 by TF32, as x @ w."""
    case = make_case(sizes, 384, 640, dtype=dtype, before=7, after=5)
    out, vjp = jax.vjp(lambda lhs, rhs: jaxops.grouped_matmul(lhs, rhs, case.offsets), case.lhs, case.rhs)
    want = reference_all(tuple(vars(case).values()))
    for name, got, w in zip(("out", "dlhs", "drhs"), (out, *vjp(case.dout)), want, strict=True):
        assert_close(got, w, "bfloat16" if dtype == "bfloat16" else "tf32", name)


@pytest.mark.parametrize("run", HALF_RUNS)
def test_compute_dtype(run):
    """A float32 rhs under bfloat16 products: its gradient is float32 and was never rounded to bfloat16."""
    case = make_case([20, 0, 25], 32, 48, after=3)

    @jax.jit
    def results(x, w, dout):
        options = {"compute_dtype": jnp.bfloat16, "out_dtype": jnp.float32, "plan": plan_of(run)}
        out, vjp = jax.vjp(lambda x, w: jaxops.grouped_matmul(x, w, case.offsets, **options), x, w)
        return out, *vjp(dout)

    out, dx, dw = results(np.asarray(case.lhs).astype(jnp.bfloat16), case.rhs, case.dout)
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert_close(dw, WGRAD_REFERENCE(*case.rounded(jnp.bfloat16), case.offsets), "float32", "drhs")


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


@pytest.mark.parametrize("run", ["xla", *HALF_RUNS[2:]])  # of grouped_matmul's own results, or Hopper's kernel
@pytest.mark.parametrize(("pairs", "dtype", "transpose_rhs"), [(1, "float16", False), (2, "bfloat16", True)])
def test_sum(run, pairs, dtype, transpose_rhs):
    """It is rounded once: rounded terms would show where they cancel. No value outside the groups is in it."""
    cases = [make_case([17, 0, 40], 40, 56, dtype=dtype, seed=seed, before=2, after=5) for seed in range(pairs)]
    offsets, dout = cases[0].offsets, cases[0].dout

    @functools.partial(jax.jit, static_argnums=0)
    def results(product, lhs, rhs, dout):
        out, vjp = jax.vjp(product, lhs, rhs)
        return out, *vjp(dout.astype(out.dtype))

    def ours(lhs, rhs):
        rhs = tuple(jnp.swapaxes(b, 1, 2) for b in rhs) if transpose_rhs else rhs
        plan = dataclasses.replace(plan_of(run), device=current_device())
        return grouped_matmul_sum(lhs, rhs, offsets, transpose_rhs=transpose_rhs, plan=plan)

    def exact(lhs, rhs):
        return sum(grouped_matmul_reference(a, b, offsets) for a, b in zip(lhs, rhs, strict=True))

    given = tuple(case.lhs for case in cases), tuple(case.rhs for case in cases)
    got = results(ours, *given, dout)
    want = results(exact, *jax.tree.map(lambda x: jnp.nan_to_num(x).astype(jnp.float32), given), jnp.nan_to_num(dout))
    for g, w, primal in zip(jax.tree.leaves(got), jax.tree.leaves(want), jax.tree.leaves((dout, given)), strict=True):
        assert g.dtype == primal.dtype
        assert_close(g, w, dtype)
    error, half_ulp = np.abs(np.asarray(got[0], np.float32) - want[0]), float(jnp.finfo(dtype).eps) / 2
    assert (error <= half_ulp * np.abs(want[0]) + 2e-4 * np.sqrt(np.mean(np.square(want[0])))).all()
    outside = np.isnan(np.asarray(cases[0].lhs, np.float32)).any(axis=1)
    for rows in (got[0], *got[1]):
        assert not np.asarray(rows, np.float32)[outside].any()
