"""The passes over rows (Pallas on Triton). The forward: gated residual, statistics, norm and modulation. The backward:
the rows' gradients and sums over each tile, and a kernel that adds up the sums of sequences of several tiles in order
of rows: deterministic, without atomics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxops._lib.arrays.manual_axes import out_struct
from jaxops._lib.arrays.powers import power_of_2
from jaxops._lib.numerics.activations import activate_and_slope
from jaxops._lib.numerics.fp8 import BLOCK, FP8, quantize_blocks
from jaxops._lib.pallas.launch_pallas import launch_named
from jaxops._lib.pallas.masked_pallas import load, store
from jaxops._lib.pallas.ragged_rows_pallas import (
    Chunks,
    Columns,
    Tile,
    ceil_div,
    fold_steps,
    fold_tiles,
    run_bounds,
    run_of,
    step_rows,
    widen,
)
from jaxops._lib.planning.costs import bytes_of
from jaxops._lib.planning.traced_once import traced_once
from jaxops.ops.adaln.plan import STATS, Arrays, Spec, Tiles

MODULATION = ("gate", "scale", "shift")
_PARTS = 4096  # numbers of each sum that a program of `_sums_kernel` loads at a time


def normalise(
    columns: Columns, x: Chunks, spec: Spec, stats: dict[str, jax.Array], rows_in: jax.Array | None = None
) -> tuple[Chunks, dict[str, jax.Array]]:
    """x minus its mean (layer), over its standard deviation (or RMS), and these statistics [step, 1].

    The mean is subtracted before the variance is taken, so that a large mean cancels nothing of it.

    Args:
      stats: statistics that are known already.
      rows_in: other rows are zeros and stay zeros, with epsilon 0 too; None for all.
    """
    stats = dict(stats)
    if spec.norm == "layer":
        if "mean" not in stats:
            stats["mean"] = columns.mean(x)
        x = [value - stats["mean"] for value in x]
        masks = [columns_in for _, columns_in in columns]
        x = [v if mask is None else jnp.where(mask, v, 0.0) for v, mask in zip(x, masks, strict=True)]
    if "rstd" not in stats:
        square = columns.mean([value * value for value in x])
        stats["rstd"] = lax.rsqrt((square if rows_in is None else jnp.where(rows_in, square, 1.0)) + spec.epsilon)
    return [value * stats["rstd"] for value in x], stats


def load_shared(ref: dict, spec: Spec, tile: Tile, columns: Columns) -> dict[str, Chunks]:
    """The vectors, by name, of all of a tile's rows: its sequence's modulation, weight, bias."""
    names = [name for name in MODULATION if name in ref and not spec.per_row]
    shared = {name: columns.load(ref[name], tile.clipped) for name in names}
    return shared | {name: columns.load_vector(ref[name]) for name in ("weight", "bias") if name in ref}


def affine(n: Chunks, shared: dict[str, Chunks]) -> Chunks:
    n = [a * w for a, w in zip(n, shared["weight"], strict=True)] if "weight" in shared else n
    return [a + b for a, b in zip(n, shared["bias"], strict=True)] if "bias" in shared else n


def _operations(spec: Spec, gated: bool) -> int:
    """About so many of an element in the forward: 2 for the gated residual, 8 for norm and modulation. A backward has
    three times as many."""
    return 2 * gated + 8 * (spec.norm is not None)


def _fwd_kernel(ref: dict, *, spec: Spec, tiles: Tiles, save_stats: bool):
    (T, D), program = ref["x"].shape, pl.program_id(0)
    columns, first = Columns(D, tiles.block), program * tiles.rows
    of_rows = [name for name in ("x", "h", *(MODULATION if spec.per_row else ())) if name in ref]
    last = jnp.minimum(first + tiles.rows, T)

    def load_rows(rows, _):
        return {name: columns.load(ref[name], rows, rows < last) for name in of_rows}

    def of_tile(tile: Tile, loaded):
        shared = {name: widen(chunks) for name, chunks in load_shared(ref, spec, tile, columns).items()}

        def body(rows, rows_in, loaded, carry):
            vectors = shared | {name: widen(chunks) for name, chunks in loaded.items()}
            _fwd_step(ref, tile, columns, rows, rows_in, vectors, spec=spec, save_stats=save_stats)
            return carry

        if tiles.ahead:
            return fold_steps(tile, tiles.step, load_rows, body, (), loaded)[0]
        return fold_steps(tile, tiles.step, load_rows, body, ())

    # The first rows are in flight during the search for their sequence.
    loaded = load_rows(*step_rows(first, tiles.step, last)) if tiles.ahead else ()
    fold_tiles(ref["offsets"], program, T, tiles.rows, of_tile, loaded)


def _fwd_step(
    ref: dict, tile: Tile, columns: Columns, rows, rows_in, m: dict[str, Chunks], *, spec: Spec, save_stats: bool
) -> None:
    """Stores the results of a step's rows, of which m has operands and vectors."""
    inside = tile.inside
    x = m["x"]
    if "gate" in ref:
        # Rounded before the statistics: y is adaln of the new residual as stored. Outside rows keep their residual.
        x = [
            jnp.where(inside, a + g * b, a).astype(ref["x"].dtype).astype(jnp.float32)
            for a, g, b in zip(x, m["gate"], m["h"], strict=True)
        ]
        columns.store(ref["residual"], rows, rows_in, x)
    if spec.norm is not None:
        n, stats = normalise(columns, x, spec, {})
        for name in STATS[spec.norm] if save_stats else ():
            store(ref[name], (rows,), stats[name], rows_in)
        a = [activate_and_slope(u, spec.activation)[0] for u in affine(n, m)]
        modulated = zip(a, m["scale"], m["shift"], strict=True)
        y = [jnp.where(inside, b * (1 + scale) + shift, 0.0) for b, scale, shift in modulated]
        if "y_scales" in ref:
            y, scales = zip(*(quantize_blocks(chunk, ref["y"].dtype) for chunk in y), strict=True)
            blocks = dataclasses.replace(columns, D=ref["y_scales"].shape[0], block=columns.block // BLOCK)
            blocks.store(ref["y_scales"], rows, rows_in, scales, transposed=True)
        columns.store(ref["y"], rows, rows_in, y)


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
        grid=(pl.cdiv(T, tiles.rows),),
        warps=tiles.warps,
        interpret=interpret,
        name="adaln_fwd" if spec.norm is not None else "gated_residual_fwd",
        flops=T * D * _operations(spec, arrays.gate is not None),
    )


def _bwd_kernel(ref: dict, *, summed: tuple[str, ...], spec: Spec, tiles: Tiles):
    T, D = ref["dx_in" if spec.norm is None else "x"].shape
    p, programs, columns = pl.program_id(0), pl.cdiv(T, tiles.rows), Columns(D, tiles.block)

    def of_tile(tile: Tile, _):
        sums = _fold_tile(ref, tile, columns, summed=summed, spec=spec, tiles=tiles)
        # A sequence's sum is complete where one program has all of its rows. Else another kernel adds the parts.
        starts, ends = tile.start == tile.lo, tile.end == tile.hi
        whole, part = starts & ends & tile.inside, jnp.logical_not(starts & ends) & tile.inside
        is_whole, is_part, at = (
            jnp.broadcast_to(v, (1, 1)) for v in (whole, part, p + programs * starts.astype(jnp.int32))
        )
        for name, chunks in zip(summed, sums, strict=True):
            value = [jnp.sum(chunk, axis=0, keepdims=True) for chunk in chunks]
            columns.store(ref[f"d{name}"], tile.clipped, is_whole, value)
            columns.store(ref[f"parts_{name}"], at, is_part, value)
        return ()

    def zero_if_empty(i, carry):
        sequence = p + i * programs
        lo, hi = run_bounds(ref["offsets"], sequence + 1, T)

        @pl.when((sequence < B) & (lo == hi))
        def _():
            at, zero = jnp.broadcast_to(sequence, (1, 1)), [jnp.zeros((1, tiles.block), jnp.float32) for _ in columns]
            for name in summed:
                columns.store(ref[f"d{name}"], at, None, zero)

        return carry

    fold_tiles(ref["offsets"], p, T, tiles.rows, of_tile)
    if summed:
        B = ref["offsets"].shape[0] - 1
        lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(B, programs)), zero_if_empty, ())


def _fold_tile(
    ref: dict, tile: Tile, columns: Columns, *, summed: tuple[str, ...], spec: Spec, tiles: Tiles
) -> list[Chunks]:
    """Stores the gradients of a tile's rows; returns the sums over them, [step, block] arrays for each of `summed`."""
    inside = tile.inside
    shared = {name: widen(chunks) for name, chunks in load_shared(ref, spec, tile, columns).items()}
    saved = [name for name in (STATS[spec.norm] if spec.norm else ()) if name in ref]

    def load_rows(rows, rows_in):
        # Of an outside row only the cotangent that passes through is read: x, dy and h are zero, and so is every term.
        loaded = {name: columns.load(ref[name], rows, rows_in & inside) for name in ("x", "dy", "h") if name in ref}
        loaded |= {name: [load(ref[name], (rows,), rows_in & inside)] for name in saved}
        passed = ("dx_in", *(MODULATION if spec.per_row else ()))
        return loaded | {name: columns.load(ref[name], rows, rows_in) for name in passed if name in ref}

    def body(rows, rows_in, loaded, sums):
        m = shared | {name: widen(chunks) for name, chunks in loaded.items()}
        terms: dict[str, Chunks] = {}
        dx = m.get("dx_in", [])
        if spec.norm is not None:
            n, stats = normalise(columns, m["x"], spec, {name: m[name][0] for name in saved}, rows_in & inside)
            dy = m["dy"]
            activated = [activate_and_slope(u, spec.activation) for u in affine(n, shared)]
            terms["shift"] = dy
            terms["scale"] = [d * a for d, (a, _) in zip(dy, activated, strict=True)]
            du = [d * (1 + scale) for d, scale in zip(dy, m["scale"], strict=True)]
            du = [d if slope is None else d * slope for d, (_, slope) in zip(du, activated, strict=True)]
            terms["weight"] = [d * a for d, a in zip(du, n, strict=True)]
            terms["bias"] = du
            dn = [d * w for d, w in zip(du, shared["weight"], strict=True)] if "weight" in shared else du
            along = columns.mean([d * a for d, a in zip(dn, n, strict=True)])
            back = [d - a * along for d, a in zip(dn, n, strict=True)]
            if spec.norm == "layer":
                mean = columns.mean(dn)
                back = [d - mean for d in back]
            # Zero times a NaN in the modulation of an outside row (or of the sequence it is clipped to) is NaN.
            back = [jnp.where(inside, d * stats["rstd"], 0.0) for d in back]
            dx = [jnp.where(inside, d + p, p) for d, p in zip(back, dx, strict=True)] if dx else back
            columns.store(ref["dx"], rows, rows_in, dx)
        if "gate" in ref:
            dx = [jnp.where(inside, d, 0.0) for d in dx]
            terms["gate"] = [d * b for d, b in zip(dx, m["h"], strict=True)]
            dh = [jnp.where(inside, d * g, 0.0) for d, g in zip(dx, m["gate"], strict=True)]
            columns.store(ref["dh"], rows, rows_in, dh)
        for name in MODULATION if spec.per_row else ():
            if f"d{name}" in ref:
                columns.store(ref[f"d{name}"], rows, rows_in, terms[name])
        return [
            [s + term for s, term in zip(chunks, terms[name], strict=True)]
            for name, chunks in zip(summed, sums, strict=True)
        ]

    zeros = [[jnp.zeros((tiles.step, tiles.block), jnp.float32) for _ in columns] for _ in summed]
    if tiles.ahead:
        return fold_steps(
            tile, tiles.step, load_rows, body, zeros, load_rows(*step_rows(tile.start, tiles.step, tile.end))
        )[1]
    return fold_steps(tile, tiles.step, load_rows, body, zeros)


def _sums_kernel(ref: dict, *, names: tuple[str, ...], T: int, rows: int, width: int):
    parts, offsets_ref = [ref[f"parts_{name}"] for name in names], ref["offsets"]
    B, D, programs = offsets_ref.shape[0] - 1, parts[0].shape[1], pl.cdiv(T, rows)
    program, columns = pl.program_id(0), pl.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)[None, :]
    by_sequence = programs > B
    run = program + 1 if by_sequence else run_of(offsets_ref, program * rows)
    lo, hi = run_bounds(offsets_ref, run, T)
    first = lax.div(lo, jnp.int32(rows))  # the program with the sequence's first rows
    others = ceil_div(hi, rows) - first - 1
    # With more sequences than programs, a program here takes the sequence whose second tile is its own.
    mine = (run >= 1) & (run <= B) & (hi > lo) & (others > 0)

    @pl.when(mine if by_sequence else mine & (first + 1 == program))
    def _():
        columns_in, height = columns < D, _PARTS // width

        def add(i, sums):
            row = i * height + jnp.arange(height, dtype=jnp.int32)[:, None]
            blocks = [load(part, (first + 1 + row, columns), (row < others) & columns_in) for part in parts]
            return [s + jnp.sum(block, axis=0, keepdims=True) for s, block in zip(sums, blocks, strict=True)]

        at, sequence = (jnp.broadcast_to(v, (1, 1)) for v in (programs + first, run - 1))
        sums = lax.fori_loop(
            0, ceil_div(others, height), add, [load(part, (at, columns), columns_in) for part in parts]
        )
        for name, s in zip(names, sums, strict=True):
            store(ref[f"d{name}"], (sequence, columns), s, columns_in)


def _finish_sums(
    offsets: jax.Array, results: dict[str, jax.Array], names: tuple[str, ...], *, T: int, rows: int, interpret: bool
) -> dict[str, jax.Array]:
    """d<name> [B, D] of each name, with the parts of sequences of several tiles added up.

    Args:
      results: of `_bwd_kernel`: d<name>, and parts_<name> [2 programs, D]: of tiles that start before their program,
        then of sequences' first tiles.
    """
    done = {name: results[f"d{name}"] for name in names}
    parts = {f"parts_{name}": results[f"parts_{name}"] for name in names}
    (B, D), programs = done[names[0]].shape, pl.cdiv(T, rows)
    width = min(512, max(32, power_of_2(D * min(B, programs) // 1024)))
    return launch_named(
        functools.partial(_sums_kernel, names=names, T=T, rows=rows, width=width),
        {"offsets": offsets, **parts, **done},
        {f"d{name}": out_struct((B, D), x.dtype, like=x) for name, x in done.items()},
        grid=(min(B, programs), pl.cdiv(D, width)),
        warps=8,
        interpret=interpret,
        name="adaln_sums",
        flops=sum(part.size for part in parts.values()),
        # What the backward has written to the results' memory is not read.
        bytes_accessed=bytes_of(offsets, *parts.values(), *done.values()),
        aliases={name: f"d{name}" for name in names},
    )


@traced_once("spec", "tiles", "interpret")
def backward_pallas(
    spec: Spec, tiles: Tiles, arrays: Arrays, dx_in, dy, stats: dict[str, jax.Array], *, interpret: bool
) -> dict[str, jax.Array]:
    """The gradients of all inputs but offsets, by name. No size is 0.

    Args:
      arrays: the forward's; with a gate x is the new residual. Without norm x is not read.
      dx_in: [T, D], the cotangent of the new residual; None without gate.
      dy: [T, D]; None without norm.
      stats: the forward's {"mean": [T], "rstd": [T]} ("rms" has no mean), or {} to compute them again.
    """
    x, offsets = arrays.x, arrays.offsets
    (T, D), B, f32 = x.shape, offsets.shape[0] - 1, jnp.dtype("float32")
    given = {name: value for name, value in arrays._asdict().items() if value is not None}
    modulation = {name: given[name] for name in MODULATION if name in given}
    affines = [name for name in ("weight", "bias") if name in given]
    sums = ({} if spec.per_row else {name: value.dtype for name, value in modulation.items()}) | dict.fromkeys(
        affines, f32
    )
    unread = ("shift", "x") if spec.norm is None else ("shift",)
    operands = {name: value for name, value in given.items() if name not in unread} | {"dy": dy, "dx_in": dx_in} | stats

    count = pl.cdiv(T, tiles.rows)
    out = {"dx": ((T, D), x.dtype)} if spec.norm is not None else {}
    out |= {"dh": ((T, D), given["h"].dtype)} if "h" in given else {}
    out |= {f"d{name}": ((T, D), value.dtype) for name, value in modulation.items()} if spec.per_row else {}
    out |= {f"d{name}": ((B, D), dtype) for name, dtype in sums.items()}
    out |= {f"parts_{name}": ((2 * count, D), f32) for name in sums}
    results = launch_named(
        functools.partial(_bwd_kernel, summed=tuple(sums), spec=spec, tiles=tiles),
        operands,
        {name: out_struct(*shape_and_dtype, like=x) for name, shape_and_dtype in out.items()},
        grid=(count,),
        warps=tiles.warps,
        interpret=interpret,
        name="adaln_bwd" if spec.norm is not None else "gated_residual_bwd",
        flops=3 * T * D * _operations(spec, "gate" in given),
    )
    if sums:
        results |= _finish_sums(offsets, results, tuple(sums), T=T, rows=tiles.rows, interpret=interpret)
    gradients = {name: results[f"d{name}"] for name in ("x", "h", *modulation) if f"d{name}" in results}
    gradients |= {name: jnp.sum(results[f"d{name}"], axis=0).astype(given[name].dtype) for name in affines}
    return gradients if spec.norm is not None else gradients | {"x": dx_in}
