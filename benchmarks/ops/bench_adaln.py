"""AdaLN over packed sequences, alone and after a gated residual, beside plain JAX and torch.compile.

python -m benchmarks adaln                    # everything: 4 shapes, 12 distributions, 2 ops, fwd and fwd+bwd
python -m benchmarks adaln --shapes t65536_d3072 --dists unequal --ops adaln --passes fwd,bwd --peers xla
python -m benchmarks adaln --smoke --out /tmp/x    # tiny shapes, every code path, CPU too

Rates are in GB/s beside the copy bandwidth.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.peers import adaln as peers_adaln
from benchmarks.peers.adaln import Named, Side
from benchmarks.peers.torch_process import TorchProcess
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
    """One op, shape, pass and distribution.

    shape.B is the distribution's number of sequences, sequences that of the named shape.
    """

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


def case_inputs(case: Case, rows: Named) -> Named:
    """The inputs of one case's sides; adaln's have no h, gate and dnew_residual."""
    B, D = case.shape.B, case.shape.D
    vectors = {name: harness.normal(10 + seed, (B, D), DTYPE) for seed, name in enumerate(("gate", "scale", "shift"))}
    ids = jnp.asarray(np.repeat(np.arange(B, dtype=np.int32), np.diff(case.offsets)))
    inputs = rows | vectors | {"offsets": jnp.asarray(case.offsets), "sequence_ids": ids}
    unused = () if case.op == "gated_residual_adaln" else ("h", "gate", "dnew_residual")
    return {name: value for name, value in inputs.items() if name not in unused}


def ready_jax(name: str, case: Case, programs: dict[str, Program], inputs: Named) -> harness.Ready:
    """programs: compiled once an op, shape, pass and number of sequences: their lengths are data."""
    if name not in programs:
        programs[name] = Program.of(peers_adaln.jax_side(case.op, name), case.pass_name, inputs)
    check = lambda results: checks.demand_right(*checks.packed_errors(results, inputs, case.offsets), LIMITS)
    return harness.checked(name, programs[name].compiled, programs[name].args(inputs), check)


def ready_torch(torch: TorchProcess, case: Case, options: dict[str, list[str]]) -> harness.Ready:
    if case.pass_name == "bwd":
        raise NotImplementedError("torch.compile's backward is timed together with its forward only")
    request = {"op": case.op, "pass": case.pass_name, "dist": case.dist, "sequences": case.sequences}
    answer = torch.ask(do="prepare", limits=checks.LIMITS[LIMITS], **request, **case.shape.dims, **options)
    tried = ", ".join(f"{recipe} {us:.0f} us" for recipe, us in answer["tried"].items())
    print(f"  torch_compile at {case.label}: {tried}; compiled and timed in {answer['prepared_s']:.0f} s", flush=True)
    for refusal in answer["refusals"]:
        print(f"  torch_compile at {case.label}: refused: {refusal}", flush=True)
    return harness.torch_ready("torch_compile", torch, answer)


def measure_case(run: Run, case: Case, programs: dict[str, Program], inputs: Named) -> None:
    """Checks, times and writes every side of one case."""
    makers = run.sides("pallas", ready_jax, case, programs, inputs)
    if run.torch is not None:
        makers["torch_compile"] = functools.partial(ready_torch, run.torch, case, run.torch_options)
    moved = case.shape.moved_bytes(case.op, case.pass_name)
    row = harness.case_of(case.op, case.pass_name, case.shape, DTYPE, case.dist)
    run.measure("pallas", case.label, row, makers, "gbps", moved, cold=harness.cold(moved))


def measure_shape(run: Run, shape: PackedShape, dists: list[str], ops: list[str], passes: list[str]) -> None:
    rows = row_tensors(shape)
    # First the distributions with the shape's own number of sequences: they share programs, and torch keeps one case.
    dists = sorted(dists, key=lambda dist: shape.of_dist(dist).B != shape.B)
    for op in ops:
        for pass_name in passes:
            programs, compiled_for = {}, None
            for dist in dists:
                offsets = shapes.group_offsets(shapes.sequence_lengths(dist, shape.B, shape.T))
                case = Case(op, shape.of_dist(dist), pass_name, dist, offsets, shape.B)
                if compiled_for != case.shape.B:
                    programs, compiled_for = {}, case.shape.B
                measure_case(run, case, programs, case_inputs(case, rows))


def start_torch() -> TorchProcess | None:
    offsets = shapes.group_offsets(shapes.sequence_lengths("unequal", SMOKE.B, SMOKE.T))
    case, options = Case("adaln", SMOKE, "fwd", "unequal", offsets, SMOKE.B), {"ways": ["index"], "modes": ["default"]}
    return harness.start_torch("torch_compile", lambda torch: ready_torch(torch, case, options), COMPILE_SECONDS)


def main(
    shape_names: str = harness.shapes_option(shapes.PACKED),
    dists: str = typer.Option("", help=f"Of {', '.join(shapes.PACKED_DISTS)}; by default each shape's own."),
    ops: str = typer.Option(",".join(shapes.PACKED_OPS)),
    passes: str = typer.Option("fwd,fwd+bwd", help=f"Of {', '.join(shapes.PACKED_PASSES)}; bwd leaves torch out."),
    peers: str = typer.Option(PEERS, help='"" for none; also: jaxops_xla, the portable backend of jaxops.'),
    out: str = harness.OUT,
    rounds: int = typer.Option(5),
    torch_ways: str = typer.Option(
        TORCH_WAYS, help="How torch gets a row's modulation. Each is compiled once a case, the last two with gradients."
    ),
    torch_modes: str = typer.Option(
        TORCH_MODES, help="Of torch.compile: the first is tried with all ways, the others with the fastest."
    ),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/adaln.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.leave_room_for_torch()
    file = harness.begin("adaln", out, smoke)
    sides = harness.names(peers)
    torch = start_torch() if "torch_compile" in sides else None
    run = Run(
        file=file,
        rounds=rounds,
        ceiling=harness.write_copy(file, smoke),
        peers=[name for name in sides if name != "torch_compile"],
        torch=torch,
        torch_options={"ways": torch_ways.split(","), "modes": torch_modes.split(",")},
    )
    for shape in [SMOKE] if smoke else [shapes.PACKED[name] for name in shape_names.split(",")]:
        measure_shape(run, shape, dists.split(",") if dists else list(shape.dists), ops.split(","), passes.split(","))
        run.done(shape.name)
    if torch is not None:
        torch.close()
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
