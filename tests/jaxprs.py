"""What a traced function does."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params


def equations(jaxpr: Any) -> Iterator[Any]:
    """A jaxpr's, each followed by those of what it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def kernel_arrays(jaxpr: Any) -> list[Any]:
    """The types of all operands and results of the Pallas kernels that a jaxpr launches."""
    launches = [equation for equation in equations(jaxpr) if equation.primitive.name == "pallas_call"]
    return [variable.aval for equation in launches for variable in (*equation.invars, *equation.outvars)]


def overflow_int32(arrays: list[Any]) -> list[Any]:
    """Arrays of more than 2^31 elements that JAX's Pallas lowering indexes in int32 (those of at most 2^32 bytes)."""
    return [x for x in arrays if x.size > 2**31 and x.size * x.dtype.itemsize <= 2**32]
