"""The two products that both ops and their gradients are made of, on the backend that the plan says."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.arrays.differentiable import differentiable_as
from jaxops._lib.planning.device import current_device
from jaxops.parallel.device_numbers import if_devices_in_order
from jaxops.parallel.plan import Plan, Problem, make_plan, reach_of

Pairs = tuple[tuple[jax.Array, jax.Array], ...]


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments of an op.

    Attributes:
      dtype: of what is sent and of the results.
      multiplied: of the products' operands: not dtype if the precision asks for another one.
      w_dtypes: of the gradients of the weights.
      save: what the backward of a gather reads, "own" or "gathered" rows.
    """

    axis_name: str
    dtype: jnp.dtype
    multiplied: jnp.dtype
    precision: lax.Precision
    w_dtypes: tuple[jnp.dtype, ...]
    backend: str
    save: str = "own"


def gather_products(
    spec: Spec, x: jax.Array, weights: tuple[jax.Array, ...], rows: jax.Array | None, *, transposed: bool
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Products [devices * m, n] of all devices' rows of x [m, K] with each w [K, n], or [n, K]; and those rows.

    The kernel gathers beside the product with the widest w; the others are multiplied after it. Its results are of
    spec.dtype, XLA's float32.

    Args:
      rows: int32 scalar: x is zero from this row of all on.
    """
    columns = [w.shape[0 if transposed else 1] for w in weights]
    widest = max(range(len(weights)), key=lambda i: columns[i])
    plan = _plan(spec, x.shape[0], columns[widest], (x.shape[1],), transposed, x.shape[1])
    if plan.backend == "xla":
        gathered = gather(spec, x)
        return tuple(_times(spec, gathered, w, transposed) for w in weights), gathered
    x, weights = x.astype(spec.dtype), tuple(w.astype(spec.dtype) for w in weights)
    first, gathered = _gather_kernel(spec, plan, transposed, x, weights[widest], rows)
    products = [first if i == widest else _times(spec, gathered, w, transposed) for i, w in enumerate(weights)]
    return tuple(products), gathered


def scatter_products(
    spec: Spec, pairs: Pairs, x: jax.Array | None, rows: jax.Array | None, *, transposed: bool
) -> tuple[jax.Array, jax.Array | None]:
    """This device's rows [m, n] of the sum over devices and pairs of h [devices * m, K] and w [K, n], or [n, K].

    Args:
      x: this device's rows [m, k], which are gathered beside it; None for none.
      rows: int32 scalar: each h is zero from this row of all on.
    """
    (h, w), devices = pairs[0], lax.axis_size(spec.axis_name)
    depths = tuple(h.shape[1] for h, _ in pairs)
    sent = 0 if x is None else x.shape[1]
    plan = _plan(spec, h.shape[0] // devices, w.shape[0 if transposed else 1], depths, transposed, sent)
    if plan.backend == "xla":
        products = [_times(spec, h, w, transposed) for h, w in pairs]
        summed = scatter_sum(spec, functools.reduce(jnp.add, products))
        return summed, None if x is None else gather(spec, x)
    pairs = tuple((h.astype(spec.dtype), w.astype(spec.dtype)) for h, w in pairs)
    return _scatter_kernel(spec, plan, transposed, pairs, None if x is None else x.astype(spec.dtype), rows)


def _plan(spec: Spec, m: int, n: int, depths: tuple[int, ...], transposed: bool, sent: int) -> Plan:
    exact = spec.multiplied == spec.dtype
    problem = Problem(reach_of((spec.axis_name,)), m, n, depths, spec.dtype.name, transposed, exact, sent)
    return make_plan(problem, current_device(), backend=spec.backend)


def _launch(spec: Spec, kernel: Any, plain: Any, *operands: Any) -> Any:
    """kernel(*operands). vmap runs it in a loop, for the programs of a batch would share one counter of tiles.

    With backend="auto", plain(*operands) on meshes that kernels cannot run on.
    """
    call = kernel if spec.backend == "mosaic" else functools.partial(if_devices_in_order, kernel, plain)
    return jax.custom_batching.sequential_vmap(call)(*operands)


def _gather_in_kernel(spec: Spec, plan: Plan, transposed: bool, x: jax.Array, w: jax.Array, rows: jax.Array | None):
    from jaxops.parallel.products_mosaic import gather_matmul

    assert plan.tiles is not None  # make_plan fills it
    kernel = functools.partial(gather_matmul, axis_name=spec.axis_name, tiles=plan.tiles, transposed=transposed)
    return _launch(spec, kernel, functools.partial(_gather_plain, spec, plan, transposed), x, w, rows)


def _gather_plain(spec: Spec, plan: Plan, transposed: bool, x: jax.Array, w: jax.Array, rows: jax.Array | None):
    (y,), gathered = gather_products(dataclasses.replace(spec, backend="xla"), x, (w,), rows, transposed=transposed)
    return y.astype(spec.dtype), gathered


def _scatter_in_kernel(spec: Spec, plan: Plan, transposed: bool, pairs: Pairs, x: Any, rows: jax.Array | None):
    from jaxops.parallel.products_mosaic import matmul_scatter

    assert plan.tiles is not None  # make_plan fills it
    kernel = functools.partial(matmul_scatter, axis_name=spec.axis_name, tiles=plan.tiles, transposed=transposed)
    return _launch(spec, kernel, functools.partial(_scatter_plain, spec, plan, transposed), pairs, x, rows)


def _scatter_plain(spec: Spec, plan: Plan, transposed: bool, pairs: Pairs, x: Any, rows: jax.Array | None):
    return scatter_products(dataclasses.replace(spec, backend="xla"), pairs, x, rows, transposed=transposed)


_gather_kernel = differentiable_as(_gather_in_kernel, _gather_plain, static=3)
_scatter_kernel = differentiable_as(_scatter_in_kernel, _scatter_plain, static=3)


def gather(spec: Spec, x: jax.Array) -> jax.Array:
    """[devices * m, ...] from every device's x [m, ...]."""
    if not x.size:  # XLA's all-gather takes no size of 0
        return jnp.concatenate([x] * lax.axis_size(spec.axis_name))
    return lax.all_gather(x, spec.axis_name, tiled=True)


def scatter_sum(spec: Spec, x: jax.Array) -> jax.Array:
    """This device's [M / devices, ...] of the sum of every device's x [M, ...], each rounded to spec.dtype before."""
    x = x.astype(spec.dtype)
    if not x.size:
        return x[: x.shape[0] // lax.axis_size(spec.axis_name)]
    return lax.psum_scatter(x, spec.axis_name, tiled=True)


def dot(spec: Spec, a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """The product in float32."""
    a, b = (operand.astype(spec.multiplied) for operand in (a, b))
    axes = ((contracted[0],), (contracted[1],))
    return lax.dot_general(a, b, (axes, ((), ())), precision=spec.precision, preferred_element_type=jnp.float32)


def _times(spec: Spec, rows: jax.Array, w: jax.Array, transposed: bool) -> jax.Array:
    """rows @ w, or rows @ w.T, in float32."""
    return dot(spec, rows, w, (1, 1 if transposed else 0))
