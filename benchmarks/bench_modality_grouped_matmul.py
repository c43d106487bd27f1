"""Grouped products of several modalities: jaxops' one call beside one grouped_matmul a modality, and beside one of matrices that are all padded to the widest.

python -m benchmarks.bench_modality_grouped_matmul                                      # everything: 2 workloads x 2 distributions x 3 passes
python -m benchmarks.bench_modality_grouped_matmul --shapes vision_text --passes fwd
python -m benchmarks.bench_modality_grouped_matmul --smoke --out /tmp/x                 # a tiny workload, every code path, CPU too

TFLOP/s count each row's own product. The padded matrices are made before anything is timed; what comes out of their wgrad is left padded.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxops
from benchmarks import checks, harness, shapes
from benchmarks.shapes import GroupedShape
from benchmarks.shapes_modality import MODALITIES, ModalityShape

DISTS = ("balanced", "skewed")
DTYPE = jnp.bfloat16
OURS, EACH, PADDED = "jaxops", "one_call_each", "padded"
SMOKE = ModalityShape("smoke", (GroupedShape("vision", 2, 40, 32, 48), GroupedShape("text", 3, 24, 48, 16)))

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass
class Inputs:
    """One workload's operands: a rhs[G, K, N] a modality, and padded[G, K, N], which is all of them with zeros around."""

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
    """Every call gives zeros in the others' rows, so that adding puts the results together; XLA makes one pass of it."""
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
    """From (lhs, rhs, dout, offsets) to what the pass gives."""
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


@jax.jit
def _errors(got: Arrays, want: Arrays) -> jax.Array:
    each = [
        checks.relative_errors(g.reshape(-1, g.shape[-1]), w.reshape(-1, w.shape[-1]))
        for g, w in zip(got, want, strict=True)
    ]
    return jnp.max(jnp.stack(each), axis=0)  # max passes NaN on


def errors(got: Arrays, want: Arrays) -> tuple[float, float]:
    """(largest, RMS) error of each row over its RMS, the worst of all rows; a row that must be zero and is not counts as infinitely wrong."""
    max_err, rms_err = _errors(got, want)
    return float(max_err), float(rms_err)


def reference(shape: ModalityShape, pass_name: str, inputs: Inputs, offsets: jax.Array) -> Arrays:
    """The pass in float32. In dlhs what lies past a modality's columns is zero, in the result likewise."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (inputs.lhs, inputs.rhs, inputs.dout))
    with jax.default_matmul_precision("highest"):
        return jax.jit(program("xla", pass_name, "xla"))(*wide, offsets)


def ready_side(
    side: str, shape: ModalityShape, pass_name: str, inputs: Inputs, offsets: jax.Array, want: Arrays
) -> harness.Ready:
    args = inputs.args(side, offsets)
    compiled, seconds = harness.compile_fits(program(side, pass_name, "auto" if harness.on_gpu() else "pallas"), *args)
    results = compiled(*args)
    found = unpadded(results, shape) if side == PADDED and pass_name == "wgrad" else results
    max_err, rms_err = errors(found, want)
    checks.demand_right(max_err, rms_err, jnp.dtype(DTYPE).name)
    ready = harness.ready(side, compiled, args, sum(result.nbytes for result in results), max_err)
    ready.facts["compile_s"] = seconds
    return ready


def measure_case(run: harness.Run, shape: ModalityShape, pass_name: str, dist: str, inputs: Inputs) -> None:
    """Checks, times and writes every side of one case."""
    offsets = jnp.asarray(shapes.group_offsets(shape.sizes(dist)))
    label = f"{shape.name} {dist} {pass_name}"
    want = reference(shape, pass_name, inputs, offsets)
    ready = run.ready_sides(OURS, label, ready_side, shape, pass_name, inputs, offsets, want)
    del want
    times = run.times(OURS, ready)
    named = {
        "op": "modality_grouped_matmul",
        "pass": pass_name,
        "name": shape.name,
        "shape": shape.dims,
        "dtype": jnp.dtype(DTYPE).name,
        "dist": dist,
    }
    run.write(OURS, named, ready, times, "tflops", shape.flops)
    print(
        f"{label:36}"
        + " | ".join(
            f"{side} {t.us_p50:.0f} us {shape.flops / t.us_p50 / 1e6:.0f} TFLOP/s" for side, t in times.items()
        ),
        flush=True,
    )


def main(
    shape_names: str = typer.Option(
        ",".join(MODALITIES), "--shapes", help="Comma-separated names from benchmarks/shapes_modality.py."
    ),
    dists: str = typer.Option(",".join(DISTS), help="Within each modality."),
    passes: str = typer.Option(",".join(shapes.PASSES)),
    peers: str = typer.Option(f"{EACH},{PADDED}", help='"" for none; also: xla, the portable backend.'),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(5),
    smoke: bool = typer.Option(False, help="A tiny workload, every code path; needs --out."),
) -> None:
    """Appends to <out>/modality_grouped_matmul.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.demand_place(out, smoke)
    start = time.perf_counter()
    file = harness.results_folder(out) / "modality_grouped_matmul.jsonl"
    run = harness.Run(
        file=file,
        rounds=rounds,
        ceiling=harness.write_dense(file, DTYPE, smoke),
        peers=[name for name in peers.split(",") if name],
    )
    for shape in [SMOKE] if smoke else [MODALITIES[name] for name in shape_names.split(",")]:
        inputs = Inputs.make(shape)
        for pass_name in passes.split(","):
            for dist in dists.split(","):
                measure_case(run, shape, pass_name, dist, inputs)
        del inputs
        print(f"{shape.name} done after {time.perf_counter() - start:.0f} s", flush=True)
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
