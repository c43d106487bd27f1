"""`all_gather_matmul` and `matmul_reduce_scatter`: products across a mesh axis, each the gradient of the other."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxops._lib.arrays.checks import check_choice, check_float, check_size, compute_dtype_of
from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import axis_index, barrier, vary_together
from jaxops._lib.arrays.precision import named_cast, resolve_precision
from jaxops.parallel.plan import BACKENDS
from jaxops.parallel.products import Spec, dot, gather_products, scatter_products

Weights = tuple[jax.Array, ...]
Biases = tuple[jax.Array | None, ...]
Rows = jax.Array | None
SAVES = "own", "gathered"


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array | Weights,
    axis_name: str,
    *,
    bias: jax.Array | Biases | None = None,
    rows: jax.Array | int | None = None,
    compute_dtype=None,
    precision: lax.PrecisionLike = None,
    save: Literal["own", "gathered"] = "own",
    backend: str = "auto",
) -> Any:
    """All-gathers the rows of x over a mesh axis and multiplies them by this device's columns of w.

    The first product of sequence parallelism. Call it inside `jax.shard_map`, over a mesh that has the axis and may
    have others. Differentiable (reverse mode, any order) in x, w and bias. The gradient of x is a
    `matmul_reduce_scatter`. The residual is the device's own rows of x: the backward gathers again.

    >>> import jax, jax.numpy as jnp, jaxops
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> product = lambda x, w: jaxops.all_gather_matmul(x, w, "tensor")
    >>> specs = {"in_specs": (P("tensor"), P(None, "tensor")), "out_specs": P(None, "tensor")}
    >>> jax.jit(jax.shard_map(product, mesh=mesh, **specs))(jnp.ones((8, 4)), jnp.ones((4, 16))).shape
    (8, 16)

    Args:
      x: [m, K] this device's rows, bfloat16, float16 or float32.
      w: [K, n] this device's columns, or a tuple of such arrays: x is gathered once and the result is a tuple. dtype of
        x unless compute_dtype is given.
      axis_name: the mesh axis. Device d has rows d * m to (d + 1) * m - 1 of all.
      bias: [n], added in float32, to the kernel's product after it is rounded; for a tuple w a tuple, with None where
        there is no bias.
      rows: int32 scalar on the device: how many of all devices' rows are valid, from the first one. The values of the
        others are not read, and the results are zero there. Pad to a `jaxops.bucket_length`: new values never
        recompile.
      compute_dtype: dtype to which x and w are cast inside, and of the result. The gradient of a float32 w is float32
        and never rounded to compute_dtype.
      precision: of float32 products, as in `jaxops.grouped_matmul`.
      save: what the backward reads of x. "own": this device's rows. "gathered": all rows, devices times the memory,
        which spares the backward's gather.
      backend: "mosaic" gathers and multiplies in one kernel; "xla" is `jax.lax.all_gather`, then the product. "auto"
        takes the kernel where it can run (docs/parallel.md).

    Returns:
      [devices * m, n] in compute_dtype; a tuple for a tuple w.

    Raises:
      ValueError: shapes that do not fit, an axis that does not exist here, an unknown save or backend.
      NotImplementedError: backend="mosaic" where the kernel cannot run.
      TypeError: dtypes that differ without compute_dtype or are not floats, rows that are not an integer.

    Residuals: "all_gather_matmul.x" where x was cast, or "all_gather_matmul.rows" with save="gathered";
    "all_gather_matmul.out" (docs/residual_names.md).

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
    """
    weights: Weights = w if isinstance(w, tuple) else (w,)
    biases: Any = bias if isinstance(w, tuple) else (bias,)
    if not weights:
        raise ValueError("w is an empty tuple; pass at least one array.")
    if not isinstance(w, tuple) and isinstance(bias, tuple):
        raise TypeError("bias is a tuple and w is one array; pass one array.")
    if biases is None:
        biases = (None,) * len(weights)
    if not isinstance(biases, tuple) or len(biases) != len(weights):
        raise ValueError(f"bias must be a tuple of {len(weights)}, as w is; write None for those without.")
    check_choice("save", save, SAVES)
    options = compute_dtype, precision, backend
    spec, *operands = _prepare("all_gather_matmul.x", "[m, K]", x, weights, biases, rows, axis_name, options)
    products: Any = _gather_matmul(dataclasses.replace(spec, save=save), *operands)
    return products if isinstance(w, tuple) else products[0]


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
    """Multiplies this device's columns of h by its rows of w and reduce-scatters the products over a mesh axis.

    The second product of sequence parallelism. Call it inside `jax.shard_map`, over a mesh that has the axis and may
    have others. Differentiable (reverse mode, any order) in h, w and bias. The gradient of h is an `all_gather_matmul`;
    the gradient of w multiplies the same gathered rows.

    >>> import jax, jax.numpy as jnp, jaxops
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(),), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> product = lambda h, w: jaxops.matmul_reduce_scatter(h, w, "tensor")
    >>> specs = {"in_specs": (P(None, "tensor"), P("tensor")), "out_specs": P("tensor")}
    >>> jax.jit(jax.shard_map(product, mesh=mesh, **specs))(jnp.ones((16, 8)), jnp.ones((8, 4)))[0]
    Array([8., 8., 8., 8.], dtype=float32)

    Args:
      h: [M, n] this device's columns, bfloat16, float16 or float32; M is a multiple of the number of devices.
      w: [n, K] this device's rows. dtype of h unless compute_dtype is given.
      axis_name: the mesh axis. Device d gets rows d * M / devices to (d + 1) * M / devices - 1.
      bias: [K], added once, in float32, after the sum.
      rows: as in `all_gather_matmul`: how many of the M rows are valid.
      compute_dtype, precision: as in `all_gather_matmul`; each device's part of the sum is rounded to compute_dtype.
      backend: as in `all_gather_matmul`; "xla" is the product, then `jax.lax.psum_scatter`.

    Returns:
      [M / devices, K] in compute_dtype.

    Raises:
      ValueError, TypeError, NotImplementedError: as `all_gather_matmul`; ValueError: M that is no multiple of the
        devices.

    Residuals: "matmul_reduce_scatter.h" where h was cast, "matmul_reduce_scatter.out" (docs/residual_names.md).

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
    """
    options = compute_dtype, precision, backend
    operands = _prepare("matmul_reduce_scatter.h", "[M, n]", h, (w,), (bias,), rows, axis_name, options)
    if h.shape[0] % (devices := lax.axis_size(axis_name)):
        raise ValueError(
            f"h has {h.shape[0]} rows, which is no multiple of the {devices} devices of axis {axis_name!r}: pad them, "
            f"and pass rows={h.shape[0]}."
        )
    return _matmul_scatter(*operands)


def _prepare(
    name: str, shape: str, x: jax.Array, weights: Weights, biases: Biases, rows: Any, axis_name: str, options: tuple
) -> tuple[Spec, jax.Array, Weights, Biases, Rows]:
    """The arguments of the custom_vjp, after all checks. name: x's checkpoint name where it is cast."""
    compute_dtype, precision, backend = options
    x_name = name.split(".")[1]
    check_float(x_name, x, shape)
    for w, bias in zip(weights, biases, strict=True):
        check_float("w", w, f"[{x_name}.shape[1], columns]")
        check_size("w.shape[0]", w.shape[0], f"{x_name}.shape[1]", x.shape[1])
        if bias is not None and jnp.shape(bias) != (w.shape[1],):
            raise ValueError(f"bias has shape {jnp.shape(bias)}; it must be {(w.shape[1],)}, a number per column of w.")
    check_choice("backend", backend, ("auto", *BACKENDS))
    dtype, *_ = [compute_dtype_of(x_name, x, "w", w, compute_dtype, "the gradient of w stays") for w in weights]
    of_products, multiplied = resolve_precision(precision, dtype)
    index = axis_index(axis_name)
    # index: the operands vary over this axis too, so that JAX sums the gradient of one that is replicated over it.
    x, rows, _, *others = vary_together(x, _check_rows(rows), index, *weights, *biases)
    spec = Spec(axis_name, dtype, multiplied, of_products, tuple(jnp.dtype(w.dtype) for w in weights), backend)
    return spec, named_cast(x, dtype, name), tuple(others[: len(weights)]), tuple(others[len(weights) :]), rows


def _check_rows(rows: jax.Array | int | None) -> Rows:
    if rows is None:
        return None
    if jnp.shape(rows) != ():
        raise ValueError(f"rows has shape {jnp.shape(rows)}; it must be a scalar, the number of valid rows.")
    if isinstance(rows, bool) or not jnp.issubdtype(jnp.result_type(rows), jnp.integer):
        dtype = "a bool" if isinstance(rows, bool) else jnp.result_type(rows)
        raise TypeError(f"rows is {dtype}; it must be an integer.")
    return jnp.asarray(rows, jnp.int32)


def _mask(rows: Rows, x: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """x [m, ...], whose first row is row `first` of all, with zeros from row `rows` on."""
    if rows is None:
        return x
    return jnp.where((first + jnp.arange(x.shape[0], dtype=jnp.int32) < rows)[:, None], x, 0)


def _mask_own(spec: Spec, rows: Rows, x: jax.Array) -> jax.Array:
    """`_mask` of this device's own rows."""
    return _mask(rows, x, lax.axis_index(spec.axis_name) * x.shape[0])


def _bias_gradient(bias: jax.Array | None, dy: jax.Array) -> jax.Array | None:
    return None if bias is None else jnp.sum(dy.astype(jnp.float32), axis=0).astype(bias.dtype)


def _gather_forward(spec: Spec, x: jax.Array, weights: Weights, biases: Biases, rows: Rows) -> Weights:
    return _gathered_forward(spec, x, weights, biases, rows)[0]


def _gathered_forward(
    spec: Spec, x: jax.Array, weights: Weights, biases: Biases, rows: Rows
) -> tuple[Weights, jax.Array]:
    """The results, and all devices' rows of x."""
    products, gathered = gather_products(spec, _mask_own(spec, rows, x), weights, rows, transposed=False)

    def biased(y: jax.Array, bias: jax.Array | None) -> jax.Array:
        if bias is not None:
            y = _mask(rows, y.astype(jnp.float32) + bias.astype(jnp.float32)[None])
        return y.astype(spec.dtype)

    return tuple(map(biased, products, biases)), gathered


def _gather_fwd(spec: Spec, x: jax.Array, *others):
    if spec.save == "own":
        ys = _gather_matmul(spec, x, *others)
    else:
        ys, gathered = _gathered_forward(spec, x, *others)
        x = checkpoint_name(gathered, "all_gather_matmul.rows")
    return checkpoint_name(ys, "all_gather_matmul.out"), (x, *others)


def _gather_bwd(spec: Spec, residuals, dys: Weights):
    x, weights, biases, rows = residuals
    if spec.save == "own":
        # Delays the gather until the cotangents exist: XLA would otherwise keep the forward's gathered rows.
        x, dys = barrier((x, dys))
    dys = tuple(_mask(rows, dy) for dy in dys)
    pairs = tuple(zip(dys, weights, strict=True))
    own = _mask_own(spec, rows, x) if spec.save == "own" else None
    dx, gathered = scatter_products(spec, pairs, own, rows, transposed=True)
    gathered = x if gathered is None else gathered
    dws = tuple(dot(spec, gathered, dy, (0, 0)).astype(dtype) for dy, dtype in zip(dys, spec.w_dtypes, strict=True))
    return dx, dws, tuple(map(_bias_gradient, biases, dys)), None


def _scatter_forward(spec: Spec, h: jax.Array, weights: Weights, biases: Biases, rows: Rows) -> jax.Array:
    y, _ = scatter_products(spec, ((_mask(rows, h), weights[0]),), None, rows, transposed=False)
    (bias,) = biases
    if bias is not None:
        y = _mask_own(spec, rows, y.astype(jnp.float32) + bias.astype(jnp.float32)[None])
    return y.astype(spec.dtype)


def _scatter_fwd(spec: Spec, *operands):
    return checkpoint_name(_matmul_scatter(spec, *operands), "matmul_reduce_scatter.out"), operands


def _scatter_bwd(spec: Spec, operands, dy: jax.Array):
    h, weights, (bias,), rows = operands
    dy = _mask_own(spec, rows, dy)
    (dh,), gathered = gather_products(spec, dy, weights, rows, transposed=True)
    dw = dot(spec, _mask(rows, h), gathered, (0, 0)).astype(spec.w_dtypes[0])
    return dh.astype(spec.dtype), (dw,), (_bias_gradient(bias, dy),), None


_gather_matmul = differentiable(_gather_forward, _gather_fwd, _gather_bwd, static=1)
_matmul_scatter = differentiable(_scatter_forward, _scatter_fwd, _scatter_bwd, static=1)
