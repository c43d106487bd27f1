"""grouped_matmul on a CPU: jaxops' loop over row tiles beside jax.lax.ragged_dot and a masked loop over groups.

python -m benchmarks.bench_cpu_backend            # writes benchmarks/results/cpu/grouped_matmul.jsonl
python -m benchmarks.bench_cpu_backend --sweep    # prints the time of each number of rows a tile instead
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import lax

from benchmarks import checks, harness, shapes
from benchmarks.peers_jax import jaxops_passes, vjp_passes
from benchmarks.shapes import GroupedShape
from jaxops.ops.grouped_matmul import xla

SHAPES = (
    GroupedShape("cpu_g8", 8, 4096, 128, 256),
    GroupedShape("cpu_g64", 64, 2048, 128, 128),
    GroupedShape("cpu_g4", 4, 512, 64, 64),
    GroupedShape("cpu_g128", 128, 256, 64, 64),
)
SMOKE = (GroupedShape("smoke", 4, 64, 32, 32),)
DISTS = ("balanced", "skewed")
TILE_ROWS = (16, 32, 64, 128, 256, 512)
ROUND_US = 40_000


def masked_loop(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    """A loop by hand: every group multiplies all rows, with the rows of other groups zeroed."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(lhs.shape[0])[:, None]

    def step(g, out):
        return out + jnp.where((ends[g] - sizes[g] <= rows) & (rows < ends[g]), lhs, 0) @ rhs[g]

    return lax.fori_loop(0, rhs.shape[0], step, jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype))


SIDES = {"xla": jaxops_passes("xla"), "ragged_dot": vjp_passes(lax.ragged_dot), "masked_loop": vjp_passes(masked_loop)}


def both(passes: dict[str, Callable]) -> Callable:
    """Forward and both gradients: each side's passes in one program."""
    return lambda *args: tuple(passes[name](*args) for name in shapes.PASSES)


def compiled_sides(args: tuple, sides: dict[str, dict[str, Callable]]) -> dict[tuple[str, str], Callable]:
    return {
        (side, pass_name): harness.compile_fits(fn, *args)[0]
        for side, p in sides.items()
        for pass_name, fn in (("fwd", p["fwd"]), ("fwd+bwd", both(p)))
    }


def arguments(shape: GroupedShape, dist: str) -> tuple[tuple[jax.Array, ...], np.ndarray]:
    """((lhs, rhs, dout, group_offsets, group_sizes), group_offsets on the host), float32."""
    offsets = shapes.group_offsets(shapes.group_sizes(dist, shape.G, shape.M))
    dims = [(shape.M, shape.K), (shape.G, shape.K, shape.N), (shape.M, shape.N)]
    arrays = [harness.normal(seed, size, jnp.float32) for seed, size in enumerate(dims)]
    return (*arrays, jnp.asarray(offsets), jnp.asarray(np.diff(offsets))), offsets


def worst_error(shape: GroupedShape, results, args: tuple, offsets: np.ndarray) -> tuple[float, float]:
    errors = [
        checks.grouped_errors(name, shape, out, args[:3], offsets)
        for name, out in zip(shapes.PASSES, results, strict=True)
    ]
    return max(e[0] for e in errors), max(e[1] for e in errors)


def variant(name: str, fn: Callable, args: tuple) -> harness.Variant:
    jax.block_until_ready(fn(*args))
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    us = 1e6 * (time.perf_counter() - start)
    return harness.Variant(name, functools.partial(_times, fn, args), min(100, max(3, round(ROUND_US / us))))


def measure(shape: GroupedShape, dist: str, ceilings: harness.Ceilings, rounds: int) -> list[dict]:
    args, offsets = arguments(shape, dist)
    compiled = compiled_sides(args, SIDES)
    rows = []
    for pass_name, flops in (("fwd", shape.flops), ("fwd+bwd", 3 * shape.flops)):
        max_errs, variants = {}, []
        for side in SIDES:
            results = compiled[side, "fwd+bwd"](*args)
            max_errs[side], rms_err = worst_error(shape, results, args, offsets)
            if not checks.within_limits(max_errs[side], rms_err, "float32"):
                harness.print_left_out(
                    f"{side} at {shape.name} {dist}",
                    ArithmeticError(f"wrong result: {max_errs[side]:.2e}, RMS {rms_err:.2e}"),
                )
                continue
            variants.append(variant(side, compiled[side, pass_name], args))
        times = harness.interleave(variants, rounds)
        for side, t in times.items():
            case = {
                "op": "grouped_matmul",
                "pass": pass_name,
                "name": shape.name,
                "shape": shape.dims,
                "dtype": "float32",
                "dist": dist,
                "backend": side,
            }
            vs = (
                {peer: other.us_p50 / t.us_p50 for peer, other in times.items() if peer != "xla"}
                if side == "xla"
                else {}
            )
            tflops = flops / t.us_p50 / 1e6
            rows.append(harness.make_row(case, t, tflops / ceilings.dense_tflops, vs, max_errs[side], tflops=tflops))
        line = " | ".join(f"{side} {t.us_p50:.0f} ({t.us_p20:.0f} to {t.us_p80:.0f}) us" for side, t in times.items())
        print(f"{shape.name:10} {dist:10} {pass_name:8}{line}", flush=True)
    return rows


def sweep(chosen: tuple[GroupedShape, ...], dists: tuple[str, ...], rounds: int) -> None:
    """Prints a table of microseconds a number of rows a tile, fwd and fwd+bwd."""
    chooser = xla._tile_rows
    print("| shape | rows | pass | chosen | " + " | ".join(map(str, TILE_ROWS)) + " |")
    print("|" + " --- |" * (4 + len(TILE_ROWS)))
    try:
        for shape in chosen:
            for dist in dists:
                args, _ = arguments(shape, dist)
                by_rows = {}
                for rows in [rows for rows in TILE_ROWS if rows <= shape.M]:
                    xla._tile_rows = lambda M, G, rows=rows: min(rows, M)
                    by_rows[rows] = compiled_sides(args, {"xla": jaxops_passes("xla")})
                for pass_name in ("fwd", "fwd+bwd"):
                    times = harness.interleave(
                        [variant(str(rows), fns["xla", pass_name], args) for rows, fns in by_rows.items()], rounds
                    )
                    cells = [f"{times[str(rows)].us_p50:.0f}" if str(rows) in times else "-" for rows in TILE_ROWS]
                    print(
                        f"| {shape.name} | {dist} | {pass_name} | {chooser(shape.M, shape.G)} | "
                        + " | ".join(cells)
                        + " |",
                        flush=True,
                    )
    finally:
        xla._tile_rows = chooser


def main(
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/cpu by default."),
    rounds: int = typer.Option(7),
    sweep_tiles: bool = typer.Option(False, "--sweep", help="Print the time of each number of rows a tile instead."),
    smoke: bool = typer.Option(False, help="One tiny shape; needs --out."),
) -> None:
    """Appends to <out>/grouped_matmul.jsonl."""
    if smoke and not out and not sweep_tiles:
        raise typer.BadParameter("with --smoke the rows are no results: pass --out.")
    jax.config.update("jax_platforms", "cpu")
    chosen = SMOKE if smoke else SHAPES
    if sweep_tiles:
        sweep(chosen, DISTS, rounds)
        return
    ceilings, _ = harness.measure_ceilings(64 if smoke else 1024, jnp.float32, 1 << 16 if smoke else 1 << 28)
    print(
        f"ceilings: copy {ceilings.copy_gbps:.1f} GB/s, dense float32 {ceilings.dense_tflops:.4f} TFLOP/s", flush=True
    )
    for shape in chosen:
        for dist in DISTS[:1] if smoke else DISTS:
            for row in measure(shape, dist, ceilings, rounds):
                harness.append_row(harness.results_folder(out) / "grouped_matmul.jsonl", row)


def _times(fn: Callable, args: tuple, iterations: int) -> list[float]:
    return harness.call_times_us(fn, *args, iterations=iterations)


if __name__ == "__main__":
    typer.run(main)
