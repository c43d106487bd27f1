"""A mixture-of-experts layer: jaxops' beside the same layer with tokamax or lax.ragged_dot and XLA.

python -m benchmarks moe                          # everything: 7 shapes, fwd and fwd+bwd, 3 distributions
python -m benchmarks moe --shapes mixtral_t16384 --passes fwd --peers ""
python -m benchmarks moe --shapes models --dists balanced,router --peers ""   # 22 layers of open models
python -m benchmarks moe --smoke --out /tmp/x     # a tiny shape, every code path, CPU too

TFLOP/s count the routed rows' products. All sides use the same float32 router: with random logits, or with logits that
force even or Zipf groups (shapes_moe.preferences). Rows also have the share of the time outside the products (on a GPU)
and the bytes that the layer needs beside its operands and results; of_balanced is the rate over that with even groups,
where these were measured before. Beside gpt-oss' units are jaxops' single ops alone; beside joined weights also the
same layer with two arrays.
"""

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

import jaxops
from benchmarks import harness, shapes
from benchmarks.harness import checks
from benchmarks.harness.command import Benchmark, command
from benchmarks.peers.jax_passes import tokamax_dot
from benchmarks.shapes import models
from benchmarks.shapes import moe as shapes_moe
from benchmarks.shapes.moe import MoeShape

PASSES = ("fwd", "fwd+bwd")
DISTS = ("balanced", "router", "skewed")
SMOKE = MoeShape("smoke", 24, 4, 2, 16, 32)
DTYPE = jnp.bfloat16
OURS, REFERENCE = "jaxops", "reference"
UNFUSED = "jaxops_unfused"  # permute, three grouped products with the activation in XLA, and combine
APART = "jaxops_two_arrays"  # of a shape with joined weights
FP8 = {f"jaxops_fp8_{recipe}": recipe for recipe in ("tensorwise", "rowwise", "blockwise", "blockwise_with_gw_hp")}
SIDES = {"gpt_oss": (OURS, UNFUSED, "xla"), "joined": (OURS, UNFUSED, APART, "xla")}  # of shapes with a form
PRODUCTS = ("grouped_gemm", "grouped_glu", "moe_mlp_bwd", "fp8_gemm")  # names of kernels that multiply
SHOWN = 24  # kernels of a row
# RMS error over the RMS: of three products with two roundings between them, and of FP8 products.
LIMIT, FP8_LIMIT = 3e-2, 0.12

Arrays = tuple[jax.Array, ...]
Results = Callable[[], Arrays]
Programs = dict[tuple[str, str, str], "Future[harness.Compiled]"]  # by side, shape and pass
Dot = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def router_logits(preferred: jax.Array, tokens: jax.Array, router: jax.Array) -> jax.Array:
    return tokens.astype(jnp.float32) @ router + preferred


def jaxops_layer(
    shape: MoeShape, backend: str, recipe: str | None, preferred: jax.Array, tokens: jax.Array, router: jax.Array,
    *experts: jax.Array,
) -> jax.Array:  # fmt: skip
    routing = jaxops.route(router_logits(preferred, tokens, router), shape.k, backend=backend)
    gate, *up, down = experts[:3]
    biases = experts[3:]
    unit = {"activation": "swiglu_oai", "biases": biases} if shape.form == "gpt_oss" else {}
    return jaxops.moe_mlp(
        tokens, gate, up[0] if up else None, down, routing, recipe=recipe, backend=backend, **unit
    )  # fmt: skip


def unfused_layer(
    shape: MoeShape, backend: str, preferred: jax.Array, tokens: jax.Array, router: jax.Array, *experts: jax.Array
) -> jax.Array:
    """The layer from single ops."""
    routing = jaxops.route(router_logits(preferred, tokens, router), shape.k, backend=backend)
    multiply = functools.partial(jaxops.grouped_matmul, group_offsets=routing.group_offsets, backend=backend)
    x = jaxops.permute(tokens, routing, backend=backend)
    if shape.form == "joined":
        joined, down = experts
        y = multiply(jaxops.grouped_glu(x, joined, None, routing.group_offsets, backend=backend), down)
    elif shape.form == "gpt_oss":
        gate, up, down, b_gate, b_up, b_down = experts
        g, u = jnp.minimum(multiply(x, gate, bias=b_gate), 7.0), jnp.clip(multiply(x, up, bias=b_up), -7.0, 7.0)
        y = multiply((u + 1) * g * jax.nn.sigmoid(1.702 * g), down, bias=b_down)
    else:
        gate, up, down = experts
        y = multiply(jax.nn.silu(multiply(x, gate)) * multiply(x, up), down)
    return jaxops.combine(y, routing, backend=backend)


def joins(side: str, shape: MoeShape) -> bool:
    """Whether a side has gate and up in one array."""
    return shape.form == "joined" and side in (OURS, UNFUSED)


def join(inputs: Arrays) -> Arrays:
    *others, gate, up, down = inputs
    return *others, jnp.concatenate([gate, up], axis=2), down


def apart(results: Arrays) -> Arrays:
    """Results with the gradients of gate and up by themselves; y alone as it is."""
    if len(results) == 1:
        return results
    *others, joined, down = results
    return *others, *jnp.split(joined, 2, axis=2), down


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
      ValueError: the side has no layer of this form.
    """
    if side not in SIDES[shape.form] if shape.form else side == APART:
        raise ValueError(f"has no layer of the form {shape.form!r}")
    backend = "auto" if harness.on_gpu() else "xla"
    if side == UNFUSED:
        return functools.partial(unfused_layer, shape, backend)
    if side in (OURS, APART, *FP8):
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


def kinds_of(shape: MoeShape) -> list[tuple[tuple[int, ...], float, Any]]:
    """Sizes, scale and dtype of dy, tokens, router, gate, up and down."""
    E, D, F = shape.E, shape.D, shape.F
    biases = [((E, n), 1.0, jnp.float32) for n in (F, F, D)] if shape.form == "gpt_oss" else []
    return [
        ((shape.T, D), 1.0, DTYPE),
        ((shape.T, D), 1.0, DTYPE),
        ((D, E), D**-0.5, jnp.float32),
        ((E, D, F), D**-0.5, DTYPE),
        ((E, D, F), D**-0.5, DTYPE),
        ((E, F, D), F**-0.5, DTYPE),
        *biases,
    ]


def make_inputs(shape: MoeShape) -> Arrays:
    """dy, tokens, router, gate, up, down."""
    return tuple(
        harness.normal(seed, size, dtype) * jnp.asarray(scale, dtype)
        for seed, (size, scale, dtype) in enumerate(kinds_of(shape))
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


def start_compiling_layer(pool: Executor, sides: list[str], shape: MoeShape, passes: list[str]) -> Programs:
    """All sides' passes, what makes and compares their operands, and the reference, of forward and backward."""
    kinds = kinds_of(shape)
    given = [jax.ShapeDtypeStruct(size, dtype) for size, _, dtype in kinds]
    args = (jax.ShapeDtypeStruct((shape.T, shape.E), jnp.float32), *given)
    results = {"fwd": tuple(given[1:2]), "fwd+bwd": (given[1], *given[1:])}

    def start(side: str, pass_name: str, **options) -> "Future[harness.Compiled]":
        own = jax.eval_shape(join, args) if joins(side, shape) else args
        trace = lambda: harness.tracing(jax.jit(program(side, shape, pass_name)), *own, **options)()
        return harness.start_compiling(pool, trace)

    for size, _, dtype in kinds:
        harness.start_compiling(pool, harness.tracing(harness.normal, 0, size, dtype))
    for name in passes:
        harness.start_compiling(pool, harness.tracing(errors, results[name], results[name]))
    found = {(side, shape.name, name): start(side, name) for side, name in itertools.product(sides, passes)}
    # XLA tries no algorithms out for its products: it need not be fast.
    return found | {(REFERENCE, shape.name, ""): start("xla", "fwd+bwd", xla_gpu_autotune_level=0)}


def compile_all(run: harness.Run, chosen: list[MoeShape]) -> Programs:
    with ThreadPoolExecutor(12) as pool:
        each = [start_compiling_layer(pool, [OURS, *run.peers], shape, run.options["passes"]) for shape in chosen]
    run.done("compiling")
    return {key: program for programs in each for key, program in programs.items()}


def ready_side(
    side: str, shape: MoeShape, pass_name: str, dist: str, programs: Programs, inputs: Arrays, want: Results
) -> harness.Ready:
    if side == "ragged_dot" and dist != "router":
        raise ValueError("on a GPU its time does not depend on the groups' sizes, and it is the slowest by far")
    compiled, wanted = programs[side, shape.name, pass_name].result(), want()
    temp_bytes = None
    if (memory := compiled.result.memory_analysis()) is not None:
        temp_bytes = memory.temp_size_in_bytes
        harness.demand_room(temp_bytes + memory.output_size_in_bytes, "temporaries and results")

    joined = joins(side, shape)

    def check(results: Arrays) -> float:
        results = apart(results) if joined else results
        max_err, rms_err = (float(error) for error in errors(results, wanted))
        if not rms_err <= (FP8_LIMIT if side in FP8 else LIMIT):
            raise ArithmeticError(f"wrong result: RMS error {rms_err:.2e} of the RMS")
        return max_err

    inputs = join(inputs) if joined else inputs
    ready = harness.checked(side, compiled, inputs, check, temp_bytes=temp_bytes)
    if side in FP8:
        ready.facts["recipe"] = FP8[side]
    if side in (OURS, UNFUSED, APART, *FP8):
        ready.facts |= around(compiled.result, inputs)
    return ready


class Inputs:
    """One shape's operands, and the TFLOP/s that were reached with even groups, by pass and side."""

    def __init__(self, shape: MoeShape):
        self.arrays = make_inputs(shape)
        self.balanced: dict[tuple[str, str], float] = {}


def measure(run: harness.Run, shape: MoeShape, given: Inputs, pass_name: str, dist: str) -> None:
    inputs = (jnp.asarray(shapes_moe.preferences(dist, shape)), *given.arrays)
    # Called by the sides: a reference that does not fit leaves them out, and does not end the run.
    reference = lambda: run.programs[REFERENCE, shape.name, ""].result().result(*inputs)
    want = functools.cache(lambda: reference()[: 1 if pass_name == "fwd" else None])
    row = harness.case_of("moe", pass_name, shape, DTYPE, dist)
    label = harness.label_of(row)
    makers = run.sides(OURS, ready_side, shape, pass_name, dist, run.programs, inputs, want)
    sides, times = run.time(OURS, label, makers)
    for name, t in times.items():
        beside = {peer: other for peer, other in times.items() if peer not in FP8}
        vs = harness.ratios(name, beside, OURS)
        if name in FP8 and OURS in times:
            vs = {"jaxops_bf16": times[OURS].us_p50 / t.us_p50}
        tflops = shape.flops(pass_name) / t.us_p50 / 1e6
        if dist == "balanced":
            given.balanced[pass_name, name] = tflops
        even = given.balanced.get((pass_name, name))
        more = {} if even is None else {"of_balanced": tflops / even}
        run.write_side(row, name, sides[name], t, vs, "tflops", shape.flops(pass_name), **more)
        print(f"{label:40} {name:28}{t.us_p50:10.1f} us {tflops:6.0f} TFLOP/s {vs} {more}", flush=True)


main = command(
    Benchmark(
        name="moe",
        shapes=shapes_moe.MOES,
        sets={"models": models.MODEL_LAYERS},
        compiled=compile_all,
        smoke=SMOKE,
        inputs=Inputs,
        options={"passes": PASSES, "dists": DISTS},
        known={"dists": shapes.DISTS},
        measure=measure,
        peers=",".join((UNFUSED, APART, *FP8, "tokamax_triton", "ragged_dot")),
        ceilings={"dtype": DTYPE},
        ceiling="dense_tflops",
    )
)
