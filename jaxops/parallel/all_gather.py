"""`all_gather_matmul`: all devices' rows times the columns of w that a device has."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.checks import check_float, check_size
from jaxops._lib.differentiable import differentiable
from jaxops._lib.manual_axes import barrier
from jaxops._lib.precision import named_cast
from jaxops.parallel.operands import (
    Spec,
    bias_gradient,
    check_bias,
    check_rows,
    devices_of,
    dot,
    gather,
    make_spec,
    only,
    only_own,
    scatter_sum,
    vary_over,
)

Weights = tuple[jax.Array, ...]
Biases = tuple[jax.Array | None, ...]


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array | Weights,
    axis_name: str,
    *,
    bias: jax.Array | Biases | None = None,
    rows: jax.Array | int | None = None,
    compute_dtype=None,
    precision: lax.PrecisionLike = None,
    backend: str = "auto",
) -> Any:
    """Gathers the rows of all devices of a mesh axis and multiplies them by this device's columns of w: the first
    product of sequence parallelism.

    Call it inside `jax.shard_map`, over a mesh that has the axis and may have others. Differentiable (reverse mode,
    any order) in x, w and bias. The gradient of x is a `matmul_reduce_scatter`; between forward and backward a device
    keeps its own rows of x alone, and the backward gathers again.

    >>> import jax, jax.numpy as jnp, jaxops
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> product = lambda x, w: jaxops.all_gather_matmul(x, w, "tensor")
    >>> product = jax.shard_map(product, mesh=mesh, in_specs=(P("tensor"), P(None, "tensor")), out_specs=P(None, "tensor"))
    >>> jax.jit(product)(jnp.ones((8, 4)), jnp.ones((4, 16))).shape
    (8, 16)

    Args:
      x: [m, K] a device's rows, bfloat16, float16 or float32.
      w: [K, n] a device's columns, or a tuple of such: x is gathered once, and the result is a tuple, too. dtype of x
        unless compute_dtype is given.
      axis_name: the mesh axis. Device d's rows are number d * m to (d + 1) * m - 1 of all.
      bias: [n], added in float32; of a tuple a tuple, None for those without.
      rows: int32 scalar on the device: of all devices' rows, only those before it count. What the others hold is not
        read, and the results are zero there. Pad to a `jaxops.bucket_length`, and new values compile nothing.
      compute_dtype: dtype to which x and w are cast inside, and of the result. A float32 w keeps a float32 gradient,
        which is never rounded.
      precision: of float32 products, as in `jaxops.grouped_matmul`.
      backend: "auto" or "xla": `jax.lax.all_gather`, then the product.

    Returns:
      [devices * m, n] in compute_dtype, a tuple of such for a tuple w.

    Raises:
      ValueError: shapes that do not fit, an axis that is not there, an unknown backend.
      TypeError: dtypes that differ without compute_dtype, or are not multiplied; rows that are no integer.

    Residuals: "all_gather_matmul.x" where x was cast, "all_gather_matmul.out" (docs/residual_names.md).

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
    """
    weights: Weights = w if isinstance(w, tuple) else (w,)
    biases = _of_each(bias, w)
    check_float("x", x, "[m, K]")
    for one, its_bias in zip(weights, biases, strict=True):
        check_float("w", one, "[K, n]")
        check_size("w.shape[0]", one.shape[0], "x.shape[1]", x.shape[1])
        check_bias(its_bias, one.shape[1])
    spec = make_spec("x", x, weights, axis_name, compute_dtype, precision, backend)
    devices_of(axis_name)
    x, rows, *both = vary_over(axis_name, x, check_rows(rows), *weights, *biases)
    x = named_cast(x, spec.dtype, "all_gather_matmul.x")
    found: Any = _multiply(spec, x, tuple(both[: len(weights)]), tuple(both[len(weights) :]), rows)
    return found if isinstance(w, tuple) else found[0]


def _of_each(bias: jax.Array | Biases | None, w: jax.Array | Weights) -> Biases:
    if not isinstance(w, tuple):
        if isinstance(bias, tuple):
            raise TypeError("bias is a tuple and w is one array; pass one array.")
        return (bias,)
    if not w:
        raise ValueError("w is an empty tuple; pass at least one array.")
    if bias is None:
        return (None,) * len(w)
    if not isinstance(bias, tuple) or len(bias) != len(w):
        raise ValueError(f"bias must be a tuple of {len(w)}, as w is; write None for those without.")
    return bias


def _products(
    spec: Spec, gathered: jax.Array, weights: Weights, biases: Biases, rows: jax.Array | None
) -> tuple[jax.Array, ...]:
    def one(w: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = dot(spec, gathered, w, (1, 0))
        if bias is not None:
            y = only(rows, y + bias.astype(jnp.float32)[None])
        return y.astype(spec.dtype)

    return tuple(map(one, weights, biases))


def _forward(
    spec: Spec, x: jax.Array, weights: Weights, biases: Biases, rows: jax.Array | None
) -> tuple[jax.Array, ...]:
    return _products(spec, gather(spec, only_own(spec, rows, x)), weights, biases, rows)


def _fwd(spec: Spec, x: jax.Array, weights: Weights, biases: Biases, rows: jax.Array | None):
    found: Any = _multiply(spec, x, weights, biases, rows)
    return tuple(checkpoint_name(y, "all_gather_matmul.out") for y in found), (x, weights, biases, rows)


def _bwd(spec: Spec, kept, dys: tuple[jax.Array, ...]):
    x, weights, biases, rows = kept
    # After the cotangents are there: XLA would find that the forward has gathered the same, and keep that.
    x, dys = barrier((x, dys))
    dys = tuple(only(rows, dy) for dy in dys)
    dx = scatter_sum(
        spec, functools.reduce(jnp.add, [dot(spec, dy, w, (1, 1)) for dy, w in zip(dys, weights, strict=True)])
    )
    gathered = gather(spec, only_own(spec, rows, x))
    dws = tuple(dot(spec, gathered, dy, (0, 0)).astype(dtype) for dy, dtype in zip(dys, spec.w_dtypes, strict=True))
    return dx, dws, tuple(map(bias_gradient, biases, dys)), None


_multiply = differentiable(_forward, _fwd, _bwd, static=1)
