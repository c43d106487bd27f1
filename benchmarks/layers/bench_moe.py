"""A mixture-of-experts layer: jaxops' beside the same layer with tokamax or lax.ragged_dot and XLA.

python -m benchmarks moe                          # everything: 3 shapes, fwd and fwd+bwd, 3 distributions
python -m benchmarks moe --shapes mixtral_t16384 --passes fwd --peers ""
python -m benchmarks moe --smoke --out /tmp/x     # a tiny shape, every code path, CPU too

TFLOP/s count the routed rows' products. All sides use the same float32 router: with random logits, or with logits that
force even or Zipf groups (shapes_moe.preferences). Rows also have the share of the time outside the products (on a GPU)
and the bytes that the layer needs beside its operands and results.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxops
from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.peers.jax_passes import tokamax_dot
from benchmarks.shapes import moe as shapes_moe
from benchmarks.shapes.moe import MoeShape

PASSES = ("fwd", "fwd+bwd")
DISTS = ("router", "balanced", "skewed")
SMOKE = MoeShape("smoke", 24, 4, 2, 16, 32)
DTYPE = jnp.bfloat16
OURS = "jaxops"
UNFUSED = "jaxops_unfused"  # permute, three grouped products with the activation in XLA, and combine
FP8 = {f"jaxops_fp8_{recipe}": recipe for recipe in ("tensorwise", "rowwise", "blockwise", "blockwise_with_gw_hp")}
PRODUCTS = ("grouped_gemm", "grouped_glu", "moe_mlp_bwd", "fp8_gemm")  # names of kernels that multiply
SHOWN = 24  # kernels of a row
# RMS error over the RMS: of three products with two roundings between them, and of FP8 products.
LIMIT, FP8_LIMIT = 3e-2, 0.12

Arrays = tuple[jax.Array, ...]
Dot = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def router_logits(preferred: jax.Array, tokens: jax.Array, router: jax.Array) -> jax.Array:
    return tokens.astype(jnp.float32) @ router + preferred


def jaxops_layer(
    shape: MoeShape, backend: str, recipe: str | None, preferred: jax.Array, tokens: jax.Array, router: jax.Array,
    *experts: jax.Array,
) -> jax.Array:  # fmt: skip
    gate, up, down = experts
    routing = jaxops.route(router_logits(preferred, tokens, router), shape.k, backend=backend)
    return jaxops.moe_mlp(tokens, gate, up, down, routing, recipe=recipe, backend=backend)


def unfused_layer(
    shape: MoeShape, backend: str, preferred: jax.Array, tokens: jax.Array, router: jax.Array, *experts: jax.Array
) -> jax.Array:
    """The layer from single ops."""
    gate, up, down = experts
    routing = jaxops.route(router_logits(preferred, tokens, router), shape.k, backend=backend)
    multiply = functools.partial(jaxops.grouped_matmul, group_offsets=routing.group_offsets, backend=backend)
    x = jaxops.permute(tokens, routing, backend=backend)
    y = multiply(jax.nn.silu(multiply(x, gate)) * multiply(x, up), down)
    return jaxops.combine(y, routing, backend=backend)


def plain_layer(
    shape: MoeShape, dot: Dot, preferred: jax.Array, tokens: jax.Array, router: jax.Array, *experts: jax.Array
) -> jax.Array:
    """What a user writes around a ragged product: top_k, a sort, gathers, and the sum of each token's rows."""
    gate, up, down = experts
    scores, chosen = jax.lax.top_k(jax.nn.softmax(router_logits(preferred, tokens, router)), shape.k)
    weights = scores / jnp.sum(scores, axis=1, keepdims=True)
    order = jnp.argsort(chosen.ravel(), stable=True)
    sizes = jnp.bincount(chosen.ravel(), length=shape.E).astype(jnp.int32)
    x = tokens[order // shape.k]
    y = dot((jax.nn.silu(dot(x, gate, sizes)) * dot(x, up, sizes)).astype(tokens.dtype), down, sizes)
    choices = y[jnp.argsort(order)].reshape(shape.T, shape.k, shape.D)
    return jnp.sum(choices.astype(jnp.float32) * weights[:, :, None], axis=1).astype(tokens.dtype)


def layer_of(side: str, shape: MoeShape) -> Callable[..., jax.Array]:
    """
    Raises:
      ImportError: the peer is not installed.
    """
    backend = "auto" if harness.on_gpu() else "xla"
    if side == UNFUSED:
        return functools.partial(unfused_layer, shape, backend)
    if side == OURS or side in FP8:
        return functools.partial(jaxops_layer, shape, backend, FP8.get(side))
    if side == "xla":
        return functools.partial(jaxops_layer, shape, "xla", None)
    dot = jax.lax.ragged_dot if side == "ragged_dot" else tokamax_dot(side)
    return functools.partial(plain_layer, shape, dot)


def program(side: str, shape: MoeShape, pass_name: str) -> Callable[..., Arrays]:
    """(preferred, dy, tokens, router, gate, up, down) -> y, and with the backward the gradients from tokens on."""
    layer = layer_of(side, shape)
    if pass_name == "fwd":
        return lambda preferred, dy, *given: (layer(preferred, *given),)

    def both(preferred: jax.Array, dy: jax.Array, *given: jax.Array) -> Arrays:
        y, vjp = jax.vjp(functools.partial(layer, preferred), *given)
        return y, *vjp(dy)

    return both


def make_inputs(shape: MoeShape) -> Arrays:
    """dy, tokens, router, gate, up, down."""
    E, D, F = shape.E, shape.D, shape.F
    kinds = (  # each one's shape, scale and dtype
        ((shape.T, D), 1.0, DTYPE),
        ((shape.T, D), 1.0, DTYPE),
        ((D, E), D**-0.5, jnp.float32),
        ((E, D, F), D**-0.5, DTYPE),
        ((E, D, F), D**-0.5, DTYPE),
        ((E, F, D), F**-0.5, DTYPE),
    )
    return tuple(
        harness.normal(seed, size, dtype) * jnp.asarray(scale, dtype) for seed, (size, scale, dtype) in enumerate(kinds)
    )


@jax.jit
def errors(got: Arrays, want: Arrays) -> jax.Array:
    """[largest, RMS] error of each result over its RMS, the worst of them."""
    flat = lambda x: x.reshape(1, -1)
    each = [checks.relative_errors(flat(g), flat(w).astype(jnp.float32)) for g, w in zip(got, want, strict=True)]
    return jnp.max(jnp.stack(each), axis=0)


def around(compiled: Any, inputs: Arrays) -> dict[str, Any]:
    """The share of a call's time in kernels that do not multiply groups, and the longest kernels. Only jaxops' kernels
    have names that tell."""
    launched = harness.kernels(compiled, *inputs)
    total = sum(us for _, us in launched)
    other = sum(us for name, us in launched if not any(product in name for product in PRODUCTS))
    if not total:
        return {}
    longest = sorted(launched, key=lambda kernel: -kernel[1])[:SHOWN]
    return {"around": other / total, "kernels": [[name[:60], round(us, 1)] for name, us in longest]}


def ready_side(
    side: str, shape: MoeShape, pass_name: str, dist: str, programs: dict[str, Any], inputs: Arrays, want: Arrays
) -> harness.Ready:
    """programs: (compiled, seconds) of each side, kept for the next distribution."""
    if side == "ragged_dot" and dist != DISTS[0]:
        raise ValueError("on a GPU its time does not depend on the groups' sizes, and it is the slowest by far")
    if side not in programs:
        programs[side] = harness.compile_fits(program(side, shape, pass_name), *inputs)

    def check(results: Arrays) -> float:
        max_err, rms_err = (float(error) for error in errors(results, want))
        if not rms_err <= (FP8_LIMIT if side in FP8 else LIMIT):
            raise ArithmeticError(f"wrong result: RMS error {rms_err:.2e} of the RMS")
        return max_err

    ready = harness.checked(side, programs[side], inputs, check)
    memory = programs[side][0].memory_analysis()
    ready.facts["temp_bytes"] = memory.temp_size_in_bytes if memory is not None else None
    if side in FP8:
        ready.facts["recipe"] = FP8[side]
    if side in (OURS, UNFUSED, *FP8):
        ready.facts |= around(programs[side][0], inputs)
    return ready


class Inputs:
    """One shape's operands, and the programs of the last pass, compiled once for all distributions."""

    def __init__(self, shape: MoeShape):
        self.arrays = make_inputs(shape)
        self.pass_name, self.programs = "", dict[str, Any]()

    def programs_of(self, pass_name: str) -> dict[str, Any]:
        if pass_name != self.pass_name:
            self.pass_name, self.programs = pass_name, {}
        return self.programs


def measure(run: harness.Run, shape: MoeShape, given: Inputs, pass_name: str, dist: str) -> None:
    inputs = (jnp.asarray(shapes_moe.preferences(dist, shape)), *given.arrays)
    programs = given.programs_of(pass_name)
    if "reference" not in programs:
        programs["reference"] = harness.compile_fits(program("xla", shape, pass_name), *inputs)
    want = programs["reference"][0](*inputs)
    row = harness.case_of("moe", pass_name, shape, DTYPE, dist)
    label = harness.label_of(row)
    sides, times = run.time(OURS, label, run.sides(OURS, ready_side, shape, pass_name, dist, programs, inputs, want))
    for name, t in times.items():
        beside = {peer: other for peer, other in times.items() if peer not in FP8}
        vs = harness.ratios(name, beside, OURS)
        if name in FP8 and OURS in times:
            vs = {"jaxops_bf16": times[OURS].us_p50 / t.us_p50}
        run.write_side(row, name, sides[name], t, vs, "tflops", shape.flops(pass_name))
        tflops = shape.flops(pass_name) / t.us_p50 / 1e6
        print(f"{label:40} {name:28}{t.us_p50:10.1f} us {tflops:6.0f} TFLOP/s {vs}", flush=True)


main = command(
    Benchmark(
        name="moe",
        shapes=shapes_moe.MOES,
        smoke=SMOKE,
        inputs=Inputs,
        options={"passes": PASSES, "dists": DISTS},
        known={"dists": shapes.DISTS},
        measure=measure,
        peers=",".join((UNFUSED, *FP8, "tokamax_triton", "ragged_dot")),
        ceilings={"dtype": DTYPE},
        ceiling="dense_tflops",
    )
)
