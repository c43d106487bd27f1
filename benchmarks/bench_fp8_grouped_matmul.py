"""FP8 grouped matmul, blockwise, the weights quantised before and every cast of activations and gradients counted: beside jaxops' own bf16 and torch's FP8.

python -m benchmarks.bench_fp8_grouped_matmul                       # everything: 6 shapes, balanced and skewed, fwd, dgrad, wgrad
python -m benchmarks.bench_fp8_grouped_matmul --shapes mixtral_up --passes wgrad,fwd+bwd --dists balanced
python -m benchmarks.bench_fp8_grouped_matmul --smoke --out /tmp/x  # a tiny shape, every code path, CPU too

fwd casts lhs, dgrad dout, wgrad both, each into the one layout that the pass reads. fwd+bwd is one training step of the layer with cached weights: lhs and dout
are cast once, into both layouts. TFLOP/s count routed rows.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxops
from benchmarks import checks, fp8_machine, fp8_products, harness, shapes
from benchmarks.peers_torch import TorchProcess
from benchmarks.shapes import GroupedShape
from jaxops._lib.fp8 import Quantized
from jaxops.ops.fp8_matmul.operand import cols_of
from jaxops.ops.fp8_matmul.plan import Plan, Problem
from jaxops.ops.fp8_matmul.recipes import RECIPES

DTYPE = jnp.bfloat16
RECIPE = RECIPES["blockwise"]
SMOKE = GroupedShape("smoke", 4, 384, 256, 128)
PASSES = ("fwd", "dgrad", "wgrad", "fwd+bwd")
PEERS = "jaxops_bf16,torch_grouped_mm,deepgemm"
_SHORT = 64  # rows of a group: the errors of a sum of fewer do not average out
_PARTS = {"fwd": ("fwd",), "dgrad": ("dgrad",), "wgrad": ("wgrad",), "fwd+bwd": ("fwd", "dgrad", "wgrad")}
Passes = dict[str, Callable[..., dict[str, Any]]]


@dataclasses.dataclass
class Run:
    """What stays the same from case to case. left_out counts what jaxops itself could not do."""

    file: pathlib.Path
    rounds: int
    ceilings: harness.Ceilings
    dense_tflops: float | None
    peers: list[str]
    torch: dict[str, TorchProcess]
    backend: str
    left_out: int = 0


@dataclasses.dataclass
class Inputs:
    """One shape's operands, made once. quantized: rhs in both layouts, as a step's first microbatch would leave it."""

    lhs: jax.Array
    rhs: jax.Array
    dout: jax.Array
    quantized: Quantized

    @classmethod
    def make(cls, shape: GroupedShape) -> "Inputs":
        G, M, K, N = shape.G, shape.M, shape.K, shape.N
        lhs, rhs, dout = (harness.normal(seed, dims, DTYPE) for seed, dims in enumerate([(M, K), (G, K, N), (M, N)]))
        return cls(lhs, rhs, dout, fp8_products.quantize_for(RECIPE, "w", rhs))

    def args(self, offsets: np.ndarray) -> tuple:
        return self.lhs, self.rhs, self.quantized, self.dout, jnp.asarray(offsets)


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
    def flops(self) -> int:
        return self.shape.flops * len(_PARTS[self.pass_name])

    @property
    def moved(self) -> int:
        """What the passes must read and write at the least: activations and gradients in bfloat16, the weights in FP8 (wgrad writes them in bfloat16)."""
        s = self.shape
        groups = int(np.count_nonzero(np.diff(self.offsets)))
        rows, weights = 2 * (s.M * s.K + s.M * s.N), groups * s.K * s.N
        parts = {"fwd": rows + weights, "dgrad": rows + weights, "wgrad": rows + 2 * s.G * s.K * s.N}
        return sum(parts[part] for part in _PARTS[self.pass_name])


def jaxops_fp8(plan: Plan) -> Passes:
    """(lhs, rhs, quantised rhs, dout, offsets) -> results by pass."""

    def fwd(lhs, rhs, quantized, dout, offsets):
        return {"fwd": jaxops.fp8_grouped_matmul(lhs, quantized, offsets, recipe=RECIPE.name, plan=plan)}

    def dgrad(lhs, rhs, quantized, dout, offsets):
        """XLA drops the forward, whose result nobody reads."""
        vjp = jax.vjp(
            lambda lhs: jaxops.fp8_grouped_matmul(lhs, quantized, offsets, recipe=RECIPE.name, plan=plan), lhs
        )[1]
        return {"dgrad": vjp(dout)[0]}

    def wgrad(lhs, rhs, quantized, dout, offsets):
        """As the op's backward, but for lhs' and dout's row layouts, which a whole step writes along with these and dgrad reads."""
        a, b = (
            cols_of(fp8_products.quantize_for(RECIPE, name, x, layouts="col", group_offsets=offsets))
            for name, x in (("x", lhs), ("dy", dout))
        )
        how = {"ragged": "contraction", "length": lhs.shape[0], "out_dtype": rhs.dtype, "fast": False}
        return {"wgrad": fp8_products.multiply(a, b, offsets, tiles=plan.wgrad, **how)}

    def fwd_bwd(lhs, rhs, quantized, dout, offsets):
        def call(lhs, rhs):
            return jaxops.fp8_grouped_matmul(lhs, rhs, offsets, recipe=RECIPE.name, rhs_quantized=quantized, plan=plan)

        out, vjp = jax.vjp(call, lhs, rhs)
        dlhs, drhs = vjp(dout)
        return {"fwd": out, "dgrad": dlhs, "wgrad": drhs}

    return {"fwd": fwd, "dgrad": dgrad, "wgrad": wgrad, "fwd+bwd": fwd_bwd}


def jaxops_bf16() -> Passes:
    """jaxops' own grouped matmul of the same operands in bfloat16."""

    def fwd(lhs, rhs, quantized, dout, offsets):
        return {"fwd": jaxops.grouped_matmul(lhs, rhs, offsets)}

    def dgrad(lhs, rhs, quantized, dout, offsets):
        return {"dgrad": jaxops.grouped_matmul(dout, rhs, offsets, transpose_rhs=True)}

    def wgrad(lhs, rhs, quantized, dout, offsets):
        return {"wgrad": jaxops.grouped_wgrad(lhs, dout, offsets)}

    return {
        "fwd": fwd,
        "dgrad": dgrad,
        "wgrad": wgrad,
        "fwd+bwd": lambda *args: fwd(*args) | dgrad(*args) | wgrad(*args),
    }


def compile_sides(
    run: Run, shape: GroupedShape, pass_name: str, inputs: Inputs
) -> dict[str, tuple[Callable, float, dict]]:
    """(compiled, seconds, facts) of each JAX side. Once a shape and pass: the group sizes are data."""
    args = inputs.args(shapes.group_offsets(shapes.group_sizes("balanced", shape.G, shape.M)))
    problem = Problem(shape.M, shape.K, shape.N, RECIPE.name, jnp.dtype(DTYPE).name, shape.G)
    compiled = {}
    for name in ("fp8", *(peer for peer in run.peers if peer == "jaxops_bf16")):
        try:
            facts = {}
            if name == "fp8":
                plan = fp8_products.choose_plan(problem, run.backend)
                passes = jaxops_fp8(plan)
                facts = {
                    "backend": plan.backend,
                    "recipe": RECIPE.name,
                    "kernels": fp8_products.kernels_of(plan, _PARTS[pass_name]),
                }
            else:
                passes = jaxops_bf16()
            compiled[name] = (*harness.compile_fits(passes[pass_name], *args), facts)
        except Exception as error:
            harness.print_left_out(f"{name} at {shape.name} {pass_name}", error)
            run.left_out += name == "fp8"
    return compiled


def ready_jax(name: str, compiled: Callable, case: Case, inputs: Inputs) -> harness.Ready:
    args = inputs.args(case.offsets)
    results = compiled(*args)
    tensors = (inputs.lhs, inputs.rhs, inputs.dout)
    sizes = np.diff(case.offsets)
    short = case.pass_name in ("wgrad", "fwd+bwd") and np.min(sizes[sizes > 0]) < _SHORT
    limits = jnp.dtype(DTYPE).name if name != "fp8" else "fp8 short sums" if short else "fp8"
    errors = [
        checks.grouped_errors(part, case.shape, result, tensors, case.offsets) for part, result in results.items()
    ]
    for max_err, rms_err in errors:
        checks.demand_right(max_err, rms_err, limits)
    out_bytes = sum(result.nbytes for result in results.values())
    del results
    return harness.ready(name, compiled, args, out_bytes, max(max_err for max_err, _ in errors))


def ready_torch(torch: TorchProcess, name: str, case: Case) -> harness.Ready:
    request = {
        "op": "fp8_grouped_matmul",
        "library": fp8_machine.LIBRARIES[name],
        "limits": checks.LIMITS["fp8"],
        "pass": case.pass_name,
        "dist": case.dist,
    }
    answer = torch.ask(do="prepare", **request, **case.shape.dims)
    return harness.Ready(
        harness.Variant(name, torch.times_us, harness.iterations_for(answer["us"], 0)),
        answer["max_err"],
        {"recipe": answer["recipe"]},
    )


def measure_case(run: Run, case: Case, compiled: dict[str, tuple[Callable, float, dict]], inputs: Inputs) -> None:
    """Checks, times and writes every side of one case."""
    ready: dict[str, harness.Ready] = {}
    for name, (fn, seconds, facts) in compiled.items():
        try:
            ready[name] = ready_jax(name, fn, case, inputs)
            ready[name].facts |= facts | {"compile_s": seconds}
        except Exception as error:
            harness.print_left_out(f"{name} at {case.label}", error)
            run.left_out += name == "fp8"
    if case.pass_name in ("fwd", "dgrad"):
        for name, process in run.torch.items():
            try:
                ready[name] = ready_torch(process, name, case)
            except Exception as error:
                harness.print_left_out(f"{name} at {case.label}", error)
    times = harness.interleave([side.variant for side in ready.values()], run.rounds)
    run.left_out += "fp8" in ready and "fp8" not in times
    least_us = (
        None
        if run.dense_tflops is None
        else dataclasses.replace(run.ceilings, dense_tflops=run.dense_tflops).least_us(case.flops, case.moved)
    )
    for name, t in times.items():
        named = {"op": "fp8_grouped_matmul", "pass": case.pass_name, "name": case.shape.name, "shape": case.shape.dims}
        named |= {"dtype": jnp.dtype(DTYPE).name, "dist": case.dist}
        facts = ready[name].facts | {"tflops": case.flops / t.us_p50 / 1e6, "cold": harness.cold(case.moved)}
        named["backend"] = facts.pop("backend", name)
        of_ceiling, vs = None if least_us is None else least_us / t.us_p50, harness.ratios(name, times, own="fp8")
        harness.append_row(run.file, harness.make_row(named, t, of_ceiling, vs, ready[name].max_err, **facts))
    line = " | ".join(
        f"{name} {t.us_p50:.0f} us {case.flops / t.us_p50 / 1e6:.0f} TFLOP/s" for name, t in times.items()
    )
    print(f"{case.label:32}{line}", flush=True)


def main(
    shape_names: str = typer.Option(
        ",".join(shapes.GROUPED), "--shapes", help="Comma-separated names from benchmarks/shapes.py."
    ),
    dists: str = typer.Option("balanced,skewed", help=f"Of {', '.join(shapes.DISTS)}."),
    passes: str = typer.Option(",".join(PASSES[:3]), help=f"Of {', '.join(PASSES)}."),
    peers: str = typer.Option(PEERS, help='"" for none.'),
    backend: str = typer.Option("auto", help="Of jaxops."),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(4),
    smoke: bool = typer.Option(False, help="A tiny shape, every code path; needs --out."),
) -> None:
    """Appends to <out>/fp8_grouped_matmul.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.leave_room_for_torch()
    harness.demand_place(out, smoke)
    start = time.perf_counter()
    names = [name for name in peers.split(",") if name]
    torch = fp8_machine.start_torch(names, op="fp8_grouped_matmul", **{"pass": "fwd", "dist": "balanced"}, **SMOKE.dims)
    file = harness.results_folder(out) / "fp8_grouped_matmul.jsonl"
    ceilings, dense_tflops = fp8_machine.measure_machine(file, smoke)
    run = Run(file, rounds, ceilings, dense_tflops, names, torch, backend)
    for shape in [SMOKE] if smoke else [shapes.GROUPED[name] for name in shape_names.split(",")]:
        inputs = Inputs.make(shape)
        for pass_name in passes.split(","):
            compiled = compile_sides(run, shape, pass_name, inputs)
            for dist in dists.split(","):
                offsets = shapes.group_offsets(shapes.group_sizes(dist, shape.G, shape.M))
                measure_case(run, Case(shape, pass_name, dist, offsets), compiled, inputs)
            del compiled
        del inputs
        print(f"{shape.name} done after {time.perf_counter() - start:.0f} s", flush=True)
    for process in torch.values():
        process.close()
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
