"""fp8_grouped_matmul, blockwise with weights quantised before: beside jaxops' own bf16 and torch's FP8.

python -m benchmarks fp8_grouped_matmul          # everything: 6 shapes, balanced and skewed, fwd, dgrad, wgrad
python -m benchmarks fp8_grouped_matmul --shapes mixtral_up --passes wgrad,fwd+bwd --dists balanced
python -m benchmarks fp8_grouped_matmul --smoke --out /tmp/x    # a tiny shape, every code path, CPU too

Every cast of activations and gradients is part of the time: fwd casts lhs, dgrad dout, wgrad both, each into the one
layout that the pass reads. fwd+bwd is one training step of a layer with cached weights: lhs and dout are cast once,
into both layouts. gemm, beside wgrad, is its product alone, of operands quantised before. TFLOP/s count routed rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jaxops
from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.ops import bench_grouped_matmul, fp8_machine, fp8_products
from benchmarks.peers.torch_process import TorchProcess
from benchmarks.shapes import GroupedShape
from jaxops._lib.numerics.fp8 import Quantized
from jaxops.ops.fp8_matmul.operand import Operand, cols_of
from jaxops.ops.fp8_matmul.plan import Plan, Problem
from jaxops.ops.fp8_matmul.recipes import RECIPES

DTYPE = jnp.bfloat16
RECIPE = RECIPES["blockwise"]
SMOKE = GroupedShape("smoke", 4, 384, 256, 128)
PASSES = ("fwd", "dgrad", "wgrad", "fwd+bwd")
OURS, GEMM, PEERS = "fp8", "gemm", "gemm,jaxops_bf16,torch_grouped_mm"
_SHORT = 64  # rows of a group: the errors of shorter sums do not average out
_PARTS = {"fwd": ("fwd",), "dgrad": ("dgrad",), "wgrad": ("wgrad",), "fwd+bwd": ("fwd", "dgrad", "wgrad")}
Passes = dict[str, Callable[..., dict[str, Any]]]


@dataclasses.dataclass(kw_only=True)
class Run(harness.Run):
    """ceilings: with the dense FP8 rate; None where XLA has no cuBLASLt FP8."""

    ceilings: harness.Ceilings | None
    torch: dict[str, TorchProcess]
    backend: str


@dataclasses.dataclass
class Inputs:
    """One shape's operands, made once. quantized: rhs in both layouts, as a step's first microbatch leaves it."""

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


class Case(bench_grouped_matmul.Case):
    @property
    def flops(self) -> int:
        return self.shape.flops * len(_PARTS[self.pass_name])

    @property
    def moved(self) -> int:
        """The fewest bytes of the passes: activations and gradients in bfloat16, weights in FP8, wgrad in bfloat16."""
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
        """XLA drops the forward."""
        vjp = jax.vjp(
            lambda lhs: jaxops.fp8_grouped_matmul(lhs, quantized, offsets, recipe=RECIPE.name, plan=plan), lhs
        )[1]
        return {"dgrad": vjp(dout)[0]}

    def wgrad(lhs, rhs, quantized, dout, offsets):
        """As the op's backward, without the row layouts of lhs and dout, which a whole step casts too, for dgrad."""
        return multiply_columns(plan, quantize_columns(lhs, dout, offsets), offsets, lhs.shape[0])

    def fwd_bwd(lhs, rhs, quantized, dout, offsets):
        def call(lhs, rhs):
            return jaxops.fp8_grouped_matmul(lhs, rhs, offsets, recipe=RECIPE.name, rhs_quantized=quantized, plan=plan)

        out, vjp = jax.vjp(call, lhs, rhs)
        dlhs, drhs = vjp(dout)
        return {"fwd": out, "dgrad": dlhs, "wgrad": drhs}

    return {"fwd": fwd, "dgrad": dgrad, "wgrad": wgrad, "fwd+bwd": fwd_bwd}


def quantize_columns(lhs: jax.Array, dout: jax.Array, offsets: jax.Array) -> tuple[Operand, Operand]:
    """Both operands of wgrad."""
    of = lambda name, x: cols_of(fp8_products.quantize_for(RECIPE, name, x, layouts="col", group_offsets=offsets))
    return of("x", lhs), of("dy", dout)


def multiply_columns(
    plan: Plan, operands: tuple[Operand, Operand], offsets: jax.Array, rows: int
) -> dict[str, jax.Array]:
    how = {"length": rows, "out_dtype": jnp.dtype(DTYPE), "fast": False}
    return {"wgrad": fp8_products.multiply(*operands, offsets, tiles=plan.wgrad, **how)}


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


def ready_jax(
    name: str, run: Run, case: Case, programs: dict[str, tuple[Callable, float]], inputs: Inputs
) -> harness.Ready:
    """programs: compiled once a shape and pass: the group sizes are data."""
    s, args = case.shape, inputs.args(case.offsets)
    plan = fp8_products.choose_plan(Problem(s.M, s.K, s.N, RECIPE.name, jnp.dtype(DTYPE).name, s.G), run.backend)
    if name == GEMM:
        program = lambda operands, offsets: multiply_columns(plan, operands, offsets, s.M)
        args = quantize_columns(inputs.lhs, inputs.dout, args[-1]), args[-1]
    else:
        program = (jaxops_fp8(plan) if name == OURS else jaxops_bf16())[case.pass_name]
    if name not in programs:
        programs[name] = harness.compile_fits(program, *args)
    tensors, sizes = (inputs.lhs, inputs.rhs, inputs.dout), np.diff(case.offsets)
    short = case.pass_name in ("wgrad", "fwd+bwd") and np.min(sizes[sizes > 0]) < _SHORT
    limits = jnp.dtype(DTYPE).name if name not in (OURS, GEMM) else "fp8 short sums" if short else "fp8"

    def check(results: dict[str, jax.Array]) -> float:
        errors = [checks.grouped_errors(part, s, result, tensors, case.offsets) for part, result in results.items()]
        return max(checks.demand_right(*each, limits) for each in errors)

    facts: dict[str, Any] = {"backend": GEMM if name == GEMM else plan.backend, "recipe": RECIPE.name}
    facts["kernels"] = fp8_products.kernels_of(plan, _PARTS[case.pass_name])
    return harness.checked(name, programs[name], args, check, **(facts if name in (OURS, GEMM) else {}))


def ready_torch(torch: TorchProcess, name: str, case: Case) -> harness.Ready:
    request = {"op": "fp8_grouped_matmul", "limits": checks.LIMITS["fp8"]}
    request |= {"pass": case.pass_name, "dist": case.dist}
    return harness.torch_ready(name, torch, torch.ask(do="prepare", **request, **case.shape.dims))


def measure_case(run: Run, case: Case, programs: dict[str, tuple[Callable, float]], inputs: Inputs) -> None:
    """Checks, times and writes every side of one case."""
    ours = {GEMM, "jaxops_bf16"} if case.pass_name == "wgrad" else {"jaxops_bf16"}
    jax_sides = (OURS, *(peer for peer in run.peers if peer in ours))
    makers = {name: functools.partial(ready_jax, name, run, case, programs, inputs) for name in jax_sides}
    if case.pass_name in ("fwd", "dgrad"):
        makers |= {name: functools.partial(ready_torch, torch, name, case) for name, torch in run.torch.items()}
    row = harness.case_of("fp8_grouped_matmul", case.pass_name, case.shape, DTYPE, case.dist)
    least_us = None if run.ceilings is None else run.ceilings.least_us(case.flops, case.moved)
    facts = {"least_us": least_us, "cold": harness.cold(case.moved)}
    run.measure(OURS, case.label, row, makers, "tflops", case.flops, **facts)


def main(
    shape_names: str = harness.shapes_option(shapes.GROUPED),
    dists: str = typer.Option("balanced,skewed", help=f"Of {', '.join(shapes.DISTS)}."),
    passes: str = typer.Option(",".join(PASSES[:3]), help=f"Of {', '.join(PASSES)}."),
    peers: str = typer.Option(PEERS, help='"" for none.'),
    backend: str = typer.Option("auto", help="Of jaxops."),
    out: str = harness.OUT,
    rounds: int = typer.Option(4),
    smoke: bool = harness.SMOKE,
) -> None:
    """Appends to <out>/fp8_grouped_matmul.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.leave_room_for_torch()
    file, names = harness.begin("fp8_grouped_matmul", out, smoke), harness.names(peers)
    torch = fp8_machine.start_torch(names, op="fp8_grouped_matmul", **{"pass": "fwd", "dist": "balanced"}, **SMOKE.dims)
    ceilings, fp8_tflops = fp8_machine.measure_machine(file, smoke)
    fp8 = None if fp8_tflops is None else dataclasses.replace(ceilings, dense_tflops=fp8_tflops)
    run = Run(file=file, rounds=rounds, ceiling=None, peers=names, ceilings=fp8, torch=torch, backend=backend)
    for shape in [SMOKE] if smoke else [shapes.GROUPED[name] for name in shape_names.split(",")]:
        inputs = Inputs.make(shape)
        for pass_name in passes.split(","):
            programs: dict[str, tuple[Callable, float]] = {}
            for dist in dists.split(","):
                offsets = shapes.group_offsets(shapes.group_sizes(dist, shape.G, shape.M))
                measure_case(run, Case(shape, pass_name, dist, offsets), programs, inputs)
        del inputs
        run.done(shape.name)
    for process in torch.values():
        process.close()
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
