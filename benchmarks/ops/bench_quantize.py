"""quantize: jaxops' kernels beside jnp and torch.compile, in GB/s beside the copy bandwidth.

python -m benchmarks quantize                         # everything: 5 shapes, 4 scalings, one layout and both
python -m benchmarks quantize --shapes m8192_k4096 --scalings block_1x128 --layouts both --peers xla
python -m benchmarks quantize --smoke --out /tmp/x    # tiny shapes, every code path, CPU too

GB/s count the bfloat16 tensor once and every value and scale once, also if a tensorwise scale needs a second read:
`passes` has the number of reads.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxops
from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.ops import quantized_bytes
from benchmarks.peers import fp8 as peers_fp8
from benchmarks.shapes import MatrixShape

SCALINGS = ("tensorwise", "rowwise", "block_1x128", "block_128x128")
LAYOUTS = ("row", "both")
TORCH = "torch_compile"
SMOKE = MatrixShape(256, 128)
LIMITS = "fp8 cast"
_CHECKED_ROWS = 1024


def jaxops_side(scaling: Any, layouts: Any, backend: str) -> Callable[[jax.Array], peers_fp8.Named]:
    def call(x):
        q = jaxops.quantize(x, scaling=scaling, layouts=layouts, backend=backend)
        parts = {"values": q.values, "scales": q.scales, "values_t": q.values_t, "scales_t": q.scales_t}
        return {name: part for name, part in parts.items() if part is not None}

    return call


@jax.jit
def differing(got: peers_fp8.Named, want: peers_fp8.Named) -> dict[str, jax.Array]:
    """The number of elements with other bits, of each part."""
    bits = {1: jnp.uint8, 4: jnp.uint32}
    as_bits = functools.partial(
        jax.tree.map, lambda part: jax.lax.bitcast_convert_type(part, bits[part.dtype.itemsize])
    )
    return jax.tree.map(lambda a, b: jnp.sum(a != b, dtype=jnp.int32), as_bits(got), as_bits(want))


def demand_same_bits(got: peers_fp8.Named, want: peers_fp8.Named) -> None:
    """
    Raises:
      ArithmeticError: a value or a scale differs.
    """
    for name, part in want.items():
        if name not in got or got[name].shape != part.shape or got[name].dtype != part.dtype:
            raise ArithmeticError(f"wrong result: {name} must be {part.dtype}{part.shape}")
    counts = differing({name: got[name] for name in want}, want)
    if wrong := {name: int(count) for name, count in counts.items() if int(count)}:
        raise ArithmeticError(f"wrong result: other bits than the xla backend's: {wrong}")


def peer_errors(scaling: str, got: peers_fp8.Named, x: jax.Array) -> tuple[float, float]:
    """(largest, RMS) error over the RMS of some rows and, with both layouts, some columns.

    Scales are [rows, blocks].
    """
    worst = [_relative_errors(got["values"][:_CHECKED_ROWS], got["scales"], x[:_CHECKED_ROWS], scaling)]
    if "values_t" in got:
        worst.append(
            _relative_errors(got["values_t"][:_CHECKED_ROWS], got["scales_t"], x[:, :_CHECKED_ROWS].T, scaling)
        )
    return max(float(errors[0]) for errors in worst), max(float(errors[1]) for errors in worst)


@functools.partial(jax.jit, static_argnums=3)
def _relative_errors(values, scales, x, scaling: str):
    rows, columns = values.shape
    if scaling == "block_128x128":
        scales = jnp.repeat(scales, peers_fp8.BLOCK, axis=0)
    if scaling.startswith("block"):
        scales = jnp.repeat(scales, peers_fp8.BLOCK, axis=1)[:rows, :columns]
    elif scaling == "rowwise":
        scales = scales[:rows]
    return checks.relative_errors(values.astype(jnp.float32) * scales, x.astype(jnp.float32))


def ready_side(
    name: str, scaling: str, layouts: str, x: jax.Array, want: Callable[[], peers_fp8.Named]
) -> harness.Ready:
    peer = functools.partial(peers_fp8.quantize, scaling=scaling, layouts=layouts)
    side = peer if name == "xla" else jaxops_side(scaling, layouts, name.removeprefix("jaxops_"))

    def check(got: peers_fp8.Named) -> float:
        if name == "xla":
            return checks.demand_right(*peer_errors(scaling, got, x), LIMITS)
        demand_same_bits(got, want())
        return 0.0

    return harness.checked(name, harness.compile_fits(side, x), (x,), check)


def measure(run: harness.Run, shape: MatrixShape, x: jax.Array, scaling: str, layouts: str) -> None:
    # Without it no side of jaxops can be checked.
    want = functools.cache(lambda: jax.jit(jaxops_side(scaling, layouts, "xla"))(x))
    makers = run.sides("pallas", ready_side, scaling, layouts, x, want)
    row = harness.case_of("quantize", "fwd", shape, "bfloat16")
    if (scaling, layouts) == ("block_1x128", "row"):
        makers |= run.torch_side(TORCH, row, LIMITS)
    moved = quantized_bytes.moved_bytes(scaling, shape.M, shape.K, layouts)
    passes = quantized_bytes.reads_needed(scaling, layouts)
    run.measure("pallas", row, makers, "gbps", moved, scaling=scaling, layouts=layouts, passes=passes)


main = command(
    Benchmark(
        name="quantize",
        shapes=shapes.MATRICES,
        smoke=SMOKE,
        inputs=lambda shape: harness.normal(0, (shape.M, shape.K), jnp.bfloat16),
        options={"scalings": SCALINGS, "layouts": LAYOUTS},
        measure=measure,
        peers=f"xla,{TORCH}",
        ceiling="copy_gbps",
        torch=(TORCH, {"op": "quantize", "limits": checks.LIMITS[LIMITS], **SMOKE.dims}),
    )
)
