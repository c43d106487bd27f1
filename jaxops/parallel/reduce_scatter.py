"""`matmul_reduce_scatter`: the rows of w that a device has times its columns of h, summed over the devices, each of which gets its own rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.checks import check_float, check_size
from jaxops._lib.differentiable import differentiable
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


def matmul_reduce_scatter(
    h: jax.Array,
    w: jax.Array,
    axis_name: str,
    *,
    bias: jax.Array | None = None,
    rows: jax.Array | int | None = None,
    compute_dtype=None,
    precision: lax.PrecisionLike = None,
    backend: str = "auto",
) -> jax.Array:
    """Multiplies this device's columns of h by its rows of w, sums over all devices of a mesh axis, and keeps this
    device's rows of the sum: the second product of sequence parallelism.

    Call it inside `jax.shard_map`, over a mesh that has the axis and may have others. Differentiable (reverse mode,
    any order) in h, w and bias. The gradient of h is an `all_gather_matmul`, and the weight gradient multiplies what
    that has gathered.

    >>> import jax, jax.numpy as jnp, jaxops
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> product = lambda h, w: jaxops.matmul_reduce_scatter(h, w, "tensor")
    >>> product = jax.shard_map(product, mesh=mesh, in_specs=(P(None, "tensor"), P("tensor")), out_specs=P("tensor"))
    >>> jax.jit(product)(jnp.ones((16, 8)), jnp.ones((8, 4)))[0]
    Array([8., 8., 8., 8.], dtype=float32)

    Args:
      h: [M, n] a device's columns, bfloat16, float16 or float32; M is a multiple of the number of devices.
      w: [n, K] a device's rows. dtype of h unless compute_dtype is given.
      axis_name: the mesh axis. Device d gets rows d * M / devices to (d + 1) * M / devices - 1.
      bias: [K], added once, in float32, after the sum.
      rows: int32 scalar on the device: of the M rows, only those before it count. What the others hold is not read,
        and the result is zero there.
      compute_dtype: dtype to which h and w are cast inside, of each device's part of the sum, and of the result. A
        float32 w keeps a float32 gradient, which is never rounded.
      precision: of float32 products, as in `jaxops.grouped_matmul`.
      backend: "auto" or "xla": the product, then `jax.lax.psum_scatter`.

    Returns:
      [M / devices, K] in compute_dtype.

    Raises:
      ValueError: shapes that do not fit, M that is no multiple of the devices, an axis that is not there, an unknown
        backend.
      TypeError: dtypes that differ without compute_dtype, or are not multiplied; rows that are no integer.

    Residuals: "matmul_reduce_scatter.h" where h was cast, "matmul_reduce_scatter.out" (docs/residual_names.md).

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
    """
    check_float("h", h, "[M, n]")
    check_float("w", w, "[n, K]")
    check_size("w.shape[0]", w.shape[0], "h.shape[1]", h.shape[1])
    check_bias(bias, w.shape[1])
    spec = make_spec("h", h, (w,), axis_name, compute_dtype, precision, backend)
    devices = devices_of(axis_name)
    if h.shape[0] % devices:
        raise ValueError(
            f"h has {h.shape[0]} rows, which is no multiple of the {devices} devices of axis {axis_name!r}: pad them, and pass rows={h.shape[0]}."
        )
    h, w, bias, rows = vary_over(axis_name, h, w, bias, check_rows(rows))
    return _multiply(spec, named_cast(h, spec.dtype, "matmul_reduce_scatter.h"), w, bias, rows)


def _forward(spec: Spec, h: jax.Array, w: jax.Array, bias: jax.Array | None, rows: jax.Array | None) -> jax.Array:
    y = scatter_sum(spec, dot(spec, only(rows, h), w, (1, 0)))
    if bias is not None:
        y = only_own(spec, rows, y.astype(jnp.float32) + bias.astype(jnp.float32)[None])
    return y.astype(spec.dtype)


def _fwd(spec: Spec, h: jax.Array, w: jax.Array, bias: jax.Array | None, rows: jax.Array | None):
    found: Any = _multiply(spec, h, w, bias, rows)
    return checkpoint_name(found, "matmul_reduce_scatter.out"), (h, w, bias, rows)


def _bwd(spec: Spec, kept, dy: jax.Array):
    h, w, bias, rows = kept
    dy = only_own(spec, rows, dy)
    gathered = gather(spec, dy)
    dh = dot(spec, gathered, w, (1, 1)).astype(spec.dtype)
    dw = dot(spec, only(rows, h), gathered, (0, 0)).astype(spec.w_dtypes[0])
    return dh, dw, bias_gradient(bias, dy), None


_multiply = differentiable(_forward, _fwd, _bwd, static=1)
