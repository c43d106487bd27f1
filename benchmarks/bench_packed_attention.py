"""Attention within packed sequences: the ways that JAX offers (jaxops has none), so that a model can choose.

python -m benchmarks.bench_packed_attention                        # everything
python -m benchmarks.bench_packed_attention --smoke --out /tmp/x   # a tiny shape; on a CPU without cuDNN's ways
"""

import functools
import os

import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import checks, harness, peers_attention, shapes
from benchmarks.packing import Sequences
from benchmarks.shapes import AttentionShape

DTYPE = jnp.bfloat16
SMOKE = AttentionShape("smoke", 128, 2, 16, 4)


def measure_case(run: harness.Run, shape: AttentionShape, dist: str, passes: list[str]) -> None:
    """Checks, times and writes every way that works."""
    offsets = shapes.group_offsets(shapes.sequence_lengths(dist, shape.B, shape.T))
    qkv_dout = [harness.normal(seed, (shape.T, shape.N, shape.H), DTYPE) for seed in range(4)]
    sequences = Sequences.of(offsets)
    args = (*qkv_dout, sequences)
    want = checks.attention_reference(*qkv_dout, sequences)
    check = lambda results: checks.demand_right(*checks.attention_errors(results, want), "bfloat16 attention")

    for pass_name in passes:

        def ready_side(name: str, pass_name: str = pass_name) -> harness.Ready:
            program = peers_attention.PASSES[pass_name](peers_attention.SIDES[name])
            return harness.checked(name, harness.compile_fits(program, *args), args, check)

        row = harness.case_of("packed_attention", pass_name, shape, DTYPE, dist)
        row["shape"] |= {"B": len(offsets) - 1}
        makers = {name: functools.partial(ready_side, name) for name in run.peers}
        flops, label = shape.flops(pass_name, np.diff(offsets)), f"{shape.name} {dist} {pass_name}"
        run.measure("", label, row, makers, "tflops", flops, longest=sequences.longest)


def main(
    shape_names: str = harness.shapes_option(shapes.ATTENTION),
    dists: str = typer.Option("unequal", help=f"Of {', '.join(shapes.PACKED_DISTS)}."),
    passes: str = typer.Option(",".join(peers_attention.PASSES)),
    ways: str = typer.Option(",".join(peers_attention.SIDES)),
    out: str = harness.OUT,
    rounds: int = typer.Option(3),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/packed_attention.jsonl. TFLOP/s count the pairs within sequences only."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # a masked T * T of 24 heads in float32 is 26 GB
    file = harness.begin("packed_attention", out, smoke)
    run = harness.Run(file=file, rounds=rounds, ceiling=None, peers=ways.split(","))
    for shape in [SMOKE] if smoke else [shapes.ATTENTION[name] for name in shape_names.split(",")]:
        for dist in dists.split(","):
            measure_case(run, shape, dist, passes.split(","))
        run.done(shape.name)


if __name__ == "__main__":
    typer.run(main)
