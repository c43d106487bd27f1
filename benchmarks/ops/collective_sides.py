"""What runs across devices: the ops, a Megatron MLP and the other ways to compute them in JAX, as functions of one
device's arrays, and programs that call them again and again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from benchmarks.harness import on_gpu
from benchmarks.shapes import DenseShape

AXIS = "tensor"
GATHER, SCATTER, MLP = "all_gather_matmul", "matmul_reduce_scatter", "mlp"
OWN, XLA, GEMM = "jaxops", "xla", "gemm"
KEPT, AGAIN = "jaxops_gathered", "xla_own_rows"  # of the MLP


class Side(NamedTuple):
    """A way to compute something.

    Attributes:
      call: of what one device has; jax.shard_map calls it.
      operands, results: how they lie on the axis.
    """

    call: Callable
    operands: tuple[P, ...]
    results: Any


def mesh_of_all() -> Mesh:
    """All devices on one axis."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def backend() -> str:
    """Of jaxops: on a GPU its kernel, or an error."""
    return "mosaic" if on_gpu() else "xla"


def gather(x: jax.Array, w: jax.Array) -> jax.Array:
    return jaxops.all_gather_matmul(x, w, AXIS, backend=backend())


def scatter(h: jax.Array, w: jax.Array) -> jax.Array:
    return jaxops.matmul_reduce_scatter(h, w, AXIS, backend=backend())


def gather_and_keep(x: jax.Array, w: jax.Array) -> jax.Array:
    return jaxops.all_gather_matmul(x, w, AXIS, save="gathered", backend=backend())


def gather_by_xla(x: jax.Array, w: jax.Array) -> jax.Array:
    return jaxops.all_gather_matmul(x, w, AXIS, backend="xla")


def scatter_by_xla(h: jax.Array, w: jax.Array) -> jax.Array:
    return jaxops.matmul_reduce_scatter(h, w, AXIS, backend="xla")


def xla_gather(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(lax.all_gather(x, AXIS, tiled=True), w)


def xla_scatter(h: jax.Array, w: jax.Array) -> jax.Array:
    return lax.psum_scatter(jnp.dot(h, w), AXIS, tiled=True)


def mlp(first: Callable, second: Callable) -> Callable:
    """(result, gradients of x, w1 and w2) of (x, w1, w2, dy) with the result's gradient dy."""

    def call(x: jax.Array, w1: jax.Array, w2: jax.Array, dy: jax.Array) -> tuple:
        y, gradients = jax.vjp(lambda x, w1, w2: second(jax.nn.gelu(first(x, w1)), w2), x, w1, w2)
        return y, *gradients(dy)

    return call


_GATHERS = (P(AXIS), P(None, AXIS))
_SCATTERS = (P(None, AXIS), P(AXIS))
SIDES: dict[str, dict[str, Side]] = {
    GATHER: {
        OWN: Side(gather, _GATHERS, P(None, AXIS)),
        XLA: Side(xla_gather, _GATHERS, P(None, AXIS)),
        GEMM: Side(jnp.dot, (P(), P(None, AXIS)), P(None, AXIS)),
    },
    SCATTER: {
        OWN: Side(scatter, _SCATTERS, P(AXIS)),
        XLA: Side(xla_scatter, _SCATTERS, P(AXIS)),
        GEMM: Side(jnp.dot, _SCATTERS, P(AXIS)),
    },
    MLP: {
        name: Side(mlp(*products), (P(AXIS), P(None, AXIS), P(AXIS), P(AXIS)), (P(AXIS), *_GATHERS, P(AXIS)))
        for name, products in {
            OWN: (gather, scatter),
            KEPT: (gather_and_keep, scatter),
            XLA: (xla_gather, xla_scatter),
            AGAIN: (gather_by_xla, scatter_by_xla),
        }.items()
    },
}


def operands(op: str, shape: DenseShape, over: Mesh, dtype: Any) -> tuple[jax.Array, ...]:
    """x [M, K] and w [K, N], or h [M, N] and w [N, K], or the MLP's x, w1, w2, dy: random normal, the weights scaled so
    that results are of the size of x."""
    M, K, N = shape.M, shape.K, shape.N
    sizes = {GATHER: ((M, K), (K, N)), SCATTER: ((M, N), (N, K)), MLP: ((M, K), (K, N), (N, K), (M, K))}[op]
    found = []
    for i, (size, lies) in enumerate(zip(sizes, SIDES[op][OWN].operands, strict=True)):
        scale = size[0] ** -0.5 if i in (1, 2) else 1.0
        draw = lambda i=i, size=size, scale=scale: (scale * jax.random.normal(jax.random.key(i), size)).astype(dtype)
        found.append(jax.jit(draw, out_shardings=NamedSharding(over, lies))())
    return tuple(found)


def program(side: Side, over: Mesh, calls: int) -> Any:
    """A jitted tuple of the results of so many calls, each of which begins after the one before: as in a training step,
    the host starts all of them at once."""
    once = jax.jit(side.call)  # lowered once

    def called(x: jax.Array, *others: jax.Array) -> tuple:
        found = []
        for _ in range(calls):
            x, result = lax.optimization_barrier((x, once(x, *others)))
            found.append(result)
        return tuple(found)

    # all of them are results: XLA would drop the others
    return jax.jit(
        jax.shard_map(called, mesh=over, in_specs=side.operands, out_specs=(side.results,) * calls, check_vma=False)
    )
