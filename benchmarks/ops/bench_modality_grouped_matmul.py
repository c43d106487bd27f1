"""modality_grouped_matmul beside one grouped_matmul a modality, and beside one with all matrices padded to the widest.

python -m benchmarks modality_grouped_matmul          # everything: 2 workloads x 2 distributions x 3 passes
python -m benchmarks modality_grouped_matmul --shapes vision_text --passes fwd --peers ""
python -m benchmarks modality_grouped_matmul --smoke --out /tmp/x   # a tiny workload, every code path, CPU too

TFLOP/s count each row's own product. The weights are padded before the measurement; their wgrad stays padded.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.shapes import GroupedShape
from benchmarks.shapes.modality import MODALITIES, ModalityShape

DISTS = ("balanced", "skewed")
DTYPE = jnp.bfloat16
OURS, EACH, PADDED = "jaxops", "one_call_each", "padded"
SMOKE = ModalityShape("smoke", (GroupedShape("vision", 2, 40, 32, 48), GroupedShape("text", 3, 24, 48, 16)))

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass
class Inputs:
    """One workload's operands: rhs[G, K, N] of each modality; padded[G, K, N], all of them, zero-padded."""

    lhs: jax.Array
    rhs: Arrays
    padded: jax.Array
    dout: jax.Array

    @classmethod
    def make(cls, shape: ModalityShape) -> "Inputs":
        M, K, N = (shape.dims[name] for name in "MKN")
        rhs = tuple(harness.normal(2 + i, (part.G, part.K, part.N), DTYPE) for i, part in enumerate(shape.parts))
        padded = jnp.concatenate([jnp.pad(w, ((0, 0), (0, K - w.shape[1]), (0, N - w.shape[2]))) for w in rhs])
        return cls(harness.normal(0, (M, K), DTYPE), rhs, padded, harness.normal(1, (M, N), DTYPE))

    def args(self, side: str, offsets: jax.Array) -> tuple:
        return self.lhs, (self.padded,) if side == PADDED else self.rhs, self.dout, offsets


def one_call_each(lhs: jax.Array, rhs: Arrays, offsets: jax.Array, backend: str) -> jax.Array:
    """Every call writes zeros in the other modalities' rows, so the results are added; XLA fuses that into one pass."""
    N, first, found = max(w.shape[2] for w in rhs), 0, []
    for w in rhs:
        product = jaxops.grouped_matmul(
            lhs[:, : w.shape[1]], w, offsets[first : first + w.shape[0] + 1], backend=backend
        )
        found.append(jnp.pad(product, ((0, 0), (0, N - w.shape[2]))))
        first += w.shape[0]
    return functools.reduce(jnp.add, found)


def multiply(side: str, backend: str) -> Callable[[jax.Array, Arrays, jax.Array], jax.Array]:
    """
    Raises:
      ValueError: an unknown side.
    """
    if side == EACH:
        return functools.partial(one_call_each, backend=backend)
    if side == PADDED:
        return lambda lhs, rhs, offsets: jaxops.grouped_matmul(lhs, rhs[0], offsets, backend=backend)
    if side not in (OURS, "xla"):
        raise ValueError(f"unknown side {side!r}")
    return functools.partial(jaxops.modality_grouped_matmul, backend="xla" if side == "xla" else backend)


def program(side: str, pass_name: str, backend: str) -> Callable[..., Arrays]:
    """(lhs, rhs, dout, offsets) -> the results of the pass."""
    product = multiply(side, backend)

    def run(lhs: jax.Array, rhs: Arrays, dout: jax.Array, offsets: jax.Array) -> Arrays:
        if pass_name == "fwd":
            return (product(lhs, rhs, offsets),)
        if pass_name == "dgrad":
            return jax.vjp(lambda lhs: product(lhs, rhs, offsets), lhs)[1](dout)
        return jax.vjp(lambda rhs: product(lhs, rhs, offsets), rhs)[1](dout)[0]

    return run


def unpadded(results: Arrays, shape: ModalityShape) -> Arrays:
    """Each modality's part of a padded wgrad."""
    starts = np.cumsum([0, *(part.G for part in shape.parts)])
    return tuple(
        results[0][start : start + part.G, : part.K, : part.N]
        for start, part in zip(starts[:-1].tolist(), shape.parts, strict=True)
    )


def reference(shape: ModalityShape, pass_name: str, inputs: Inputs, offsets: jax.Array) -> Arrays:
    """The pass in float32; dlhs and the result are zero past a modality's columns."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (inputs.lhs, inputs.rhs, inputs.dout))
    with jax.default_matmul_precision("highest"):
        return jax.jit(program("xla", pass_name, "xla"))(*wide, offsets)


def ready_side(
    side: str, shape: ModalityShape, pass_name: str, inputs: Inputs, offsets: jax.Array, want: Arrays
) -> harness.Ready:
    args = inputs.args(side, offsets)

    def check(results: Arrays) -> float:
        found = unpadded(results, shape) if side == PADDED and pass_name == "wgrad" else results
        return checks.demand_right(*checks.worst_errors(found, want), jnp.dtype(DTYPE).name)

    backend = "auto" if harness.on_gpu() else "pallas"
    return harness.checked(side, harness.compile_fits(program(side, pass_name, backend), *args), args, check)


def measure(run: harness.Run, shape: ModalityShape, inputs: Inputs, pass_name: str, dist: str) -> None:
    offsets = jnp.asarray(shapes.group_offsets(shape.sizes(dist)))
    want = reference(shape, pass_name, inputs, offsets)
    makers = run.sides(OURS, ready_side, shape, pass_name, inputs, offsets, want)
    row = harness.case_of("modality_grouped_matmul", pass_name, shape, DTYPE, dist)
    run.measure(OURS, row, makers, "tflops", shape.flops)


main = command(
    Benchmark(
        name="modality_grouped_matmul",
        shapes=MODALITIES,
        smoke=SMOKE,
        inputs=Inputs.make,
        options={"passes": shapes.PASSES, "dists": DISTS},
        known={"dists": shapes.DISTS},
        measure=measure,
        peers=f"{EACH},{PADDED}",
        ceilings={"dtype": DTYPE},
        ceiling="dense_tflops",
    )
)
