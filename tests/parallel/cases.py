"""Both products over host devices, as functions of whole arrays, beside the float32 product."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxops
from tests.arrays import put

AXIS = "tensor"
# Of each product: how x (or h), w, the bias and the result lie on the axis.
GATHER = (P(AXIS), P(None, AXIS), P(AXIS), P(None, AXIS))
SCATTER = (P(None, AXIS), P(AXIS), P(), P(AXIS))
PRODUCTS = {
    "all_gather_matmul": (jaxops.all_gather_matmul, GATHER),
    "matmul_reduce_scatter": (jaxops.matmul_reduce_scatter, SCATTER),
}


DEVICES = jax.device_count()
# For the tests of the kernels, of a device: rows, contracted size, columns. Rows below and above a tile and no multiple
# of 8; sizes that are no multiple of a tile, and columns that are no multiple of 64; more tiles than programs.
SIZES = [(1, 72, 64), (129, 200, 328), (200, 256, 320), (625, 1000, 568), (2048, 264, 1920), (7, 2888, 64)]


def whole(name: str, m: int, k: int, n: int) -> tuple[int, int, int]:
    """Of all devices."""
    return (DEVICES * m, k, DEVICES * n) if name == "all_gather_matmul" else (DEVICES * m, DEVICES * k, n)


def mesh_of(*devices: int, names: tuple[str, ...] = (AXIS,), order: int = 1) -> Mesh:
    """order: -1 for devices whose numbers descend."""
    count = int(np.prod(devices))
    return Mesh(
        np.array(jax.devices()[:count][::order]).reshape(devices), names, axis_types=(AxisType.Auto,) * len(names)
    )


@functools.cache
def over(mesh: Mesh, name: str, *, bias: bool = False, rows: bool = False, check_vma: bool = True, **how) -> Callable:
    """The product of whole (x, w[, bias][, rows])."""
    op, (of_x, of_w, of_bias, of_result) = PRODUCTS[name]

    def call(x, w, *more):
        given = dict(zip([*["bias"] * bias, *["rows"] * rows], more, strict=True))
        return op(x, w, AXIS, **given, **how)

    specs = (of_x, of_w, *[of_bias] * bias, *[P()] * rows)
    return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=of_result, check_vma=check_vma)


def make(M: int, K: int, N: int, dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """x [M, K], w [K, N], bias [N] and the result's cotangent [M, N]."""
    rng = np.random.default_rng(seed)
    scale = max(1, K) ** -0.5
    return tuple(
        put(s * rng.normal(size=shape), dtype) for s, shape in ((1, (M, K)), (scale, (K, N)), (1, (N,)), (1, (M, N)))
    )


@functools.partial(jax.jit, static_argnums=0)
def results(f: Callable, operands: tuple, others: tuple, dy: jax.Array) -> tuple:
    """(y, gradients of the operands)"""
    y, vjp = jax.vjp(lambda *operands: f(*operands, *others), *operands)
    return y, *vjp(dy)


def wanted(x, w, bias, dy, rows: int | None = None) -> tuple:
    """Of whole arrays, in float64."""
    x, w, bias, dy = (np.asarray(a, np.float64) for a in (x, w, bias, dy))
    there = np.ones(len(x), bool) if rows is None else np.arange(len(x)) < rows
    x, dy = (np.where(there[:, None], a, 0) for a in (x, dy))
    return np.where(there[:, None], x @ w + bias, 0), dy @ w.T, x.T @ dy, dy.sum(axis=0)
