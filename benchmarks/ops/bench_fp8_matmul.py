"""FP8 linear layers with all their casts, and the products alone: jaxops' recipes beside bf16, XLA's FP8 and torch's.

python -m benchmarks fp8_matmul                       # everything: 11 shapes, 3 recipes, all passes
python -m benchmarks fp8_matmul --shapes m8192_k8192_n8192 --recipes blockwise --passes fwd+bwd --peers xla_bf16
python -m benchmarks fp8_matmul --smoke --out /tmp/x  # a tiny shape, every code path, CPU too

fwd casts x and w in each call, fwd+bwd x, w and dy, inference x: its w is quantised before. gemm is one product of
quantised operands by jaxops' kernel.

Rows have `floor_us`: the products of operands quantised before, timed in the same run, plus the fewest bytes that the
casts must move (fp8_products.cast_bytes) at the copy bandwidth. `of_floor` is floor_us / us_p50.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxops
from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.ops import fp8_products
from benchmarks.peers import fp8 as peers_fp8
from benchmarks.shapes import DenseShape
from jaxops.ops.fp8_matmul.plan import Plan, Problem
from jaxops.ops.fp8_matmul.recipes import RECIPES, Recipe

DTYPE = jnp.bfloat16
SMOKE = DenseShape(128, 256, 128)
PASSES = ("fwd", "fwd+bwd", "inference", "gemm")
PRODUCTS = {"fwd": ("fwd",), "inference": ("fwd",), "fwd+bwd": ("fwd", "dgrad", "wgrad")}
DEFAULT_RECIPES = ("tensorwise", "rowwise", "blockwise")
TORCH = "torch_compile"  # for fwd+bwd it compiles for some seconds a shape


@dataclasses.dataclass
class Inputs:
    x: jax.Array
    w: jax.Array
    dy: jax.Array

    @classmethod
    def make(cls, shape: DenseShape) -> "Inputs":
        M, K, N = shape.M, shape.K, shape.N
        return cls(*(harness.normal(seed, dims, DTYPE) for seed, dims in enumerate([(M, K), (K, N), (M, N)])))

    @property
    def args(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.x, self.w, self.dy


@dataclasses.dataclass
class Side:
    """One program of a comparison.

    Attributes:
      recipe: jaxops' recipe; "" of a peer.
      own: whether it is compared with the peers: jaxops' linear, and its kernels in pass gemm, but no floor's products.
      ready: checked, with the entries of its row.
    """

    recipe: str
    own: bool
    ready: harness.Ready


Makers = dict[str, Callable[[], Side]]


def own_passes(recipe: Recipe, plan: Plan) -> dict[str, Callable[..., dict[str, Any]]]:
    """(x, w, dy, amax) -> results by name. amax, of x and w: what delayed scaling needs. Inference: w is Quantized."""

    def linear(x, w, amax):
        given = {"amax": amax} if recipe.delayed else {}
        result = jaxops.fp8_matmul(x, w, recipe=recipe.name, plan=plan, **given)
        return result if recipe.delayed else (result, None)

    def fwd(x, w, dy, amax):
        y, new_amax = linear(x, w, amax)
        return {"y": y} | ({} if new_amax is None else {"amax": jnp.stack(new_amax)})

    def fwd_bwd(x, w, dy, amax):
        y, vjp, new_amax = jax.vjp(lambda x, w: linear(x, w, amax), x, w, has_aux=True)
        dx, dw = vjp(dy)
        return {"y": y, "dx": dx, "dw": dw} | ({} if new_amax is None else {"amax": jnp.stack(new_amax)})

    return {"fwd": fwd, "fwd+bwd": fwd_bwd, "inference": fwd}


def limits_of(recipe: Recipe | None, pass_name: str) -> str:
    return "fp8 e5m2" if pass_name == "fwd+bwd" and (recipe is None or recipe.dout.dtype == "float8_e5m2") else "fp8"


def checked(name: str, program: Callable, args: tuple, inputs: Inputs, limits: str, **facts) -> harness.Ready:
    """Compiled without XLA's Triton GEMMs, as the peers; jaxops leaves a product to XLA only for high-precision weight
    gradients and where cuBLASLt takes the FP8 one."""

    def check(results: dict[str, jax.Array]) -> float:
        tensors = {key: value for key, value in results.items() if key != "amax"}
        return checks.demand_right(*checks.linear_errors(tensors, *inputs.args), limits)

    compiled = harness.compile_fits(program, *args, cublas=True)
    facts = {key: fact(compiled[0]) if callable(fact) else fact for key, fact in facts.items()}
    return harness.checked(name, compiled, args, check, **facts)


def problem_of(shape: DenseShape, recipe: str) -> Problem:
    return Problem(shape.M, shape.K, shape.N, recipe, jnp.dtype(DTYPE).name)


def own_side(shape: DenseShape, recipe: Recipe, pass_name: str, inputs: Inputs) -> Side:
    plan = fp8_products.choose_plan(problem_of(shape, recipe.name))
    amax = tuple(jnp.max(jnp.abs(tensor)).astype(jnp.float32) for tensor in (inputs.x, inputs.w))
    cast = "inside" if plan.fwd is not None and plan.fwd.cast_lhs else "before"
    facts: dict[str, Any] = {"backend": plan.backend, "recipe": recipe.name, "cast": cast}
    facts["kernels"] = fp8_products.kernels_of(plan, PRODUCTS[pass_name])
    w = fp8_products.quantize_for(recipe, "w", inputs.w) if pass_name == "inference" else inputs.w
    args = (inputs.x, w, inputs.dy, amax if recipe.delayed else None)
    program, limits = own_passes(recipe, plan)[pass_name], limits_of(recipe, pass_name)
    return Side(recipe.name, True, checked(recipe.name, program, args, inputs, limits, **facts))


def floor_side(shape: DenseShape, recipe: Recipe, pass_name: str, inputs: Inputs) -> Side:
    """Only the products of the plan."""
    plan = fp8_products.choose_plan(problem_of(shape, recipe.name))
    tensors = {"x": inputs.x, "w": inputs.w, "dy": inputs.dy}
    q = {name: fp8_products.quantize_for(recipe, name, tensor) for name, tensor in tensors.items()}
    program, limits = fp8_products.gemms(recipe, PRODUCTS[pass_name], plan), limits_of(recipe, pass_name)
    name = f"{recipe.name} products"
    return Side(recipe.name, False, checked(name, program, (q, inputs.x, inputs.dy), inputs, limits))


def bf16_side(pass_name: str, inputs: Inputs) -> Side:
    program = peers_fp8.bf16_passes()["fwd" if pass_name == "inference" else pass_name]
    return Side("", False, checked("xla_bf16", program, inputs.args, inputs, "bfloat16"))


def xla_side(run: harness.Run, pass_name: str, inputs: Inputs) -> Side:
    """XLA's FP8, in the form that is faster at the first shape, which `run.options` keeps."""
    chosen = run.options.setdefault(f"form of xla {pass_name}", [])
    found: dict[str, harness.Ready] = {}
    for form in chosen or ["scaled", "direct"]:
        try:
            program = peers_fp8.fp8_passes(form)[pass_name]
            recipe = lambda compiled, form=form: (
                f"tensorwise, {form}, {peers_fp8.fp8_calls(compiled)} cuBLASLt FP8 calls"
            )
            found[form] = checked("xla", program, inputs.args, inputs, limits_of(None, pass_name), recipe=recipe)
        except Exception as error:
            harness.print_left_out(f"xla {form} {pass_name}", error)
    if not found:
        raise RuntimeError("neither way of writing it worked")
    if not chosen:
        quick = {form: min(side.variant.times_us(3)) for form, side in found.items()}
        chosen.append(min(quick, key=lambda form: quick[form]))
        times = ", ".join(f"{form} {us:.0f} us ({found[form].facts['recipe']})" for form, us in quick.items())
        print(f"  xla {pass_name}: {times}", flush=True)
    return Side("", False, found[chosen[0]])


def gemm_sides(run: harness.Run, shape: DenseShape, inputs: Inputs) -> Makers:
    """The product alone.

    tensorwise: one scale a tensor, sums over all of K in the tensor core, as cuBLASLt's. tensorwise promoted: partial
    sums of 128 in float32. blockwise: 1x128 by 128x128. blockwise wgrad: 1x128 by 1x128, x.T @ dy of the same shape.
    """

    def own(recipe_name: str, label: str, pass_name: str, fast: bool) -> Side:
        recipe, problem = RECIPES[recipe_name], problem_of(shape, recipe_name)
        plan = fp8_products.choose_plan(problem)
        tiles = fp8_products.own_tiles(problem, plan, pass_name)
        if pass_name in recipe.fast and not fast:  # sums in float32 need the tiles of a dgrad of the same shape
            same = problem_of(DenseShape(shape.M, shape.N, shape.K), recipe_name)
            tiles = fp8_products.own_tiles(same, fp8_products.choose_plan(same), "dgrad")
        plan = dataclasses.replace(plan, **{pass_name: tiles})
        recipe = dataclasses.replace(recipe, fast=frozenset({pass_name} if fast else ()))
        names = ("x", "w") if pass_name == "fwd" else ("x", "dy")
        q = {name: fp8_products.quantize_for(recipe, name, getattr(inputs, name)) for name in names}
        program, args = fp8_products.gemms(recipe, (pass_name,), plan), (q, inputs.x, inputs.dy)
        facts = {"backend": plan.backend, "recipe": label, "kernels": fp8_products.kernels_of(plan, (pass_name,))}
        return Side(label, True, checked(label, program, args, inputs, limits_of(recipe, "fwd"), **facts))

    def cublaslt() -> Side:
        q = {name: fp8_products.quantize_for(RECIPES["tensorwise"], name, getattr(inputs, name)) for name in ("x", "w")}
        scale = math.prod(tensor.scales for tensor in q.values() if tensor.scales is not None)
        args = (q["x"].values, q["w"].values_t)
        compiled = harness.compile_fits(peers_fp8.cublaslt_gemm, *args, cublas=True)
        if (calls := peers_fp8.fp8_calls(compiled[0])) != 1:
            raise NotImplementedError(f"XLA made {calls} cuBLASLt FP8 calls of it")

        def check(result: jax.Array) -> float:
            errors = checks.linear_errors({"y": (result * scale).astype(DTYPE)}, *inputs.args)
            return checks.demand_right(*errors, "fp8")

        recipe = "tensorwise, unscaled, fast accumulation"
        return Side("", False, harness.checked("cublaslt", compiled, args, check, recipe=recipe))

    makers: Makers = {
        "tensorwise": lambda: own("tensorwise", "tensorwise", "fwd", True),
        "tensorwise promoted": lambda: own("tensorwise", "tensorwise promoted", "fwd", False),
        "blockwise": lambda: own("blockwise", "blockwise", "fwd", False),
        "blockwise wgrad": lambda: own("blockwise", "blockwise wgrad", "wgrad", False),
    }
    makers = {name: make for name, make in makers.items() if name.split()[0] in run.options["recipes"]}
    if "xla_bf16" in run.peers:
        makers["xla_bf16"] = lambda: bf16_side("fwd", inputs)
    return makers | {"cublaslt": cublaslt}


def linear_sides(run: harness.Run, row: dict, shape: DenseShape, inputs: Inputs) -> Makers:
    makers: Makers = {}
    pass_name = row["pass"]
    for recipe in (RECIPES[name] for name in run.options["recipes"]):
        makers[recipe.name] = functools.partial(own_side, shape, recipe, pass_name, inputs)
        products = functools.partial(floor_side, shape, recipe, pass_name, inputs)
        makers[f"{recipe.name} products"] = products
    peers = {"xla_bf16": lambda: bf16_side(pass_name, inputs), "xla": lambda: xla_side(run, pass_name, inputs)}
    makers |= {name: peers[name] for name in run.peers}
    if pass_name == "inference":
        makers.pop("xla", None)  # it would cast w in each call
    torch = run.torch_side(TORCH, row, "fp8") if pass_name in run.options["torch_passes"] else {}
    return makers | {name: lambda make=make: Side("", False, make()) for name, make in torch.items()}


def measure(run: harness.Run, shape: DenseShape, inputs: Inputs, pass_name: str) -> None:
    """All sides of one shape and pass, interleaved; the products alone are in the rows that are compared with them."""
    row = harness.case_of("fp8_matmul", pass_name, shape, DTYPE)
    label, sides = harness.label_of(row), dict[str, Side]()

    def kept(name: str, make: Callable[[], Side]) -> harness.Ready:
        sides[name] = make()
        return sides[name].ready

    makers = gemm_sides(run, shape, inputs) if pass_name == "gemm" else linear_sides(run, row, shape, inputs)
    own = {name for name in makers if name.split()[0] in RECIPES}
    _, times = run.time(own, label, {name: functools.partial(kept, name, make) for name, make in makers.items()})
    flops = shape.flops * len(PRODUCTS.get(pass_name, ("fwd",)))
    peers = {name: t for name, t in times.items() if not sides[name].recipe}
    for name, t in times.items():
        side = sides[name]
        if side.recipe and not side.own:
            continue
        facts = floor_facts(run, shape, pass_name, side, t, times)
        compared = {name: t} | (peers if side.own else {})
        vs = harness.ratios(name, compared, own=name)
        run.write_side(row, name, side.ready, t, vs, "tflops", flops, **facts)
        against = "".join(f", {ratio:.2f}x {peer}" for peer, ratio in vs.items())
        floor = f", {facts['of_floor']:.2f} of floor" if facts else ""
        print(
            f"{label:34} {name:30}{t.us_p50:8.0f} us {flops / t.us_p50 / 1e6:6.0f} TFLOP/s{against}{floor}", flush=True
        )


def floor_facts(
    run: harness.Run, shape: DenseShape, pass_name: str, side: Side, t: harness.Times, times: dict[str, harness.Times]
) -> dict[str, float]:
    """gemm_us: the products alone."""
    products = times.get(f"{side.recipe} products")
    if not side.own or products is None:
        return {}
    moved = fp8_products.cast_bytes(RECIPES[side.recipe], pass_name, shape.M, shape.K, shape.N)
    floor_us = products.us_p50 + moved / run.ceilings.copy_gbps / 1e3
    return {"gemm_us": products.us_p50, "floor_us": floor_us, "of_floor": floor_us / t.us_p50}


main = command(
    Benchmark(
        name="fp8_matmul",
        shapes=shapes.DENSE,
        smoke=SMOKE,
        inputs=Inputs.make,
        options={"passes": PASSES, "recipes": DEFAULT_RECIPES, "torch_passes": ("fwd",)},
        known={"recipes": RECIPES, "torch_passes": ("fwd", "fwd+bwd")},
        loops=("passes",),
        measure=measure,
        peers=f"xla_bf16,xla,{TORCH}",
        rounds=4,
        ceilings={"dtype": DTYPE, "fp8": True},
        ceiling="fp8_tflops",
        torch=(TORCH, {"op": "fp8_matmul", "pass": "fwd", "limits": checks.LIMITS["fp8"], **SMOKE.dims}),
    )
)
