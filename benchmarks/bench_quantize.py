"""Quantisation to FP8: jaxops' one pass beside what one writes in jnp and torch.compile, in GB/s beside the copy bandwidth.

python -m benchmarks.bench_quantize                                 # everything: 5 shapes, 4 scalings, one layout and both
python -m benchmarks.bench_quantize --shapes m8192_k4096 --scalings block_1x128 --layouts both --peers xla
python -m benchmarks.bench_quantize --smoke --out /tmp/x            # tiny shapes, every code path, CPU too

GB/s count the bfloat16 tensor once and every value and scale once, also where the scale of a whole tensor makes a second read necessary: `passes` says so.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import typer

import jaxops
from benchmarks import checks, fp8_machine, harness, peers_fp8, quantized_bytes, shapes
from benchmarks.peers_torch import TorchProcess
from benchmarks.shapes import MatrixShape

SCALINGS = ("tensorwise", "rowwise", "block_1x128", "block_128x128")
LAYOUTS = ("row", "both")
PEERS = "xla,torch_compile"
SMOKE = MatrixShape(256, 128)
LIMITS = "fp8 cast"
_CHECKED_ROWS = 1024


@dataclasses.dataclass(kw_only=True)
class Run(harness.Run):
    torch: TorchProcess | None


@dataclasses.dataclass
class Case:
    shape: MatrixShape
    scaling: Any
    layouts: Any

    @property
    def label(self) -> str:
        return f"{self.shape.name} {self.scaling} {self.layouts}"

    @property
    def moved(self) -> int:
        return quantized_bytes.moved_bytes(self.scaling, self.shape.M, self.shape.K, self.layouts)

    @property
    def facts(self) -> dict:
        return {
            "scaling": self.scaling,
            "layouts": self.layouts,
            "passes": quantized_bytes.reads_needed(self.scaling, self.layouts),
        }


def jaxops_side(case: Case, backend: str) -> Callable[[jax.Array], peers_fp8.Named]:
    def call(x):
        q = jaxops.quantize(x, scaling=case.scaling, layouts=case.layouts, backend=backend)
        parts = {"values": q.values, "scales": q.scales, "values_t": q.values_t, "scales_t": q.scales_t}
        return {name: part for name, part in parts.items() if part is not None}

    return call


@jax.jit
def differing(got: peers_fp8.Named, want: peers_fp8.Named) -> dict[str, jax.Array]:
    """How many elements of each part have other bits."""
    bits = {1: jnp.uint8, 4: jnp.uint32}
    as_bits = functools.partial(
        jax.tree.map, lambda part: jax.lax.bitcast_convert_type(part, bits[part.dtype.itemsize])
    )
    return jax.tree.map(lambda a, b: jnp.sum(a != b, dtype=jnp.int32), as_bits(got), as_bits(want))


def demand_same_bits(got: peers_fp8.Named, want: peers_fp8.Named) -> None:
    """
    Raises:
      ArithmeticError: a value or a scale is another one.
    """
    for name, part in want.items():
        if name not in got or got[name].shape != part.shape or got[name].dtype != part.dtype:
            raise ArithmeticError(f"wrong result: {name} must be {part.dtype}{part.shape}")
    if wrong := {
        name: int(count) for name, count in differing({name: got[name] for name in want}, want).items() if int(count)
    }:
        raise ArithmeticError(f"wrong result: other bits than the xla backend's: {wrong}")


def peer_errors(case: Case, got: peers_fp8.Named, x: jax.Array) -> tuple[float, float]:
    """(largest, RMS) error over the RMS of rows, of some rows and, where they are there, of some columns. A peer's scales are [rows, blocks]."""
    worst = [_relative_errors(got["values"][:_CHECKED_ROWS], got["scales"], x[:_CHECKED_ROWS], case.scaling)]
    if "values_t" in got:
        worst.append(
            _relative_errors(got["values_t"][:_CHECKED_ROWS], got["scales_t"], x[:, :_CHECKED_ROWS].T, case.scaling)
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


def ready_side(name: str, case: Case, x: jax.Array, want: peers_fp8.Named) -> harness.Ready:
    peer = functools.partial(peers_fp8.quantize, scaling=case.scaling, layouts=case.layouts)
    side = peer if name == "xla" else jaxops_side(case, name.removeprefix("jaxops_"))
    compiled, seconds = harness.compile_fits(side, x)
    got = compiled(x)
    if name == "xla":
        max_err, rms_err = peer_errors(case, got, x)
        checks.demand_right(max_err, rms_err, LIMITS)
    else:
        demand_same_bits(got, want)
        max_err = 0.0
    out_bytes = sum(part.nbytes for part in got.values())
    del got
    ready = harness.ready(name, compiled, (x,), out_bytes, max_err)
    ready.facts["compile_s"] = seconds
    return ready


def ready_torch(torch: TorchProcess, case: Case) -> harness.Ready:
    if (case.scaling, case.layouts) != ("block_1x128", "row"):
        raise NotImplementedError("only the row layout of 1x128 is timed by torch.compile")
    answer = torch.ask(do="prepare", op="quantize", limits=checks.LIMITS[LIMITS], **case.shape.dims)
    return harness.Ready(
        harness.Variant("torch_compile", torch.times_us, harness.iterations_for(answer["us"], 0)),
        answer["max_err"],
        {"recipe": answer["recipe"]},
    )


def measure_case(run: Run, case: Case, x: jax.Array) -> None:
    """Checks, times and writes every side of one case."""
    ready: dict[str, harness.Ready] = {}
    try:
        want = jax.jit(jaxops_side(case, "xla"))(x)
        ready = run.ready_sides("pallas", case.label, ready_side, case, x, want)
        del want
    except Exception as error:  # without the xla backend nothing of jaxops' is checked
        harness.print_left_out(f"jaxops at {case.label}", error)
        run.left_out += 1
    if run.torch is not None and (case.scaling, case.layouts) == ("block_1x128", "row"):
        try:
            ready["torch_compile"] = ready_torch(run.torch, case)
        except Exception as error:
            harness.print_left_out(f"torch_compile at {case.label}", error)
    times = run.times("pallas", ready)
    named = {
        "op": "quantize",
        "pass": "fwd",
        "name": case.shape.name,
        "shape": case.shape.dims,
        "dtype": "bfloat16",
        "dist": "",
    }
    run.write("pallas", named, ready, times, "gbps", case.moved, cold=harness.cold(case.moved), **case.facts)
    line = " | ".join(f"{name} {t.us_p50:.0f} us {case.moved / t.us_p50 / 1e3:.0f} GB/s" for name, t in times.items())
    own = f" | {case.moved / times['pallas'].us_p50 / 1e3 / run.ceiling:.2f} of copy" if "pallas" in times else ""
    print(f"{case.label:40}{line}{own}", flush=True)


def main(
    shape_names: str = typer.Option(
        ",".join(shapes.MATRICES), "--shapes", help="Comma-separated names from benchmarks/shapes.py."
    ),
    scalings: str = typer.Option(",".join(SCALINGS)),
    layouts: str = typer.Option(",".join(LAYOUTS)),
    peers: str = typer.Option(PEERS, help='"" for none; also: jaxops_xla, the portable backend of jaxops.'),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(5),
    smoke: bool = typer.Option(False, help="A tiny shape, every code path; needs --out."),
) -> None:
    """Appends to <out>/quantize.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.leave_room_for_torch()
    harness.demand_place(out, smoke)
    start = time.perf_counter()
    names = [name for name in peers.split(",") if name]
    torch = fp8_machine.start_torch(names, op="quantize", **SMOKE.dims).get("torch_compile")
    file = harness.results_folder(out) / "quantize.jsonl"
    sides = [name for name in names if name != "torch_compile"]
    run = Run(file=file, rounds=rounds, ceiling=harness.write_copy(file, smoke), peers=sides, torch=torch)
    for shape in [SMOKE] if smoke else [shapes.MATRICES[name] for name in shape_names.split(",")]:
        x = harness.normal(0, (shape.M, shape.K), jnp.bfloat16)
        for scaling in scalings.split(","):
            for layout in layouts.split(","):
                measure_case(run, Case(shape, scaling, layout), x)
        del x
        print(f"{shape.name} done after {time.perf_counter() - start:.0f} s", flush=True)
    if torch is not None:
        torch.close()
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
