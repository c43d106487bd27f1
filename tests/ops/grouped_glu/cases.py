"""Random problems for the gated linear unit, with NaN wherever nothing may be read, and the three ways to run them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops.ops import grouped_matmul
from jaxops.ops.grouped_glu import Plan, Tiles
from jaxops.ops.grouped_glu.reference import grouped_glu_reference
from tests.arrays import put
from tests.compare import assert_close
from tests.ops.grouped_matmul.cases import plan_of as product_plan_of
from tests.programs import jit_once

# "interpret" runs the kernels in Pallas' interpreter on the CPU, "gpu" compiles the same kernels.
RUNS = ["xla", "interpret", pytest.param("gpu", marks=pytest.mark.gpu)]
KERNELS = RUNS[1:]
# The forward's kernel for few rows, and with sums that are split over programs.
FUSED, SPLIT = ([run, pytest.param(f"{run}-gpu", marks=pytest.mark.gpu)] for run in ("fused", "fused-split"))


def plan_of(run: str) -> Plan:
    """Blocks smaller than the tests' sizes. "interpret" runs the activation kernels only, with products by XLA;
    "fused" the forward's kernel for few rows beside them."""
    if run in ("xla", "own"):  # "own": tiles of the plan's choice
        return Plan("xla" if run == "xla" else "pallas")
    if run.startswith("fused"):
        tiles = grouped_matmul.Tiles(32, 16, 16, panel=2, tail=16, split=2 if "split" in run else 1)
        return dataclasses.replace(plan_of("gpu" if run.endswith("gpu") else "interpret"), fused=tiles)
    return Plan("pallas", Tiles(8, 32), Tiles(4, 16), product_plan_of("xla" if run == "interpret" else run))


@dataclasses.dataclass(frozen=True)
class Case:
    """x[M, K], w_gate[G, K, F], w_up[G, K, F], dh[M, F]; rows outside the groups are NaN in x and dh."""

    x: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    dh: jax.Array
    offsets: jax.Array

    @property
    def outside(self) -> np.ndarray:
        row, offsets = np.arange(self.x.shape[0]), np.asarray(self.offsets)
        return ((row < offsets[0]) | (row >= offsets[-1]))[:, None]

    @property
    def arrays(self) -> tuple:
        return tuple(vars(self).values())


def make_case(sizes, K: int, F: int, *, dtype="float32", before: int = 0, after: int = 0, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    offsets = before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    M, G = int(offsets[-1]) + after, len(sizes)
    x, w_gate, w_up, dh = (rng.normal(size=shape) for shape in ((M, K), (G, K, F), (G, K, F), (M, F)))
    for rows in (x, dh):  # in numpy: JAX would compile each step for each shape
        rows[: offsets[0]] = rows[offsets[-1] :] = np.nan
    scale = max(1, K) ** -0.5  # a gate of about one, where activations bend
    return Case(*(put(x, dtype) for x in (x, scale * w_gate, w_up, dh)), put(offsets, jnp.int32))


def join(w_gate, w_up):
    return jnp.concatenate([w_gate, w_up], axis=2)


@jit_once("run", "joined", "options")
def run_all(arrays, run: str, joined: bool = False, options: tuple = ()):
    """(h, dx, dw_gate, dw_up); one compilation a shape, whatever the offsets."""
    x, w_gate, w_up, dh, offsets = arrays

    def f(x, w_gate, w_up):
        weights = (join(w_gate, w_up), None) if joined else (w_gate, w_up)
        return jaxops.grouped_glu(x, *weights, offsets, precision="highest", plan=plan_of(run), **dict(options))

    h, vjp = jax.vjp(f, x, w_gate, w_up)
    return h, *vjp(dh)


@functools.partial(jax.jit, static_argnames="activation")
def reference_all(arrays, activation: str = "silu"):
    x, w_gate, w_up, dh, offsets = arrays
    row = jnp.arange(x.shape[0])
    outside = ((row < offsets[0]) | (row >= offsets[-1]))[:, None]
    wide = [x.astype(jnp.float32) for x in (x, w_gate, w_up)]
    h, vjp = jax.vjp(lambda *given: grouped_glu_reference(*given, offsets, activation=activation), *wide)
    return h, *vjp(jnp.where(outside, 0, dh.astype(jnp.float32)))


def check(case: Case, run: str, *, kind: str = "float32", joined: bool = False, **options) -> None:
    """Output and gradients equal the reference's; gradients of empty groups and rows outside are exactly zero."""
    got = run_all(case.arrays, run, joined, tuple(options.items()))
    want = reference_all(case.arrays, options.get("activation", "silu"))
    for name, g, w, primal in zip(("h", "dx", "dw_gate", "dw_up"), got, want, (case.x, *case.arrays), strict=False):
        assert g.dtype == primal.dtype, f"{name} is {g.dtype}"
        # Two products, a product of both and another one: each adds its roundings.
        assert_close(g, w, kind, name, scale=2)
    empty = np.diff(np.asarray(case.offsets)) == 0
    for g in got[2:]:
        assert not np.asarray(g)[empty].any()
    for g in got[:2]:
        assert not np.asarray(g)[case.outside[:, 0]].any()
