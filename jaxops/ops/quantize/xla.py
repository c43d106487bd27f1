"""The portable backend: for each layout XLA fuses a pass for the scales and one for the values. CPU, TPU, and the
benchmarks' plain-XLA side."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._lib.numerics.fp8 import (
    AMAX_MAX,
    BLOCK,
    Quantized,
    cast_saturating,
    cast_stochastic,
    infinity_to_nan,
    kept,
    magnitudes,
    random_bits,
)
from jaxops._lib.planning.traced_once import traced_once
from jaxops._lib.ragged.offsets import group_of_rows, padded_rows, padded_starts
from jaxops.ops.quantize.outputs import Beside, Gathered, Output

_FEW = 1024  # rows; each program of the cast reads as many parts


def _rows_of_columns(offsets: jax.Array, M: int) -> jax.Array:
    """int32 [padded_rows(M, G)]: the row of x in each column of a ragged values_t, -1 for none."""
    G = offsets.shape[0] - 1
    starts, columns = padded_starts(offsets, M), padded_rows(M, G)
    column, group = jnp.arange(columns, dtype=jnp.int32), jnp.clip(group_of_rows(starts, columns), 0, G - 1)
    row = offsets[group] + column - starts[group]
    inside = (column < starts[-1]) & (row < offsets[group + 1]) & (row >= 0) & (row < M)
    return jnp.where(inside, row, -1)


def _block_shape(scaling: str, shape: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    """[G, R, C] cut into blocks: [G, R / height, height, C / 128, 128], rounded up."""
    (G, R, C), height = shape, BLOCK if scaling == "block_128x128" else 1
    return G, -(-R // height), height, -(-C // BLOCK), BLOCK


def _amax(scaling: str, x: jax.Array) -> jax.Array:
    """The largest magnitudes that make the row layout's scales, in the shape of these."""
    if scaling == "rowwise":
        return jnp.max(magnitudes(x), axis=2, initial=0.0)
    _, rows, height, columns, width = shape = _block_shape(scaling, x.shape)
    end = ((0, 0), (0, rows * height - x.shape[1]), (0, columns * width - x.shape[2]))
    amax = jnp.max(jnp.pad(magnitudes(x), end).reshape(shape), axis=(2, 4), initial=0.0)
    return amax if scaling == "block_128x128" else amax.mT


def _of_elements(scales: jax.Array, scaling: str, shape: tuple[int, ...]) -> jax.Array:
    """The row layout's scales (or factors) [G, ...], to multiply its values [G, R, C] by."""
    if scaling == "tensorwise":
        return scales[:, None, None]
    if scaling == "rowwise":
        return scales[:, :, None]
    G, rows, height, columns, width = blocks = _block_shape(scaling, shape)
    scales = scales if scaling == "block_128x128" else scales.mT
    scales = jnp.broadcast_to(scales[:, :, None, :, None], blocks).reshape(G, rows * height, columns * width)
    return scales[:, : shape[1], : shape[2]]


def _whole(source: Any) -> jax.Array:
    """[G, M, K], the tensor that is cast."""
    x = source
    if isinstance(source, Gathered):
        x = source.x[jnp.clip(source.indices, 0, source.x.shape[0] - 1)]
    elif isinstance(source, Beside):
        x = jnp.concatenate(source, axis=-1)
    return x if x.ndim == 3 else x[None]


def tensor_amax(source: Any, offsets: jax.Array | None) -> jax.Array:
    """[G, parts] float32: parts of each tensor's largest magnitude, over the rows in groups if there are offsets.

    For the kernels, too: XLA computes it in the pass that makes x, where it has one. Of few rows the parts are those of
    rows, so that it is one pass; of many a second one makes them one.
    """

    def most(x):
        if offsets is not None:
            row = jnp.arange(x.shape[1], dtype=jnp.int32)
            x = jnp.where(((offsets[0] <= row) & (row < offsets[-1]))[None, :, None], x, 0)
        axes = 2 if 0 < x.shape[1] <= _FEW else (1, 2)
        return jnp.max(magnitudes(x), axis=axes, initial=0.0).reshape(x.shape[0], -1)

    beside = source if isinstance(source, Beside) else (source,)  # without a copy of both
    return functools.reduce(jnp.maximum, (most(_whole(x)) for x in beside))


def cast_xla(
    output: Output, source: Any, offsets: jax.Array | None, amax: jax.Array | None, words: jax.Array | None, *,
    measure: bool,
) -> dict[str, jax.Array]:  # fmt: skip
    """By name, of the layouts asked: values [G, M, K], scales, values_t [G, K, M or padded], scales_t; and amax [G].

    Args:
      amax: [G], for tensorwise scales instead of the source's own.
      words: [2] int32, the key of stochastic rounding; None rounds to nearest.
      measure: also the source's own largest magnitudes.
    """
    x, form = _whole(source), output.form
    G, M, K = x.shape
    results = {}
    if form.scaling == "tensorwise" and (amax is None or measure):
        measured = jnp.max(tensor_amax(source, offsets), axis=1)
        results["amax"] = jnp.minimum(measured, AMAX_MAX)
        amax = measured if amax is None else amax
    rows = jnp.arange(G * M, dtype=jnp.int32).reshape(G, M)
    columns = jnp.arange(K, dtype=jnp.int32)[None, None, :]

    def layout(x, rows, transpose: bool) -> tuple[jax.Array, jax.Array]:
        random = None if words is None else random_bits(rows[:, :, None], columns, (words[0], words[1]))
        if transpose:
            x, random = x.mT, None if random is None else random.mT
        most: Any = amax if form.scaling == "tensorwise" else _amax(form.scaling, x)
        scales, factors = form.scale_and_factor(most)
        values = infinity_to_nan(x) * _of_elements(factors, form.scaling, x.shape)
        cast = cast_saturating(values, form.dtype) if random is None else cast_stochastic(values, form.dtype, random)
        return kept(cast), scales

    if output.row:
        results["values"], results["scales"] = layout(x, rows, transpose=False)
    if output.col:
        if offsets is not None:
            held = _rows_of_columns(offsets, M)
            empty = jnp.zeros((G, held.shape[0], K), x.dtype)
            x = jnp.where((held >= 0)[None, :, None], x[:, jnp.maximum(held, 0)], 0) if M else empty
            rows = held[None]
        results["values_t"], results["scales_t"] = layout(x, rows, transpose=True)
    if "scales" not in results and form.scaling == "tensorwise":
        results["scales"] = results["scales_t"]
    return results


@traced_once()
def dequantize_xla(q: Quantized) -> jax.Array:
    """float32 [G, M, K] of a Quantized whose arrays are all stacks, from the row layout if it has one."""
    if q.values is None:
        return dequantize_xla(Quantized(q.values_t, q.scales_t, scaling=q.scaling, dtype=q.dtype)).mT
    assert q.scales is not None
    return q.values.astype(jnp.float32) * _of_elements(q.scales, q.scaling, q.values.shape)
