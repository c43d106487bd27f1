"""fp8_grouped_matmul, blockwise with weights quantised before: beside jaxops' own bf16 and torch's FP8.

python -m benchmarks fp8_grouped_matmul          # everything: 6 shapes, balanced and skewed, fwd, dgrad, wgrad
python -m benchmarks fp8_grouped_matmul --shapes mixtral_up --passes wgrad,fwd+bwd --dists balanced
python -m benchmarks fp8_grouped_matmul --smoke --out /tmp/x    # a tiny shape, every code path, CPU too

Every cast of activations and gradients is part of the time: fwd casts lhs, dgrad dout, wgrad both, each into the one
layout that the pass reads. fwd+bwd is one training step of a layer with cached weights: lhs and dout are cast once,
into both layouts. gemm, beside wgrad, is its product alone, of operands quantised before. TFLOP/s count routed rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.harness.machine import cold
from benchmarks.ops import fp8_products
from benchmarks.peers.jax_passes import jaxops_passes
from benchmarks.shapes import GroupedShape
from jaxops.ops.fp8_matmul.operand import Operand, operand_of
from jaxops.ops.fp8_matmul.plan import Plan, Problem
from jaxops.ops.fp8_matmul.recipes import RECIPES

DTYPE = jnp.bfloat16
RECIPE = RECIPES["blockwise"]
SMOKE = GroupedShape("smoke", 4, 384, 256, 128)
PASSES = ("fwd", "dgrad", "wgrad", "fwd+bwd")
OURS, GEMM, TORCH = "fp8", "gemm", "torch_grouped_mm"
_SHORT = 64  # rows of a group: the errors of shorter sums do not average out
_PARTS = {"fwd": ("fwd",), "dgrad": ("dgrad",), "wgrad": ("wgrad",), "fwd+bwd": ("fwd", "dgrad", "wgrad")}
Passes = dict[str, Callable[..., dict[str, Any]]]


class Inputs:
    """One shape's operands, made once, and the programs of the last pass, compiled once for all distributions."""

    def __init__(self, shape: GroupedShape):
        s = shape
        sizes = [(s.M, s.K), (s.G, s.K, s.N), (s.M, s.N)]
        self.tensors = self.lhs, self.rhs, self.dout = tuple(
            harness.normal(seed, dims, DTYPE) for seed, dims in enumerate(sizes)
        )
        # rhs in both layouts, as a step's first microbatch leaves it.
        self.quantized = fp8_products.quantize_for(RECIPE, "w", self.rhs)
        self.pass_name, self.programs = "", dict[str, tuple[Callable, float]]()

    def programs_of(self, pass_name: str) -> dict[str, tuple[Callable, float]]:
        if pass_name != self.pass_name:
            self.pass_name, self.programs = pass_name, {}
        return self.programs


def moved_bytes(shape: GroupedShape, pass_name: str, offsets: np.ndarray) -> int:
    """The fewest bytes of the passes: activations and gradients in bfloat16, weights in FP8, wgrad in bfloat16."""
    s, groups = shape, int(np.count_nonzero(np.diff(offsets)))
    rows, weights = 2 * (s.M * s.K + s.M * s.N), groups * s.K * s.N
    parts = {"fwd": rows + weights, "dgrad": rows + weights, "wgrad": rows + 2 * s.G * s.K * s.N}
    return sum(parts[part] for part in _PARTS[pass_name])


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
    options = {"layouts": "col", "group_offsets": offsets}
    of = lambda name, x: operand_of(fp8_products.quantize_for(RECIPE, name, x, **options), "col")
    return of("x", lhs), of("dy", dout)


def multiply_columns(
    plan: Plan, operands: tuple[Operand, Operand], offsets: jax.Array, rows: int
) -> dict[str, jax.Array]:
    how = {"length": rows, "out_dtype": jnp.dtype(DTYPE), "fast": False}
    return {"wgrad": fp8_products.multiply(*operands, offsets, tiles=plan.wgrad, **how)}


def jaxops_bf16() -> Passes:
    """jaxops' own grouped matmul of the same operands in bfloat16."""
    own = jaxops_passes("auto")

    def of(*parts: str) -> Callable[..., dict[str, jax.Array]]:
        return lambda lhs, rhs, quantized, dout, offsets: {
            part: own[part](lhs, rhs, dout, offsets, None) for part in parts
        }

    return {pass_name: of(*parts) for pass_name, parts in _PARTS.items()}


def ready_jax(name: str, shape: GroupedShape, pass_name: str, inputs: Inputs, offsets: np.ndarray) -> harness.Ready:
    s, args = shape, (inputs.lhs, inputs.rhs, inputs.quantized, inputs.dout, jnp.asarray(offsets))
    plan = fp8_products.choose_plan(Problem(s.M, s.K, s.N, RECIPE.name, jnp.dtype(DTYPE).name, s.G))
    if name == GEMM:
        program = lambda operands, offsets: multiply_columns(plan, operands, offsets, s.M)
        args = quantize_columns(inputs.lhs, inputs.dout, args[-1]), args[-1]
    else:
        program = (jaxops_fp8(plan) if name == OURS else jaxops_bf16())[pass_name]
    programs = inputs.programs_of(pass_name)
    if name not in programs:
        programs[name] = harness.compile_fits(program, *args)
    sizes = np.diff(offsets)
    short = pass_name in ("wgrad", "fwd+bwd") and np.min(sizes[sizes > 0]) < _SHORT
    limits = jnp.dtype(DTYPE).name if name not in (OURS, GEMM) else "fp8 short sums" if short else "fp8"

    def check(results: dict[str, jax.Array]) -> float:
        errors = [checks.grouped_errors(part, s, result, inputs.tensors, offsets) for part, result in results.items()]
        return max(checks.demand_right(*each, limits) for each in errors)

    facts: dict[str, Any] = {"backend": GEMM if name == GEMM else plan.backend, "recipe": RECIPE.name}
    facts["kernels"] = fp8_products.kernels_of(plan, _PARTS[pass_name])
    return harness.checked(name, programs[name], args, check, **(facts if name in (OURS, GEMM) else {}))


def measure(run: harness.Run, shape: GroupedShape, inputs: Inputs, pass_name: str, dist: str) -> None:
    offsets = shapes.group_offsets(shapes.group_sizes(dist, shape.G, shape.M))
    makers = run.sides(OURS, ready_jax, shape, pass_name, inputs, offsets)
    if pass_name != "wgrad":
        makers.pop(GEMM, None)
    row = harness.case_of("fp8_grouped_matmul", pass_name, shape, DTYPE, dist)
    if pass_name in ("fwd", "dgrad"):
        makers |= run.torch_side(TORCH, row, "fp8")
    flops, moved = shape.flops * len(_PARTS[pass_name]), moved_bytes(shape, pass_name, offsets)
    c, least_us = run.ceilings, None
    if c.fp8_tflops is not None:
        least_us = dataclasses.replace(c, dense_tflops=c.fp8_tflops).least_us(flops, moved)
    run.measure(OURS, row, makers, "tflops", flops, least_us=least_us, cold=cold(moved))


main = command(
    Benchmark(
        name="fp8_grouped_matmul",
        shapes=shapes.GROUPED,
        smoke=SMOKE,
        inputs=Inputs,
        options={"passes": PASSES[:3], "dists": ("balanced", "skewed")},
        known={"passes": PASSES, "dists": shapes.DISTS},
        measure=measure,
        peers=f"{GEMM},jaxops_bf16,{TORCH}",
        rounds=4,
        ceilings={"dtype": DTYPE, "fp8": True},
        torch=(
            TORCH,
            {"op": "fp8_grouped_matmul", "pass": "fwd", "dist": "balanced", "limits": checks.LIMITS["fp8"]}
            | SMOKE.dims,
        ),
    )
)
