"""Measures plans on this machine's GPU and stores the fastest: `python -m jaxops.tuning --help`."""

import concurrent.futures
import dataclasses
import datetime
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._lib.arrays.checks import type_name
from jaxops._lib.planning.description import Tuning
from jaxops._lib.planning.device import Device, current_device
from jaxops._lib.planning.recorded import record
from jaxops._lib.planning.tuned import store_rows, tuned_rows, use_rows
from jaxops.described import tunings
from jaxops.profiling import device_times_us

__all__ = ["TuningError", "current_device", "record", "store", "tune", "tuned_rows", "use_rows"]

_ALIVE_BYTES = 2e10  # of results that a timed burst may hold at once
# See `_errors`; by operand bytes: some ulps of a bfloat16 result, TF32 products.
_LIMITS = {1: (1e-1, 6e-3), 2: (2e-2, 1e-2), 4: (1e-2, 3e-3)}


class TuningError(RuntimeError):
    """Nothing was measured; the message says why."""


def tune(
    problem: Any,
    passes: Sequence[str] | None = None,
    group_sizes: Sequence[np.ndarray] | None = None,
    tiles: Sequence[Any] | None = None,
    say: Callable[[str], Any] = print,
) -> list[dict]:
    """Measures every candidate for `problem` on the default GPU. A candidate is compared with the xla backend before it
    is timed.

    >>> from jaxops import tuning
    >>> from jaxops.ops import grouped_matmul
    >>> rows = tuning.tune(grouped_matmul.Problem(G=8, M=32768, K=4096, N=14336, dtype="bfloat16"))  # doctest: +SKIP
    >>> tuning.store(rows)  # doctest: +SKIP

    Args:
      problem: a Problem of grouped_matmul, adaln (layer norm; bwd is timed with the forward), quantize (a whole call
        without groups is timed), fp8_matmul (without its casts), grouped_glu (without its products), packed_attention
        (dq and dkv are timed with the forward), cached_attention, permute or route (bwd is timed with the forward).
      passes: of the op's plan, e.g. "fwd"; by default all that this problem has.
      group_sizes: rows a group (of adaln, packed_attention: lengths of the sequences), one array a routing, each
        summing to at most the rows; the fastest tiles have the least summed time. By default an even split and a Zipf
        split.
      tiles: the candidates; by default the tiles that a call has now and the op's `candidates`, of each kernel that
        runs this problem on this device.
      say: called with each line of progress.

    Returns:
      One row a pass and kernel, as `store` takes them. `gain_percent` is how much less time the best tiles take than
      those that this kernel had, where these were a candidate.

    Raises:
      TypeError: the problem is of no op that has tuned rows.
      TuningError: every candidate of a pass failed to compile or was wrong, or the default device is no GPU.
    """
    name_of_op, op = op_of(problem)
    device = gpu()
    splits = op.splits(problem) if group_sizes is None else group_sizes
    offsets = [s if s is None else jnp.asarray(np.concatenate([[0], np.cumsum(s)]), jnp.int32) for s in splits]
    plans = {kernel: op.planner.plan(kernel) for kernel in op.kernels(problem, device)}
    xla, tensors, rows = op.planner.plan("xla"), op.tensors(problem), []
    for name, kernel in itertools.product(op.passes(problem) if passes is None else passes, plans):
        known = candidates(problem, name, kernel, device)
        mine = known if tiles is None else [t for t in tiles if getattr(t, "kernel", "pallas") == kernel]
        if not mine:
            continue

        def run(chosen, *operands, name=name, plan=plans[kernel]):
            plan = xla if chosen is None else dataclasses.replace(plan, **{name: chosen})
            return op.run(name, problem, plan, *operands)

        calls = [op.operands(name, problem, tensors, each) for each in offsets]
        now = known[0]
        times = _times(name, run, calls, mine, now, op.largest_error, say)
        best = min(times, key=times.__getitem__)
        plans[kernel] = dataclasses.replace(plans[kernel], **{name: best})
        us = times[best] / len(calls)  # of a call, on average
        work = sum(op.work(name, problem, *operands) for operands in calls) / len(calls)
        measured = {"us": round(us, 1), op.unit: round(work / us / {"tflops": 1e6, "gbps": 1e3}[op.unit], 1)}
        gain = ""
        if now in times:
            measured["gain_percent"] = round(100 * (1 - times[best] / times[now]), 1)
            gain = f", {measured['gain_percent']} % less time than now"
        made = {"device": device.kind, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
        rows.append({"op": name_of_op, "pass": name, **vars(problem), "tiles": vars(best), **measured, **made})
        say(f"{problem} {name}: {best} {measured[op.unit]} {op.unit}{gain}")
    return rows


def gpu() -> Device:
    """The default device.

    Raises:
      TuningError: it is no GPU.
    """
    device = current_device()
    if device.platform != "gpu":
        raise TuningError(f"tuning measures GPU kernels, but the default device is {device.kind}.")
    return device


def op_of(problem: Any) -> tuple[str, Tuning]:
    """The op of a problem, by name and as the tuner knows it.

    Raises:
      TypeError: no op with tuned rows.
    """
    for name, op in tunings().items():
        if isinstance(problem, op.problem):
            return name, op
    raise TypeError(f"problem is {type_name(problem)}; write a Problem of {', '.join(tunings())}.")


def candidates(problem: Any, pass_name: str, kernel: str, device: Device) -> list:
    """The tiles that a call has now; then the op's candidates."""
    name, op = op_of(problem)
    now = getattr(op.planner.make_plan(problem, device, tuned_rows(name, device), backend=kernel), pass_name)
    return list(dict.fromkeys([now, *op.planner.candidates(pass_name, problem, device, kernel)]))


def store(rows: Sequence[dict]) -> list[pathlib.Path]:
    """Puts rows of `tune` into the user's cache directory, from where later processes (and later calls in this one)
    read them. They replace stored rows of the same op, key and kernel.

    Returns:
      The files written, one an op.
    """
    files = []
    for name in dict.fromkeys(row["op"] for row in rows):
        key = tunings()[name].planner.row_key
        mine = [row for row in rows if row["op"] == name]
        files.append(store_rows(name, current_device(), mine, same=lambda a, b, key=key: key(a) == key(b)))
    return files


def _worst_errors(got, want) -> tuple[float, float]:
    """`_errors`, the largest of all arrays."""
    errors = np.array([_errors(g, w) for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)])
    return errors[:, 0].max(), errors[:, 1].max()


@jax.jit
def _errors(got, want):
    """Largest error over (|want| + RMS of want), and RMS error over RMS. In pieces: float32 copies of a whole weight
    gradient can exceed the memory."""
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


def _times(
    name: str, run: Callable, calls: list[tuple], tiles: list, now: Any, largest: float | None, say: Callable
) -> dict[Any, float]:
    """Microseconds of the five fastest tiles and of `now`, summed over all calls (the operands of each).

    run: (tiles, or None for the xla backend, *operands) -> results. largest: `Tuning.largest_error`.
    """

    def compiled(t):
        try:
            return jax.jit(lambda *operands: run(t, *operands)).lower(*calls[0]).compile()
        except jax.errors.JaxRuntimeError as error:  # this compiler or card rejects these tiles; the next may run
            say(f"  {t}: {str(error).splitlines()[0][:160]}")
            return None

    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        programs = {t: p for t, p in zip(tiles, pool.map(compiled, tiles), strict=True) if p is not None}
    portable = jax.jit(lambda *operands: run(None, *operands))
    out = jax.tree.leaves(jax.eval_shape(portable, *calls[0]))
    alive = int(max(3, min(20, _ALIVE_BYTES / sum(x.size * x.dtype.itemsize for x in out))))
    limits = _LIMITS[jax.tree.leaves(calls[0])[0].dtype.itemsize]
    limits = limits if largest is None else (largest, limits[1])
    for operands in calls:
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
            sum(np.median(device_times_us(programs[t], *operands, iterations=iterations)) for operands in calls)
        )

    first = {}
    for t in programs:
        first[t] = total_us(t, 3)
    leaders = sorted(first, key=first.__getitem__)[:5]
    leaders += [now] if now in first and now not in leaders else []
    rounds = [{t: total_us(t, alive) for t in leaders} for _ in range(3)]  # interleaved: the card's clock drifts
    final = {t: float(np.median([r[t] for r in rounds])) for t in leaders}
    for t in sorted(first, key=first.__getitem__):
        say(f"  {t}: {final.get(t, first[t]):.1f} us")
    return final
