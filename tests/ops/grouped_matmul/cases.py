"""Plans with small tiles, by the ways to run them, and random problems with NaN in rows outside of the groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops.ops.grouped_matmul import Plan, Tiles
from jaxops.ops.grouped_matmul.reference import grouped_matmul_reference
from tests.arrays import put

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
        ping_pong, wide, high = (
            Tiles(bm, bn, 64, 8, 3, 2, kernel="triton", ping_pong=bm == bn)
            for bm, bn in ((128, 128), (128, 256), (256, 128))
        )
        return Plan("triton", ping_pong, wide, dataclasses.replace(high, split=5))
    return Plan(
        "pallas", Tiles(64, 64, 32, panel=2, tail=32), Tiles(128, 128, 32, panel=3, tail=64), Tiles(64, 32, 64, panel=2)
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """lhs[M, K], rhs[G, K, N], dout[M, N]; rows outside the groups are NaN in lhs and dout."""

    lhs: jax.Array
    rhs: jax.Array
    dout: jax.Array
    offsets: jax.Array

    def rounded(self, dtype) -> list[np.ndarray]:
        """lhs and dout, rounded, with zeros outside."""
        return [jnp.nan_to_num(x).astype(dtype).astype(jnp.float32) for x in (self.lhs, self.dout)]


def make_case(sizes, K: int, N: int, *, dtype="float32", before: int = 0, after: int = 0, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    offsets = before + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    M = int(offsets[-1]) + after
    lhs, rhs, dout = (rng.normal(size=shape) for shape in ((M, K), (len(sizes), K, N), (M, N)))
    for rows in (lhs, dout):  # in numpy: JAX would compile each step for each shape
        rows[: offsets[0]] = rows[offsets[-1] :] = np.nan
    return Case(*(put(x, dtype) for x in (lhs, rhs, dout)), put(offsets, jnp.int32))


@jax.jit
def reference_all(case: tuple) -> tuple:
    """(out, dlhs, drhs) of a case's arrays."""
    lhs, rhs, dout, offsets = case
    wide = jnp.nan_to_num(lhs).astype(jnp.float32), rhs.astype(jnp.float32)
    out, vjp = jax.vjp(lambda lhs, rhs: grouped_matmul_reference(lhs, rhs, offsets), *wide)
    return out, *vjp(jnp.nan_to_num(dout).astype(jnp.float32))
