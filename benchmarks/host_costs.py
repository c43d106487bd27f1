"""Host costs of a grouped matmul: dispatch of a compiled call, launched kernels, first compilation."""

import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from benchmarks import harness, shapes
from benchmarks.peers_jax import jaxops_passes
from benchmarks.shapes import GroupedShape

TINY = GroupedShape("tiny", 4, 64, 64, 64)  # the device is done before the host has sent the next call
REPEATS = 9


def dispatch_us(fn: Callable, *args, calls: int) -> float:
    """Host time of one call: many are queued, and the clock is read before the host waits for the device."""
    result = jax.block_until_ready(fn(*args))
    start = time.perf_counter()
    for _ in range(calls):
        result = fn(*args)
    sent = time.perf_counter() - start
    jax.block_until_ready(result)
    return 1e6 * sent / calls


def first_call(shape: GroupedShape, backend: str) -> tuple[float, float]:
    """(seconds to trace and lower, seconds to compile) value_and_grad of all three passes in bfloat16; nothing runs."""

    def loss(lhs, rhs, offsets):
        return jnp.sum(jaxops.grouped_matmul(lhs, rhs, offsets, backend=backend).astype(jnp.float32))

    G, M, K, N = shape.G, shape.M, shape.K, shape.N
    args = [
        jax.ShapeDtypeStruct(dims, dtype)
        for dims, dtype in (((M, K), jnp.bfloat16), ((G, K, N), jnp.bfloat16), ((G + 1,), jnp.int32))
    ]
    start = time.perf_counter()
    lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*args)
    middle = time.perf_counter()
    lowered.compile()
    return middle - start, time.perf_counter() - middle


def measure(file: pathlib.Path, compiled_shape: GroupedShape, calls: int, backend: str = "pallas") -> None:
    """Appends rows with pass "compile" and "dispatch".

    us_p50 of "compile" is the first compilation; vs.cublas of "dispatch" is against `x @ w`.
    """
    jax.devices()  # the backend's own start is not the op's
    case = {"op": "grouped_matmul", "dtype": "bfloat16", "dist": "balanced", "backend": backend}
    lower_s, compile_s = first_call(
        compiled_shape, backend
    )  # before anything of the op has been compiled in this process
    total = harness.Times.of([1e6 * (lower_s + compile_s)])
    row_case = case | {"pass": "compile", "name": compiled_shape.name, "shape": compiled_shape.dims}
    harness.append_row(file, harness.make_row(row_case, total, None, {}, None, lower_s=lower_s, compile_s=compile_s))
    print(
        f"compile of value_and_grad at {compiled_shape.name}: trace and lower {lower_s:.2f} s, compile {compile_s:.2f} "
        "s",
        flush=True,
    )

    offsets = jnp.asarray(shapes.group_offsets(shapes.group_sizes("balanced", TINY.G, TINY.M)))
    lhs, rhs, dout = (
        harness.normal(seed, dims, jnp.bfloat16)
        for seed, dims in enumerate([(TINY.M, TINY.K), (TINY.G, TINY.K, TINY.N), (TINY.M, TINY.N)])
    )
    sides = {
        "grouped": (jax.jit(lambda a, b, o: jaxops.grouped_matmul(a, b, o, backend=backend)), (lhs, rhs, offsets)),
        "dense": (jax.jit(jnp.matmul), (lhs, rhs[0])),
    }
    samples = {name: [] for name in sides}
    for _ in range(REPEATS):
        for name, (fn, args) in sides.items():
            samples[name].append(dispatch_us(fn, *args, calls=calls))
    least = {name: float(np.min(times)) for name, times in samples.items()}
    launches = {
        name: len(harness.kernels(jax.jit(fn), lhs, rhs, dout, offsets, jnp.diff(offsets)))
        for name, fn in jaxops_passes(backend).items()
    }
    row_case = case | {"pass": "dispatch", "name": TINY.name, "shape": TINY.dims}
    vs = {"cublas": least["dense"] / least["grouped"]}
    harness.append_row(
        file,
        harness.make_row(
            row_case, harness.Times.of(samples["grouped"]), None, vs, None, us_min=least["grouped"], launches=launches
        ),
    )
    print(
        f"dispatch: grouped_matmul {least['grouped']:.1f} us, x @ w {least['dense']:.1f} us; launches {launches}",
        flush=True,
    )
