"""Attention within packed sequences: what there is in JAX for it, none of it jaxops', so that a model can choose.

python -m benchmarks.bench_packed_attention                        # everything
python -m benchmarks.bench_packed_attention --smoke --out /tmp/x   # a tiny shape; on a CPU without cuDNN's ways
"""

import dataclasses
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import checks, harness, peers_attention, shapes
from benchmarks.packing import Sequences
from benchmarks.shapes import AttentionShape

DTYPE = jnp.bfloat16
SMOKE = AttentionShape("smoke", 128, 2, 16, 4)


@dataclasses.dataclass
class Case:
    shape: AttentionShape
    dist: str
    offsets: np.ndarray

    @property
    def label(self) -> str:
        return f"{self.shape.name} {self.dist}"


def measure_case(case: Case, passes: list[str], sides: list[str], file: pathlib.Path, rounds: int) -> None:
    """Checks, times and writes every way that works."""
    shape = case.shape
    qkv_dout = [harness.normal(seed, (shape.T, shape.N, shape.H), DTYPE) for seed in range(4)]
    sequences = Sequences.of(case.offsets)
    args = (*qkv_dout, sequences)
    want = checks.attention_reference(*qkv_dout, sequences)
    for pass_name in passes:
        ready: dict[str, harness.Ready] = {}
        for name in sides:
            try:
                compiled, seconds = harness.compile_fits(
                    peers_attention.PASSES[pass_name](peers_attention.SIDES[name]), *args
                )
                results = compiled(*args)
                max_err, rms_err = checks.attention_errors(results, want)
                checks.demand_right(max_err, rms_err, "bfloat16 attention")
                ready[name] = harness.ready(
                    name, compiled, args, sum(result.nbytes for result in results.values()), max_err
                )
                ready[name].facts["compile_s"] = seconds
            except Exception as error:  # a way that does not work here is a finding
                harness.print_left_out(f"{name} at {case.label} {pass_name}", error)
        times = harness.interleave([side.variant for side in ready.values()], rounds)
        flops = shape.flops(pass_name, np.diff(case.offsets))
        for name, t in times.items():
            named = {
                "op": "packed_attention",
                "pass": pass_name,
                "name": shape.name,
                "shape": shape.dims | {"B": len(case.offsets) - 1},
            }
            named |= {"dtype": jnp.dtype(DTYPE).name, "dist": case.dist, "backend": name}
            facts = ready[name].facts | {"tflops": flops / t.us_p50 / 1e6, "longest": sequences.longest}
            harness.append_row(file, harness.make_row(named, t, None, {}, ready[name].max_err, **facts))
            print(
                f"{case.label} {pass_name:8}{name:22}{t.us_p50:10.0f} us {flops / t.us_p50 / 1e6:8.1f} TFLOP/s",
                flush=True,
            )


def main(
    shape_names: str = typer.Option(
        ",".join(shapes.ATTENTION), "--shapes", help="Comma-separated names from benchmarks/shapes.py."
    ),
    dists: str = typer.Option("unequal", help=f"Of {', '.join(shapes.PACKED_DISTS)}."),
    passes: str = typer.Option(",".join(peers_attention.PASSES)),
    ways: str = typer.Option(",".join(peers_attention.SIDES)),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(3),
    smoke: bool = typer.Option(False, help="A tiny shape, every code path; needs --out."),
) -> None:
    """Appends to <out>/packed_attention.jsonl. TFLOP/s count the pairs within sequences only."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # a masked T * T of 24 heads in float32 is 26 GB
    harness.demand_place(out, smoke)
    start = time.perf_counter()
    file = harness.results_folder(out) / "packed_attention.jsonl"
    for shape in [SMOKE] if smoke else [shapes.ATTENTION[name] for name in shape_names.split(",")]:
        for dist in dists.split(","):
            offsets = shapes.group_offsets(shapes.sequence_lengths(dist, shape.B, shape.T))
            measure_case(Case(shape, dist, offsets), passes.split(","), ways.split(","), file, rounds)
        print(
            f"{shape.name} done after {time.perf_counter() - start:.0f} s, {jax.devices()[0].device_kind}", flush=True
        )


if __name__ == "__main__":
    typer.run(main)
