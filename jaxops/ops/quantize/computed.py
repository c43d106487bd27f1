"""Tensors that are computed from others and cast to FP8 in one pass over memory."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.arrays.checks import check_choice
from jaxops._lib.arrays.differentiable import differentiable
from jaxops._lib.arrays.manual_axes import vary_together
from jaxops._lib.numerics.fp8 import Quantized, magnitudes, scale_and_factor
from jaxops._lib.planning.device import device_of
from jaxops.ops.quantize.amax_pallas import tensor_amax_pallas
from jaxops.ops.quantize.api import quantize
from jaxops.ops.quantize.cast_pallas import cast_pallas
from jaxops.ops.quantize.outputs import (
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

Results = tuple[tuple[Computed, ...], tuple[jax.Array, ...]]


def quantize_computed(
    compute: Callable,
    operands: Sequence[jax.Array | Halves],
    outputs: Sequence[Output],
    *,
    group_offsets: jax.Array,
    dtype: Any,
    sums: int = 0,
    pow2_scales: bool = False,
    backend: str = "auto",
    tiles: Tiles | None = None,
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
      outputs: the results; their parts are the computed tensors, in order.
      group_offsets: [G + 1] int32, the groups of rows, as in `quantize`.
      dtype: to which computed tensors are rounded before their casts: bfloat16, float16 or float32.
      sums: how many tensors of compute are added up over the columns, unrounded.
      pow2_scales: as in `quantize`.
      backend: as in `quantize`.
      tiles: of the pass that writes the results, instead of the heuristic ones.

    Returns:
      A `Computed` for each output; and for each of the sums parts [n, R] float32, which add up to it over the first
      axis.

    Raises:
      ValueError: no matrix among the operands; an unknown backend; tiles that do not hold what shares a scale.
      NotImplementedError: a derivative; "pallas" on a GPU without FP8.
    """
    for output in outputs:
        check_choice("Output.scaling", output.scaling, ("tensorwise", "rowwise", "block_1x128"))
    given, offsets = vary_together(tuple(operands), group_offsets)
    _, R, C = size_of(given)
    computation = Computation(compute, kinds_of(given), tuple(outputs), jnp.dtype(dtype).name, sums, pow2_scales)
    problem = Problem(R, C, computation.dtype, "block_1x128", "row", ragged=True)
    device, backend = PLANNER.choose(problem, device_of(given, offsets), backend, None)
    if backend == "xla" or 0 in (R, C) or not computation.in_one_pass(C):
        return composed(computation, given, offsets, backend)
    tiles = tiles or cast_tiles(computation, C)
    computation.check_tiles(tiles, C)
    return _call(computation, tiles, amax_tiles(computation, C, 4 * device.cores), device.interpret, given, offsets)


def _passes(
    computation: Computation, cast: Tiles, amax: Tiles, interpret: bool, operands: Operands, offsets: jax.Array
) -> Results:
    scales, factors = {}, {}
    if computation.measured:
        most = tensor_amax_pallas(computation, amax, operands, offsets, interpret=interpret)
        for i, n in enumerate(computation.measured):
            scales[n], factor = scale_and_factor(most[i], computation.outputs[n].fp8, computation.pow2)
            factors[f"factor{n}"] = factor[None]
    found = cast_pallas(computation, cast, operands, offsets, factors, interpret=interpret)
    results = []
    for n, output in enumerate(computation.outputs):
        parts = range(output.parts)
        how: Any = {"scaling": output.scaling, "dtype": computation.dtype, "group_offsets": offsets}
        row, cols = None, ()
        if output.row:
            row = Quantized(found[f"values{n}"], scales.get(n, found.get(f"scales{n}")), **how)
        if output.col:
            pairs = [(found[f"values_t{n}_{i}"], scales.get(n, found.get(f"scales_t{n}_{i}"))) for i in parts]
            cols = tuple(Quantized(None, None, *pair, **how) for pair in pairs)
        plain = tuple(found[f"plain{n}_{i}"] for i in parts) if output.plain else ()
        results.append(Computed(row, cols, plain))
    return tuple(results), tuple(found[f"sums{i}"] for i in range(computation.sums))


def _no_gradient(*_):
    raise NotImplementedError("a cast to FP8 has no gradient of its own: differentiate the op that multiplies it.")


_call = differentiable(_passes, _no_gradient, _no_gradient, static=4)


def composed(computation: Computation, operands: Operands, offsets: jax.Array, backend: str) -> Results:
    """The same by XLA, which writes the computed tensors, and `quantize`."""
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
        results.append(_cast(computation, output, parts, offsets, backend))
    return tuple(results), tuple(jnp.sum(x, axis=1)[None] for x in addends)


def _cast(
    computation: Computation, output: Output, parts: list[jax.Array], offsets: jax.Array, backend: str
) -> Computed:
    plain = tuple(parts) if output.plain else ()
    if output.layouts == "none":
        return Computed(None, (), plain)
    how: dict = {"scaling": output.scaling, "dtype": output.fp8, "pow2_scales": computation.pow2}
    cast = functools.partial(quantize, **how, group_offsets=offsets, backend=backend)
    if output.parts == 1:
        q = cast(parts[0], layouts=output.layouts)
        part = {"scaling": q.scaling, "dtype": q.dtype, "group_offsets": offsets}
        row = Quantized(q.values, q.scales, **part) if output.row else None
        return Computed(row, (Quantized(None, None, q.values_t, q.scales_t, **part),) if output.col else (), plain)
    if output.measured:
        row = jnp.arange(parts[0].shape[0], dtype=jnp.int32)
        inside = ((offsets[0] <= row) & (row < offsets[-1]))[:, None]
        found = [jnp.max(magnitudes(jnp.where(inside, x, 0)), initial=0.0) for x in parts]
        cast = functools.partial(cast, amax=functools.reduce(jnp.maximum, found))
    row = cast(jnp.concatenate(parts, axis=1), layouts="row") if output.row else None
    return Computed(row, tuple(cast(x, layouts="col") for x in parts) if output.col else (), plain)
