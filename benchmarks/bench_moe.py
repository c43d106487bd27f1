"""A mixture-of-experts layer: jaxops' beside the same layer from tokamax or lax.ragged_dot with XLA around it. TFLOP/s count the routed rows' products.

python -m benchmarks.bench_moe                                       # everything: 3 shapes, fwd and fwd+bwd, 3 distributions
python -m benchmarks.bench_moe --shapes mixtral_t16384 --passes fwd --peers ""
python -m benchmarks.bench_moe --smoke --out /tmp/x                  # a tiny shape, every code path, CPU too

Every side chooses by the same float32 router, of random logits, or with each token told its experts, so that groups are even or Zipf's (shapes.preferences).
Rows say, too, how much of the time lies around the products (on a GPU) and how many bytes the layer takes beside its operands and results.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import typer

import jaxops
from benchmarks import checks, harness, shapes
from benchmarks.peers_jax import tokamax_dot
from benchmarks.shapes import MoeShape

PASSES = ("fwd", "fwd+bwd")
DISTS = ("router", "balanced", "skewed")
SMOKE = MoeShape("smoke", 24, 4, 2, 16, 32)
DTYPE = jnp.bfloat16
OURS, UNFUSED = (
    "jaxops",
    "jaxops_unfused",
)  # UNFUSED: the same from permute, three grouped products with the activation in XLA, and combine
PRODUCTS = ("grouped_gemm_kernel", "grouped_glu_kernel", "moe_mlp_bwd_kernel")  # names of kernels that multiply

Arrays = tuple[jax.Array, ...]
Dot = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def router_logits(preferred: jax.Array, tokens: jax.Array, router: jax.Array) -> jax.Array:
    return tokens.astype(jnp.float32) @ router + preferred


def jaxops_layer(
    shape: MoeShape, backend: str, preferred: jax.Array, tokens: jax.Array, router: jax.Array, *experts: jax.Array
) -> jax.Array:
    gate, up, down = experts
    routing = jaxops.route(router_logits(preferred, tokens, router), shape.k, backend=backend)
    return jaxops.moe_mlp(tokens, gate, up, down, routing, backend=backend)


def unfused_layer(
    shape: MoeShape, backend: str, preferred: jax.Array, tokens: jax.Array, router: jax.Array, *experts: jax.Array
) -> jax.Array:
    """An op after the other."""
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
    if side in (OURS, UNFUSED):
        return functools.partial(
            jaxops_layer if side == OURS else unfused_layer, shape, "auto" if harness.on_gpu() else "xla"
        )
    if side == "xla":
        return functools.partial(jaxops_layer, shape, "xla")
    dot = jax.lax.ragged_dot if side == "ragged_dot" else tokamax_dot(side)
    return functools.partial(plain_layer, shape, dot)


def program(side: str, shape: MoeShape, pass_name: str) -> Callable[..., Arrays]:
    """From (preferred, dy, tokens, router, gate, up, down) to y, and with the backward to the gradients of tokens and what follows."""
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
    return jnp.max(
        jnp.stack(
            [
                checks.relative_errors(g.reshape(1, -1), w.reshape(1, -1).astype(jnp.float32))
                for g, w in zip(got, want, strict=True)
            ]
        ),
        axis=0,
    )


def around(compiled: Any, inputs: Arrays) -> dict[str, float]:
    """The share of a call's time in kernels that do not multiply groups; of jaxops' sides, whose kernels have names."""
    launched = harness.kernels(compiled, *inputs)
    total = sum(us for _, us in launched)
    return (
        {"around": sum(us for name, us in launched if not any(product in name for product in PRODUCTS)) / total}
        if total
        else {}
    )


def ready_side(
    side: str, shape: MoeShape, pass_name: str, dist: str, programs: dict[str, Any], inputs: Arrays, want: Arrays
) -> harness.Ready:
    """programs: of each side, compiled for the distribution before, and seconds."""
    if side == "ragged_dot" and dist != DISTS[0]:
        raise ValueError("on a GPU its time does not depend on the groups' sizes, and it is the slowest by far")
    if side not in programs:
        programs[side] = harness.compile_fits(program(side, shape, pass_name), *inputs)
    compiled, seconds = programs[side]
    results = compiled(*inputs)
    max_err, rms_err = (float(error) for error in errors(results, want))
    # Three products and two roundings between them; a gradient's largest elements are those of few rows.
    if not rms_err <= 3e-2:
        raise ArithmeticError(f"wrong result: RMS error {rms_err:.2e} of the RMS")
    ready = harness.ready(side, compiled, inputs, sum(result.nbytes for result in results), max_err)
    memory = compiled.memory_analysis()
    ready.facts |= {"compile_s": seconds, "temp_bytes": memory.temp_size_in_bytes if memory is not None else None}
    if side in (OURS, UNFUSED):
        ready.facts |= around(compiled, inputs)
    return ready


def measure_case(
    run: harness.Run, shape: MoeShape, pass_name: str, dist: str, programs: dict[str, Any], inputs: Arrays
) -> None:
    """Checks, times and writes every side of one case."""
    if "reference" not in programs:
        programs["reference"] = harness.compile_fits(program("xla", shape, pass_name), *inputs)
    want = programs["reference"][0](*inputs)
    label = f"{shape.name} {dist} {pass_name}"
    ready = run.ready_sides(OURS, label, ready_side, shape, pass_name, dist, programs, inputs, want)
    del want
    times = run.times(OURS, ready)
    flops = shape.flops(pass_name)
    named = {
        "op": "moe",
        "pass": pass_name,
        "name": shape.name,
        "shape": shape.dims,
        "dtype": jnp.dtype(DTYPE).name,
        "dist": dist,
    }
    run.write(OURS, named, ready, times, "tflops", flops)
    print(
        f"{label:36}"
        + " | ".join(f"{side} {t.us_p50:.0f} us {flops / t.us_p50 / 1e6:.0f} TFLOP/s" for side, t in times.items()),
        flush=True,
    )


def main(
    shape_names: str = typer.Option(
        ",".join(shapes.MOES), "--shapes", help="Comma-separated names from benchmarks/shapes.py."
    ),
    dists: str = typer.Option(
        ",".join(DISTS), help='Of the groups: "router" for those of random logits, or names from benchmarks/shapes.py.'
    ),
    passes: str = typer.Option(",".join(PASSES)),
    peers: str = typer.Option(
        "jaxops_unfused,tokamax_triton,ragged_dot", help='"" for none; also: xla, the portable backends.'
    ),
    out: str = typer.Option("", help="Folder of the rows; benchmarks/results/<device> by default."),
    rounds: int = typer.Option(5),
    smoke: bool = typer.Option(False, help="A tiny shape, every code path; needs --out."),
) -> None:
    """Appends to <out>/moe.jsonl; exits with 1 if jaxops itself failed somewhere."""
    harness.demand_place(out, smoke)
    start = time.perf_counter()
    file = harness.results_folder(out) / "moe.jsonl"
    run = harness.Run(
        file=file,
        rounds=rounds,
        ceiling=harness.write_dense(file, DTYPE, smoke),
        peers=[name for name in peers.split(",") if name],
    )
    for shape in [SMOKE] if smoke else [shapes.MOES[name] for name in shape_names.split(",")]:
        inputs = make_inputs(shape)
        preferred = {dist: jnp.asarray(shapes.preferences(dist, shape)) for dist in dists.split(",")}
        for pass_name in passes.split(","):
            programs: dict[str, Any] = {}
            for dist, told in preferred.items():
                measure_case(run, shape, pass_name, dist, programs, (told, *inputs))
        print(f"{shape.name} done after {time.perf_counter() - start:.0f} s", flush=True)
    harness.end(run.left_out)


if __name__ == "__main__":
    typer.run(main)
