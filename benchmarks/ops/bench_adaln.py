"""AdaLN over packed sequences, alone and after a gated residual, beside plain JAX and torch.compile.

python -m benchmarks adaln                    # everything: 9 shapes, 18 distributions, 2 ops, fwd and fwd+bwd
python -m benchmarks adaln --shapes t65536_d3072 --dists unequal --ops adaln --passes fwd,bwd --peers xla
python -m benchmarks adaln --smoke --out /tmp/x    # tiny shapes, every code path, CPU too

Rates are in GB/s beside the copy bandwidth. By default each shape has its own distributions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.peers import adaln as peers_adaln
from benchmarks.peers.adaln import Named, Side
from benchmarks.shapes import PackedShape

DTYPE = jnp.bfloat16
LIMITS = "bfloat16 adaln"
SMOKE = PackedShape("smoke", 96, 64, 5, shapes.PACKED_DISTS)
TORCH = "torch_compile"


class Program(NamedTuple):
    """A compiled pass, and seconds. saved makes the further argument of a backward alone."""

    compiled: tuple[Callable[..., Named], float]
    saved: Callable[[Named], Any] | None

    @classmethod
    def of(cls, side: Side, pass_name: str, inputs: Named) -> "Program":
        if pass_name != "bwd":
            return cls(harness.compile_fits({"fwd": side.fwd, "fwd+bwd": side.fwd_bwd}[pass_name], inputs), None)
        saved = jax.jit(side.saved)
        return cls(harness.compile_fits(side.bwd, saved(inputs), inputs), saved)

    def args(self, inputs: Named) -> tuple:
        return (inputs,) if self.saved is None else (self.saved(inputs), inputs)


def row_tensors(shape: PackedShape) -> Named:
    """The operands and cotangents with a row for each token, made once a shape."""
    names = ("x", "h", "dy", "dnew_residual")
    return {name: harness.normal(seed, (shape.T, shape.D), DTYPE) for seed, name in enumerate(names)}


def case_inputs(op: str, rows: Named, offsets: np.ndarray) -> Named:
    """The inputs of one case's sides; adaln's have no h, gate and dnew_residual."""
    B, D = len(offsets) - 1, rows["x"].shape[1]
    vectors = {name: harness.normal(10 + seed, (B, D), DTYPE) for seed, name in enumerate(("gate", "scale", "shift"))}
    ids = jnp.asarray(np.repeat(np.arange(B, dtype=np.int32), np.diff(offsets)))
    inputs = rows | vectors | {"offsets": jnp.asarray(offsets), "sequence_ids": ids}
    unused = () if op == "gated_residual_adaln" else ("h", "gate", "dnew_residual")
    return {name: value for name, value in inputs.items() if name not in unused}


def ready_jax(
    name: str, op: str, pass_name: str, programs: dict[str, Program], inputs: Named, offsets: np.ndarray
) -> harness.Ready:
    """programs: compiled once an op, shape, pass and number of sequences: their lengths are data."""
    if name not in programs:
        programs[name] = Program.of(peers_adaln.jax_side(op, name), pass_name, inputs)
    check = lambda results: checks.demand_right(*checks.packed_errors(results, inputs, offsets), LIMITS)
    return harness.checked(name, programs[name].compiled, programs[name].args(inputs), check)


def measure(run: harness.Run, shape: PackedShape, rows: Named, op: str, pass_name: str) -> None:
    """All distributions: first those with the shape's own number of sequences, which share programs; torch keeps one
    case."""
    dists = run.options["dists"] or shape.dists
    programs: dict[int, dict[str, Program]] = {}
    for dist in sorted(dists, key=lambda dist: shape.of_dist(dist).B != shape.B):
        own, offsets = shape.of_dist(dist), shapes.group_offsets(shapes.sequence_lengths(dist, shape.B, shape.T))
        row, inputs = harness.case_of(op, pass_name, own, DTYPE, dist), case_inputs(op, rows, offsets)
        makers = run.sides("pallas", ready_jax, op, pass_name, programs.setdefault(own.B, {}), inputs, offsets)
        if pass_name != "bwd":  # torch.compile's is timed together with its forward only
            makers |= run.torch_side(TORCH, row, LIMITS, sequences=shape.B)
        moved = own.moved_bytes(op, pass_name, vector_itemsize=inputs["scale"].dtype.itemsize)
        run.measure("pallas", row, makers, "gbps", moved)


main = command(
    Benchmark(
        name="adaln",
        shapes=shapes.PACKED,
        smoke=SMOKE,
        inputs=row_tensors,
        options={"ops": shapes.PACKED_OPS, "passes": ("fwd", "fwd+bwd"), "dists": ()},
        known={"passes": shapes.PACKED_PASSES, "dists": shapes.PACKED_DISTS},
        loops=("ops", "passes"),
        measure=measure,
        peers=f"xla,{TORCH}",
        ceiling="copy_gbps",
        torch=(
            TORCH,
            {"op": "adaln", "pass": "fwd", "dist": "unequal", "sequences": SMOKE.B, "modes": ["default"]}
            | {"limits": checks.LIMITS[LIMITS], **SMOKE.dims},
        ),
        answer_seconds=400,  # torch compiles five times for one answer
    )
)
