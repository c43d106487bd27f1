"""The portable backend: a grouped product a modality, each added to its own rows and columns of the result."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._lib.manual_axes import vary_together
from jaxops.ops.grouped_matmul import grouped_matmul, grouped_wgrad
from jaxops.ops.grouped_matmul.modalities import Shapes, first_groups, parts_of, shapes_of


def fwd_xla(
    lhs, rhs, offsets, *, out: jax.ShapeDtypeStruct, transpose_rhs: bool, precision: lax.Precision
) -> jax.Array:
    """As `fwd_pallas` over all modalities."""
    how = {"transpose_rhs": transpose_rhs, "precision": precision, "out_dtype": out.dtype, "backend": "xla"}
    result, _ = vary_together(jnp.zeros(out.shape, out.dtype), lhs)
    for part in parts_of(shapes_of(rhs)):
        w, (first, end) = rhs[part.number], part.groups
        k, n = w.shape[1:][::-1] if transpose_rhs else w.shape[1:]
        product = grouped_matmul(lhs[:, :k], w, offsets[first : end + 1], **how)
        result = lax.dynamic_update_slice_in_dim(result, result[:, :n] + product, 0, 1)
    return result


def wgrad_xla(lhs, dout, offsets, *, shapes: Shapes, precision: lax.Precision, out_dtype) -> list[jax.Array]:
    """As `wgrad_pallas` over all modalities."""
    firsts = first_groups(shapes)
    return [
        grouped_wgrad(
            lhs[:, :k],
            dout[:, :n],
            offsets[first : first + G + 1],
            precision=precision,
            out_dtype=out_dtype,
            backend="xla",
        )
        for first, (G, k, n) in zip(firsts[:-1], shapes, strict=True)
    ]
