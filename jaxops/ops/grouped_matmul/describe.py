"""What tools and tests ask of grouped_matmul."""

import jax
import jax.numpy as jnp

from jaxops._lib.planning.description import Description, Function, Given, names, product_bytes
from jaxops.ops.grouped_matmul.api import grouped_matmul, grouped_wgrad
from jaxops.ops.grouped_matmul.jax_ragged_dot import ragged_dot
from jaxops.ops.grouped_matmul.jax_ragged_dot_general import ragged_dot_general
from jaxops.ops.grouped_matmul.plan import Problem
from jaxops.ops.grouped_matmul.reference import (
    grouped_matmul_reference,
    grouped_wgrad_reference,
    ragged_dot_general_reference,
)
from jaxops.ops.grouped_matmul.tuning import ProductTuning


def _ragged_dot(a: Given) -> jax.Array:
    offsets = jnp.pad(jnp.cumsum(a["group_sizes"], dtype=jnp.int32), (1, 0))
    if a["group_offset"] is not None:
        G = a["rhs"].shape[0]
        offsets = offsets[jnp.clip(a["group_offset"] + jnp.arange(G + 1), 0, offsets.shape[0] - 1)]
    return grouped_matmul_reference(a["lhs"], a["rhs"], offsets)


def _wgrad_bytes(a: Given) -> int:
    (M, K), (_, N), G = a["lhs"].shape, a["dout"].shape, a["group_offsets"].shape[0] - 1
    return 4 * G * M * (K + N)


_GENERAL = ("lhs", "rhs", "group_sizes", "ragged_dot_dimension_numbers", "group_offset")
_PROBLEM = Problem(8, 32768, 4096, 14336, "bfloat16")
DESCRIPTION = Description(
    functions=(
        Function(
            grouped_matmul,
            residuals=names("grouped_matmul", "lhs out"),
            wrt=("lhs", "rhs", "bias"),
            reference=lambda a: grouped_matmul_reference(
                a["lhs"], a["rhs"], a["group_offsets"], transpose_rhs=a["transpose_rhs"], bias=a["bias"]
            ),
            reference_bytes=product_bytes("lhs", "rhs"),
            problem=_PROBLEM,
        ),
        Function(
            grouped_wgrad,
            residuals=names("grouped_wgrad", "out"),
            wrt=("lhs", "dout", "accumulate_into"),
            reference=lambda a: grouped_wgrad_reference(
                a["lhs"], a["dout"], a["group_offsets"], accumulate_into=a["accumulate_into"]
            ),
            reference_bytes=_wgrad_bytes,
            problem=_PROBLEM,
        ),
        Function(
            ragged_dot,
            wrt=("lhs", "rhs"),
            reference=_ragged_dot,
            reference_bytes=product_bytes("lhs", "rhs"),
            problem=_PROBLEM,
        ),
        Function(
            ragged_dot_general,
            wrt=("lhs", "rhs"),
            reference=lambda a: ragged_dot_general_reference(*(a[name] for name in _GENERAL)),
            reference_bytes=lambda a: 8 * a["lhs"].size * a["group_sizes"].shape[-1],
            problem=_PROBLEM,
        ),
    ),
    tuning=ProductTuning(),
)
