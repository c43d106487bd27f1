"""jaxops' FP8 products of quantised operands by the kernel of a plan: floors of the FP8 rows, and GEMM rows."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

import jaxops
from benchmarks.ops import quantized_bytes
from jaxops._lib.numerics.fp8 import Quantized
from jaxops._lib.planning.device import current_device
from jaxops._lib.planning.tuned import tuned_rows
from jaxops.ops.fp8_matmul.gemm_pallas import multiply_pallas
from jaxops.ops.fp8_matmul.operand import Operand, operand_of
from jaxops.ops.fp8_matmul.plan import Plan, Problem, Tiles, candidates, make_plan
from jaxops.ops.fp8_matmul.recipes import SIDES, Recipe
from jaxops.ops.fp8_matmul.xla import multiply_xla

OP = "fp8_matmul"
RESULTS = {"fwd": "y", "dgrad": "dx", "wgrad": "dw"}
FORMATS = {"x": "lhs", "w": "rhs", "dy": "dout"}  # a tensor's format in a Recipe


def choose_plan(problem: Problem) -> Plan:
    """The op's own plan."""
    device = current_device()
    return make_plan(problem, device, tuned_rows(OP, device))


def own_tiles(problem: Problem, plan: Plan, pass_name: str) -> Tiles | None:
    """The plan's tiles; if it uses cuBLASLt, those of jaxops' kernel that tuning would start with."""
    tiles = getattr(plan, pass_name)
    if plan.backend != "triton" or tiles is None or tiles.kernel == "triton":
        return tiles
    return candidates(pass_name, problem, current_device(), "triton")[0]


def multiply(a: Operand, b: Operand, offsets: jax.Array | None = None, *, tiles: Tiles | None, **how) -> jax.Array:
    """A @ B.T by the kernel that tiles name; None is the xla backend."""
    if tiles is None or tiles.kernel == "xla":
        return multiply_xla(a, b, offsets, **how)
    if tiles.kernel == "pallas":
        return multiply_pallas(a, b, offsets, tiles=tiles, interpret=current_device().interpret, **how)
    from jaxops.ops.fp8_matmul.gemm_triton import multiply_triton  # jax-triton needs Python >= 3.12

    return multiply_triton(a, b, offsets, tiles=tiles, cores=current_device().cores, **how)


@functools.partial(jax.jit, static_argnames=("recipe", "name", "layouts"))
def quantize_for(
    recipe: Recipe, name: str, tensor: jax.Array, layouts: Literal["row", "col", "both"] = "both", group_offsets=None
) -> Quantized:
    """x, w or dy in the format of the recipe.

    Compiled once a shape; floors, GEMM rows and recipes share the results.
    """
    form = getattr(recipe, FORMATS[name])
    return jaxops.quantize(tensor, scaling=form.scaling, dtype=form.dtype, layouts=layouts, group_offsets=group_offsets)


def gemms(recipe: Recipe, passes: tuple[str, ...], plan: Plan) -> Callable[..., dict[str, jax.Array]]:
    """(quantised x, w, dy; x and dy in bfloat16, for high-precision weight gradients) -> results of the passes."""

    def call(q: dict[str, Quantized], x: jax.Array, dy: jax.Array):
        results = {}
        for pass_name in passes:
            if pass_name == "wgrad" and "wgrad" in recipe.half:
                results["dw"] = lax.dot_general(x, dy, (((0,), (0,)), ((), ())), preferred_element_type=x.dtype)
                continue
            tensors = {form: name for name, form in FORMATS.items()}
            a, b = (operand_of(q[tensors[form]], layout) for form, layout in SIDES[pass_name])
            how = {"out_dtype": jnp.bfloat16, "fast": pass_name in recipe.fast}
            results[RESULTS[pass_name]] = multiply(a, b, tiles=getattr(plan, pass_name), **how)
        return results

    return call


def kernels_of(plan: Plan, passes: tuple[str, ...]) -> dict[str, str]:
    """The kernel of each pass, in a few words."""
    found = {}
    for pass_name in passes:
        tiles = getattr(plan, pass_name)
        found[pass_name] = (
            "xla" if tiles is None or tiles.kernel == "xla" else f"{tiles.kernel} {tiles.bm}x{tiles.bn} {tiles.stages}"
        )
    return found


def cast_bytes(recipe: Recipe, pass_name: str, M: int, K: int, N: int) -> int:
    """The fewest bytes that the casts of x[M, K], w[K, N] and dy[M, N] move.

    Each tensor is read once (twice if its scale needs all of it first: `quantized_bytes.reads_needed`), and each layout
    that a product reads is written once, with its scales. fwd: x by rows, w by columns. inference: x by rows.
    fwd+bwd: x, w and dy in both layouts; with a high-precision weight gradient x and dy by rows only.
    """
    both = "row" if "wgrad" in recipe.half else "both"
    layouts = {
        "fwd": {"x": "row", "w": "col"},
        "inference": {"x": "row"},
        "fwd+bwd": {"x": both, "w": "both", "dy": both},
    }[pass_name]
    dims = {"x": (M, K), "w": (K, N), "dy": (M, N)}
    moved = 0
    for name, layout in layouts.items():
        scaling = getattr(recipe, FORMATS[name]).scaling
        reads = quantized_bytes.reads_needed(scaling, layout, given_amax=recipe.delayed and name != "dy")
        moved += quantized_bytes.moved_bytes(scaling, *dims[name], layout, reads)
    return moved
