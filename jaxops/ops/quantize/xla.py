"""The portable backend: each layout by XLA's own fusions, one pass for its scales and one for its values. CPU, TPU, and the benchmarks' plain-XLA side."""

import jax
import jax.numpy as jnp

from jaxops._lib.fp8 import (
    BLOCK,
    MOST,
    Quantized,
    cast_saturating,
    cast_stochastic,
    infinity_to_nan,
    magnitudes,
    random_bits,
    scale_and_factor,
)
from jaxops._lib.ragged import padded_rows, padded_starts
from jaxops.ops.quantize.plan import Arrays, Spec


def _inside(offsets: jax.Array, M: int) -> jax.Array:
    """bool [M]: rows that are in a group."""
    row = jnp.arange(M, dtype=jnp.int32)
    return (offsets[0] <= row) & (row < offsets[-1])


def rows_of_columns(offsets: jax.Array, M: int) -> jax.Array:
    """int32 [padded_rows(M, G)]: which row of x each column of a ragged values_t holds, -1 where it holds none."""
    G = offsets.shape[0] - 1
    starts = padded_starts(offsets, M)
    column = jnp.arange(padded_rows(M, G), dtype=jnp.int32)
    group = jnp.clip(jnp.searchsorted(starts, column, side="right").astype(jnp.int32) - 1, 0, G - 1)
    row = offsets[group] + column - starts[group]
    there = (column < starts[-1]) & (row < offsets[group + 1]) & (row >= 0) & (row < M)
    return jnp.where(there, row, -1)


def _blocks(x: jax.Array, height: int) -> jax.Array:
    """[G, R, C] as [G, R / height, height, C / 128, 128], zeros where x ends."""
    G, R, C = x.shape
    x = jnp.pad(x, ((0, 0), (0, -R % height), (0, -C % BLOCK)))
    return x.reshape(G, x.shape[1] // height, height, x.shape[2] // BLOCK, BLOCK)


def _quantize_rows(
    spec: Spec, x: jax.Array, amax: jax.Array | None, random: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """values [G, R, C] and scales of the row layout of x[G, R, C]; amax [G] with tensorwise scaling."""
    G, R, C = x.shape
    if spec.scaling == "tensorwise":
        assert amax is not None  # tensorwise has one
        scale, factor = scale_and_factor(amax, spec.fp8, spec.pow2)
        factors = factor[:, None, None]
    elif spec.scaling == "rowwise":
        scale, factor = scale_and_factor(jnp.max(magnitudes(x), axis=2, initial=0.0), spec.fp8, spec.pow2)
        factors = factor[:, :, None]
    else:
        height = BLOCK if spec.scaling == "block_128x128" else 1
        blocks = _blocks(magnitudes(x), height)
        scale, factor = scale_and_factor(
            jnp.max(blocks, axis=(2, 4), initial=0.0), spec.fp8, spec.pow2
        )  # [G, R / height, C / 128]
        factors = jnp.broadcast_to(factor[:, :, None, :, None], blocks.shape).reshape(
            G, blocks.shape[1] * height, blocks.shape[3] * BLOCK
        )[:, :R, :C]
        scale = scale if height > 1 else scale.mT
    values = infinity_to_nan(x) * factors
    return (cast_saturating(values, spec.fp8) if random is None else cast_stochastic(values, spec.fp8, random)), scale


def cast_xla(spec: Spec, arrays: Arrays) -> dict[str, jax.Array]:
    """By name, as far as they are wanted: values [G, M, K], scales, values_t [G, K, M or padded], scales_t, amax [G]."""
    x, offsets, amax, words = arrays
    G, M, K = x.shape
    found = {}
    if spec.scaling == "tensorwise" and (amax is None or spec.measure):
        of_rows = x if offsets is None else jnp.where(_inside(offsets, M)[None, :, None], x, 0)
        now = jnp.max(magnitudes(of_rows), axis=(1, 2), initial=0.0)
        found["amax"] = jnp.minimum(now, MOST)
        amax = now if amax is None else amax
    rows = jnp.arange(G * M, dtype=jnp.int32).reshape(G, M)
    columns = jnp.arange(K, dtype=jnp.int32)[None, None, :]

    def layout(x, rows, swap: bool):
        random = None if words is None else random_bits(rows[:, :, None], columns, (words[0], words[1]))
        if swap:
            x, random = x.mT, None if random is None else random.mT
        return _quantize_rows(spec, x, amax, random)

    if spec.row:
        found["values"], found["scales"] = layout(x, rows, swap=False)
    if spec.col and offsets is None:
        found["values_t"], found["scales_t"] = layout(x, rows, swap=True)
    elif spec.col:
        assert offsets is not None
        held = rows_of_columns(offsets, M)
        padded = (
            jnp.where((held >= 0)[None, :, None], x[:, jnp.maximum(held, 0)], 0)
            if M
            else jnp.zeros((G, held.shape[0], K), x.dtype)
        )
        found["values_t"], found["scales_t"] = layout(padded, held[None], swap=True)
    if "scales" not in found and spec.scaling == "tensorwise":
        found["scales"] = found["scales_t"]
    return found


def dequantize_xla(q: Quantized, shape: tuple[int, int, int]) -> jax.Array:
    """float32 [G, M, K] of a Quantized whose arrays are all stacks; from the row layout, where there is one."""
    G, M, K = shape
    if q.values is None:
        assert q.values_t is not None  # one layout is there
        assert q.scales_t is not None
        return dequantize_xla(Quantized(q.values_t, q.scales_t, scaling=q.scaling, dtype=q.dtype), (G, K, M)).mT
    assert q.scales is not None
    scales = q.scales
    if q.scaling == "tensorwise":
        scales = scales[:, None, None]
    elif q.scaling == "rowwise":
        scales = scales[:, :, None]
    else:
        height = BLOCK if q.scaling == "block_128x128" else 1
        scales = scales if height > 1 else scales.mT
        scales = jnp.repeat(jnp.repeat(scales, height, axis=1), BLOCK, axis=2)[:, :M, :K]
    return q.values.astype(jnp.float32) * scales
