"""What a traced function does."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params


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


def narrowed(x: Any) -> str:
    """As text, with 32 bits for 64 and without weak types."""
    return re.sub(r"\b(u?int|float|[iuf])64\b", r"\g<1>32", re.sub(r"~| at 0x\w+", "", str(x)))


def is_wide(x: Any) -> bool:
    """Whether a type has 64 bits. Sums and products of Python's integers, as of loops' counters, do not count: they are
    the same in 32 bits."""
    dtype = getattr(x, "dtype", None)
    return dtype in ("int64", "uint64", "float64") and not (dtype == "int64" and x.weak_type and not x.shape)


def operations(jaxpr: Any) -> tuple[list[tuple], list[Any]]:
    """(what it computes, with all types narrowed; the 64-bit types of what it computes), for two jaxprs to be compared.

    Values are numbered. Calls of `jit` are inlined, casts of constants done, casts to the same narrowed type left out.
    """
    found, wide = [], []
    number = itertools.count()

    def of(jaxpr: Any, given: list) -> list:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        values = dict(zip(jaxpr.invars, given, strict=True)) | {
            v: ("constant", narrowed(v.aval)) for v in jaxpr.constvars
        }

        def value(v: Any) -> Any:
            if not isinstance(v, Literal):
                return values[v]
            dtype = getattr(v.aval, "dtype", None)  # of a key it is none of numpy's
            return np.asarray(v.val) if isinstance(dtype, np.dtype) else str(v.val)

        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            operands = [value(v) for v in equation.invars]
            types = [v.aval for v in equation.outvars]
            if name == "jit":
                results = of(params["jaxpr"], operands)
            elif name == "convert_element_type" and isinstance(operands[0], np.ndarray):
                results = [operands[0].astype(params["new_dtype"])]
            else:
                wide.extend(filter(is_wide, types))
                if name == "convert_element_type" and narrowed(equation.invars[0].aval) == narrowed(types[0]):
                    results = operands
                else:
                    results = [next(number) for _ in types]
                    inner = {key: list(jaxprs_in_params({key: x})) for key, x in params.items()}
                    how = [(key, narrowed(x)) for key, x in params.items() if not inner[key] and key != "weak_type"]
                    shown = [x.tolist() if isinstance(x, np.ndarray) else ("value", x) for x in operands]
                    found.append((name, repr(shown), how, [narrowed(x) for x in types]))
                    for called in itertools.chain.from_iterable(inner.values()):
                        called = getattr(called, "jaxpr", called)
                        wide.extend(v.aval for v in called.invars if is_wide(v.aval))
                        found.append(("results", repr(of(called, [next(number) for _ in called.invars]))))
            values.update(zip(equation.outvars, results, strict=True))
        return [value(v) for v in jaxpr.outvars]

    found.append(("results", repr(of(jaxpr, [next(number) for _ in getattr(jaxpr, "jaxpr", jaxpr).invars]))))
    return found, wide


def same_operations(one: Any, other: Any) -> bool:
    """Whether two traced functions compute the same."""
    return operations(one.jaxpr)[0] == operations(other.jaxpr)[0]


def same_program(one: Any, other: Any, *operands: Any) -> bool:
    """Whether two jitted functions compute the same."""
    return same_operations(one.trace(*operands), other.trace(*operands))
