"""FP8 linear layers with all their casts: jaxops' recipes beside bf16, XLA's own FP8 and torch's, and beside their own floor; and the products alone.

python -m benchmarks.bench_fp8_matmul                                              # everything: 6 shapes, 3 recipes, fwd, fwd+bwd and the products alone
python -m benchmarks.bench_fp8_matmul --shapes m8192_k8192_n8192 --recipes blockwise,blockwise_with_gw_hp --passes fwd+bwd --peers xla_bf16
python -m benchmarks.bench_fp8_matmul --smoke --out /tmp/x                         # a tiny shape, every code path, CPU too

fwd casts x and w in each call, fwd+bwd x, w and dy. `floor_us`: the same products of operands that were cast before, timed in the same run, and the fewest
bytes that the casts must move (fp8_products.cast_bytes) at the copy bandwidth; `of_floor`: floor_us / us_p50. `cast`: before the product or inside it;
`chosen`: whether the plan takes that by itself. gemm: one product of operands that were cast before, by jaxops' own kernel.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import typer

import jaxops
from benchmarks import checks, fp8_machine, fp8_products, harness, peers_fp8, shapes
from benchmarks.peers_torch import TorchProcess
from benchmarks.shapes import DenseShape
from jaxops.ops.fp8_matmul.plan import Plan, Problem
from jaxops.ops.fp8_matmul.recipes import RECIPES, Recipe

DTYPE = jnp.bfloat16
SMOKE = DenseShape(128, 256, 128)
PASSES = ("fwd", "fwd+bwd", "gemm")
PRODUCTS = {"fwd": ("fwd",), "fwd+bwd": ("fwd", "dgrad", "wgrad")}
DEFAULT_RECIPES = "tensorwise,rowwise,blockwise"
CASTS: tuple[Literal["before", "inside"], ...] = ("before", "inside")
PEERS = "xla_bf16,xla,torch_compile,deepgemm"


@dataclasses.dataclass
class Run:
    """What stays the same from case to case. xla_forms: which way of writing FP8 XLA does best, once a pass. left_out counts what jaxops could not do."""

    file: pathlib.Path
    rounds: int
    copy_gbps: float
    dense_tflops: float | None
    recipes: list[str]
    peers: list[str]
    torch: dict[str, TorchProcess]
    torch_passes: list[str]
    backend: str
    xla_forms: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: int = 0


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
    """One program of a comparison, compiled, checked and ready, or not.

    Attributes:
      recipe: jaxops' recipe; "" of a peer.
      own: whether it is jaxops' linear, or a product of its kernels in pass gemm, which is compared with the peers; a floor's products are not.
      facts: what its row says beside the times.
    """

    name: str
    recipe: str
    own: bool
    facts: dict
    ready: harness.Ready


def own_passes(recipe: Recipe, plan: Plan) -> dict[str, Callable[..., dict[str, Any]]]:
    """(x, w, dy, amax) -> results by name; amax, of x and w, is what delayed scaling is told."""

    def linear(x, w, amax):
        told = {"amax": amax} if recipe.delayed else {}
        result = jaxops.fp8_matmul(x, w, recipe=recipe.name, plan=plan, **told)
        return result if recipe.delayed else (result, None)

    def fwd(x, w, dy, amax):
        y, seen = linear(x, w, amax)
        return {"y": y} | ({} if seen is None else {"seen": jnp.stack(seen)})

    def fwd_bwd(x, w, dy, amax):
        y, vjp, seen = jax.vjp(lambda x, w: linear(x, w, amax), x, w, has_aux=True)
        dx, dw = vjp(dy)
        return {"y": y, "dx": dx, "dw": dw} | ({} if seen is None else {"seen": jnp.stack(seen)})

    return {"fwd": fwd, "fwd+bwd": fwd_bwd}


def limits_of(recipe: Recipe | None, pass_name: str) -> str:
    return "fp8 e5m2" if pass_name == "fwd+bwd" and (recipe is None or recipe.dout.dtype == "float8_e5m2") else "fp8"


def checked(name: str, compiled: Callable, args: tuple, inputs: Inputs, limits: str) -> harness.Ready:
    results = compiled(*args)
    max_err, rms_err = checks.linear_errors(
        {key: value for key, value in results.items() if key != "seen"}, *inputs.args
    )
    checks.demand_right(max_err, rms_err, limits)
    out_bytes = sum(result.nbytes for result in results.values())
    del results
    return harness.ready(name, compiled, args, out_bytes, max_err)


def own_side(
    run: Run, shape: DenseShape, recipe: Recipe, pass_name: str, cast: Literal["before", "inside"], inputs: Inputs
) -> Side:
    problem = Problem(shape.M, shape.K, shape.N, recipe.name, jnp.dtype(DTYPE).name)
    chosen = fp8_products.choose_plan(problem, run.backend)
    plan = fp8_products.choose_plan(problem, run.backend, cast)
    amax = (
        tuple(jnp.max(jnp.abs(tensor)).astype(jnp.float32) for tensor in (inputs.x, inputs.w))
        if recipe.delayed
        else None
    )
    args = (*inputs.args, amax)
    # Without XLA's Triton GEMMs, as the peers: jaxops calls XLA's products only where a weight gradient is of high precision or cuBLASLt takes an FP8 one.
    compiled, seconds = harness.compile_fits(own_passes(recipe, plan)[pass_name], *args, cublas=True)
    name = f"{recipe.name} {cast}"
    ready = checked(name, compiled, args, inputs, limits_of(recipe, pass_name))
    demand_cast(cast, compiled, args)
    facts = {
        "backend": plan.backend,
        "recipe": recipe.name,
        "cast": cast,
        "chosen": chosen.cast == cast,
        "compile_s": seconds,
    }
    facts["kernels"] = fp8_products.kernels_of(plan, PRODUCTS[pass_name])
    return Side(name, recipe.name, True, facts, ready)


def demand_cast(cast: str, compiled: Callable, args: tuple) -> None:
    """
    Raises:
      NotImplementedError: no kernel was launched that casts inside; the row would be one of another way of casting.
    """
    launched = harness.kernels(compiled, *args) if cast == "inside" else []
    if launched and not any("inside" in name for name, _ in launched):
        raise NotImplementedError(f"no kernel casts inside: {', '.join(name for name, _ in launched)}")


def floor_side(run: Run, shape: DenseShape, recipe: Recipe, pass_name: str, inputs: Inputs) -> Side:
    """The products of the plan that casts before them, and nothing else."""
    plan = fp8_products.choose_plan(
        Problem(shape.M, shape.K, shape.N, recipe.name, jnp.dtype(DTYPE).name), run.backend, "before"
    )
    tensors = {"x": inputs.x, "w": inputs.w, "dy": inputs.dy}
    q = {name: fp8_products.quantize_for(recipe, name, tensor) for name, tensor in tensors.items()}
    args = (q, inputs.x, inputs.dy)
    compiled, _ = harness.compile_fits(fp8_products.gemms(recipe, PRODUCTS[pass_name], plan), *args, cublas=True)
    name = f"{recipe.name} products"
    return Side(name, recipe.name, False, {}, checked(name, compiled, args, inputs, limits_of(recipe, pass_name)))


def jax_peer(run: Run, name: str, pass_name: str, inputs: Inputs) -> Side:
    if name == "xla_bf16":
        compiled, seconds = harness.compile_fits(peers_fp8.bf16_passes()[pass_name], *inputs.args, cublas=True)
        return Side(
            name,
            "",
            False,
            {"backend": name, "compile_s": seconds},
            checked(name, compiled, inputs.args, inputs, "bfloat16"),
        )
    forms = [run.xla_forms[pass_name]] if pass_name in run.xla_forms else ["scaled", "direct"]
    found: dict[str, Side] = {}
    for form in forms:
        try:
            compiled, seconds = harness.compile_fits(peers_fp8.fp8_passes(form)[pass_name], *inputs.args, cublas=True)
            calls = peers_fp8.fp8_calls(compiled)
            facts = {"backend": name, "recipe": f"tensorwise, {form}, {calls} cuBLASLt FP8 calls", "compile_s": seconds}
            found[form] = Side(
                name, "", False, facts, checked(name, compiled, inputs.args, inputs, limits_of(None, pass_name))
            )
        except Exception as error:
            harness.print_left_out(f"xla {form} {pass_name}", error)
    if not found:
        raise RuntimeError("neither way of writing it worked")
    if len(forms) > 1:  # the first shape decides
        quick = {form: min(side.ready.variant.times_us(3)) for form, side in found.items()}
        run.xla_forms[pass_name] = min(quick, key=lambda form: quick[form])
        print(
            f"  xla {pass_name}: "
            + ", ".join(f"{form} {us:.0f} us ({found[form].facts['recipe']})" for form, us in quick.items()),
            flush=True,
        )
    return found[run.xla_forms.get(pass_name, next(iter(found)))]


def torch_peer(run: Run, name: str, shape: DenseShape, pass_name: str) -> Side:
    torch, limits = run.torch[name], checks.LIMITS["fp8"]
    answer = torch.ask(
        do="prepare",
        op="fp8_matmul",
        library=fp8_machine.LIBRARIES[name],
        limits=limits,
        **{"pass": pass_name},
        **shape.dims,
    )
    variant = harness.Variant(name, torch.times_us, harness.iterations_for(answer["us"], 0))
    facts = {"backend": name, "recipe": answer["recipe"]}
    return Side(name, "", False, facts, harness.Ready(variant, answer["max_err"], {}))


def gemm_sides(run: Run, shape: DenseShape, inputs: Inputs) -> list[tuple[str, Callable[[], Side]]]:
    """The product alone. tensorwise: one scale each, sums of all of K in the tensor core, as cuBLASLt's; tensorwise promoted: partial sums of 128 in float32.
    blockwise: 1x128 by 128x128. blockwise wgrad: 1x128 by 1x128, the product x.T @ dy of the same shape. blockwise inside: x in bfloat16, cast on the way."""
    M, K, N = shape.M, shape.K, shape.N
    dtype = jnp.dtype(DTYPE).name

    def own(recipe_name: str, label: str, pass_name: str, fast: bool) -> Side:
        recipe = RECIPES[recipe_name]
        problem = Problem(M, K, N, recipe_name, dtype)
        plan = fp8_products.choose_plan(problem, run.backend, "before")
        tiles = fp8_products.own_tiles(problem, plan, pass_name)
        if (
            pass_name in recipe.fast and not fast
        ):  # sums in float32 want other tiles: those of a dgrad of the same shape
            same = Problem(M, N, K, recipe_name, dtype)
            tiles = fp8_products.own_tiles(same, fp8_products.choose_plan(same, run.backend, "before"), "dgrad")
        plan = dataclasses.replace(plan, **{pass_name: tiles})
        recipe = dataclasses.replace(recipe, fast=frozenset({pass_name} if fast else ()))
        names = ("x", "w") if pass_name == "fwd" else ("x", "dy")
        q = {name: fp8_products.quantize_for(recipe, name, getattr(inputs, name)) for name in names}
        args = (q, inputs.x, inputs.dy)
        compiled, seconds = harness.compile_fits(fp8_products.gemms(recipe, (pass_name,), plan), *args, cublas=True)
        facts = {
            "backend": plan.backend,
            "recipe": label,
            "compile_s": seconds,
            "kernels": fp8_products.kernels_of(plan, (pass_name,)),
        }
        return Side(label, label, True, facts, checked(label, compiled, args, inputs, limits_of(recipe, "fwd")))

    def inside() -> Side:
        recipe, label = RECIPES["blockwise"], "blockwise inside"
        plan = fp8_products.choose_plan(Problem(M, K, N, "blockwise", dtype), run.backend, "inside")
        q = fp8_products.quantize_for(recipe, "w", inputs.w)
        args = (inputs.x, q)
        compiled, seconds = harness.compile_fits(
            lambda x, w: {"y": jaxops.fp8_matmul(x, w, recipe="blockwise", plan=plan)}, *args, cublas=True
        )
        demand_cast("inside", compiled, args)
        facts = {
            "backend": plan.backend,
            "recipe": label,
            "compile_s": seconds,
            "kernels": fp8_products.kernels_of(plan, ("fwd",)),
        }
        return Side(label, label, True, facts, checked(label, compiled, args, inputs, "fp8"))

    def cublaslt() -> Side:
        q = {name: fp8_products.quantize_for(RECIPES["tensorwise"], name, getattr(inputs, name)) for name in ("x", "w")}
        scales = [tensor.scales for tensor in q.values() if tensor.scales is not None]
        args = (q["x"].values, q["w"].values_t)
        compiled, seconds = harness.compile_fits(peers_fp8.cublaslt_gemm, *args, cublas=True)
        if (calls := peers_fp8.fp8_calls(compiled)) != 1:
            raise NotImplementedError(f"XLA made {calls} cuBLASLt FP8 calls of it")
        result = compiled(*args)
        max_err, rms_err = checks.linear_errors({"y": (result * scales[0] * scales[1]).astype(DTYPE)}, *inputs.args)
        checks.demand_right(max_err, rms_err, "fp8")
        facts = {"backend": "cublaslt", "recipe": "tensorwise, unscaled, fast accumulation", "compile_s": seconds}
        return Side("cublaslt", "", False, facts, harness.ready("cublaslt", compiled, args, result.nbytes, max_err))

    makers: list[tuple[str, Callable[[], Side]]] = [
        ("tensorwise", lambda: own("tensorwise", "tensorwise", "fwd", True)),
        ("tensorwise promoted", lambda: own("tensorwise", "tensorwise promoted", "fwd", False)),
        ("blockwise", lambda: own("blockwise", "blockwise", "fwd", False)),
        ("blockwise wgrad", lambda: own("blockwise", "blockwise wgrad", "wgrad", False)),
        ("blockwise inside", inside),
    ]
    makers = [(name, make) for name, make in makers if name.split()[0] in run.recipes]
    if "xla_bf16" in run.peers:
        makers.append(("xla_bf16", lambda: jax_peer(run, "xla_bf16", "fwd", inputs)))
    return [*makers, ("cublaslt", cublaslt)]


def linear_sides(run: Run, shape: DenseShape, pass_name: str, inputs: Inputs) -> list[tuple[str, Callable[[], Side]]]:
    makers: list[tuple[str, Callable[[], Side]]] = []
    for recipe in (RECIPES[name] for name in run.recipes):
        makers += [
            (f"{recipe.name} {cast}", functools.partial(own_side, run, shape, recipe, pass_name, cast, inputs))
            for cast in CASTS
        ]
        makers.append((f"{recipe.name} products", functools.partial(floor_side, run, shape, recipe, pass_name, inputs)))
    makers += [
        (name, functools.partial(jax_peer, run, name, pass_name, inputs))
        for name in run.peers
        if name not in fp8_machine.LIBRARIES
    ]
    makers += [
        (name, functools.partial(torch_peer, run, name, shape, pass_name))
        for name in run.torch
        if pass_name in run.torch_passes
    ]
    return makers


def measure_case(run: Run, shape: DenseShape, pass_name: str, inputs: Inputs) -> None:
    """Checks, times and writes every side of one shape and pass, all of them interleaved."""
    label = f"{shape.name} {pass_name}"
    sides: dict[str, Side] = {}
    for name, make in (
        gemm_sides(run, shape, inputs) if pass_name == "gemm" else linear_sides(run, shape, pass_name, inputs)
    ):
        try:
            sides[name] = make()
        except Exception as error:  # a cast inside is not every recipe's; all else that jaxops cannot do is counted
            harness.print_left_out(f"{name} at {label}", error)
            run.left_out += name.split()[0] in RECIPES and not (
                name.endswith("inside") and isinstance(error, (NotImplementedError, ValueError))
            )
    times = harness.interleave([side.ready.variant for side in sides.values()], run.rounds)
    run.left_out += sum(name not in times for name, side in sides.items() if side.own)
    flops = shape.flops * len(PRODUCTS.get(pass_name, ("fwd",)))
    peers = {name: t for name, t in times.items() if not sides[name].own and not sides[name].recipe}
    for name, t in times.items():
        side = sides[name]
        if side.recipe and not side.own:
            continue  # a floor's products stand in the rows that are compared with them
        facts: dict[str, Any] = (
            side.facts
            | side.ready.facts
            | {"tflops": flops / t.us_p50 / 1e6}
            | floor_facts(run, shape, pass_name, side, t, times)
        )
        named = {
            "op": "fp8_matmul",
            "pass": pass_name,
            "name": shape.name,
            "shape": shape.dims,
            "dtype": jnp.dtype(DTYPE).name,
            "dist": "",
        }
        of_ceiling = None if run.dense_tflops is None else facts["tflops"] / run.dense_tflops
        vs = {peer: other.us_p50 / t.us_p50 for peer, other in peers.items()} if side.own else {}
        harness.append_row(
            run.file,
            harness.make_row(named | {"backend": facts.pop("backend")}, t, of_ceiling, vs, side.ready.max_err, **facts),
        )
        against = "".join(f", {ratio:.2f}x {peer}" for peer, ratio in vs.items())
        floor = f", {facts['of_floor']:.2f} of floor" if "of_floor" in facts else ""
        print(f"{label:34}{name:30}{t.us_p50:8.0f} us {facts['tflops']:6.0f} TFLOP/s{against}{floor}", flush=True)


def floor_facts(
    run: Run, shape: DenseShape, pass_name: str, side: Side, t: harness.Times, times: dict[str, harness.Times]
) -> dict[str, float]:
    """gemm_us: the products alone. A recipe that is cast inside has the same floor: the fewest bytes that a cast before it moves."""
    products = times.get(f"{side.recipe} products")
    if not side.own or products is None:
        return {}
    cast_us = fp8_products.cast_bytes(RECIPES[side.recipe], pass_name, shape.M, shape.K, shape.N) / run.copy_gbps / 1e3
    floor_us = products.us_p50 + cast_us
    return {"gemm_us": products.us_p50, "floor_us": floor_us, "of_floor": floor_us / t.us_p50}


def main(
    shape_names: str = typer.Option(
        ",".join(shapes.DENSE), "--shapes", help="Comma-separated names from benchmarks/shapes.py."
    ),
    recipes: str = typer.Option(DEFAULT_RECIPES, help=f"Of {', '.join(RECIPES)}."),
    passes: str = typer.Option(",".join(PASSES)),
    peers: str = typer.Option(PEERS, help='"" for none.'),
    torch_passes: str = typer.Option(
        "fwd", help="Passes in which torch takes part; fwd+bwd compiles for some seconds a shape."
    ),
    backend: str = typer.Option("auto", help="Of jaxops."),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(4),
    smoke: bool = typer.Option(False, help="A tiny shape, every code path; needs --out."),
) -> None:
    """Appends to <out>/fp8_matmul.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.leave_room_for_torch()
    harness.demand_place(out, smoke)
    start = time.perf_counter()
    names = [name for name in peers.split(",") if name]
    torch = fp8_machine.start_torch(names, op="fp8_matmul", **{"pass": "fwd"}, **SMOKE.dims)
    file = harness.results_folder(out) / "fp8_matmul.jsonl"
    ceilings, dense_tflops = fp8_machine.measure_machine(file, smoke)
    run = Run(
        file,
        rounds,
        ceilings.copy_gbps,
        dense_tflops,
        recipes.split(","),
        names,
        torch,
        torch_passes.split(","),
        backend,
    )
    for shape in [SMOKE] if smoke else [shapes.DENSE[name] for name in shape_names.split(",")]:
        inputs = Inputs.make(shape)
        for pass_name in passes.split(","):
            measure_case(run, shape, pass_name, inputs)
        del inputs
        print(f"{shape.name} done after {time.perf_counter() - start:.0f} s", flush=True)
    for process in torch.values():
        process.close()
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
