"""Gated residual, statistics, normalisation and modulation in one pass over the rows, as a Pallas kernel lowered through Triton."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxops._lib.fp8 import BLOCK, FP8, quantize_blocks
from jaxops._lib.launch_pallas import launch
from jaxops._lib.manual_axes import out_struct
from jaxops._lib.traced_once import traced_once
from jaxops.ops.adaln.plan import STATS, Arrays, Spec, Tiles
from jaxops.ops.adaln.rows_pallas import Columns, activate, affine, find_tile, steps_of, tile_count, widen


def _fwd_kernel(*refs, names: tuple[str, ...], spec: Spec, tiles: Tiles, save_stats: bool):
    ref = dict(zip(names, refs, strict=True))
    T, D = ref["x"].shape
    B = ref["offsets"].shape[0] - 1
    tile = find_tile(ref["offsets"], pl.program_id(0), T, tiles.rows)
    inside = (tile.sequence >= 0) & (tile.sequence < B)
    own = jnp.broadcast_to(jnp.clip(tile.sequence, 0, B - 1), (1, 1))
    columns = Columns(D, tiles.block)
    modulation = [name for name in ("gate", "scale", "shift") if name in ref]
    of_tile = {} if spec.per_row else {name: widen(columns.load(ref[name], own)) for name in modulation}
    weight, bias = (widen(columns.load_vector(ref[name])) if name in ref else None for name in ("weight", "bias"))

    def load(rows, rows_in):
        names = ("x", *(("h",) if "h" in ref else ()), *(modulation if spec.per_row else ()))
        return {name: columns.load(ref[name], rows, rows_in) for name in names}

    def body(rows, rows_in, loaded, carry):
        m = of_tile | {name: widen(chunks) for name, chunks in loaded.items()}
        x = m["x"]
        if "gate" in ref:
            # Rounded before the statistics: y is adaln of the new residual as it is stored. An outside row keeps its residual, whatever h holds.
            x = [
                jnp.where(inside, a + g * b, a).astype(ref["x"].dtype).astype(jnp.float32)
                for a, g, b in zip(x, m["gate"], m["h"], strict=True)
            ]
            columns.store(ref["residual"], rows, rows_in, x)
        if spec.norm is not None:
            n, stats = columns.normalise(x, spec)
            for name in STATS[spec.norm] if save_stats else ():
                plgpu.store(ref[name].at[rows], stats[name], mask=rows_in)
            a = [activate(u, spec.activation)[0] for u in affine(n, weight, bias)]
            y = [
                jnp.where(inside, b * (1 + scale) + shift, 0.0)
                for b, scale, shift in zip(a, m["scale"], m["shift"], strict=True)
            ]
            if "y_scales" in ref:
                quantized = [quantize_blocks(chunk, ref["y"].dtype) for chunk in y]
                y = [values for values, _ in quantized]
                blocks = dataclasses.replace(columns, D=ref["y_scales"].shape[0], block=tiles.block // BLOCK)
                blocks.store_transposed(ref["y_scales"], rows, rows_in, [scales for _, scales in quantized])
            columns.store(ref["y"], rows, rows_in, y)
        return carry

    steps_of(tile, tiles, load, body, 0)


@traced_once("spec", "tiles", "save_stats", "interpret")
def forward_pallas(
    spec: Spec, tiles: Tiles, arrays: Arrays, *, save_stats: bool, interpret: bool
) -> dict[str, jax.Array]:
    """By name, as far as they are wanted: residual [T, D], y [T, D] in spec.out_dtype and its y_scales (FP8), mean and rstd [T]. No size is 0."""
    x, offsets = arrays.x, arrays.offsets
    T, D = x.shape
    operands = {name: value for name, value in arrays._asdict().items() if value is not None}
    outs = {"residual": ((T, D), x.dtype)} if arrays.gate is not None else {}
    if spec.out_dtype in FP8:
        # Room for whole blocks of 128 in every register array: the last one may be wider than D.
        tiles = dataclasses.replace(tiles, block=max(BLOCK, tiles.block))
        outs["y_scales"] = ((pl.cdiv(D, BLOCK), T), jnp.dtype("float32"))
    if spec.norm is not None:
        outs |= {"y": ((T, D), jnp.dtype(spec.out_dtype))} | (
            dict.fromkeys(STATS[spec.norm], ((T,), jnp.dtype("float32"))) if save_stats else {}
        )
    found = launch(
        functools.partial(_fwd_kernel, names=(*operands, *outs), spec=spec, tiles=tiles, save_stats=save_stats),
        *operands.values(),
        out=[out_struct(shape, dtype, like=x) for shape, dtype in outs.values()],
        grid=(tile_count(T, offsets.shape[0] - 1, tiles.rows),),
        warps=tiles.warps,
        interpret=interpret,
        name="adaln_fwd" if spec.norm is not None else "gated_residual_fwd",
    )
    return dict(zip(outs, found, strict=True))
