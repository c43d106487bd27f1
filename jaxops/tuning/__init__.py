"""Measures plans on the device at hand and keeps the fastest: `python -m jaxops.tuning grouped-matmul --shape 8,32768,4096,14336`,
`python -m jaxops.tuning adaln --shape 65536,3072,64`, or `python -m jaxops.tuning quantize --shape 16384,4096`."""

import concurrent.futures
import dataclasses
import datetime
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._lib.device import Device, current_device
from jaxops._lib.tuned import store_rows, tuned_rows, use_rows
from jaxops.ops import adaln, fp8_matmul, quantize
from jaxops.ops.adaln.plan import PASSES as ADALN_PASSES
from jaxops.ops.adaln.plan import key_of_row as adaln_key_of_row
from jaxops.ops.fp8_matmul import product as fp8_product
from jaxops.ops.fp8_matmul.plan import key_of_row as fp8_key_of_row
from jaxops.ops.grouped_matmul import Plan, Problem, Tiles, candidates, grouped_matmul, grouped_wgrad
from jaxops.ops.grouped_matmul.plan import PASSES, kernels_for, key_of_row
from jaxops.ops.quantize.plan import key_of_row as quantize_key_of_row
from jaxops.profiling import device_times_us

__all__ = [
    "TuningError",
    "current_device",
    "store",
    "tune",
    "tune_adaln",
    "tune_fp8_matmul",
    "tune_quantize",
    "tuned_rows",
    "use_rows",
]

_ALIVE_BYTES = 2e10  # results that a timed burst may hold at once
_LIMITS = {
    1: (1e-1, 6e-3),
    2: (2e-2, 1e-2),
    4: (1e-2, 3e-3),
}  # see _errors; by operand bytes: some ulps of a bfloat16 result, TF32 products


class TuningError(RuntimeError):
    """Nothing was measured; says why."""


def tune(
    problem: Problem,
    passes: Sequence[str] = PASSES,
    group_sizes: Sequence[np.ndarray] | None = None,
    tiles: Sequence[Tiles] | None = None,
    say: Callable = print,
) -> list[dict]:
    """Measures every candidate for `problem` on the default GPU; a candidate is compared with the xla backend before it is timed.

    Args:
      problem: static shape and dtype; transpose_rhs must be False (the rows serve transposed weights too).
      passes: among "fwd", "dgrad", "wgrad".
      group_sizes: rows a group, one array a routing, each summing to at most M; the fastest plan is that with the least summed time. By default an
        even split and a Zipf split.
      tiles: the candidates; by default `candidates(pass, problem, device, kernel)` of each kernel that multiplies this problem on this device.
      say: called with each line of progress.

    Returns:
      One row a pass and kernel, as `store` takes them.

    Raises:
      TuningError: every candidate of a pass failed to compile, was wrong, or the default device is no GPU.
    """
    device = _gpu()
    routings = [
        np.asarray(sizes) for sizes in (group_sizes if group_sizes is not None else default_group_sizes(problem))
    ]
    keys = jax.random.split(jax.random.key(0), 3)
    lhs, dout = (
        jax.random.normal(key, (problem.M, width), problem.dtype)
        for key, width in ((keys[0], problem.K), (keys[1], problem.N))
    )
    rhs = jax.random.normal(keys[2], (problem.G, problem.K, problem.N), problem.dtype)
    offsets = [jnp.asarray(np.concatenate([[0], np.cumsum(sizes)]), jnp.int32) for sizes in routings]
    rows = []
    flops = 2 * sum(int(sizes.sum()) for sizes in routings) / len(routings) * problem.K * problem.N
    for name, kernel in itertools.product(passes, kernels_for(problem, device)):
        mine = (
            [t for t in tiles if t.kernel == kernel] if tiles is not None else candidates(name, problem, device, kernel)
        )
        if not mine:
            continue
        operands = {"fwd": (lhs, rhs), "dgrad": (dout, rhs), "wgrad": (lhs, dout)}[name]
        best, us = _fastest(name, _run, [(*operands, o) for o in offsets], mine, say)
        us /= len(routings)  # a call's, on the mean
        size = {"G": problem.G, "M": problem.M, "K": problem.K, "N": problem.N}
        measured = {"us": round(us, 1), "tflops": round(flops / us / 1e6, 1)}
        rows.append({"pass": name, **size, "dtype": problem.dtype, "tiles": vars(best), **measured, **_made(device)})
        say(f"{name}: {best} {measured['tflops']} TFLOP/s over {len(routings)} routings")
    return rows


def tune_adaln(
    problem: adaln.Problem,
    passes: Sequence[str] = ADALN_PASSES,
    rows: Sequence[adaln.Tiles] | None = None,
    say: Callable = print,
) -> list[dict]:
    """As `tune`, for `jaxops.adaln` or, with problem.gated, `jaxops.gated_residual_adaln`: layer norm, sequences of unequal length.

    Args:
      problem: static shape and dtype.
      passes: among "fwd" and "bwd"; bwd is timed together with the forward before it.
      rows: the candidates; by default `candidates(pass, problem)`.
      say: called with each line of progress.

    Returns:
      One row a pass, as `store` takes them.

    Raises:
      TuningError: every candidate of a pass failed to compile, was wrong, or the default device is no GPU.
    """
    device = _gpu()
    T, D, B = problem.T, problem.D, problem.B
    modulations, of_rows = (
        (3, 4) if problem.gated else (2, 2)
    )  # arrays [B, D]; arrays [T, D]: x or residual and h, then the results' cotangents
    keys = jax.random.split(jax.random.key(0), 7)
    arrays = [jax.random.normal(key, (T, D), problem.dtype) for key in keys[:of_rows]]
    modulation = [jax.random.normal(key, (B, D), problem.dtype) for key in keys[of_rows : of_rows + modulations]]
    lengths = 0.25 + 1.5 * np.random.default_rng(0).permutation(B) / max(B - 1, 1)
    offsets = jnp.asarray(np.floor(np.concatenate([[0], np.cumsum(lengths)]) / lengths.sum() * T + 0.5), jnp.int32)
    found = []
    for name in passes:
        best, us = _fastest(
            name, _run_adaln, [(arrays, modulation, offsets)], list(rows or adaln.candidates(name, problem)), say
        )
        moved = T * D * jnp.dtype(problem.dtype).itemsize * {"fwd": 2, "bwd": 5}[name] * (2 if problem.gated else 1)
        measured = {"us": round(us, 1), "gbps": round(moved / us / 1e3, 1)}
        found.append(
            {
                "pass": name,
                "D": D,
                "dtype": problem.dtype,
                "gated": problem.gated,
                "rows": vars(best),
                **measured,
                **_made(device),
            }
        )
        say(f"{name}: {best} {measured['gbps']} GB/s" + (" with the forward" if name == "bwd" else ""))
    return found


def tune_quantize(
    problem: quantize.Problem, tiles: Sequence[quantize.Tiles] | None = None, say: Callable = print
) -> list[dict]:
    """As `tune`, for `jaxops.quantize`: a whole call is timed, first with each tile of the pass that looks for the largest magnitudes (where there is
    one), then with each of the cast.

    Args:
      problem: static shape, dtype, scaling and layouts; not ragged (the rows serve ragged calls too).
      tiles: the candidates; by default `candidates(pass, problem)`.
      say: called with each line of progress.

    Returns:
      One row a pass, as `store` takes them.

    Raises:
      TuningError: every candidate of a pass failed to compile, was wrong, or the default device is no GPU.
    """
    device = _gpu()
    x = jax.random.normal(jax.random.key(0), (problem.M, problem.K), problem.dtype)
    layouts = 2 if problem.layouts == "both" else 1
    found, plan = [], quantize.Plan()
    for name in ("amax", "cast") if problem.looks_first else ("cast",):

        def run(name, backend, tile, x, plan=plan):
            plan = quantize.Plan("xla") if backend == "xla" else dataclasses.replace(plan, **{name: tile})
            q = quantize.quantize(x, scaling=problem.scaling, layouts=problem.layouts, plan=plan)  # pyright: ignore[reportArgumentType]
            return [jnp.atleast_1d(leaf) for leaf in jax.tree.leaves(q)]

        best, us = _fastest(name, run, [(x,)], list(tiles or quantize.candidates(name, problem)), say)
        plan = dataclasses.replace(plan, **{name: best})
        measured = {"us": round(us, 1), "gbps": round(x.size * (x.dtype.itemsize + layouts) / us / 1e3, 1)}
        sizes = {key: getattr(problem, key) for key in ("M", "K", "dtype", "scaling", "layouts")}
        found.append({"pass": name, **sizes, "tile": vars(best), **measured, **_made(device)})
        say(f"{problem.scaling} {problem.layouts}, {name}: {best} {measured['gbps']} GB/s")
    return found


def store(rows: list[dict], op: str = "grouped_matmul"):
    """Puts tuned rows of `op` into the user's cache directory, from where later processes (and later calls in this one) read them."""
    key = {
        "grouped_matmul": key_of_row,
        "adaln": adaln_key_of_row,
        "fp8_matmul": fp8_key_of_row,
        "quantize": quantize_key_of_row,
    }[op]
    return store_rows(op, current_device(), rows, same=lambda a, b: key(a) == key(b))


def tune_fp8_matmul(
    problem: fp8_matmul.Problem,
    passes: Sequence[str] = PASSES,
    tiles: Sequence[fp8_matmul.Tiles] | None = None,
    say: Callable = print,
) -> list[dict]:
    """As `tune`, for the products of `jaxops.fp8_matmul` and, with problem.G, of `jaxops.fp8_grouped_matmul` (an even and a Zipf split), without their casts.

    Args:
      problem: static shape, recipe and dtype.
      passes: among "fwd", "dgrad", "wgrad".
      tiles: the candidates; by default `candidates(pass, problem, device)`.
      say: called with each line of progress.

    Returns:
      One row a pass, as `store` takes them.

    Raises:
      TuningError: every candidate of a pass failed to compile, was wrong, or the default device is no Hopper GPU.
    """
    device = _gpu()
    recipe, (M, K, N, G) = fp8_matmul.RECIPES[problem.recipe], (problem.M, problem.K, problem.N, problem.G)
    routings = [None]
    if G:
        sizes = default_group_sizes(Problem(G, M, K, N, problem.dtype))
        routings = [jnp.asarray(np.concatenate([[0], np.cumsum(each)]), jnp.int32) for each in sizes]
    keys = jax.random.split(jax.random.key(0), 3)
    tensors = {"x": (M, K), "w": (G, K, N) if G else (K, N), "dy": (M, N)}
    found = []
    for name in passes:
        (a, a_layout), (b, b_layout) = {
            "fwd": (("x", "row"), ("w", "col")),
            "dgrad": (("dy", "row"), ("w", "row")),
            "wgrad": (("x", "col"), ("dy", "col")),
        }[name]
        operands = []
        for offsets in routings:
            sides = []
            for tensor, layout in ((a, a_layout), (b, b_layout)):
                value = jax.random.normal(keys["xwd".index(tensor[0])], tensors[tensor], problem.dtype)
                form, ragged = getattr(recipe, tensor), offsets if layout == "col" and tensor != "w" else None
                q = quantize.quantize(
                    value, scaling=form.scaling, dtype=form.dtype, layouts=layout, group_offsets=ragged
                )  # pyright: ignore[reportArgumentType]
                sides.append(q)
            operands.append((*sides, offsets))

        def run(name, backend, chosen, a, b, offsets, a_layout=a_layout, b_layout=b_layout):
            plan = (
                fp8_matmul.Plan("xla")
                if backend == "xla"
                else fp8_matmul.Plan("triton", "before", chosen, chosen, chosen)
            )
            spec = fp8_product.Spec(recipe, plan, problem.dtype, problem.dtype, problem.dtype, False)
            left, right = (
                fp8_product.rows_of(q) if layout == "row" else fp8_product.cols_of(q)
                for q, layout in ((a, a_layout), (b, b_layout))
            )
            return fp8_product.multiply(spec, name, left, right, offsets, problem.dtype, M if name == "wgrad" else None)

        best, us = _fastest(name, run, operands, list(tiles or fp8_matmul.candidates(name, problem, device)), say)
        us /= len(routings)
        measured = {"us": round(us, 1), "tflops": round(2 * M * K * N / us / 1e6, 1)}
        size = {"G": G, "M": M, "K": K, "N": N, "recipe": problem.recipe}
        found.append({"pass": name, **size, "tiles": vars(best), **measured, **_made(device)})
        say(f"{problem.recipe} {name}: {best} {measured['tflops']} TFLOP/s")
    return found


def _gpu() -> Device:
    device = current_device()
    if device.platform != "gpu":
        raise TuningError(f"tuning measures GPU kernels, but the default device is {device.kind}.")
    return device


def _made(device: Device) -> dict[str, str]:
    return {"device": device.kind, "jax": jax.__version__, "date": datetime.date.today().isoformat()}


def default_group_sizes(problem: Problem) -> list[np.ndarray]:
    """An even split of M, and a Zipf split in shuffled order."""
    even = np.diff(np.arange(problem.G + 1) * problem.M // problem.G)
    share = np.random.default_rng(0).permutation(1 / np.arange(1, problem.G + 1))
    return [
        even,
        np.diff(np.floor(np.concatenate([[0], np.cumsum(share / share.sum())]) * problem.M + 0.5).astype(int)),
    ]


def _run(name: str, backend: str, tiles: Tiles | None, a, b, offsets):
    plan = Plan("xla") if backend == "xla" or tiles is None else Plan(tiles.kernel, tiles, tiles, tiles)
    if name == "wgrad":
        return grouped_wgrad(a, b, offsets, plan=plan)
    # The forward pass of a transposed rhs is the dgrad kernel, called directly.
    return grouped_matmul(a, b, offsets, transpose_rhs=name == "dgrad", plan=plan)


def _run_adaln(name: str, backend: str, rows: adaln.Tiles | None, arrays, modulation, offsets):
    plan = adaln.Plan("xla") if backend == "xla" else dataclasses.replace(adaln.Plan(), **{name: rows})
    gated = len(modulation) == 3
    inputs, cotangents = (arrays[:2], tuple(arrays[2:])) if gated else (arrays[:1], arrays[1])
    op: Callable = functools.partial(adaln.gated_residual_adaln if gated else adaln.adaln, per="sequence")
    if name == "fwd":
        return op(*inputs, *modulation, offsets, plan=plan)
    out, vjp = jax.vjp(lambda *args: op(*args, offsets, plan=plan), *inputs, *modulation)
    return out, vjp(cotangents)


def _worst_errors(got, want) -> tuple[float, float]:
    """`_errors`, the largest of all arrays."""
    errors = [
        [float(e) for e in _errors(g, w)] for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    return max(e[0] for e in errors), max(e[1] for e in errors)


@jax.jit
def _errors(got, want):
    """Largest error over (|want| + RMS of want), and RMS error over RMS, piece by piece: float32 copies of a whole weight gradient can outgrow the memory."""
    size = float(want.size)  # more than int32 holds
    got, want = (x.reshape(math.gcd(x.shape[0], 64), -1) for x in (got, want))

    def widen(x):
        return x.astype(jnp.float32)

    rms = jnp.sqrt(jnp.sum(jax.lax.map(lambda w: jnp.sum(widen(w) ** 2), want)) / size)

    def one(pair):
        error = jnp.abs(widen(pair[0]) - widen(pair[1]))
        return jnp.max(error / (jnp.abs(widen(pair[1])) + rms)), jnp.sum(error**2)

    worst, square = jax.lax.map(one, (got, want))
    return jnp.max(worst), jnp.sqrt(jnp.sum(square) / size) / rms


def _fastest(name: str, run: Callable, routings: list[tuple], tiles: list, say: Callable) -> tuple[Any, float]:
    """The candidate with the least summed time over all routings (operands of one call each), and that time in microseconds."""

    def compiled(t):
        try:
            return jax.jit(lambda *operands: run(name, "pallas", t, *operands)).lower(*routings[0]).compile()
        except (
            jax.errors.JaxRuntimeError
        ) as error:  # a tile that this compiler or card refuses is no candidate; the next one may run
            say(f"  {t}: {str(error).splitlines()[0][:160]}")
            return None

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        programs = {t: p for t, p in zip(tiles, pool.map(compiled, tiles), strict=True) if p is not None}
    portable = jax.jit(lambda *operands: run(name, "xla", None, *operands))
    out = jax.tree.leaves(jax.eval_shape(portable, *routings[0]))
    alive = int(max(3, min(20, _ALIVE_BYTES / sum(x.size * x.dtype.itemsize for x in out))))
    limits = _LIMITS[jax.tree.leaves(routings[0])[0].dtype.itemsize]
    for operands in routings:
        want = portable(*operands)
        for t in list(programs):
            errors = _worst_errors(programs[t](*operands), want)
            if not (errors[0] < limits[0] and errors[1] < limits[1]):
                say(f"  {t}: WRONG, max {errors[0]:.1e} RMS {errors[1]:.1e}")
                del programs[t]
        del want
    if not programs:
        raise TuningError(f"no candidate for {name} compiled and was right.")

    def total_us(t, iterations: int) -> float:
        return float(
            sum(np.median(device_times_us(programs[t], *operands, iterations=iterations)) for operands in routings)
        )

    first = {t: total_us(t, 3) for t in programs}
    leaders = sorted(first, key=first.__getitem__)[:5]
    rounds = [{t: total_us(t, alive) for t in leaders} for _ in range(3)]  # interleaved: the card's clock moves
    final = {t: float(np.median([r[t] for r in rounds])) for t in leaders}
    for t in sorted(first, key=first.__getitem__):
        say(f"  {t}: {final.get(t, first[t]):.1f} us")
    best = min(leaders, key=final.__getitem__)
    return best, final[best]
