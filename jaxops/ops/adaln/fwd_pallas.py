"""The forward: gated residual, statistics, norm and modulation in one pass over the rows (Pallas on Triton)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.numerics.activations import activate_and_slope
from jaxops._lib.numerics.fp8 import BLOCK, FP8, quantize_blocks
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.pallas.masked_pallas import store
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.adaln.plan import STATS, Arrays, Spec, Tiles
from jaxops.ops.adaln.rows_pallas import (
    MODULATION,
    Columns,
    affine,
    find_tile,
    fold_steps,
    load_shared,
    tile_count,
    widen,
)


def _operations(spec: Spec, arrays: Arrays, fp8: bool) -> int:
    """For an element of x: 2 for the gated residual; 5 for the layer norm (difference, square, times rstd, two sums), 3
    for RMS; 1 each for weight, bias and activation, 2 for the modulation; for FP8 a magnitude, a comparison, and times
    the factor."""
    gated = 2 * (arrays.gate is not None)
    if spec.norm is None:
        return gated
    affine = sum(x is not None for x in (arrays.weight, arrays.bias, spec.activation))
    return gated + {"layer": 5, "rms": 3}[spec.norm] + affine + 2 + 3 * fp8


def _fwd_kernel(ref: dict, *, spec: Spec, tiles: Tiles, save_stats: bool):
    T, D = ref["x"].shape
    tile, columns = find_tile(ref["offsets"], pl.program_id(0), T, tiles.rows), Columns(D, tiles.block)
    inside, shared = tile.inside, load_shared(ref, spec, tile, columns)
    of_rows = [name for name in ("x", "h", *(MODULATION if spec.per_row else ())) if name in ref]

    def load_rows(rows, rows_in):
        return {name: columns.load(ref[name], rows, rows_in) for name in of_rows}

    def body(rows, rows_in, loaded, carry):
        m = shared | {name: widen(chunks) for name, chunks in loaded.items()}
        x = m["x"]
        if "gate" in ref:
            # Rounded before the statistics: y is adaln of the new residual as stored. Outside rows keep their residual.
            x = [
                jnp.where(inside, a + g * b, a).astype(ref["x"].dtype).astype(jnp.float32)
                for a, g, b in zip(x, m["gate"], m["h"], strict=True)
            ]
            columns.store(ref["residual"], rows, rows_in, x)
        if spec.norm is not None:
            n, stats = columns.normalise(x, spec, {})
            for name in STATS[spec.norm] if save_stats else ():
                store(ref[name], (rows,), stats[name], rows_in)
            a = [activate_and_slope(u, spec.activation)[0] for u in affine(n, shared)]
            modulated = zip(a, m["scale"], m["shift"], strict=True)
            y = [jnp.where(inside, b * (1 + scale) + shift, 0.0) for b, scale, shift in modulated]
            if "y_scales" in ref:
                y, scales = zip(*(quantize_blocks(chunk, ref["y"].dtype) for chunk in y), strict=True)
                blocks = dataclasses.replace(columns, D=ref["y_scales"].shape[0], block=tiles.block // BLOCK)
                blocks.store(ref["y_scales"], rows, rows_in, scales, transposed=True)
            columns.store(ref["y"], rows, rows_in, y)
        return carry

    fold_steps(tile, tiles, load_rows, body, 0)


@traced_once("spec", "tiles", "save_stats", "interpret")
def forward_pallas(
    spec: Spec, tiles: Tiles, arrays: Arrays, *, save_stats: bool, interpret: bool
) -> dict[str, jax.Array]:
    """Results: residual, y [T, D], y_scales (FP8), mean and rstd [T] (save_stats), as far as asked. No size is 0."""
    struct, (T, D), f32 = functools.partial(out_struct, like=arrays.x), arrays.x.shape, jnp.dtype("float32")
    out = {"residual": struct((T, D), arrays.x.dtype)} if arrays.gate is not None else {}
    if spec.out_dtype in FP8:
        # Register arrays of whole blocks of 128; the last one may be wider than D.
        tiles = dataclasses.replace(tiles, block=max(BLOCK, tiles.block))
        out["y_scales"] = struct((pl.cdiv(D, BLOCK), T), f32)
    if spec.norm is not None:
        out["y"] = struct((T, D), jnp.dtype(spec.out_dtype))
        out |= dict.fromkeys(STATS[spec.norm] if save_stats else (), struct((T,), f32))
    return launch_named(
        functools.partial(_fwd_kernel, spec=spec, tiles=tiles, save_stats=save_stats),
        arrays._asdict(),
        out,
        grid=(tile_count(T, arrays.offsets.shape[0] - 1, tiles.rows),),
        warps=tiles.warps,
        interpret=interpret,
        name="adaln_fwd" if spec.norm is not None else "gated_residual_fwd",
        flops=T * D * _operations(spec, arrays, fp8="y_scales" in out),
    )
