"""Tensors that are computed from others and cast to FP8 in one pass over memory."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.numerics.fp8 import Quantized
from jaxops._lib.planning.device import device_of
from jaxops.ops.quantize.amax_pallas import tensor_amax_pallas
from jaxops.ops.quantize.api import cast, no_gradient
from jaxops.ops.quantize.cast_pallas import cast_pallas
from jaxops.ops.quantize.outputs import (
    Beside,
    Computation,
    Computed,
    Halves,
    Operands,
    Output,
    amax_tiles,
    cast_tiles,
    kinds_of,
    size_of,
)
from jaxops.ops.quantize.plan import PLANNER, Problem, Tiles
from jaxops.ops.quantize.xla import tensor_amax

Results = tuple[tuple[Computed, ...], tuple[jax.Array, ...]]


def quantize_computed(
    compute: Callable,
    operands: Sequence[jax.Array | Halves],
    outputs: Sequence[Output],
    *,
    group_offsets: jax.Array,
    dtype: Any,
    sums: int = 0,
    backend: str = "auto",
) -> Results:
    """Computes tensors [R, C] element by element and casts them, as `quantize` casts what compute has written.

    On a GPU each operand is read once and each result written once; with tensorwise scales a pass before that reads
    the operands and finds the largest magnitudes. Rows outside the groups are in no column layout and no tensorwise
    scale; in all other results they are unspecified.

    Args:
      compute: takes the operands in float32, all of the same rows and columns, and returns a tuple of the computed
        tensors and a tuple of `sums` tensors. Each element depends on the operands' elements of the same place, and is
        zero where these are. A vector's elements have a column axis of 1. Static: the same object in each call.
      operands: matrices [R, C], `Halves` of a matrix [R, 2 * C], which are two operands, bfloat16, float16 or float32;
        and vectors [R] float32.
      outputs: the results; their parts, one or two, are the computed tensors, in order.
      group_offsets: [G + 1] int32, the groups of rows, as in `quantize`.
      dtype: to which computed tensors are rounded before their casts: bfloat16, float16 or float32.
      sums: how many tensors of compute are added up over the columns, unrounded.
      backend: as in `quantize`.

    Returns:
      A `Computed` for each output; and for each of the sums parts [n, R] float32, which add up to it over the first
      axis.

    Raises:
      ValueError: no matrix among the operands; an unknown backend.
      NotImplementedError: a derivative; "pallas" on a GPU without FP8.
    """
    given, offsets = vary_together(tuple(operands), group_offsets)
    _, R, C = size_of(given)
    computation = Computation(compute, kinds_of(given), tuple(outputs), jnp.dtype(dtype).name, sums)
    problem = Problem(R, C, computation.dtype, "block_1x128", "row", ragged=True)
    device, backend = PLANNER.choose(problem, device_of(given, offsets), backend, None)
    if backend == "xla" or 0 in (R, C) or not computation.in_one_pass(C):
        return composed(computation, given, offsets, backend)
    tiles = cast_tiles(computation, C), amax_tiles(computation, C, 4 * device.cores)
    return _call(computation, *tiles, device.interpret, given, offsets)


def _passes(
    computation: Computation, tiles: Tiles, amax: Tiles, interpret: bool, operands: Operands, offsets: jax.Array
) -> Results:
    scales, factors = {}, {}
    if computation.measured:
        most = tensor_amax_pallas(computation, amax, operands, offsets, interpret=interpret)
        for i, n in enumerate(computation.measured):
            scales[n], factor = computation.outputs[n].form.scale_and_factor(most[i])
            factors[f"factor{n}"] = factor[None]
    arrays = cast_pallas(computation, tiles, operands, offsets, factors, interpret=interpret)
    results = []
    for n, output in enumerate(computation.outputs):
        parts = range(output.parts)
        facts: Any = {"scaling": output.scaling, "dtype": computation.dtype, "group_offsets": offsets}
        row, cols = None, ()
        if output.row:
            row = Quantized(arrays[f"values{n}"], scales.get(n, arrays.get(f"scales{n}")), **facts)
        if output.col:
            pairs = [(arrays[f"values_t{n}_{i}"], scales.get(n, arrays.get(f"scales_t{n}_{i}"))) for i in parts]
            cols = tuple(Quantized(None, None, *pair, **facts) for pair in pairs)
        plain = tuple(arrays[f"plain{n}_{i}"] for i in parts) if output.plain else ()
        results.append(Computed(row, cols, plain))
    return tuple(results), tuple(arrays[f"sums{i}"] for i in range(computation.sums))


_call = differentiable(_passes, no_gradient, no_gradient, static=4)


def composed(computation: Computation, operands: Operands, offsets: jax.Array, backend: str) -> Results:
    """The same by XLA, which writes the computed tensors, and `cast`."""
    whole = []
    for x in operands:
        if isinstance(x, Halves):
            whole += jnp.split(x.x, 2, axis=1)
        else:
            whole.append(x[:, None] if x.ndim == 1 else x)
    assert computation.compute is not None
    tensors, addends = computation.compute(*(x.astype(jnp.float32) for x in whole))
    rounded = [x.astype(computation.dtype) for x in tensors]
    results = []
    for output in computation.outputs:
        parts, rounded = rounded[: output.parts], rounded[output.parts :]
        results.append(_cast(output, parts, offsets, backend))
    return tuple(results), tuple(jnp.sum(x, axis=1)[None] for x in addends)


def _cast(output: Output, parts: list[jax.Array], offsets: jax.Array, backend: str) -> Computed:
    plain = tuple(parts) if output.plain else ()
    if output.layouts == "none":
        return Computed(plain=plain)
    source = parts[0] if len(parts) == 1 else Beside(*parts)
    amax = jnp.max(tensor_amax(source, offsets)) if output.measured else None
    to = functools.partial(cast, form=output.form, group_offsets=offsets, amax=amax, backend=backend)
    if len(parts) == 1:  # both layouts in one pass
        q, _ = to(source, layouts=output.layouts)
        row = dataclasses.replace(q, values_t=None, scales_t=None) if output.row else None
        return Computed(row, (dataclasses.replace(q, values=None, scales=None),) if output.col else (), plain)
    row = to(source, layouts="row")[0] if output.row else None
    cols = tuple(to(x, layouts="col")[0] for x in parts) if output.col else ()
    return Computed(row, cols, plain)
