"""Random problems for grouped matmul, with NaN wherever nothing may be read, and the three ways to run them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops._lib.planning.device import current_device
from jaxops.ops.grouped_matmul import Plan, Tiles, grouped_matmul_sum
from jaxops.ops.grouped_matmul.reference import grouped_matmul_reference
from tests.arrays import put
from tests.compare import assert_close
from tests.programs import jit_once

# "interpret" runs the Pallas kernels in Pallas' interpreter, "gpu" compiles them, "triton" runs the Gluon kernels for
# Hopper, which need 16-bit dtypes and widths that are multiples of 8.
RUNS = ["xla", "interpret", pytest.param("gpu", marks=pytest.mark.gpu)]
KERNELS = RUNS[1:]
HALF_RUNS = [*RUNS, pytest.param("triton", marks=pytest.mark.gpu)]


def plan_of(run: str) -> Plan:
    """Tiles that differ by pass and are smaller than the tests' sizes; on a GPU at least 64 wide, for wgmma."""
    if run == "xla":
        return Plan("xla")
    if run == "interpret":
        return Plan(
            "pallas",
            Tiles(16, 32, 16, panel=2),
            Tiles(32, 16, 16, panel=3, tail=16),
            Tiles(16, 16, 16, panel=2, peel=True),
        )
    if run == "triton":
        ping_pong, wide, narrow = (
            Tiles(bm, bn, 64, 8, 3, 2, kernel="triton", ping_pong=each)
            for bm, bn, each in ((128, 128, True), (128, 256, False), (128, 128, False))
        )
        return Plan("triton", ping_pong, wide, dataclasses.replace(narrow, split=5))
    return Plan(
        "pallas", Tiles(64, 64, 32, panel=2, tail=32), Tiles(128, 128, 32, panel=3, tail=64), Tiles(64, 32, 64, panel=2)
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """lhs[M, K], rhs[G, K, N], bias[G, N], dout[M, N]; rows outside the groups are NaN in lhs and dout."""

    lhs: jax.Array
    rhs: jax.Array
    bias: jax.Array
    dout: jax.Array
    offsets: jax.Array

    @property
    def outside(self) -> np.ndarray:
        row, offsets = np.arange(self.lhs.shape[0]), np.asarray(self.offsets)
        return ((row < offsets[0]) | (row >= offsets[-1]))[:, None]


def make_case(sizes, K: int, N: int, *, dtype="float32", before: int = 0, after: int = 0, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    offsets = before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    M, G = int(offsets[-1]) + after, len(sizes)

    lhs, rhs, bias, dout = (rng.normal(size=shape) for shape in ((M, K), (G, K, N), (G, N), (M, N)))
    for rows in (lhs, dout):  # in numpy: JAX would compile each step for each shape
        rows[: offsets[0]] = rows[offsets[-1] :] = np.nan
    return Case(*(put(x, dtype) for x in (lhs, rhs, bias, dout)), put(offsets, jnp.int32))


@jit_once("run", "transpose_rhs", "precision")
def run_all(case_arrays, run: str, transpose_rhs: bool = False, precision: str | None = "highest"):
    """(out, dlhs, drhs, dbias); one compilation a shape, whatever the offsets."""
    lhs, rhs, bias, dout, offsets = case_arrays

    def f(lhs, rhs, bias):
        weights = jnp.swapaxes(rhs, 1, 2) if transpose_rhs else rhs
        return jaxops.grouped_matmul(
            lhs, weights, offsets, bias=bias, transpose_rhs=transpose_rhs, precision=precision, plan=plan_of(run)
        )

    out, vjp = jax.vjp(f, lhs, rhs, bias)
    return out, *vjp(dout)


@jax.jit
def reference_all(case_arrays):
    lhs, rhs, bias, dout, offsets = case_arrays
    row = jnp.arange(lhs.shape[0])
    outside = ((row < offsets[0]) | (row >= offsets[-1]))[:, None]
    wide = [x.astype(jnp.float32) for x in (lhs, rhs, bias)]
    out, vjp = jax.vjp(lambda lhs, rhs, bias: grouped_matmul_reference(lhs, rhs, offsets, bias=bias), *wide)
    return out, *vjp(jnp.where(outside, 0, dout.astype(jnp.float32)))


def check(
    case: Case, run: str, *, kind: str = "float32", precision: str | None = "highest", transpose_rhs: bool = False
) -> None:
    """Every output and gradient equals the reference's; empty groups' gradients and outside rows are exactly zero."""
    arrays = tuple(vars(case).values())
    got = run_all(arrays, run, transpose_rhs=transpose_rhs, precision=precision)
    want = reference_all(arrays)
    for name, g, w, primal in zip(("out", "dlhs", "drhs", "dbias"), got, want, (case.lhs, *arrays), strict=False):
        assert g.dtype == primal.dtype, f"{name} is {g.dtype}"
        assert_close(g, w, kind, name)
    empty = np.diff(np.asarray(case.offsets)) == 0
    for g in got[2:]:
        assert not np.asarray(g)[empty].any()
    for g in got[:2]:
        assert not np.asarray(g)[case.outside[:, 0]].any()


@functools.partial(jax.jit, static_argnames=("run", "transpose_rhs", "pairs"))
def sum_and_gradients(lhs: tuple, rhs: tuple, dout, offsets, run: str, transpose_rhs: bool, pairs: int):
    """(sum, dlhs, drhs) of `grouped_matmul_sum`; rhs is transposed first if transpose_rhs. "reference" in float32."""

    def f(lhs, rhs):
        if run == "reference":
            return sum(grouped_matmul_reference(a, b, offsets) for a, b in zip(lhs, rhs, strict=True))
        rhs = tuple(jnp.swapaxes(b, 1, 2) for b in rhs) if transpose_rhs else rhs
        plan = dataclasses.replace(plan_of(run), device=current_device())
        return grouped_matmul_sum(
            lhs, rhs, offsets, plan=plan, transpose_rhs=transpose_rhs, precision="highest" if run != "triton" else None
        )

    lhs, rhs = lhs[:pairs], rhs[:pairs]
    if run == "reference":
        row = jnp.arange(dout.shape[0])
        outside = ((row < offsets[0]) | (row >= offsets[-1]))[:, None]
        (lhs, rhs), dout = (
            jax.tree.map(lambda x: x.astype(jnp.float32), (lhs, rhs)),
            jnp.where(outside, 0, dout.astype(jnp.float32)),
        )
    out, vjp = jax.vjp(f, lhs, rhs)
    return out, *vjp(dout.astype(out.dtype))


def check_sum(run: str, sizes, K: int, N: int, *, dtype: str, transpose_rhs: bool, pairs: int = 2, **where) -> None:
    """The sum is rounded once: rounded terms would show where they cancel. No value outside the groups is in it."""
    case, other = (make_case(sizes, K, N, dtype=dtype, seed=seed, **where) for seed in (0, 1))
    given = (case.lhs, other.lhs), (case.rhs, other.rhs), case.dout, case.offsets
    got, want = (
        sum_and_gradients(*given, run, transpose_rhs and run != "reference", pairs) for run in (run, "reference")
    )
    for g, w, primal in zip(
        jax.tree.leaves(got), jax.tree.leaves(want), (case.dout, *given[0][:pairs], *given[1][:pairs]), strict=True
    ):
        assert g.dtype == primal.dtype
        assert_close(g, w, dtype)
    error, half_ulp = np.abs(np.asarray(got[0], np.float32) - want[0]), float(jnp.finfo(dtype).eps) / 2
    assert (error <= half_ulp * np.abs(want[0]) + 2e-4 * np.sqrt(np.mean(np.square(want[0])))).all()
    for rows in (got[0], *got[1]):
        assert not np.asarray(rows, np.float32)[case.outside[:, 0]].any()
    for weights in got[2]:
        assert not np.asarray(weights, np.float32)[np.diff(np.asarray(case.offsets)) == 0].any()
