"""AdaLN over packed sequences, alone and after a gated residual: jaxops beside plain JAX and torch.compile, in GB/s beside the copy bandwidth.

python -m benchmarks.bench_adaln                                    # everything: 4 shapes, 12 distributions in all, 2 ops, fwd and fwd+bwd
python -m benchmarks.bench_adaln --shapes t65536_d3072 --dists unequal --ops adaln --passes fwd,bwd,fwd+bwd --peers xla
python -m benchmarks.bench_adaln --smoke --out /tmp/x               # tiny shapes, every code path, CPU too
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import checks, harness, peers_adaln, shapes
from benchmarks.peers_adaln import Named, Side
from benchmarks.peers_torch import TorchProcess
from benchmarks.shapes import PackedShape

DTYPE = jnp.bfloat16
LIMITS = "bfloat16 adaln"
SMOKE = PackedShape("smoke", 96, 64, 5, shapes.PACKED_DISTS)
PEERS = "xla,torch_compile"
TORCH_WAYS = "index,repeat,index_float32,onehot"
TORCH_MODES = "default,max-autotune-no-cudagraphs"
COMPILE_SECONDS = 400  # torch compiles five times for one answer


@dataclasses.dataclass(kw_only=True)
class Run(harness.Run):
    torch: TorchProcess | None
    torch_options: dict[str, list[str]]


@dataclasses.dataclass
class Case:
    """One op, shape, pass and distribution. shape has the distribution's own number of sequences; sequences is the named shape's."""

    op: str
    shape: PackedShape
    pass_name: str
    dist: str
    offsets: np.ndarray
    sequences: int

    @property
    def label(self) -> str:
        return f"{self.op} {self.shape.name} {self.dist} {self.pass_name}"


@dataclasses.dataclass
class Program:
    """A compiled pass. saved makes the backward's further argument, where the pass is a backward alone."""

    compiled: Callable[..., Named]
    seconds: float
    saved: Callable[[Named], Any] | None

    @classmethod
    def of(cls, side: Side, pass_name: str, inputs: Named) -> "Program":
        if pass_name != "bwd":
            return cls(*harness.compile_fits({"fwd": side.fwd, "fwd+bwd": side.fwd_bwd}[pass_name], inputs), None)
        saved = jax.jit(side.saved)
        return cls(*harness.compile_fits(side.bwd, saved(inputs), inputs), saved)

    def args(self, inputs: Named) -> tuple:
        return (inputs,) if self.saved is None else (self.saved(inputs), inputs)


def row_tensors(shape: PackedShape) -> Named:
    """The operands and cotangents that have a row for each token: made once a shape."""
    return {
        name: harness.normal(seed, (shape.T, shape.D), DTYPE)
        for seed, name in enumerate(("x", "h", "dy", "dnew_residual"))
    }


def case_inputs(case: Case, rows: Named) -> Named:
    """What one case's sides are called with: adaln's have no h, gate and dnew_residual."""
    B, D = case.shape.B, case.shape.D
    vectors = {name: harness.normal(10 + seed, (B, D), DTYPE) for seed, name in enumerate(("gate", "scale", "shift"))}
    ids = jnp.asarray(np.repeat(np.arange(B, dtype=np.int32), np.diff(case.offsets)))
    inputs = rows | vectors | {"offsets": jnp.asarray(case.offsets), "sequence_ids": ids}
    return (
        inputs
        if case.op == "gated_residual_adaln"
        else {name: value for name, value in inputs.items() if name not in ("h", "gate", "dnew_residual")}
    )


def compile_sides(run: Run, case: Case, inputs: Named) -> dict[str, Program]:
    """Each side that takes part. Once an op, shape, pass and number of sequences: their lengths are data."""
    programs = {}
    for name in ("pallas", *run.peers):
        try:
            programs[name] = Program.of(peers_adaln.jax_side(case.op, name), case.pass_name, inputs)
        except Exception as error:
            harness.print_left_out(f"{name} at {case.label}", error)
            run.left_out += name == "pallas"
    return programs


def ready_jax(name: str, program: Program, case: Case, inputs: Named) -> harness.Ready:
    args = program.args(inputs)
    results = program.compiled(*args)
    max_err, rms_err = checks.packed_errors(results, inputs, case.offsets)
    checks.demand_right(max_err, rms_err, LIMITS)
    out_bytes = sum(result.nbytes for result in results.values())
    del results
    ready = harness.ready(name, program.compiled, args, out_bytes, max_err)
    ready.facts["compile_s"] = program.seconds
    return ready


def ready_torch(torch: TorchProcess, case: Case, options: dict[str, list[str]]) -> harness.Ready:
    if case.pass_name == "bwd":
        raise NotImplementedError("torch.compile's backward is timed together with its forward only")
    limits = checks.LIMITS[LIMITS]
    request = {"op": case.op, "pass": case.pass_name, "dist": case.dist, "sequences": case.sequences, "limits": limits}
    answer = torch.ask(do="prepare", **request, **case.shape.dims, **options)
    tried = ", ".join(f"{recipe} {us:.0f} us" for recipe, us in answer["tried"].items())
    print(f"  torch_compile at {case.label}: {tried}; compiled and timed in {answer['prepared_s']:.0f} s", flush=True)
    for refusal in answer["refusals"]:
        print(f"  torch_compile at {case.label}: refused: {refusal}", flush=True)
    # torch's allocator reuses one result, so only the time counts.
    variant = harness.Variant("torch_compile", torch.times_us, harness.iterations_for(answer["us"], 0))
    return harness.Ready(variant, answer["max_err"], {"recipe": answer["recipe"]})


def measure_case(run: Run, case: Case, programs: dict[str, Program], inputs: Named) -> None:
    """Checks, times and writes every side of one case."""
    ready: dict[str, harness.Ready] = {}
    for name, program in programs.items():
        try:
            ready[name] = ready_jax(name, program, case, inputs)
        except Exception as error:
            harness.print_left_out(f"{name} at {case.label}", error)
            run.left_out += name == "pallas"
    if run.torch is not None:
        try:
            ready["torch_compile"] = ready_torch(run.torch, case, run.torch_options)
        except Exception as error:
            harness.print_left_out(f"torch_compile at {case.label}", error)
    times = run.times("pallas", ready)
    moved = case.shape.moved_bytes(case.op, case.pass_name)
    cold = harness.cold(moved)
    named = {
        "op": case.op,
        "pass": case.pass_name,
        "name": case.shape.name,
        "shape": case.shape.dims,
        "dtype": jnp.dtype(DTYPE).name,
        "dist": case.dist,
    }
    run.write("pallas", named, ready, times, "gbps", moved, cold=cold)
    line = " | ".join(f"{name} {t.us_p50:.0f} us {moved / t.us_p50 / 1e3:.0f} GB/s" for name, t in times.items())
    print(f"{case.label:52}{line}{'' if cold else ' | caches not cold'}", flush=True)


def measure_shape(run: Run, shape: PackedShape, dists: list[str], ops: list[str], passes: list[str]) -> None:
    rows = row_tensors(shape)
    # Those with the shape's own number of sequences first: they share what is compiled, torch's too, which keeps one case.
    dists = sorted(dists, key=lambda dist: shape.of_dist(dist).B != shape.B)
    for op in ops:
        for pass_name in passes:
            programs, compiled_for = {}, None
            for dist in dists:
                offsets = shapes.group_offsets(shapes.sequence_lengths(dist, shape.B, shape.T))
                case = Case(op, shape.of_dist(dist), pass_name, dist, offsets, shape.B)
                inputs = case_inputs(case, rows)
                if compiled_for != case.shape.B:
                    programs, compiled_for = compile_sides(run, case, inputs), case.shape.B
                measure_case(run, case, programs, inputs)


def start_torch() -> TorchProcess | None:
    """A machine without torch, or without a compiler for it, says so once."""
    torch = TorchProcess(root=str(harness.ROOT), answer_seconds=COMPILE_SECONDS)
    offsets = shapes.group_offsets(shapes.sequence_lengths("unequal", SMOKE.B, SMOKE.T))
    try:
        ready_torch(
            torch, Case("adaln", SMOKE, "fwd", "unequal", offsets, SMOKE.B), {"ways": ["index"], "modes": ["default"]}
        )
    except RuntimeError as error:
        harness.print_left_out("torch_compile", error)
        torch.close()
        return None
    return torch


def main(
    shape_names: str = typer.Option(
        ",".join(shapes.PACKED), "--shapes", help="Comma-separated names from benchmarks/shapes.py."
    ),
    dists: str = typer.Option("", help=f"Of {', '.join(shapes.PACKED_DISTS)}; by default each shape's own."),
    ops: str = typer.Option(",".join(shapes.PACKED_OPS)),
    passes: str = typer.Option("fwd,fwd+bwd", help=f"Of {', '.join(shapes.PACKED_PASSES)}; bwd leaves torch out."),
    peers: str = typer.Option(PEERS, help='"" for none; also: jaxops_xla, the portable backend of jaxops.'),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(5),
    torch_ways: str = typer.Option(
        TORCH_WAYS,
        help="How torch gets a row's modulation; each costs a compilation a case, the last two only with gradients.",
    ),
    torch_modes: str = typer.Option(
        TORCH_MODES, help="Of torch.compile: the first is tried with all ways, the others with the fastest."
    ),
    smoke: bool = typer.Option(False, help="Tiny shapes, every code path; needs --out."),
) -> None:
    """Appends to <out>/adaln.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.leave_room_for_torch()
    harness.demand_place(out, smoke)
    start = time.perf_counter()
    names = [name for name in peers.split(",") if name]
    options = {"ways": torch_ways.split(","), "modes": torch_modes.split(",")}
    torch = start_torch() if "torch_compile" in names else None
    file = harness.results_folder(out) / "adaln.jsonl"
    sides = [name for name in names if name != "torch_compile"]
    run = Run(
        file=file,
        rounds=rounds,
        ceiling=harness.write_copy(file, smoke),
        peers=sides,
        torch=torch,
        torch_options=options,
    )
    for shape in [SMOKE] if smoke else [shapes.PACKED[name] for name in shape_names.split(",")]:
        measure_shape(run, shape, dists.split(",") if dists else list(shape.dists), ops.split(","), passes.split(","))
        print(f"{shape.name} done after {time.perf_counter() - start:.0f} s", flush=True)
    if torch is not None:
        torch.close()
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
