"""What both products share: checks, static arguments, the collectives, and products of what a device has."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.checks import check_choice, compute_dtype_of
from jaxops._lib.manual_axes import vary_together
from jaxops._lib.precision import resolve_precision


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments.

    Attributes:
      axis_name: the mesh axis that the rows are spread over.
      dtype: in which rows are sent and results returned.
      multiplied: dtype to which operands are cast before a product; another than dtype where a precision says so.
      precision: of float32 products.
      w_dtypes: of the weights' gradients.
    """

    axis_name: str
    dtype: jnp.dtype
    multiplied: jnp.dtype
    precision: lax.Precision
    w_dtypes: tuple[jnp.dtype, ...]


def make_spec(
    x_name: str, x: jax.Array, weights: tuple[jax.Array, ...], axis_name: str, compute_dtype, precision, backend: str
) -> Spec:
    """
    Raises:
      ValueError: an unknown backend or precision.
      TypeError: dtypes that differ without compute_dtype.
    """
    check_choice("backend", backend, ("auto", "xla"))
    dtypes = {compute_dtype_of(x_name, x, "w", w, compute_dtype, "the gradient of w stays") for w in weights}
    dtype = dtypes.pop()
    found, multiplied = resolve_precision(precision, dtype)
    return Spec(axis_name, dtype, multiplied, found, tuple(jnp.dtype(w.dtype) for w in weights))


def devices_of(axis_name: str) -> int:
    """
    Raises:
      TypeError: several names, or none.
      ValueError: no axis of that name here.
    """
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name is a {type(axis_name).__name__}; it must be the name of one mesh axis.")
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis here: call inside jax.shard_map over a mesh that has it."
        ) from None


def check_rows(rows: jax.Array | int | None) -> jax.Array | None:
    """
    Raises:
      ValueError, TypeError: rows that are no integer scalar.
    """
    if rows is None:
        return None
    if jnp.shape(rows) != ():
        raise ValueError(
            f"rows has shape {jnp.shape(rows)}; it must be a scalar: of all devices' rows, how many from the first one on count."
        )
    if isinstance(rows, bool) or not jnp.issubdtype(jnp.result_type(rows), jnp.integer):
        raise TypeError(
            f"rows is {'a bool' if isinstance(rows, bool) else jnp.result_type(rows)}; it must be an integer."
        )
    return jnp.asarray(rows, jnp.int32)


def check_bias(bias: jax.Array | None, columns: int) -> None:
    """
    Raises:
      ValueError: another shape.
    """
    if bias is not None and jnp.shape(bias) != (columns,):
        raise ValueError(
            f"bias has shape {jnp.shape(bias)}; it must be {(columns,)}, a number for each column of the result."
        )


def only(rows: jax.Array | None, x: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """x [m, ...], whose first row is number `first` of all, with zeros from row number `rows` on."""
    if rows is None:
        return x
    return jnp.where((first + jnp.arange(x.shape[0], dtype=jnp.int32) < rows)[:, None], x, 0)


def only_own(spec: Spec, rows: jax.Array | None, x: jax.Array) -> jax.Array:
    """`only` of the rows [m, ...] that this device has of all devices' rows."""
    return only(rows, x, lax.axis_index(spec.axis_name) * x.shape[0])


def vary_over(axis_name: str, *arrays: jax.Array | None) -> tuple:
    """`vary_together`, over this axis too: the gradient of an operand that is replicated over it is then summed over it."""
    return vary_together(*arrays, lax.axis_index(axis_name))[:-1]


def gather(spec: Spec, x: jax.Array) -> jax.Array:
    """[devices * m, ...] of every device's x [m, ...]."""
    if not x.size:  # XLA gathers nothing of size 0
        return jnp.concatenate([x] * lax.axis_size(spec.axis_name))
    return lax.all_gather(x, spec.axis_name, tiled=True)


def scatter_sum(spec: Spec, x: jax.Array) -> jax.Array:
    """This device's [M / devices, ...] of the sum of every device's x [M, ...], each rounded to the spec's dtype before."""
    x = x.astype(spec.dtype)
    if not x.size:
        return x[: x.shape[0] // lax.axis_size(spec.axis_name)]
    return lax.psum_scatter(x, spec.axis_name, tiled=True)


def dot(spec: Spec, a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """In float32."""
    a, b = (operand.astype(spec.multiplied) for operand in (a, b))
    axes = ((contracted[0],), (contracted[1],))
    return lax.dot_general(a, b, (axes, ((), ())), precision=spec.precision, preferred_element_type=jnp.float32)


def bias_gradient(bias: jax.Array | None, dy: jax.Array) -> jax.Array | None:
    return None if bias is None else jnp.sum(dy.astype(jnp.float32), axis=0).astype(bias.dtype)
