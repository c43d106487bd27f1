"""Grouped matmul: jaxops' three passes beside every peer that can be imported, over named shapes and distributions of group sizes.

python -m benchmarks.bench_grouped_matmul                       # everything: 6 shapes x 3 distributions x 3 passes
python -m benchmarks.bench_grouped_matmul --host                # host dispatch, launches and compile time instead
python -m benchmarks.bench_grouped_matmul --smoke --out /tmp/x  # tiny shapes, every code path, CPU too
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks import checks, harness, host_costs, shapes
from benchmarks.peers_jax import Passes, jax_peer, jaxops_passes
from benchmarks.peers_torch import TorchProcess
from benchmarks.shapes import GroupedShape
from jaxops.ops.grouped_matmul import Problem, make_plan
from jaxops.tuning import current_device, tuned_rows

DTYPE = jnp.bfloat16
SMOKE = GroupedShape("smoke", 4, 96, 64, 128)
OURS = "jaxops"
PEERS = "ragged_dot,tokamax_mosaic,tokamax_triton,torch_grouped_mm,cublas"


@dataclasses.dataclass
class Run:
    """What stays the same from case to case. sides: jaxops first, then the JAX peers. left_out counts what jaxops itself could not do."""

    file: pathlib.Path
    rounds: int
    ceilings: harness.Ceilings
    sides: dict[str, Passes]
    torch: TorchProcess | None
    left_out: int = 0


@dataclasses.dataclass
class Inputs:
    """One shape's operands, made once. dense is the one matrix of the equal dense product."""

    lhs: jax.Array
    rhs: jax.Array
    dout: jax.Array
    dense: jax.Array

    @classmethod
    def make(cls, shape: GroupedShape) -> "Inputs":
        G, M, K, N = shape.G, shape.M, shape.K, shape.N
        return cls(
            *(harness.normal(seed, dims, DTYPE) for seed, dims in enumerate([(M, K), (G, K, N), (M, N), (K, N)]))
        )

    def args(self, side: str, offsets: np.ndarray) -> tuple[jax.Array, ...]:
        return (
            self.lhs,
            self.dense if side == "cublas" else self.rhs,
            self.dout,
            jnp.asarray(offsets),
            jnp.asarray(np.diff(offsets)),
        )


@dataclasses.dataclass
class Case:
    """One shape, pass and distribution."""

    shape: GroupedShape
    pass_name: str
    dist: str
    offsets: np.ndarray

    @property
    def label(self) -> str:
        return f"{self.shape.name} {self.dist} {self.pass_name}"

    @property
    def out_bytes(self) -> int:
        s = self.shape
        return 2 * {"fwd": s.M * s.N, "dgrad": s.M * s.K, "wgrad": s.G * s.K * s.N}[self.pass_name]


def kernel_of(case: Case) -> str:
    """Which of jaxops' kernels the case runs."""
    if not harness.on_gpu():
        return "pallas"
    device, problem = (
        current_device(),
        Problem(case.shape.G, case.shape.M, case.shape.K, case.shape.N, jnp.dtype(DTYPE).name),
    )
    return getattr(make_plan(problem, device, tuned_rows("grouped_matmul", device)), case.pass_name).kernel


def ready_jax(side: str, compiled: Callable, case: Case, inputs: Inputs) -> harness.Ready:
    """Checks one call's result, then gets it ready to be timed."""
    args = inputs.args(side, case.offsets)
    if side == "cublas":
        max_err = None  # JAX's own product is not on trial
        jax.block_until_ready(compiled(*args))
    else:
        max_err, rms_err = checks.grouped_errors(
            case.pass_name, case.shape, compiled(*args), (inputs.lhs, inputs.rhs, inputs.dout), case.offsets
        )
        checks.demand_right(max_err, rms_err, jnp.dtype(DTYPE).name)
    return harness.ready(side, compiled, args, case.out_bytes, max_err)


def ready_torch(torch: TorchProcess, case: Case) -> harness.Ready:
    answer = torch.ask(
        do="prepare", op="grouped_matmul", **case.shape.dims, **{"pass": case.pass_name, "dist": case.dist}
    )
    checks.demand_right(answer["max_err"], answer["rms_err"], jnp.dtype(DTYPE).name)
    # torch's allocator reuses one result, so only the time counts.
    return harness.Ready(
        harness.Variant("torch_grouped_mm", torch.times_us, harness.iterations_for(answer["us"], 0)),
        answer["max_err"],
        {"recipe": answer["recipe"]},
    )


def compile_sides(run: Run, shape: GroupedShape, pass_name: str, inputs: Inputs) -> dict[str, tuple[Callable, float]]:
    """(compiled, seconds) of each side that takes part at this shape. Once a shape and pass: the group sizes are data."""
    compiled = {}
    any_offsets = shapes.group_offsets(shapes.group_sizes("balanced", shape.G, shape.M))
    for side, passes in run.sides.items():
        if side == "cublas" and not shape.name.startswith(("mixtral", "smoke")):
            continue
        try:
            # jax.lax.ragged_dot multiplies every row by every group's matrix on a GPU.
            if (
                side == "ragged_dot"
                and harness.on_gpu()
                and (seconds := shape.G * shape.flops / (0.5e12 * run.ceilings.dense_tflops)) > 2
            ):
                raise TimeoutError(f"one call would take about {seconds:.0f} s")
            compiled[side] = harness.compile_fits(
                passes[pass_name], *inputs.args(side, any_offsets), cublas=side == "cublas"
            )
        except Exception as error:
            harness.print_left_out(f"{side} at {shape.name} {pass_name}", error)
            run.left_out += side == OURS
    return compiled


def measure_case(run: Run, case: Case, compiled: dict[str, tuple[Callable, float]], inputs: Inputs) -> None:
    """Checks, times and writes every side of one case."""
    ready: dict[str, harness.Ready] = {}
    for side, (fn, seconds) in compiled.items():
        if side == "ragged_dot" and case.dist != "balanced":
            continue  # its time does not depend on the sizes, and it is the slowest by far
        try:
            ready[side] = ready_jax(side, fn, case, inputs)
            ready[side].facts["compile_s"] = seconds
        except Exception as error:
            harness.print_left_out(f"{side} at {case.label}", error)
            run.left_out += side == OURS
    if run.torch is not None:
        try:
            ready["torch_grouped_mm"] = ready_torch(run.torch, case)
        except Exception as error:
            harness.print_left_out(f"torch_grouped_mm at {case.label}", error)
    times = harness.interleave([side.variant for side in ready.values()], run.rounds)
    run.left_out += OURS in ready and OURS not in times
    moved = case.shape.moved_bytes(case.pass_name, np.diff(case.offsets))
    least_us = run.ceilings.least_us(case.shape.flops, moved)
    cold = harness.cold(moved)
    for side, t in times.items():
        named = {"op": "grouped_matmul", "pass": case.pass_name, "name": case.shape.name, "shape": case.shape.dims}
        named |= {
            "dtype": jnp.dtype(DTYPE).name,
            "dist": case.dist,
            "backend": kernel_of(case) if side == OURS else side,
        }
        facts = ready[side].facts | {"tflops": case.shape.flops / t.us_p50 / 1e6, "cold": cold}
        harness.append_row(
            run.file,
            harness.make_row(
                named, t, least_us / t.us_p50, harness.ratios(side, times, OURS), ready[side].max_err, **facts
            ),
        )
    line = " | ".join(
        f"{side} {t.us_p50:.0f} us {case.shape.flops / t.us_p50 / 1e6:.0f} TFLOP/s" for side, t in times.items()
    )
    print(f"{case.label:32}{line}{'' if cold else ' | caches not cold'}", flush=True)


def measure_machine(run_torch: TorchProcess | None, file: pathlib.Path, smoke: bool) -> harness.Ceilings:
    """The ceilings, written as rows of their own. torch's cuBLAS counts too, where it is faster than XLA's choice."""
    m = shapes.GROUPED["mixtral_up"]
    n, copied, wide = (64, 1 << 20, (96, 64, 128)) if smoke else (8192, 2 << 30, (m.M, m.K, m.N))
    ceilings, times = harness.measure_ceilings(n, DTYPE, copied, dense=wide)
    sizes = {"dense_square": (n, n, n), "dense_wide": wide}
    recipes: dict[str, dict] = {}
    if run_torch is not None:
        for name, (rows, k, cols) in list(sizes.items()):
            try:
                answer = run_torch.ask(
                    do="prepare", op="grouped_matmul", **{"pass": "dense", "M": rows, "K": k, "N": cols}
                )
                times[f"{name} torch"] = harness.Times.of(run_torch.times_us(harness.iterations_for(answer["us"], 0)))
                sizes[f"{name} torch"], recipes[f"{name} torch"] = (rows, k, cols), {"recipe": answer["recipe"]}
            except RuntimeError as error:
                harness.print_left_out(f"torch {name}", error)
    rates = {
        name: 2 * rows * k * cols / times[name].us_p50 / 1e6 for name, (rows, k, cols) in sizes.items() if name in times
    }
    ceilings = dataclasses.replace(ceilings, dense_tflops=max(rates.values()))
    harness.append_row(file, harness.copy_row(copied, times.pop("copy")))
    for name, t in times.items():
        backend = "torch_matmul" if name.endswith("torch") else "xla"
        case = {"op": "matmul", "pass": "fwd", "name": name.removesuffix(" torch"), "dist": "", "backend": backend}
        case |= {"shape": dict(zip("MKN", sizes[name], strict=True)), "dtype": jnp.dtype(DTYPE).name}
        of = rates[name] / ceilings.dense_tflops
        harness.append_row(file, harness.make_row(case, t, of, {}, None, tflops=rates[name], **recipes.get(name, {})))
    each = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
    print(
        f"ceilings: copy {ceilings.copy_gbps:.0f} GB/s, dense {ceilings.dense_tflops:.1f} TFLOP/s ({each})", flush=True
    )
    return ceilings


def choose_sides(names: list[str], backend: str) -> dict[str, Passes]:
    sides = {OURS: jaxops_passes(backend)}
    for name in names:
        try:
            sides[name] = jax_peer(name)
        except ImportError as error:
            harness.print_left_out(name, error)
    return sides


def main(
    shape_names: str = typer.Option(
        ",".join(shapes.GROUPED), "--shapes", help="Comma-separated names from benchmarks/shapes.py."
    ),
    dists: str = typer.Option("balanced,skewed,one_group", help=f"Of {', '.join(shapes.DISTS)}."),
    passes: str = typer.Option(",".join(shapes.PASSES)),
    peers: str = typer.Option(PEERS, help='"" for none; also: xla, the portable backend of jaxops.'),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(5),
    host: bool = typer.Option(False, help="Measure host dispatch, launches and compile time instead."),
    smoke: bool = typer.Option(False, help="Tiny shapes, every code path; needs --out."),
) -> None:
    """Appends to <out>/grouped_matmul.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.leave_room_for_torch()
    harness.demand_place(out, smoke)
    file = harness.results_folder(out) / "grouped_matmul.jsonl"
    if host:
        host_costs.measure(file, SMOKE if smoke else shapes.GROUPED["mixtral_up"], calls=20 if smoke else 500)
        return
    start = time.perf_counter()
    chosen = [SMOKE] if smoke else [shapes.GROUPED[name] for name in shape_names.split(",")]
    names = [name for name in peers.split(",") if name]
    torch = TorchProcess(root=str(harness.ROOT)) if "torch_grouped_mm" in names else None
    backend = "auto" if harness.on_gpu() else "pallas"  # interpreted
    sides = choose_sides([name for name in names if name != "torch_grouped_mm"], backend)
    if torch is not None:
        try:  # a machine without torch says so once
            torch.ask(do="prepare", op="grouped_matmul", **SMOKE.dims, **{"pass": "fwd", "dist": "balanced"})
        except RuntimeError as error:
            harness.print_left_out("torch_grouped_mm", error)
            torch = None
    run = Run(file, rounds, measure_machine(torch, file, smoke), sides, torch)
    for shape in chosen:
        inputs = Inputs.make(shape)
        for pass_name in passes.split(","):
            compiled = compile_sides(run, shape, pass_name, inputs)
            for dist in dists.split(","):
                offsets = shapes.group_offsets(shapes.group_sizes(dist, shape.G, shape.M))
                measure_case(run, Case(shape, pass_name, dist, offsets), compiled, inputs)
        del inputs
        print(f"{shape.name} done after {time.perf_counter() - start:.0f} s", flush=True)
    if torch is not None:
        torch.close()
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
